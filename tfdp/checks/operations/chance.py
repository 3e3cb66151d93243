"""Random numbers."""

from tfdp.checks.node import COUNTS, NONE, Node, lengths_from, rule
from tfdp.checks.values import Value, causes_of

_DRAWS = """
    RandomStandardNormal RandomUniform RandomUniformInt StatefulStandardNormalV2
    StatefulTruncatedNormal StatefulUniform StatefulUniformFullInt
    StatefulUniformInt StatelessRandomNormal StatelessRandomNormalV2
    StatelessRandomUniform StatelessRandomUniformFullInt
    StatelessRandomUniformFullIntV2 StatelessRandomUniformInt
    StatelessRandomUniformIntV2 StatelessRandomUniformV2 StatelessTruncatedNormal
    StatelessTruncatedNormalV2 TruncatedNormal
"""


@rule(*_DRAWS.split(), rows_in=NONE)
def _draw(node: Node) -> Value:
    """Describe random numbers: which ones they are depends on no data."""
    shape = node.inputs[2 if node.op.type.startswith("Stateful") else 0]
    if shape.numbers is None:
        return node.free()
    # How many numbers are drawn is in their shape, not in them.
    causes = causes_of(each for each in node.inputs if each is not shape)
    return node.free(lengths_from(shape), causes)


@rule("RandomShuffle", "RandomIndexShuffle")
def _shuffle(node: Node) -> Value:
    value = node.inputs[0]
    if value.axis == 0:
        return node.mixed("puts rows to others")
    return node.like(value)


@rule("RngReadAndSkip", "RngSkip", rows_in=NONE)
def _moved_generator(node: Node) -> Value:
    # By how many numbers are drawn it moves, and that may be by how many rows.
    causes = frozenset(each for each in node.causes if each.why != COUNTS)
    return node.free(causes=causes)
