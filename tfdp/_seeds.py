"""Random seeds: drawn for each row of a batch by itself, or refused."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfdp._types import Tensor

# A generator, and the argument `ordered` of each of its draws since the row began.
_Draws = tuple[keras.random.SeedGenerator, list[bool]]


class _RowSeeds(threading.local):
    """The row whose seeds this thread draws, if any, and what it has drawn."""

    row: Tensor | None = None
    refused: bool = False

    def __init__(self) -> None:
        self.drawn: dict[int, _Draws] = {}

    @contextlib.contextmanager
    def changed(self, **values: object) -> Iterator[None]:
        """Set attributes of this thread, and set them back in the end."""
        # Outside of these contexts the replacement does what the original does.
        keras.random.SeedGenerator.next = _next_seed_of_row
        before = {name: getattr(self, name) for name in values}
        self.__dict__.update(values)
        try:
            yield
        finally:
            self.__dict__.update(before)


_row_seeds = _RowSeeds()
_next_seed = keras.random.SeedGenerator.next


@contextlib.contextmanager
def seeds_of_row(row: Tensor) -> Iterator[Callable[[], None]]:
    """Let every Keras seed generator draw seeds of its own for one row of a batch.

    Inside `tf.vectorized_map` the state of a generator is the same for all rows,
    so that all of them would get one dropout mask. Here the number of the row
    and of the draw are folded into the seed, and the state stays as it is. Generators
    with a true attribute `is_same_for_all_rows` leave the row out.

    Args:
        row: Scalar integer tensor, the number of the row.

    Yields:
        A function to call outside the map: it moves the state of every generator
        that was used past the seeds that were drawn.
    """
    drawn: dict[int, _Draws] = {}

    def advance() -> None:
        for generator, draws in drawn.values():
            for ordered in draws:
                _next_seed(generator, ordered=ordered)

    with _row_seeds.changed(row=row, drawn=drawn):
        yield advance


def drawing_again() -> contextlib.AbstractContextManager[None]:
    """Within `seeds_of_row`, draw once more what was drawn since it began."""
    return _row_seeds.changed(drawn={})


def without_chance() -> contextlib.AbstractContextManager[None]:
    """Let whatever asks a Keras seed generator for a seed end in a `RandomError`."""
    return _row_seeds.changed(refused=True)


class RandomError(RuntimeError):
    """A seed was drawn where nothing may be random."""


def _next_seed_of_row(
    generator: keras.random.SeedGenerator, ordered: bool = True
) -> Tensor:
    if _row_seeds.refused:
        raise RandomError
    if _row_seeds.row is None:
        return _next_seed(generator, ordered=ordered)
    draws = _row_seeds.drawn.setdefault(id(generator), (generator, []))[1]
    state = tf.convert_to_tensor(generator.state)
    row = tf.cast(_row_seeds.row, tf.int64)
    if getattr(generator, "is_same_for_all_rows", False):
        row = tf.constant(0, tf.int64)
    # Odd multipliers modulo 2**31: rows and draws of one state never meet.
    offset = row * 0x9E3779B1 + len(draws) * 0x85EBCA77
    draws.append(ordered)
    fold = tf.stack([tf.zeros_like(offset), offset % (1 << 31)])
    return tf.cast((tf.cast(state, tf.int64) + fold) % (1 << 32), state.dtype)
