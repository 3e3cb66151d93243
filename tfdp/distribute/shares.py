"""Batches that replicas share: each takes rows that no other takes."""

import dataclasses
import functools
import hashlib
import zlib
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tfdp import _keras, _tree
from tfdp._types import Nest, Padded, Tensor
from tfdp.data.drawn_dataset import DrawnDataset
from tfdp.data.rows import Rows, rows_of
from tfdp.data.training_data import TrainingData
from tfdp.distribute.replicas import Replicas, replica_number, share_bounds, summed
from tfdp.errors import NotPrivateError
from tfdp.losses.batch import Batch, with_equal_rows
from tfdp.sampling import fresh_key

# Begins the message of a step that is not the same for all workers.
DIFFERENT_STEPS = "The workers do not take the same step"

# Rows that workers compare before they share them, of sources that are not in memory.
_COMPARED_ROWS = 4096
_ROWS_AT_ONCE = 4096


class Share(NamedTuple):
    """What one replica takes of a batch.

    Attributes:
        fingerprint: Of the whole batch, a scalar int64 within 32 bits.
        rows: Nested tensors, `(x,)`, `(x, y)` or `(x, y, sample_weight)`; there may
            be no rows.
        is_padding: Marks the rows that are none; an empty tuple if there are no marks.
    """

    fingerprint: Tensor
    rows: Nest
    is_padding: Nest = ()

    def batch(self) -> Nest:
        """Return the rows, with the marks if there are some."""
        # TensorFlow takes values of replicas apart by index, which `Padded` refuses.
        if isinstance(self.is_padding, tuple):
            return self.rows
        return Padded(self.rows, self.is_padding)


# number of the step -> indices of the rows of its batch, in ascending order.
_Draw = Callable[[int], NDArray[np.int64]]


def shared_out(
    data: TrainingData,
    replicas: Replicas,
    *,
    epochs: int,
    rows_per_unit: int,
    class_weight: dict[int, float] | None,
) -> TrainingData:
    """Let every replica take a share of each batch.

    Batches of arrays are drawn by number, with a key that all processes have from
    the chief: each draws the same indices and reads the rows of its own replicas.
    Of a `tf.data.Dataset` every process reads all batches and keeps its share.

    Guarantees:
        The shares of a step are disjoint, and together they are one batch. Where
        processes read different batches, `agreed_stream` raises; where they have
        different arrays, or the same rows in another order, this does.

    Args:
        data: What `fit` was given.
        replicas: Of the model.
        epochs: How many `fit` will run.
        rows_per_unit: Consecutive rows that are clipped together; they stay together.
        class_weight: As in `keras.Model.fit`.

    Returns:
        The data as Keras gets them.

    Raises:
        NotPrivateError: If processes have different arrays.
        ValueError: If there are weights of examples and of classes.
    """
    drawn = data.drawn
    if data.batch_size is not None:
        # Keras would shuffle these arrays, in each process in another order.
        rows = rows_of(data.x, data.y, data.sample_weight)
        drawn = DrawnDataset(rows, data.scheme)
    if drawn is not None:
        draws = (data.steps_per_epoch or len(drawn)) * max(epochs, 0)
        draw = drawn.numbered_draws(_common_key(replicas), draws)
        _check_same_rows(drawn.rows, replicas)

    def pipeline(context: tf.distribute.InputContext) -> tf.data.Dataset:
        part = _Part(context, rows_per_unit)
        if drawn is None:
            shares = _shares_of_batches(data.x, part, replicas.processes > 1)
        else:
            shares = _shares_of_rows(drawn, draw, part)
        if class_weight is not None:
            shares = shares.map(functools.partial(_with_class_weight, class_weight))
        return shares.prefetch(2 * part.replicas)

    # Shares of what is drawn have no end of their own.
    steps = data.keras_steps_per_epoch if drawn is None else data.steps_per_epoch
    return dataclasses.replace(
        data,
        x=replicas.distributed(pipeline),
        y=None,
        sample_weight=None,
        keras_steps_per_epoch=steps,
        shuffle=False,
        batch_size=None,
    )


def check_shareable(data: TrainingData) -> None:
    """Refuse data that replicas cannot share.

    Args:
        data: What `fit` was given.

    Raises:
        TypeError: If they are neither arrays nor a `tf.data.Dataset` of dense tensors.
    """
    x = data.x
    if data.drawn is not None or data.batch_size is not None:
        return
    if not isinstance(x, tf.data.Dataset):
        raise TypeError(
            "Replicas share the batches of arrays, of a `tfdp.data.PoissonDataset` or "
            f"of a `tf.data.Dataset`. Received: x of type {type(x).__name__}. Use "
            "`private.fit(x, y, batch_size=...)`, or "
            "`tf.data.Dataset.from_generator(...)`."
        )


