"""Models are checked before they train, anew where something else would run."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tests.small import data, logits_loss, network, noiseless, optimizer, private
from tfdp.distribute.replicas import ONE_DEVICE
from tfdp.losses import BAM
from tfdp.training.batch_clipper import BatchClipper
from tfdp.training.checked_model import CheckedModel, rows_to_check


def weights_of(model):
    return [variable.numpy() for variable in model.trainable_variables]


def segments(model):
    return model.ledger.segments


@pytest.mark.slow
def test_batch_normalization_is_refused_before_training():
    model = keras.Sequential([
        keras.Input((3,)),
        layers.Dense(2),
        layers.BatchNormalization(),
    ])
    before = weights_of(model)
    wrapped = private(model)
    with pytest.raises(tfdp.errors.UnsupportedLayerError, match="GroupNormalization"):
        wrapped.fit(*data())
    with pytest.raises(tfdp.errors.UnsupportedLayerError, match="GroupNormalization"):
        private(model, optimizer(expected_batch_size=4)).train_on_batch(*data())
    for old, new in zip(before, weights_of(model), strict=True):
        np.testing.assert_array_equal(old, new)
    assert segments(wrapped) == ()


@pytest.mark.parametrize(
    ("broadcast", "is_later"),
    [
        *(("targets", True), ("targets", False), ("weight", True), ("weight", False)),
        ("scalar", False),
    ],
)
def test_one_row_beside_many_is_refused(broadcast, is_later):
    """Also where the first batches, which are looked at, have as many of each."""
    x, y = data(6)
    good = (x, y, np.ones(6, "float32"))
    bad = {
        "targets": (x, y[:1], good[2]),
        "weight": (x, y, good[2][:1]),
        "scalar": (x, y, np.float32(1)),
    }[broadcast]
    signature = tuple(
        tf.TensorSpec([None, *each.shape[1:]] if np.ndim(each) else [], each.dtype)
        for each in bad
    )
    batches = [good] * 20 * is_later + [bad]
    rows = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=signature
    )
    model = private(network(), optimizer(expected_batch_size=6))
    error = tf.errors.InvalidArgumentError if is_later else ValueError
    with pytest.raises(error, match="the same number of rows"):
        model.fit(rows, verbose=0)


@pytest.mark.slow
def test_a_layer_unfrozen_after_the_check_is_checked_again():
    x, y = data(20)
    norm = layers.BatchNormalization(center=False, scale=False, trainable=False)
    model = private(
        keras.Sequential([keras.Input((3,)), norm, layers.Dense(2)]), run_eagerly=True
    )
    model.fit(x, y, batch_size=5, verbose=0)
    norm.trainable = True
    with pytest.raises(tfdp.errors.UnsupportedLayerError):
        model.fit(x, y, batch_size=5, verbose=0)


@pytest.mark.slow
def test_layers_are_checked_though_the_first_batch_is_empty():
    x, y = data(20)
    model = private(
        keras.Sequential([
            keras.Input((3,)),
            layers.BatchNormalization(),
            layers.Dense(2),
        ]),
        optimizer(expected_batch_size=5),
    )

    def batches():
        yield x[:0], y[:0]
        yield x, y

    with pytest.raises(tfdp.errors.UnsupportedLayerError):
        model.fit(batches(), verbose=0)


@pytest.mark.slow
def test_a_compute_loss_that_keeps_data_is_refused():
    class Keeps(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = layers.Dense(2)
            self.seen = self.add_weight(shape=(), trainable=False)

        def call(self, x):
            return self.head(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            self.seen.assign_add(keras.ops.sum(keras.ops.cast(y, "float32")))
            return super().compute_loss(x, y, y_pred, sample_weight)

    model = Keeps()
    wrapped = private(model)
    with pytest.raises(tfdp.errors.UnsupportedLossError, match="keep no data"):
        wrapped.fit(*data(), verbose=0)


@pytest.mark.slow
def test_a_loss_that_couples_examples_is_refused():
    def coupled(y_true, y_pred):
        return keras.ops.sum(keras.ops.square(y_pred - keras.ops.mean(y_pred, 0)), -1)

    with pytest.raises(tfdp.errors.UnsupportedLossError):
        private(loss=coupled).fit(*data())


@pytest.mark.parametrize("traced", [False, True])
def test_a_step_of_ones_own_is_checked_first(traced):
    inner = keras.Sequential([
        keras.Input((3,)),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(2),
    ])
    model = private(inner, noiseless(expected_batch_size=4))
    step = tf.function(model.train_step) if traced else model.train_step
    before = model.get_weights()
    with pytest.raises(tfdp.errors.UnsupportedLayerError, match="BatchNormalization"):
        step((tf.ones([4, 3]), tf.zeros([4], tf.int32)))
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)


# ---------------------------------------------------------------------- what is known


def checked_model(model):
    made = CheckedModel(model, "auto", None, ONE_DEVICE)
    made.compile(logits_loss(), None, None)
    return made


@pytest.mark.parametrize(
    ("loss", "batch_size", "seen"),
    [
        (None, 5, (None, None)),
        (BAM("mse", radius=0.1), 5, (None, None)),
        (BAM("mse", radius=0.1, ascent="exact"), 5, (5, 8)),
        (BAM("mse", radius=0.1, ascent="exact"), None, (None, 8)),
    ],
)
def test_layers_see_no_number_of_rows_but_of_derivatives(loss, batch_size, seen):
    model = network()
    checked = CheckedModel(model, "auto", None, ONE_DEVICE)
    checked.compile(logits_loss(), None, loss)
    clipper = BatchClipper(model, checked.engine)
    of_passes = BatchClipper(model, checked.engine, 1, physical_batch_size=8)
    assert seen == tuple(
        checked.static_rows(batch_size, each) for each in (clipper, of_passes)
    )


def test_a_number_of_rows_is_checked_once():
    model = network()
    checked, rows = checked_model(model), (*data(), None)
    assert not checked.knows(rows, None)
    checked.check(rows, rows, 5, keras.Variable(0, dtype="int64"))
    assert checked.signature.shape.as_list() == [None, 3]
    assert checked.knows(rows, None)
    assert checked.knows(rows, 5)
    assert not checked.knows(rows, 6)
    model.layers[0].trainable = False
    assert not checked.knows(rows, 5)


def test_other_rows_are_checked_again():
    model = keras.Sequential([keras.Input((None, 3)), layers.Dense(2)])
    checked = checked_model(model)
    y_of_steps = np.zeros([8, 5], np.int32)
    of_five = (np.zeros([8, 5, 3]), y_of_steps, None)
    checked.check(of_five, of_five, None, keras.Variable(0, dtype="int64"))
    assert checked.knows(of_five, None)
    for other in (
        (np.zeros([8, 4, 3]), np.zeros([8, 4], np.int32), None),  # Another length.
        (of_five[0], y_of_steps[..., None], None),  # Another rank.
        (of_five[0], y_of_steps.astype("int64"), None),  # Another dtype.
        (*of_five[:2], np.ones(8)),  # Another part.
    ):
        assert not checked.knows(other, None)
    any_length = (
        tf.TensorSpec([None, None, 3]),
        tf.TensorSpec([None, None], tf.int32),
        None,
    )
    assert not checked.knows(any_length, None)
    checked.check(any_length, of_five, None, keras.Variable(0, dtype="int64"))
    # What is proven for any length holds for each.
    assert checked.knows((np.zeros([8, 4, 3]), np.zeros([8, 4], np.int32), None), None)


def test_another_loss_is_checked_again():
    model = network()
    checked, rows = checked_model(model), (*data(), None)
    checked.check(rows, rows, None, keras.Variable(0, dtype="int64"))
    first = checked.objective()
    assert checked.objective() is first
    checked.compile("mse", None, None)
    assert not checked.knows(rows, None)
    assert checked.objective() is not first


# --------------------------------------------- what mixes rows of some shapes alone


@keras.saving.register_keras_serializable("tests")
class Windows(layers.Layer):
    """Replaces steps by the mean of their window: of 8 steps, whosever they are."""

    def call(self, x):
        windows = tf.reshape(x, [-1, 8, x.shape[-1]])
        return tf.reshape(windows - tf.reduce_mean(windows, 1, True), tf.shape(x))


def windows():
    return keras.Sequential([
        keras.Input((None, 4)),
        Windows(),
        layers.GlobalAveragePooling1D(),
        layers.Dense(2),
    ])


def steps(length, rows=4):
    return np.ones([rows, length, 4], np.float32), np.zeros(rows, np.int32)


def refused():
    return pytest.raises(tfdp.errors.UnsupportedLayerError, match="Windows")


def fails_alone():
    """Of an open length it is not proven, and each row goes by itself: 12 are no windows."""
    return pytest.raises(tf.errors.InvalidArgumentError, match=r"(?i)reshape")


@pytest.mark.slow
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_batches_of_another_length_are_checked(run_eagerly):
    model = private(
        windows(), noiseless(expected_batch_size=4), run_eagerly=run_eagerly
    )
    model.train_on_batch(*steps(16))
    before = model.get_weights()
    with refused():
        model.train_on_batch(*steps(12))
    with refused():
        model.train_step(tuple(map(tf.constant, steps(12))))
    with refused():
        model.fit(*steps(12), batch_size=4, verbose=0)
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.mark.slow
@pytest.mark.parametrize("first", [16, 12])
def test_a_dataset_whose_batches_differ_in_length_is_checked_for_any(first):
    def batches():
        for length in (first, 12):
            yield steps(length)

    signature = (tf.TensorSpec([4, None, 4]), tf.TensorSpec([4], tf.int32))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    model = private(windows(), noiseless(expected_batch_size=4))
    with fails_alone():
        model.fit(dataset, verbose=0)
    with fails_alone():
        model.fit(batches(), steps_per_epoch=2, verbose=0)


@pytest.mark.slow
def test_a_graph_for_any_length_is_checked_for_any():
    model = private(windows(), noiseless(expected_batch_size=4))
    model.train_on_batch(*steps(16))
    signature = (tf.TensorSpec([4, None, 4]), tf.TensorSpec([4], tf.int32))
    step = tf.function(
        lambda x, y: model.train_step((x, y)),
        input_signature=signature,
        autograph=False,
    )
    with fails_alone():
        step(*steps(12))


@pytest.mark.slow
def test_targets_of_another_rank_are_checked():
    class Squares(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return keras.ops.mean((y_true - y_pred) ** 2, -1)

    x, y = np.ones([8, 3], np.float32), np.ones([8, 2], np.float32)
    model = private(loss=Squares())
    model.fit(x, y[:, :1], batch_size=4, verbose=0)
    with pytest.raises(tfdp.errors.UnsupportedLossError):
        model.fit(x, y[:, 0], batch_size=8, verbose=0)


def test_the_rows_that_are_looked_at_are_few_and_there_may_be_none():
    x, y = data()
    for given in ((x, y, None), (tf.constant(x), tf.constant(y), None)):
        rows = rows_to_check(given)
        np.testing.assert_array_equal(rows[0], x[:4])
        np.testing.assert_array_equal(rows[1], y[:4])
        assert rows[2] is None
    made_up = rows_to_check((x[:0], y[:0], None))
    assert made_up[0].shape == (4, 3)

    @tf.function
    def in_graph(x):
        made_up = rows_to_check((x, None, None))[0]
        assert isinstance(made_up, np.ndarray)
        assert made_up.shape == (4, 3)

    in_graph(tf.constant(x))
