"""Random numbers."""

import tensorflow as tf

from tfdp._seeds import SECRET
from tfdp._types import Tensor
from tfdp.checks.node import BY_PLACE, COUNTS, NONE, Node, lengths_from, rule
from tfdp.checks.sizes import is_fixed
from tfdp.checks.values import Cause, Value, causes_of

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
    if not is_fixed(shape.numbers):
        # Those of a row go by its place in the batch, which changes where another row is
        # left out. So nobody may know them; see `secret_seeds`.
        causes |= _causes_of_places(node)
    return node.free(lengths_from(shape), causes)


def _causes_of_places(node: Node) -> frozenset[Cause]:
    """Say what is the matter with numbers that rows get by their places."""
    if node.op.type.startswith("Stateless"):
        origins = _origins(node.op.inputs[1])
        if any(op.name.rpartition("/")[2].startswith(SECRET) for op in origins):
            return frozenset()
        # What comes into a loop or a branch from outside is taken for secret.
        if any(op.type == "Placeholder" for op in origins):
            return frozenset()
        # Where a row runs by itself it has one place only, but a state moves on.
        has_state = any(op.type == "RngReadAndSkip" for op in origins)
    elif node.op.type.startswith("Stateful") or node.attr("seed") or node.attr("seed2"):
        has_state = True
    else:
        # The operating system has seeded it.
        return frozenset()
    return frozenset({node.cause(BY_PLACE, is_certain=has_state)})


def _origins(seed: Tensor) -> set[tf.Operation]:
    """Return the operations of a graph that a seed is made by, lengths and variables left out."""
    found, waiting = {seed.op}, [seed.op]
    while waiting:
        op = waiting.pop()
        inputs = () if op.type == "Shape" else op.inputs
        new = {each.op for each in inputs if each.dtype != tf.resource} - found
        found |= new
        waiting += new
    return found


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
