"""The vectorized engine against one example at a time in float64."""

import numpy as np
import pytest
import tensorflow as tf

from tests.problems import PROBLEMS, cases, nan_row, precision, scale_outlier
from tests.reference import assert_all_close, clipped_sum, problem_gradients
from tfdp import _tree
from tfdp.clipping import clip_as_tensor
from tfdp.engines.passes import run_whole
from tfdp.engines.vectorized import VectorizedEngine
from tfdp.losses.objective import Objective

MODES = ("eager", "graph", "xla")


def clipped(problem, batch, mode, dtype, clip, rows_per_unit=1):
    """Run the engine on a problem in one of the modes."""
    with precision(dtype):
        objective = Objective.of(
            problem.build(dtype), problem.loss(dtype), problem.loss_weights
        )
        clip = clip_as_tensor(clip, objective.variables)

        def run(data):
            sums, norms, _ = run_whole(
                lambda rows: VectorizedEngine().clip_and_sum(
                    objective, rows, l2_norm_clip=clip, rows_per_unit=rows_per_unit
                ),
                data,
                rows_per_unit=rows_per_unit,
            )
            return sums, norms

        if mode != "eager":
            run = tf.function(run, jit_compile=mode == "xla", autograph=False)
        return run(_tree.map_tensors(tf.convert_to_tensor, tuple(batch)))


def check(problem, batch, mode, dtype, tolerance, unit_size=1):
    """Compare with the reference, with clipping active for half of the units."""
    gradients = problem_gradients(problem, batch)
    _, norms = clipped_sum(gradients, 1.0, unit_size)
    finite = norms[np.isfinite(norms)]
    clip = float(np.median(finite)) * 0.9 if finite.any() else 1.0
    expected, norms = clipped_sum(gradients, clip, unit_size)
    sums, result_norms = clipped(problem, batch, mode, dtype, clip, unit_size)
    assert_all_close(sums, expected, rtol=0, atol=tolerance * clip * max(len(norms), 1))
    np.testing.assert_array_equal(np.isfinite(result_norms), np.isfinite(norms))
    at = np.isfinite(norms)
    np.testing.assert_allclose(
        result_norms[at], norms[at], rtol=tolerance, atol=tolerance * clip
    )


@pytest.mark.parametrize("problem", cases(lacking={"random"}))
def test_graph_equals_one_example_at_a_time(problem):
    check(problem, problem.batch(5), "graph", "float32", 2e-5)
