"""How a logical batch is cut: what is clipped together, what runs together."""

import dataclasses
import math

from tfdp.optimizers import DPOptimizer
from tfdp.sampling import Scheme
from tfdp.training.batch_clipper import BatchClipper


def with_sizes(
    clipper: BatchClipper, scheme: Scheme, optimizer: DPOptimizer
) -> BatchClipper:
    """Settle what depends on the expected batch size, also in the optimizer.

    Args:
        clipper: Of the model; its rows in a pass, if any, are what the user wants.
        scheme: How the batches are drawn.
        optimizer: Says how many microbatches there are; and the batch size, if the
            scheme does not know.

    Returns:
        A clipper that knows how many examples are clipped together, and how many rows
        are in a pass through the model.

    Raises:
        ValueError: If the batch size is not known, or the sizes, or microbatches and
            the sampling, do not go together.
    """
    batch_size = scheme.expected_batch_size or optimizer.expected_batch_size
    if batch_size is None:
        raise ValueError(
            "The expected batch size of these data is not known, and the divisor "
            "of the noised sum is never taken from the data. Received: "
            f"expected_batch_size=None. Use `{type(optimizer).__name__}(..., "
            "expected_batch_size=256)` or `private.fit(tfdp.data.declare(dataset, "
            "number_of_examples=..., expected_batch_size=256, sampling=...))`."
        )
    # The divisor is public: what is expected of a batch, not how large one was.
    optimizer.expect_batch_size(batch_size)
    examples_per_unit = optimizer.examples_per_unit(batch_size)
    if examples_per_unit > 1 and not scheme.allows_units:
        instead = ", or `DPModel(model, sampling='shuffle')`"
        raise ValueError(
            "Microbatches of several examples need batches of fixed size: under "
            f"{(scheme.sampling or scheme.kind)!r} sampling one example more shifts all "
            "groups behind it, and no clipping bounds that. Received: num_microbatches="
            f"{optimizer.num_microbatches}, batch_size={batch_size:g}. Use "
            f"`num_microbatches=None`{instead if scheme.unit == 'example' else ''}."
        )
    rows_per_unit = examples_per_unit * scheme.rows_per_example
    physical_batch_size = clipper.physical_batch_size
    if physical_batch_size is None and scheme.slots is not None:
        # Each replica has a share of the batches, which are of one size.
        physical_batch_size = -(-scheme.slots // clipper.replicas.number)
    if physical_batch_size is not None:
        check_whole_units(physical_batch_size, rows_per_unit)
    elif clipper.jit_compile:
        # XLA compiles for one size. One Poisson batch in 44 is larger than this and takes
        # two passes: 1.023 times the rows on average, where room for nearly all batches
        # would be more.
        is_fixed = scheme.allows_units and scheme.expected_batch_size is not None
        most = batch_size if is_fixed else batch_size + 2 * math.sqrt(batch_size)
        rows = math.ceil(most / clipper.replicas.number) * scheme.rows_per_example
        physical_batch_size = filled_up(rows, rows_per_unit)
    return dataclasses.replace(
        clipper,
        examples_per_unit=examples_per_unit,
        rows_per_example=scheme.rows_per_example,
        physical_batch_size=physical_batch_size,
    )


def check_whole_units(physical_batch_size: int, examples_per_unit: int) -> None:
    """Refuse passes that would cut a unit in two: each part would be clipped alone.

    Args:
        physical_batch_size: Rows in a pass.
        examples_per_unit: Examples whose mean gradient is clipped.

    Raises:
        ValueError: If the passes hold no whole units.
    """
    if physical_batch_size % examples_per_unit:
        raise ValueError(
            "`physical_batch_size` must hold whole microbatches, or users. Received: "
            f"physical_batch_size={physical_batch_size}, {examples_per_unit} "
            "examples that are clipped together. Use `physical_batch_size="
            f"{filled_up(physical_batch_size, examples_per_unit)}`."
        )


def filled_up(rows: int, examples_per_unit: int) -> int:
    """Return the least number of rows of whole units that has room for so many."""
    return rows + -rows % examples_per_unit