def agreed_stream(
    replicas: Replicas,
    stream: Tensor,
    fingerprint: Tensor,
    settings: list[Tensor],
) -> Tensor:
    """Return the chief's stream of noise, if all processes take the same step.

    Args:
        replicas: Of the model.
        stream: Of this process's own noise.
        fingerprint: Of the batch that this process has; a value for each replica.
        settings: Scalars that must be the same in all processes, up to the rounding
            of float32.

    Returns:
        The same stream in all processes.

    Raises:
        tf.errors.InvalidArgumentError: When it runs, in every process, if batches
            or settings differ: an example could be in the shares of two replicas, or
            the noise too small for one.
    """
    # As whole numbers, whose sums are exact.
    settings_bits = tf.stack([
        tf.cast(tf.bitcast(tf.cast(each, tf.float32), tf.int32), tf.int64)
        for each in settings
    ])

    def exchange(stream: Tensor, fingerprint: Tensor) -> list[Tensor]:
        number = replica_number()
        of_chief = tf.where(tf.equal(number, 0), stream, tf.zeros_like(stream))
        own = tf.concat([[fingerprint], settings_bits], 0)
        # A row for each replica. Of a mere sum, who has the mean of all sees nothing.
        row = tf.one_hot(number, replicas.number, dtype=tf.int64)[:, tf.newaxis]
        return [*summed([of_chief, row * own]), own]

    of_chief, of_all, own = replicas.first(replicas.run(exchange, stream, fingerprint))
    check = tf.debugging.assert_equal(of_all, own, f"{DIFFERENT_STEPS}.")
    # No noise, and so no step, before the check has passed.
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(of_chief)


