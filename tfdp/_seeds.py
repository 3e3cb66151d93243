"""Random seeds: secret, drawn for each row of a batch by itself, or refused."""

import contextlib
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras
from tfdp._types import Tensor

# What operations that give secret seeds are called in a graph.
SECRET = "secret_seed"

# A generator, and the argument `ordered` of each of its draws since the row began.
_Draws = tuple[keras.random.SeedGenerator, list[bool]]


class _RowSeeds(threading.local):
    """The key and the row of the seeds that this thread draws, and what it has drawn."""

    key: Tensor | None = None
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
# Those that have drawn in one of these contexts, tracked by a layer or not.
_drawing: weakref.WeakSet[keras.random.SeedGenerator] = weakref.WeakSet()


def states_of_drawing() -> list[keras.Variable]:
    """List the states of the generators that have drawn for models in training."""
    return [generator.state for generator in _drawing]


class _Key:
    """Two words from the operating system, in a variable that is never saved.

    Attributes:
        is_known: Whether they are 0, so that masks follow from the states alone.
        words: int64, shape ``(2,)``, each less than 2**32.
    """

    def __init__(self) -> None:
        self.is_known = False
        with tf.init_scope(), _keras.unmirrored_variables():
            self.words = tf.Variable(self._new(), trainable=False, name="mask_key")

    def renew(self, *, is_known: bool) -> None:
        self.is_known = is_known
        with tf.init_scope():
            self.words.assign(self._new())

    def renew_in_child(self) -> None:
        # A child cannot use its parent's GPU, nor draw with a key that lies there.
        if "GPU" not in str(self.words.device):
            self.renew(is_known=self.is_known)

    def _new(self) -> np.ndarray:
        if self.is_known:
            return np.zeros(2, np.int64)
        return np.frombuffer(secrets.token_bytes(8), np.uint32).astype(np.int64)


_keys: weakref.WeakKeyDictionary[keras.Model, _Key] = weakref.WeakKeyDictionary()


def _renew_in_child() -> None:
    for key in _keys.values():
        key.renew_in_child()


os.register_at_fork(after_in_child=_renew_in_child)


def _key_of(model: keras.Model) -> _Key:
    if model not in _keys:
        _keys[model] = _Key()
    return _keys[model]


def renew_key(model: keras.Model, *, is_known: bool) -> None:
    """Let a model draw other numbers from here on, from the same states.

    Args:
        model: See `secret_seeds`.
        is_known: Whether what it draws follows from the states alone, for tests.
    """
    _key_of(model).renew(is_known=is_known)


def use_key(model: keras.Model, *, is_known: bool) -> None:
    """Let a model have a key for what comes, whatever trained it before.

    Args:
        model: See `secret_seeds`.
        is_known: See `renew_key`.
    """
    if _key_of(model).is_known != is_known:
        renew_key(model, is_known=is_known)


def key_words(model: keras.Model) -> tf.Variable:
    """Return the variable of a model's key, for steps that draw the same numbers again."""
    return _key_of(model).words


def move_on(model: keras.Model) -> None:
    """Let a model draw other numbers from the same states, in a graph or not.

    Those of a known key follow from the states alone.
    """
    key = _key_of(model)
    if not key.is_known:
        # Not by adding: seeds of two layers may differ by as little as what is added.
        words = tf.random.stateless_uniform(
            [2], key.words, minval=None, maxval=None, dtype=tf.uint32
        )
        key.words.assign(tf.cast(words, tf.int64))


@contextlib.contextmanager
def counted_once(model: keras.Model) -> Iterator[None]:
    """Leave the states of a model's generators as one draw does, in a graph or not.

    How often they drew tells how many passes a batch took, thus how many rows it had, and
    an exported model has the states in it. What comes next needs another key.
    """
    # Not that of Keras's global generator, from which others draw meanwhile. What all rows
    # share is the same in each pass.
    own = set(map(id, model.variables))
    own -= set(map(id, _keras.shared_seed_states(model)))
    states = [each for each in _keras.seed_states(model) if id(each) in own]
    if _key_of(model).is_known:
        states = []
    before = [tf.identity(state.value) for state in states]
    yield
    for state, value in zip(states, before, strict=True):
        state.assign(value + tf.constant([0, 1], value.dtype))


def secret_seeds(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Let nobody who knows the states of Keras's seed generators know what they draw.

    A row draws by its place in the batch, so that without one row those behind it draw
    what others drew. That changes nothing for those who know only how draws are
    distributed, but all for those who know the draws: then one row would move a
    clipped sum by many times the clip norm. States are no secret: they are saved with
    the model, and `keras.utils.set_random_seed` sets them. So a key is added to each
    seed, and the number of the replica, as the states of replicas are all alike.

    Generators with a true attribute `is_same_for_all_rows` draw as without.

    Args:
        model: The model that draws, or for which views are drawn.

    Returns:
        A context in which it is so.
    """
    return _row_seeds.changed(key=_key_of(model).words)


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
    _drawing.add(generator)
    if _row_seeds.row is None:
        return _with_key(generator, _next_seed(generator, ordered=ordered))
    draws = _row_seeds.drawn.setdefault(id(generator), (generator, []))[1]
    state = tf.convert_to_tensor(generator.state)
    row = tf.cast(_row_seeds.row, tf.int64)
    if getattr(generator, "is_same_for_all_rows", False):
        row = tf.constant(0, tf.int64)
    # Odd multipliers modulo 2**31: rows and draws of one state never meet.
    offset = row * 0x9E3779B1 + len(draws) * 0x85EBCA77
    draws.append(ordered)
    fold = tf.stack([tf.zeros_like(offset), offset % (1 << 31)])
    seed = tf.cast((tf.cast(state, tf.int64) + fold) % (1 << 32), state.dtype)
    return _with_key(generator, seed)


def _with_key(generator: keras.random.SeedGenerator, seed: Tensor) -> Tensor:
    """Add the key and the number of the replica; two seeds of a generator stay two."""
    if _row_seeds.key is None or getattr(generator, "is_same_for_all_rows", False):
        return seed
    seed = tf.convert_to_tensor(seed)
    words = tf.cast(seed, tf.int64) + _row_seeds.key
    replica = tf.distribute.get_replica_context()
    if replica is not None and replica.num_replicas_in_sync > 1:
        number = tf.cast(replica.replica_id_in_sync_group, tf.int64)
        words += tf.stack([number * 0x9E3779B1, tf.zeros_like(number)])
    return tf.identity(tf.cast(words % (1 << 32), seed.dtype), name=SECRET)
