"""Entries of tensors that are picked by their numbers."""

from tfdp.checks.step import Step, axis_from, rule, static_lengths
from tfdp.checks.values import PLAIN, Value


@rule("ResourceGather")
def _gather_of_variable(step: Step) -> Value:
    _, indices = step.inputs
    rest = static_lengths(step.tensor)
    if step.attr("batch_dims") or indices.lengths is None or rest is None:
        return step.unknown()
    return step.like(indices, [*indices.lengths, *rest[len(indices.lengths) :]])


@rule("GatherV2", "Gather")
def _gather(step: Step) -> Value:
    params, indices, *along = step.inputs
    if params.lengths is None or indices.lengths is None:
        return step.unknown()
    axis = axis_from(along[0], len(params.lengths)) if along else 0
    if axis is None:
        return step.unknown()
    if params.axis == axis:
        return step.mixed("picks some rows by their numbers")
    batch_dims = 0 if step.op.type == "Gather" else step.attr("batch_dims")
    if batch_dims < 0:
        batch_dims += len(indices.lengths)
    picked = indices.lengths[batch_dims:]
    lengths = [*params.lengths[:axis], *picked, *params.lengths[axis + 1 :]]
    # Where the rows of both are in the result, which must be the same place.
    places = set()
    if params.axis is not None:
        shift = len(picked) - 1 if params.axis > axis else 0
        places.add((params.axis + shift, params.layout))
    if indices.axis is not None:
        shift = axis - batch_dims if indices.axis >= batch_dims else 0
        places.add((indices.axis + shift, indices.layout))
    if len(places) > 1:
        return step.mixed("lets each row pick entries of all others")
    place, layout = next(iter(places), (None, PLAIN))
    return step.output(place, layout, lengths=lengths)


@rule("GatherNd", "ResourceGatherNd")
def _gather_nd(step: Step) -> Value:
    params, indices = step.inputs
    if params.axis is not None:
        if params.lengths is not None and indices.axis is None and indices.lengths:
            # How many of the first axes each index is about.
            depth = indices.lengths[-1]
            if isinstance(depth, int) and params.axis >= depth:
                rows = params.axis - depth + len(indices.lengths) - 1
                return step.output(rows, params.layout)
        return step.mixed("picks some rows by their numbers", is_certain=False)
    if indices.axis is not None and indices.from_end in {None, -1}:
        return step.unknown()
    rest = static_lengths(step.tensor)
    if indices.lengths is None or rest is None:
        return step.like(indices)
    own = indices.lengths[:-1]
    return step.like(indices, [*own, *rest[len(own) :]])