class _Part(NamedTuple):
    """The replicas of one process.

    Attributes:
        context: Says which process it is.
        rows_per_unit: Consecutive rows that stay together.
    """

    context: tf.distribute.InputContext
    rows_per_unit: int

    @property
    def replicas(self) -> int:
        """How many there are."""
        context = self.context
        return int(context.num_replicas_in_sync // context.num_input_pipelines)

    def bounds(self, rows: Nest, place: Nest) -> tuple[Nest, Nest]:
        """Return which rows the replica at a place in this process takes."""
        return share_bounds(
            rows,
            replica=self.context.input_pipeline_id * self.replicas + place,
            replicas=self.context.num_replicas_in_sync,
            rows_per_unit=self.rows_per_unit,
        )


def _common_key(replicas: Replicas) -> int:
    """Return a fresh secret key that all processes have from the chief."""
    key = fresh_key()
    if replicas.processes == 1:
        return key
    words = np.frombuffer(key.to_bytes(16, "little"), np.int64)
    of_chief = replicas.of_all(words.tolist())[0]
    return int.from_bytes(of_chief.tobytes(), "little")


def _check_same_rows(rows: tuple[Nest, ...], replicas: Replicas) -> None:
    """Refuse arrays whose rows are not those of the other processes, one by one.

    All rows of arrays in memory are compared. Of files, which take long to read, a
    random sample of rows is, another one each time.

    Raises:
        NotPrivateError: If they differ.
    """
    if replicas.processes == 1:
        return
    digest = _digest(keras.tree.flatten(rows), _common_key(replicas))
    prints = replicas.of_all(digest)
    if len(np.unique(prints, axis=0)) > 1:
        raise NotPrivateError(
            "All workers must have the same rows in the same order: each takes some by "
            "their numbers, and an example with two numbers could count twice in a "
            "step. Received: different rows at the same positions. Load the data alike "
            "everywhere, with `train_test_split(..., random_state=0)` and "
            "`sorted(os.listdir(folder))`."
        )


def _digest(sources: list[Rows], key: int) -> list[int]:
    """Return a fingerprint of rows, 128 bits that say nothing to who has no key.

    Args:
        sources: Of the same number of rows.
        key: Secret, the same in all processes.

    Returns:
        Two numbers.
    """
    digest = hashlib.blake2b(digest_size=16, key=key.to_bytes(16, "little"))
    rows = len(sources[0])
    drawn = np.random.default_rng(key).integers(rows, size=_COMPARED_ROWS)
    some = [np.unique(drawn)]
    for source in sources:
        digest.update(f"{source}".encode())
        chunks = some
        if source.is_in_memory:
            chunks = np.array_split(np.arange(rows), -(-rows // _ROWS_AT_ONCE))
        for indices in chunks:
            taken = source.take(indices)
            if isinstance(taken, tf.Tensor):  # Strings
                taken = np.array([repr(each) for each in taken.numpy().ravel()])
            digest.update(np.ascontiguousarray(taken).tobytes())
    return [int(word) for word in np.frombuffer(digest.digest(), np.int64)]


def _shares_of_rows(data: DrawnDataset, draw: _Draw, part: _Part) -> tf.data.Dataset:
    """Return, without an end, the shares of the replicas of one process in turn."""
    # The replicas of a process ask for the same draw one after the other, and read
    # ahead into the next one.
    draw = functools.lru_cache(maxsize=2)(draw)
    nothing = data.batch_of(np.array([], int))
    leaves = keras.tree.flatten(nothing)

    def read(element: NDArray[np.int64]) -> list[Nest]:
        number, place = divmod(int(element), part.replicas)
        indices = draw(number)
        first, behind = part.bounds(len(indices), place)
        batch = data.batch_of(indices[first:behind])
        taken = map(np.asarray, keras.tree.flatten(batch))
        return [np.int64(zlib.crc32(indices.tobytes())), *taken]

    def share(element: Tensor) -> Share:
        dtypes = [tf.as_dtype(leaf.dtype) for leaf in leaves]
        fingerprint, *taken = tf.numpy_function(read, [element], [tf.int64, *dtypes])
        fingerprint = tf.ensure_shape(fingerprint, [])
        taken = [
            tf.ensure_shape(each, [None, *leaf.shape[1:]])
            for each, leaf in zip(taken, leaves, strict=True)
        ]
        batch = keras.tree.pack_sequence_as(nothing, taken)
        return Share(fingerprint, *(batch if data.is_padded else [batch]))

    elements = tf.data.Dataset.counter()
    workers = max(data.workers, 1)
    return elements.map(share, num_parallel_calls=workers, deterministic=True)


def _shares_of_batches(
    dataset: tf.data.Dataset, part: _Part, is_compared: bool
) -> tf.data.Dataset:
    """Return, for each batch, the shares of the replicas of one process in turn."""

    def shares(*batch: Nest) -> tf.data.Dataset:
        whole = with_equal_rows(Batch.of(batch if len(batch) > 1 else batch[0]))
        data = tuple(each for each in whole if each is not None)
        fingerprint = tf.constant(0, tf.int64)
        if is_compared:
            fingerprint = _fingerprint(tf.nest.flatten(data))
        rows = tf.shape(_tree.tensors(data)[0], tf.int64)[0]

        def share(place: Tensor) -> Share:
            first, behind = part.bounds(rows, place)
            return Share(
                fingerprint,
                tf.nest.map_structure(lambda each: each[first:behind], data),
            )

        return tf.data.Dataset.range(part.replicas).map(share)

    shared = dataset.flat_map(shares)
    if dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
        # Keras would take the number of shares for that of batches.
        return shared
    return shared.apply(
        tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
    )


def _fingerprint(tensors: list[Tensor]) -> Tensor:
    """Return a fingerprint of tensors, 32 bits: sums of it over replicas are exact."""
    prints = [
        tf.bitcast(
            tf.raw_ops.Fingerprint(
                data=tf.reshape(tensor, [1, -1]), method="farmhash64"
            )[0],
            tf.int64,
        )
        for tensor in tensors
    ]
    # Weighted by their places, or `(x, y)` would be as `(y, x)`.
    multiplied = [value * (2 * place + 1) for place, value in enumerate(prints)]
    return tf.math.floormod(tf.add_n(multiplied), tf.constant(2**32, tf.int64))


def _with_class_weight(class_weight: dict[int, float], share: Share) -> Share:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(share.rows)
    if sample_weight is not None or y is None:
        raise ValueError(
            "`class_weight` needs targets, and takes the place of `sample_weight`. "
            f"Received: class_weight={class_weight!r} with "
            f"{'no `y`' if y is None else '`sample_weight`'}. Multiply the weights: "
            "`sample_weight=sample_weight * weight_of_class[y]`."
        )
    return share._replace(rows=_keras.with_class_weights(class_weight, x, y))
