"""Random numbers."""

from tfdp.checks.step import COUNTS, Step, lengths_from, rule
from tfdp.checks.values import Value, causes_of, have_rows

_DRAWS = """
    RandomStandardNormal RandomUniform RandomUniformInt StatefulStandardNormalV2
    StatefulTruncatedNormal StatefulUniform StatefulUniformFullInt
    StatefulUniformInt StatelessRandomNormal StatelessRandomNormalV2
    StatelessRandomUniform StatelessRandomUniformFullInt
    StatelessRandomUniformFullIntV2 StatelessRandomUniformInt
    StatelessRandomUniformIntV2 StatelessRandomUniformV2 StatelessTruncatedNormal
    StatelessTruncatedNormalV2 TruncatedNormal
"""


@rule(*_DRAWS.split())
def _draw(step: Step) -> Value:
    """Describe random numbers: which ones they are depends on no data."""
    if have_rows(step.inputs):
        return step.unknown()
    shape = step.inputs[2 if step.op.type.startswith("Stateful") else 0]
    lengths = lengths_from(shape)
    # How many numbers are drawn is in their shape, not in them, if that is known.
    counted = shape if lengths is not None else None
    causes = causes_of(each for each in step.inputs if each is not counted)
    return step.output(None, lengths=lengths, causes=causes)


@rule("RandomShuffle", "RandomIndexShuffle")
def _shuffle(step: Step) -> Value:
    value = step.inputs[0]
    if value.axis == 0:
        return step.mixed("puts rows to others")
    return step.like(value, value.lengths)


@rule("RngReadAndSkip", "RngSkip")
def _moved_generator(step: Step) -> Value:
    if have_rows(step.inputs):
        return step.unknown()
    # By how many numbers are drawn it moves, and that may be by how many rows.
    causes = frozenset(each for each in step.causes if each.why != COUNTS)
    return step.output(None, causes=causes)
