"""Random numbers."""

from tfdp.checks.operations.axes import within_last
from tfdp.checks.step import COUNTS, Step, lengths_from, rule
from tfdp.checks.values import Cause, Value

_DRAWS = [
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "TruncatedNormal",
    "StatelessRandomNormal",
    "StatelessRandomNormalV2",
    "StatelessRandomUniform",
    "StatelessRandomUniformV2",
    "StatelessRandomUniformInt",
    "StatelessRandomUniformIntV2",
    "StatelessRandomUniformFullInt",
    "StatelessRandomUniformFullIntV2",
    "StatelessTruncatedNormal",
    "StatelessTruncatedNormalV2",
    "StatefulStandardNormalV2",
    "StatefulUniform",
    "StatefulUniformInt",
    "StatefulUniformFullInt",
    "StatefulTruncatedNormal",
]


@rule(*_DRAWS)
def _draw(step: Step) -> Value:
    """Describe random numbers: which ones they are depends on no data."""
    place = 2 if step.op.type.startswith("Stateful") else 0
    shape, others = step.inputs[place], step.inputs
    if any(each.axis is not None for each in others):
        return step.unknown()
    causes = frozenset[Cause]().union(
        *(each.causes for each in others if each is not shape)
    )
    lengths = lengths_from(shape)
    if lengths is None and shape.causes:
        causes |= shape.causes
    return step.output(None, lengths=lengths, causes=causes)


@rule("StatelessMultinomial", "Multinomial")
def _draw_of_each(step: Step) -> Value:
    return within_last(step, 1)


@rule("RandomShuffle", "RandomIndexShuffle")
def _shuffle(step: Step) -> Value:
    value = step.inputs[0]
    if value.axis == 0:
        return step.mixed("puts rows to others")
    return step.output(value.axis, value.layout, lengths=value.lengths)


@rule("RngReadAndSkip", "RngSkip")
def _moved_generator(step: Step) -> list[Value]:
    outputs = range(len(step.op.outputs))
    if any(each.axis is not None for each in step.inputs):
        return [step.unknown(n) for n in outputs]
    # By how many numbers are drawn it moves, and that may be by how many rows.
    causes = frozenset(each for each in step.causes if each.why != COUNTS)
    return [step.output(None, number=n, causes=causes) for n in outputs]
