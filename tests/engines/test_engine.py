"""An engine of one's own: a subclass, which is tried before it is believed."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.engine_checks import OUTLIER, check, runner
from tests.problems import PROBLEMS
from tfdp import _tree, clipping, engines
from tfdp.engines.vectorized import unit_gradients
from tfdp.errors import UnsupportedLayerError

PROBLEM = PROBLEMS["mlp_logits"]


class OneByOne(engines.Engine):
    """Takes one row after the other, and some factor too much of it."""

    name = "one_by_one"

    def __init__(self, factor=1.0):
        self.factor = factor

    def clip_and_sum(self, objective, batch, *, l2_norm_clip, rows_per_unit):
        assert rows_per_unit == 1

        def of_row(row):
            unit = _tree.map_tensors(lambda rows: rows[row][None], batch)
            return unit_gradients(objective, unit)

        rows = tf.range(tf.shape(batch.is_padding)[0])
        shapes = [v.shape for v in objective.variables]
        dtype = objective.variables[0].dtype
        spec = [tf.TensorSpec(shape, dtype) for shape in shapes]
        outputs = tf.TensorSpec([1, *objective.model.output_shape[1:]], dtype)
        gradients, y_pred = tf.map_fn(of_row, rows, fn_output_signature=(spec, outputs))
        gradients = [self.factor * gradient for gradient in gradients]
        sums, norms = clipping.clip_and_sum(
            gradients, is_empty=batch.is_padding, l2_norm_clip=l2_norm_clip
        )
        return sums, norms, y_pred[:, 0]

    def read(self, objective, batch):
        y_pred = objective.predict(batch.x)
        return [objective.losses(batch.x, batch.y, y_pred, batch.sample_weight)]

    def explain(self, model, signature):
        return [engines.explanation.Explanation("model", self.name, "alone", None)]


@pytest.mark.slow
def test_its_sums_and_norms_count():
    check(PROBLEM, runner(PROBLEM, [OneByOne()]), OUTLIER)


@pytest.mark.slow
def test_a_model_trains_with_it():
    private = tfdp.DPModel(PROBLEM.build(), engine=OneByOne())
    optimizer = tfdp.optimizers.DPSGD(
        learning_rate=0.1, l2_norm_clip=1.0, noise_multiplier=1.0
    )
    private.compile(optimizer, PROBLEM.loss())
    before = [variable.numpy() for variable in private.trainable_variables]
    private.fit(*PROBLEM.batch(5)[:2], batch_size=3, verbose=0)
    for variable, value in zip(private.trainable_variables, before, strict=True):
        assert np.any(variable != value)
    assert "one_by_one" in private.explain()


@pytest.mark.slow
def test_one_that_takes_other_gradients_is_refused():
    model, (x, y, _) = PROBLEM.build(), PROBLEM.batch(4)
    options = {"l2_norm_clip": 1.0, "engine": OneByOne(1.1)}
    with pytest.raises(UnsupportedLayerError, match="those of the rows taken one by"):
        tfdp.clipped_gradients(model, PROBLEM.loss(), x, y, **options)


@pytest.mark.parametrize("wrong", ["fastest", None, OneByOne])
def test_what_is_no_engine_is_refused(wrong):
    with pytest.raises(ValueError, match=r"`engine` must be .* Received: .* Use "):
        engines.get(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("base", [engines.BookkeepingEngine, engines.VectorizedEngine])
def test_one_that_does_not_clip_is_refused(base):
    class Unclipped(base):
        def clip_and_sum(self, objective, batch, *, l2_norm_clip, rows_per_unit):
            return super().clip_and_sum(
                objective,
                batch,
                l2_norm_clip=1e3 * l2_norm_clip,
                rows_per_unit=rows_per_unit,
            )

    model, (x, y, _) = PROBLEM.build(), PROBLEM.batch(4)
    options = {"l2_norm_clip": 1.0, "engine": Unclipped()}
    with pytest.raises(UnsupportedLayerError, match="must clip every unit"):
        tfdp.clipped_gradients(model, PROBLEM.loss(), x, y, **options)
