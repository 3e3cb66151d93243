"""Several views of each example: one clipped gradient, their mean."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tests.problems import PROBLEMS, precision
from tests.reference import assert_all_close, clipped_sum, per_example_gradients
from tfdp.losses.batch import Batch
from tfdp.training.augmentation import Augmentation

pytestmark = pytest.mark.keras_private

FACTORS = np.array([1.0, 0.5, -2.0])
ROWS = 6


@keras.saving.register_keras_serializable("tests")
def scaled(x):
    """Three different views, if the views of a row are next to each other."""
    factors = tf.constant(FACTORS, x.dtype)
    factors = tf.reshape(factors, [-1] + [1] * (x.shape.rank - 1))
    views = tf.reshape(x, [-1, len(FACTORS), *x.shape[1:]])
    return tf.reshape(views * factors, tf.shape(x))


def private(model, loss="mse", clip=1.0, **options):
    options = {"augmentation": scaled, "augmentation_multiplicity": 3} | options
    model = tfdp.DPModel(model, **options)
    with pytest.warns():
        optimizer = tfdp.optimizers.DPSGD(
            0.5, l2_norm_clip=clip, noise_multiplier=0.0, noise_seed=1
        )
    model.compile(optimizer, loss)
    return model


def dense(shape=(4, 4, 2)):
    model = keras.Sequential([keras.Input(shape), layers.Flatten(), layers.Dense(2)])
    for number, weight in enumerate(model.weights):
        weight.assign(np.random.default_rng(number).normal(size=weight.shape))
    return model


def images(rows=8):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 4, 4, 2)).astype("float32"), np.ones((rows, 2))


@functools.cache
def mean_gradients(problem, rows, outlier=1.0):
    """The mean over the views of the gradient of each example, in float64."""
    batch = problem.batch(rows, "float64")
    batch.x[2] *= outlier
    model, loss = problem.build("float64"), problem.loss("float64")
    with precision("float64"):
        views = [
            per_example_gradients(model, loss, batch.x * factor, *batch[1:])
            for factor in FACTORS
        ]
    return [np.mean(of_variable, axis=0) for of_variable in zip(*views, strict=True)]


@pytest.mark.parametrize(
    ("name", "engine", "physical_batch_size"),
    [
        ("mlp_logits", "vectorized", None),
        pytest.param("mlp_logits", "ghost", 4, marks=pytest.mark.slow),
        pytest.param("cnn", "bookkeeping", 4, marks=pytest.mark.slow),
    ],
)
def test_the_mean_over_the_views_is_clipped(name, engine, physical_batch_size):
    problem = PROBLEMS[name]
    gradients = mean_gradients(problem, ROWS, outlier=1e3)
    clip = float(np.median(clipped_sum(gradients, 1.0)[1]))
    expected, norms = clipped_sum(gradients, clip)
    assert norms.max() > 10 * clip
    model = private(
        problem.build(),
        problem.loss(),
        clip=clip,
        engine=engine,
        physical_batch_size=physical_batch_size,
    )
    before = [variable.numpy() for variable in model.trainable_variables]
    batch = problem.batch(ROWS)
    batch.x[2] *= 1e3
    model.fit(batch.x, batch.y, batch_size=ROWS, verbose=0)
    assert_all_close(
        [
            (old - new.numpy()) / 0.5 * ROWS
            for old, new in zip(before, model.trainable_variables, strict=True)
        ],
        expected,
        rtol=1e-3,
        atol=1e-4 * clip,
    )


@pytest.mark.slow
def test_bam_goes_uphill_along_the_mean_of_the_views():
    x, y = images()
    sums = []
    for engine in ("bookkeeping", "vectorized"):
        model = private(
            dense(), tfdp.losses.BAM("mse", radius=0.5, mix=0.7), engine=engine
        )
        model.fit(x, y, batch_size=8, verbose=0)
        sums.append([variable.numpy() for variable in model.trainable_variables])
    assert_all_close(*sums, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_microbatches_average_their_examples_views():
    problem = PROBLEMS["mlp_logits"]
    gradients = mean_gradients(problem, ROWS)
    clip = float(np.median(clipped_sum(gradients, 1.0, 2)[1]))
    expected, _ = clipped_sum(gradients, clip, 2)
    model = tfdp.DPModel(
        problem.build(),
        sampling="shuffle",
        augmentation=scaled,
        augmentation_multiplicity=3,
    )
    with pytest.warns():
        optimizer = tfdp.optimizers.DPSGD(
            1.0, l2_norm_clip=clip, noise_multiplier=0, num_microbatches=3
        )
    model.compile(optimizer, problem.loss())
    data = problem.batch(ROWS)
    # Rows in the order in which they are, as a pipeline gives them.
    dataset = tf.data.Dataset.from_tensors((data.x, data.y))
    declared = tfdp.data.declare(
        dataset,
        number_of_examples=ROWS,
        expected_batch_size=ROWS,
        sampling="shuffle",
    )
    before = [variable.numpy() for variable in model.trainable_variables]
    model.fit(declared, verbose=0)
    assert_all_close(
        [
            (old - new.numpy()) * 3
            for old, new in zip(before, model.trainable_variables, strict=True)
        ],
        expected,
        rtol=1e-3,
        atol=1e-4 * clip,
    )


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [{"jit_compile": True}, {"run_eagerly": True}])
def test_random_views_differ_and_cost_no_privacy(compiled):
    x, y = images()
    plain = private(dense(), augmentation=None, augmentation_multiplicity=1)
    layer = layers.RandomTranslation(0.5, 0.5, seed=1)
    model = private(dense(), augmentation=layer, augmentation_multiplicity=2)
    model.compile(model.optimizer, "mse", **compiled)
    for each in (plain, model):
        each.optimizer.noise_multiplier = 1.0
        each.fit(x, y, batch_size=4, epochs=2, verbose=0)
    assert model.epsilon(1e-3) == plain.epsilon(1e-3)
    views = Augmentation(layer, 2).views(
        Batch(tf.constant(x), tf.constant(y), None, tf.zeros([8], tf.bool))
    )
    assert views.x.shape == (16, 4, 4, 2)
    assert np.abs(views.x[0] - views.x[1]).max() > 0
    np.testing.assert_array_equal(views.y[::2], y)


@pytest.mark.slow
def test_the_bias_logger_sees_the_views_of_the_step():
    x, y = images()
    layer = keras.Sequential([layers.RandomFlip(seed=1), layers.RandomRotation(0.3)])
    model = private(dense(), augmentation=layer, clip=1e6)
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=2,
        verbose=0,
        callbacks=[tfdp.callbacks.BiasLogger(every=1)],
    ).history
    assert max(history["nonprivate_bias_magnitude"]) < 1e-4
    assert history["nonprivate_clipped_fraction"] == [0, 0]


@pytest.mark.slow
def test_metrics_are_those_of_one_view_of_each_example():
    x, y = images()
    model = private(dense())
    expected = np.mean(np.square(model.model(x) - y))
    logs = model.fit(x, y, batch_size=8, verbose=0).history
    assert logs["loss"] == [pytest.approx(expected, rel=1e-4)]


@pytest.mark.slow
def test_a_saved_model_augments_again(tmp_path):
    x, y = images()
    for augmentation in (scaled, layers.RandomFlip("horizontal", seed=3)):
        model = private(dense(), augmentation=augmentation)
        model.fit(x, y, batch_size=8, verbose=0)
        model.save(tmp_path / "m.keras")
        with pytest.warns():
            again = keras.models.load_model(tmp_path / "m.keras")
        config = again.get_config()
        assert config["augmentation_multiplicity"] == 3
        saved = model.get_config()["augmentation"]
        assert config["augmentation"]["config"] == saved["config"]
        again.fit(x, y, batch_size=8, verbose=0)
    assert not any("flip" in weight.path for weight in model.weights)


# -------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("multiplicity", [0, -1, 1.5, np.nan, np.inf])
def test_a_multiplicity_out_of_range_is_refused(multiplicity):
    with pytest.raises(ValueError, match="`augmentation_multiplicity` must be"):
        tfdp.DPModel(
            dense(), augmentation=scaled, augmentation_multiplicity=multiplicity
        )


@pytest.mark.parametrize("multiplicity", [None, "2", True])
def test_a_multiplicity_of_a_wrong_type_is_refused(multiplicity):
    with pytest.raises(TypeError, match="`augmentation_multiplicity` must be"):
        tfdp.DPModel(
            dense(), augmentation=scaled, augmentation_multiplicity=multiplicity
        )


def test_views_need_an_augmentation():
    with pytest.raises(ValueError, match="needs an augmentation"):
        tfdp.DPModel(dense(), augmentation_multiplicity=2)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="`augmentation` must be a Keras layer or a"):
        tfdp.DPModel(dense(), augmentation="flip")


@pytest.mark.parametrize("name", ["MixUp", "CutMix"])
def test_what_mixes_by_design_is_refused(name):
    if not hasattr(keras.layers, name):
        pytest.skip("This version of Keras has no such layer.")
    with pytest.raises(ValueError, match="a view of one example at a time"):
        tfdp.DPModel(dense(), augmentation=getattr(keras.layers, name)())


@pytest.mark.slow
def test_what_bends_a_batch_alike_bends_each_image_inside_of_the_model():
    bend = layers.RandomElasticTransform(seed=1)
    inside = functools.partial(private, keras.Sequential([bend, dense()]))
    none = {"augmentation": None, "augmentation_multiplicity": 1}
    for model in (private(dense(), augmentation=bend), inside(engine="ghost", **none)):
        with pytest.raises(
            tfdp.errors.UnsupportedLayerError, match="layer of the model"
        ):
            model.fit(*images(), batch_size=4, verbose=0)
    inside(**none).fit(*images(), batch_size=4, verbose=0)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (
            lambda x: x[::-1],
            tfdp.errors.UnsupportedLayerError,
            "rows of a batch meet: operation StridedSlice",
        ),
        (
            lambda x: tf.numpy_function(np.flip, [x], tf.float32, stateful=False),
            tfdp.errors.UnsupportedLayerError,
            "nobody knows whether rows of a batch meet in it: operation",
        ),
        (lambda x: x[:, :2], ValueError, "must keep the shape of its inputs"),
    ],
)
def test_functions_are_tried_before_the_first_step(function, error, message):
    x, y = images()
    model = private(dense(), augmentation=function)
    with pytest.raises(error, match=message):
        model.fit(x, y, batch_size=8, verbose=0)
    assert not model.ledger.segments


class SaysWhetherItIsWithoutCudnn(layers.LSTM):
    """Lets rows meet where cuDNN is not ruled out."""

    def call(self, sequences, initial_state=None, mask=None, training=False):
        outputs = super().call(sequences, initial_state, mask, training)
        return outputs + tf.reduce_sum(sequences, 0) if self.use_cudnn else outputs


def test_augmentations_run_as_they_were_checked():
    function = keras.Sequential([
        keras.Input((4, 3)),
        SaysWhetherItIsWithoutCudnn(3, return_sequences=True),
    ])
    augmentation = Augmentation(function, 2)
    x = np.ones((3, 4, 3), "float32")
    augmentation.check(x)
    alone = augmentation.views(Batch(tf.constant(x[:1]), None))
    together = augmentation.views(Batch(tf.constant(x), None))
    np.testing.assert_allclose(alone.x, together.x[:2], rtol=1e-6)
