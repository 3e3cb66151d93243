"""The gradient of a matrix whose columns do not all see the same inputs."""

import dataclasses
import math
from collections.abc import Callable

import tensorflow as tf

from tfdp._types import Tensor, Variable
from tfdp.rules.terms.outer_products import OuterProducts
from tfdp.rules.terms.term import Jvp, Movable, Term, Units


@dataclasses.dataclass(frozen=True)
class Block:
    """Some columns of a variable, which have a term to themselves.

    Attributes:
        shape: That of the variable, with fewer columns on the last axis.
    """

    shape: tuple[int, ...]

    @classmethod
    def of(cls, variable: Variable, g: Tensor) -> "Block":
        """Return the columns of a variable whose outputs have the gradients `g`."""
        return cls((*variable.shape[:-1], g.shape[-1]))


class Columns(Movable):
    """Blocks of columns side by side, each with a term of its own.

    No number is in two of them: squared norms add up, and what one block sees never
    multiplies the gradients of another.

    Args:
        variable: The Keras variable, whose last axis holds the columns.
        blocks: Terms of its blocks, from the first column to the last; the variable of
            each is a `Block`.
    """

    def __init__(self, variable: Variable, blocks: list[Movable]) -> None:
        self.variable = variable
        self.blocks = blocks

    @classmethod
    def of(
        cls,
        variable: Variable,
        seen: list[Tensor],
        g: list[Tensor],
        make: Callable[..., Movable] = OuterProducts,
    ) -> Movable:
        """Return the term of a variable whose blocks see other inputs each, or one.

        Args:
            variable: The variable.
            seen: What each block sees.
            g: Gradients of each block's outputs, their last axis that of the columns.
            make: Makes a term, of a variable or a `Block`, of what it sees and of `g`.
        """
        if len(seen) == 1:
            return make(variable, seen[0], g[0])
        pairs = zip(seen, g, strict=True)
        return cls(variable, [make(Block.of(variable, g), x, g) for x, g in pairs])

    @property
    def repeats(self) -> int | None:
        """Rows for each row of the batch."""
        return self.blocks[0].repeats

    @repeats.setter
    def repeats(self, repeats: int | None) -> None:
        for block in self.blocks:
            block.repeats = repeats

    @property
    def widths(self) -> list[int]:
        """How many columns each block has."""
        return [block.variable.shape[-1] for block in self.blocks]

    def merged(self, other: Term) -> "Columns | None":
        """Take the uses of both, block by block."""
        if not isinstance(other, Columns) or other.widths != self.widths:
            return None
        pairs = zip(self.blocks, other.blocks, strict=True)
        blocks = [block.merged(of_other) for block, of_other in pairs]
        return None if None in blocks else self.copy_with(blocks=blocks)

    def how(self, norms: str, units: Units) -> str:
        """As for the blocks; by inner products if these do not agree."""
        ways = {block.how(norms, units) for block in self.blocks}
        return ways.pop() if len(ways) == 1 else "gram"

    def numbers(self, how: str, units: Units) -> int | None:
        """Add up what the blocks take."""
        numbers = [block.numbers(how, units) for block in self.blocks]
        return None if None in numbers else sum(filter(None, numbers))

    def factors(self, units: Units) -> list[Tensor]:
        """Those of all blocks, one after the other."""
        return [each for block in self.blocks for each in block.factors(units)]

    def instantiate(self, units: Units) -> Tensor:
        """Put the gradients of the blocks side by side."""
        gradients = [
            units.view(block.instantiate(units), [width])
            for block, width in zip(self.blocks, self.widths, strict=True)
        ]
        size = math.prod(self.variable.shape)
        return tf.reshape(tf.concat(gradients, -1), [units.number, size])

    def squares_by_gram(self, units: Units) -> Tensor:
        """Add up the blocks'."""
        return tf.add_n([block.squares_by_gram(units) for block in self.blocks])

    def squares_of_dropped(self, units: Units) -> Tensor:
        """Add up the blocks'."""
        return tf.add_n([block.squares_of_dropped(units) for block in self.blocks])

    def lengths(self, units: Units) -> Tensor:
        """Add up the blocks'."""
        return tf.add_n([block.lengths(units) for block in self.blocks])

    def weighted_sum(self, factors: list[Tensor], weights: Tensor | None) -> Tensor:
        """Sum block by block."""
        remaining = iter(factors)
        sums = [
            block.weighted_sum([next(remaining) for _ in block.tensors()], weights)
            for block in self.blocks
        ]
        return tf.concat(sums, -1)

    def inner_products(self, other: Movable, units: Units) -> Tensor:
        """Add up the blocks' with those of the same columns."""
        if not isinstance(other, Columns) or other.widths != self.widths:
            return super().inner_products(other, units)
        pairs = zip(self.blocks, other.blocks, strict=True)
        return tf.add_n([block.inner_products(of, units) for block, of in pairs])

    def applied(self, a: Tensor, units: Units) -> Tensor:
        """Put the blocks' products side by side."""
        return tf.concat([block.applied(a, units) for block in self.blocks], -1)

    def applied_back(self, g: Tensor, units: Units) -> Tensor:
        """Add up the blocks' products, each with its part of the rows."""
        parts = zip(self.blocks, tf.split(g, self.widths, -1), strict=True)
        return tf.add_n([block.applied_back(part, units) for block, part in parts])

    def tensors(self) -> list[Tensor]:
        """Those of all blocks."""
        return [each for block in self.blocks for each in block.tensors()]

    def moved(self, jvp: Jvp, rate: Tensor) -> "Columns":
        """Move the blocks."""
        return self.copy_with(blocks=[block.moved(jvp, rate) for block in self.blocks])
