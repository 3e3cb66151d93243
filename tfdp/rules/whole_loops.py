"""The loops of a pass that are taken whole, and what becomes of their taps."""

from collections.abc import Callable, Iterable

import tensorflow as tf

from tfdp._tracing import note_loop
from tfdp._types import Nest, Tensor, Variable
from tfdp.rules.free import Free
from tfdp.rules.loops import NotTakenWholeError, Tap, taken_whole
from tfdp.rules.unrolling import while_loop
from tfdp.rules.uses import Followed, Use


class WholeLoops:
    """Takes the loops of a pass whole; see `tfdp.rules.loops`.

    Args:
        variables: Those whose uses are recorded.
        rows: How many rows there are.
        free: Knows what is made without rows in the graph of the pass.

    Attributes:
        is_looking: Whether a loop is being traced, to be looked at.
        not_known: What was not known of the last loop that was not taken whole.
    """

    def __init__(
        self, variables: Iterable[Variable], rows: int | Tensor, free: Free
    ) -> None:
        self.is_looking = False
        self.not_known = "it may have functions"
        self._variables = variables
        self._rows = rows
        self._free = free
        # Whether somebody has gone back through them, for each loop.
        self._are_differentiated: list[Callable[[], bool]] = []
        # Of uses of variables that are repeated outside, by their operations.
        self._taps: dict[str, Tap] = {}

    def run(self, tapes: list[tf.GradientTape], *args: Nest, **kwargs: Nest) -> Nest:
        """Do what `tf.while_loop` does; take the loop whole if all in it is known.

        Args:
            tapes: Those of the pass; see `taken_whole`.
            *args: Those of `tf.while_loop`.
            **kwargs: Likewise.

        Returns:
            What `tf.while_loop` returns.
        """
        taken = None
        self.is_looking = True
        try:
            taken = taken_whole(
                self._variables, self._rows, self._free, tapes, *args, **kwargs
            )
        except NotTakenWholeError as error:
            # Calls of layers in it say what is the matter.
            self.not_known = str(error)
        finally:
            self.is_looking = False
        if taken is None:
            return while_loop(*args, **kwargs)
        # If the proof fails, single steps may be proven.
        note_loop()
        self._taps |= taken.taps
        self._are_differentiated.append(taken.is_differentiated)
        return taken.results

    def tap_of(self, use: Use) -> Tap | None:
        """Return what stands for a use that is repeated outside of its loop."""
        return self._taps.get(use.op.name)

    def are_differentiated(self) -> bool:
        """Tell whether the model itself has gone back through one of them.

        By such a gradient variables reach the loss in one more way, which no tap is in.

        Returns:
            Whether it has.
        """
        return any(each() for each in self._are_differentiated)

    def unanswered(self, followed: Iterable[Followed]) -> list[str]:
        """List what steps do with variables that no use of these variables answers for.

        Args:
            followed: Variables, and where they meet the rows.

        Returns:
            Words for each; there must be none, or a part of a gradient would be lost.
        """
        asked = {
            (name, path) for name, tap in self._taps.items() for path in tap.variables
        }
        for each in followed:
            asked -= {(use.op.name, each.variable.path) for use in each.uses}
        return [
            f"A loop must use variables on rows. Received: `{path}` in `{name}`."
            for name, path in sorted(asked)
        ]
