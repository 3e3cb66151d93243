"""Random numbers."""

from collections.abc import Sequence

import tensorflow as tf

from tfdp._seeds import SECRET
from tfdp.checks.node import (
    BY_PLACE,
    COUNTS,
    NONE,
    SEEDS,
    Node,
    lengths_from,
    rule,
)
from tfdp.checks.sizes import is_fixed
from tfdp.checks.values import Cause, Value, causes_of, chance_of

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


# The beginnings of what operations that draw are called, and of some that do not.
_DRAWING = (
    *("Multinomial", "ParameterizedTruncated", "Random", "StatefulRandom"),
    *("StatefulStandard", "StatefulTruncated", "StatefulUniform", "TruncatedNormal"),
    *("StatelessMultinomial", "StatelessParameterized", "StatelessRandom"),
    "StatelessTruncated",
)
_NOT_DRAWING = (
    *("RandomDataset", "RandomGammaGrad", "StatelessRandomGet"),
    # Orders, which are the same for all rows or put rows to others.
    *("RandomIndexShuffle", "RandomShuffle"),
)
# What takes a seed for no more than to draw.
_BY_SEEDS = (*_DRAWING, "RandomIndexShuffle", "StatelessSample", "StatelessShuffle")
# Names of the inputs that are seeds; all others are data.
_SEED_INPUTS = ("counter", "key", "resource", "seed", "seed2")
_LENGTHS = ("Rank", "Shape", "ShapeN", "Size")
_STATE = "state"
# The state of a seed generator, as a number.
READ = "read"


def with_chance(node: Node, outputs: Sequence[Value]) -> list[Value]:
    """Say where seeds come from, and what is the matter with draws from known ones.

    What a row draws goes by its place in the batch, which changes where another row is
    left out. So nobody may know it; see `secret_seeds`.

    Args:
        node: An operation.
        outputs: What is known of its outputs.

    Returns:
        The same, with `Value.chance`, and with causes.
    """
    kind, causes = node.op.type, frozenset[Cause]()
    draws = kind.startswith(_BY_SEEDS) and not kind.startswith("StatelessRandomGet")
    chance, of_others = (
        _chance_of_inputs(node) if draws else (chance_of(node.inputs), frozenset())
    )
    if kind in _LENGTHS:
        chance &= {READ}
        return [each._replace(chance=each.chance | chance) for each in outputs]
    chance |= chance_of(outputs)
    if kind == "ReadVariableOp" and node.inputs[0].variable == SEEDS:
        chance |= {READ}
    if node.op.name.rpartition("/")[2].startswith(SECRET):
        chance |= {SECRET}
    if kind in ("RngReadAndSkip", "StatefulUniformFullInt"):
        chance |= {_STATE}
    if kind.startswith(_DRAWING) and not kind.startswith(_NOT_DRAWING):
        causes = _causes_of_places(node, chance)
    if draws and SECRET in chance:
        # Nobody who does not know the key knows what that gives; a seed itself moves on by
        # known steps.
        chance -= {READ}
    return [
        each._replace(chance=chance | of_others, causes=each.causes | causes)
        for each in outputs
    ]


def _chance_of_inputs(node: Node) -> tuple[frozenset[str], frozenset[str]]:
    """Return where the seeds of a draw come from, and those of its other inputs."""
    named = zip(node.op.op_def.input_arg, node.inputs, strict=True)
    of_seeds: list[Value] = []
    of_others: list[Value] = []
    for argument, value in named:
        (of_seeds if argument.name in _SEED_INPUTS else of_others).append(value)
    return chance_of(of_seeds), chance_of(of_others)


def has_known_seed(op: tf.Operation) -> bool:
    """Tell whether an operation draws, from a state of its own and a seed that is known."""
    may_have = _with_seeds.get(op.type)
    if may_have is None:
        definition = op.op_def
        names = {attribute.name for attribute in definition.attr}
        may_have = _with_seeds[op.type] = definition.is_stateful and "seed" in names
    return may_have and any(_seeds_of(op))


# By the type of operation: to ask TensorFlow takes long.
_with_seeds: dict[str, bool] = {}


def _seeds_of(op: tf.Operation) -> list[int]:
    names = ("seed", "seed2")
    return [op.get_attr(name) for name in names if name in op.node_def.attr]


def _causes_of_places(node: Node, chance: frozenset[str]) -> frozenset[Cause]:
    """Say what is the matter with numbers that rows get by their places."""
    lengths = node.op.outputs[0].shape
    is_of_batch = (
        any(each.axis is not None for each in node.inputs)
        or not lengths.is_fully_defined()
        or not all(is_fixed(each.numbers) for each in node.inputs)
    )
    if not is_of_batch:
        return frozenset()
    seeds = _seeds_of(node.op)
    if seeds or node.op.type.startswith("Stateful"):
        is_of_system = bool(seeds) and not any(seeds)
        return frozenset() if is_of_system else frozenset({node.cause(BY_PLACE)})
    if SECRET in chance and _STATE not in chance:
        return frozenset()
    # Where a row runs by itself it has one place only, but a state moves on.
    return frozenset({node.cause(BY_PLACE, is_certain=_STATE in chance)})
