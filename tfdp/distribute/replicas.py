"""The replicas of a `tf.distribute` strategy, which take every step together."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from tfdp import _keras, _tree
from tfdp._types import Nest, Tensor

_SUM = tf.distribute.ReduceOp.SUM

# Others keep no copy of all weights on each device, or step at different times.
STRATEGIES = (
    tf.distribute.OneDeviceStrategy,
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
)


@dataclasses.dataclass(frozen=True)
class Replicas:
    """All replicas that train one model, those of other processes too.

    Each has a copy of the weights and a share of every batch. Every process runs the
    same Python program; what it computes outside of `run` it computes once, whatever
    the number of its replicas.

    Attributes:
        strategy: Of the model; None if it was made in no strategy's scope.

    Raises:
        ValueError: If the replicas of the strategy do not step together.
    """

    strategy: tf.distribute.Strategy | None = None

    def __post_init__(self) -> None:
        """Check the strategy."""
        if self.strategy is not None and type(self.strategy) not in STRATEGIES:
            raise ValueError(
                "Private training needs replicas that take every step together. "
                f"Received: a model made in the scope of {self.strategy!r}. Use "
                "`tf.distribute.MirroredStrategy()` or "
                "`tf.distribute.MultiWorkerMirroredStrategy()`."
            )

    @property
    def number(self) -> int:
        """Number of replicas in all processes."""
        return 1 if self.strategy is None else self.strategy.num_replicas_in_sync

    @property
    def processes(self) -> int:
        """Number of processes that the replicas are in."""
        return max(sum(self._tasks.values()), 1)

    @property
    def process(self) -> int:
        """Number of this process, from 0, which is the chief."""
        if self.strategy is None or self.processes == 1:
            return 0
        resolver = self.strategy.cluster_resolver
        before = self._tasks["chief"] if resolver.task_type == "worker" else 0
        return int(resolver.task_id) + before

    @property
    def _tasks(self) -> dict[str, int]:
        """How many processes of each kind train."""
        if not isinstance(self.strategy, tf.distribute.MultiWorkerMirroredStrategy):
            return {}
        cluster = self.strategy.cluster_resolver.cluster_spec().as_dict()
        return {kind: len(cluster.get(kind, [])) for kind in ("chief", "worker")}

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which variables get a copy for each replica."""
        if self.strategy is None or tf.distribute.get_strategy() is self.strategy:
            return contextlib.nullcontext()
        scope: contextlib.AbstractContextManager[object] = self.strategy.scope()
        return scope

    @contextlib.contextmanager
    def only_first(self) -> Iterator[None]:
        """Run what follows, eagerly, as the first replica of this process would."""
        if self.strategy is None:
            yield
            return
        number = self.process * (self.number // self.processes)
        with self.scope(), tf.distribute.ReplicaContext(self.strategy, number):
            yield

    def run(self, function: Callable[..., Nest], *args: object) -> Nest:
        """Run a function on every replica of this process.

        Args:
            function: Runs in replica context.
            *args: Nests of tensors, or of what `run` has returned.

        Returns:
            A nest of what the replicas return.
        """
        if self.strategy is None:
            return function(*args)
        return self.strategy.run(_keras.with_global_seed(function), args)

    def distributed(
        self, pipeline: Callable[[tf.distribute.InputContext], tf.data.Dataset]
    ) -> Nest:
        """Return data whose elements have a value for each replica of this process.

        Args:
            pipeline: Makes the dataset of a process, of elements for its replicas in
                turn.
        """
        if self.strategy is None:
            return pipeline(tf.distribute.InputContext())
        return self.strategy.distribute_datasets_from_function(pipeline)

    def first(self, values: Nest) -> Nest:
        """Return what the first replica of this process has of each value.

        Args:
            values: A nest of what `run` has returned.
        """
        if self.strategy is None:
            return values
        of_replicas = self.strategy.experimental_local_results
        return tf.nest.map_structure(lambda value: of_replicas(value)[0], values)

    def concatenated(self, rows: Nest) -> Tensor:
        """Put the rows of all replicas one behind the other.

        Args:
            rows: What `run` has returned: floating point, shape ``(n,)``, where n may
                differ between replicas.

        Returns:
            The rows, in the order of the replicas.
        """
        if self.strategy is None:
            return rows
        if self.processes == 1:
            return tf.concat(self.strategy.experimental_local_results(rows), 0)

        def gather(rows: Tensor) -> Tensor:
            # TensorFlow's own gathering was seen to crash inside of branches.
            number, length = replica_number(), tf.size(rows, tf.int64)
            of_own = tf.one_hot(number, self.number, dtype=tf.int64)
            lengths = summed([of_own * length])[0]
            total = tf.reduce_sum(lengths)
            before = tf.cumsum(lengths, exclusive=True)[number]
            # One more, so that there is something to add up where no replica has rows.
            padding = tf.stack([before, total + 1 - before - length])
            return summed([tf.pad(rows, padding[None])])[0][:total]

        return self.first(self.run(gather, rows))

    def share_of(self, rows: Nest, *, rows_per_unit: int) -> Nest:
        """Return what one replica takes of rows that all have; in replica context.

        Args:
            rows: Nested tensors.
            rows_per_unit: Consecutive rows that are clipped together.

        Returns:
            The same nest with fewer rows; together the shares are all of them.
        """
        if self.number == 1:
            return rows
        number = tf.cast(replica_number(), tf.int64)

        def share(tensor: Tensor) -> Tensor:
            first, behind = share_bounds(
                tf.shape(tensor, tf.int64)[0],
                replica=number,
                replicas=self.number,
                rows_per_unit=rows_per_unit,
            )
            return tensor[first:behind]

        return _tree.map_tensors(share, rows)

    def of_all(self, numbers: list[int]) -> np.ndarray:
        """Collect numbers from all processes; runs eagerly.

        Args:
            numbers: As many in each process, each an int64.

        Returns:
            int64, shape ``(replicas, len(numbers))``.
        """
        own = np.array([numbers], np.int64)
        strategy = self.strategy
        if strategy is None or self.processes == 1:
            return own
        values = strategy.experimental_distribute_values_from_function(
            lambda _: tf.constant(own)
        )
        gathered: np.ndarray = strategy.gather(values, axis=0).numpy()
        return gathered

    def texts_of_all(self, text: str) -> list[str]:
        """Collect a text from all processes; runs eagerly.

        Args:
            text: Of this process.

        Returns:
            One for each replica, in their order.
        """
        encoded = text.encode()
        lengths = self.of_all([len(encoded)])[:, 0]
        padded = np.zeros(lengths.max(), np.int64)
        padded[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        return [
            row[:length].astype(np.uint8).tobytes().decode()
            for row, length in zip(self.of_all(padded.tolist()), lengths, strict=True)
        ]


# Without a strategy.
ONE_DEVICE = Replicas()


def replica_number() -> Tensor | int:
    """Return the number of the replica that runs this, of all replicas; 0 alone."""
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def summed(tensors: list[Tensor]) -> list[Tensor]:
    """Add tensors up over all replicas; runs in replica context.

    Args:
        tensors: Of the same shapes and dtypes on each replica.

    Returns:
        The sums, the same on each replica to the last bit.
    """
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return tensors
    # Arguments of a graph are on no device, and the sums would not know where to go.
    tensors = [tf.identity(tensor) for tensor in tensors]
    sums: list[Tensor] = tf.distribute.get_replica_context().all_reduce(_SUM, tensors)
    return sums


def function_of_batches(
    step: Callable[[Nest], Nest], *, is_eager: bool
) -> Callable[[Nest], Nest]:
    """Return what takes a step of all replicas with the next batch of an iterator.

    Args:
        step: Takes a batch, or nested values of all replicas.
        is_eager: Whether it is not to be compiled.

    Returns:
        A function of the iterator, with one graph for batches of all sizes.
    """
    if is_eager:
        return lambda batches: step(next(batches))
    of_any_batch = tf.function(step, autograph=False)
    of_batches: list[tuple[Nest, Nest]] = []

    def take(batches: Nest) -> Nest:
        # Outside of the graph: inside, a step would also run where the batches end.
        batch = next(batches)
        if not isinstance(batches, tf.distribute.DistributedIterator):
            return of_any_batch(batch)
        spec = batches.element_spec
        for known, function in of_batches:
            if known == spec:
                return function(batch)
        function = tf.function(step, input_signature=[spec], autograph=False)
        of_batches.append((spec, function))
        return function(batch)

    return take


def share_bounds(
    rows: int | Tensor, *, replica: int | Tensor, replicas: int, rows_per_unit: int = 1
) -> tuple[int | Tensor, int | Tensor]:
    """Return which rows of a batch a replica takes: whole units, about as many each.

    The shares of all replicas are disjoint, and together they are the batch.

    Args:
        rows: Number of rows of the batch, an int or a scalar int64 tensor.
        replica: Number of the replica, from 0, of the same type.
        replicas: How many there are.
        rows_per_unit: Consecutive rows that are clipped together.

    Returns:
        The first row of the share and the one behind its last, as `rows`.
    """
    # Units are never split: the gradient of a part would be clipped on its own.
    units = (rows + rows_per_unit - 1) // rows_per_unit
    first, behind = (
        place * units // replicas * rows_per_unit for place in (replica, replica + 1)
    )
    minimum = min if isinstance(rows, int) else tf.minimum
    return minimum(first, rows), minimum(behind, rows)
