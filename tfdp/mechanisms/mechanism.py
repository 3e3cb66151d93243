"""What noise is: it is drawn, has a secret, and costs. And the Gaussian one."""

import abc
import contextlib
import math
import os
import secrets
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Self

import keras
import numpy as np
import tensorflow as tf

from tfdp import _keras, _validate
from tfdp._types import Config, Tensor, Variable
from tfdp.clipping import ClippedSum, at_least_float32
from tfdp.sampling import Scheme

# Numbers that one draw gives to several variables, at most. XLA compiles each draw by
# itself, so it gets few; as long as one is used, its numbers take 4 bytes each.
_MOST_DRAWN_TOGETHER = 1 << 20
_MOST_DRAWN_TOGETHER_BY_XLA = 1 << 26

# What TensorFlow's operations call it.
_PHILOX = 1

# Where the angles of a seed begin: its radii, from block 0 on, never get so far.
_BLOCK_OF_ANGLES = 1 << 62

# `RngReadAndSkip` raises the state by this much for each number that it skips.
_RAISED_BY = 256

# A forked process has the keys of its parent, and must not draw the parent's noise.
_living: weakref.WeakSet["Mechanism"] = weakref.WeakSet()


def _renew_keys() -> None:
    for source in _living:
        # A child cannot use its parent's GPU, nor draw with a key that lies there.
        if not source.is_on_gpu:
            source.renew_key()


os.register_at_fork(after_in_child=_renew_keys)


class Mechanism(abc.ABC):
    """The noise of a training's steps, drawn with a secret key of its own.

    A subclass says how noise is added (`noised`) and, if steps share noise, what that
    costs. Where XLA compiles a model on a GPU it compiles `noised`, too. The noise of a
    step is to be a function of the step's stream, which no two steps share, and of what
    the mechanism remembers of the steps before.

    The generator is Philox, counter-based, keyed by the operating system. The key lives
    in a variable that is never saved, exported or made a constant of a graph;
    `keras.utils.set_random_seed`, TensorFlow's global seed and NumPy's global generator
    have no influence. Philox is not certified as cryptographically secure, and Gaussian
    noise in floating point does not protect single released gradients against attacks
    on their low-order bits [1]_.

    Noise that steps share is a secret of all of them: what a mechanism remembers is as
    secret as the data. Keep it in variables that `build` makes, which are neither
    saved nor exported. A pass that was interrupted is therefore begun anew, with fresh
    noise, and counts twice; every call of `fit` has a key of its own. So have copies
    (`copy`, `pickle`), which are rebuilt from `get_config`, but for those with a
    `noise_seed`.

    Args:
        noise_seed: None for a key from the operating system. An integer makes the
            noise reproducible, which is for tests: whoever knows it can subtract
            the noise, and a warning says so.

    Attributes:
        correlates_steps: Whether the steps of a pass share noise, so that all of them
            are one release. Such noise needs batches of which it is known that an
            example is in a pass at most once.

    References:
        .. [1] Mironov, "On Significance of the Least Significant Bits for
           Differential Privacy", CCS 2012. https://doi.org/10.1145/2382196.2382264
    """

    correlates_steps: ClassVar[bool] = False

    def __init__(self, noise_seed: int | None = None) -> None:
        if noise_seed is not None:
            noise_seed = _validate.seed("noise_seed", noise_seed)
            warnings.warn(
                "The privacy noise is reproducible: whoever knows the seed can "
                f"subtract it. Received: noise_seed={noise_seed}. For a run that is to "
                "be private leave `noise_seed` out.",
                stacklevel=3,
            )
        self.noise_seed = noise_seed
        _living.add(self)
        with tf.init_scope(), _keras.unmirrored_variables():
            self._key = tf.Variable(self._new_key(), trainable=False, name="noise_key")
            # The state of one of TensorFlow's generators, of which no number is drawn: it
            # is read and raised at once, whatever other threads do meanwhile.
            self._number = tf.Variable(
                tf.zeros([3], tf.int64), trainable=False, name="noise_number"
            )

    def __reduce__(self) -> tuple[Callable[[Config], Self], tuple[Config]]:
        """Rebuild copies: the same noise twice would cancel."""
        return type(self).from_config, (self.get_config(),)

    @property
    def is_on_gpu(self) -> bool:
        """Whether the key lies in the memory of a GPU."""
        return "GPU" in str(self._key.device)

    def renew_key(self) -> None:
        """Take a fresh key from the operating system; a seeded key stays."""
        self._key.assign(self._new_key())

    def _new_key(self) -> np.ndarray:
        if self.noise_seed is None:
            return np.frombuffer(secrets.token_bytes(16), np.int64)
        return (
            np.random
            .SeedSequence(self.noise_seed)
            .generate_state(2, np.uint64)
            .view(np.int64)
        )

    @property
    def number(self) -> Tensor:
        """The number of the next step, a scalar int64 tensor."""
        return self._number.read_value()[0] // _RAISED_BY

    def _take_number(self, count: Tensor | int = 1) -> Tensor:
        """Return the number of the next step, and go on by some steps."""
        state = tf.raw_ops.RngReadAndSkip(
            resource=self._number.handle,
            alg=_PHILOX,
            delta=tf.cast(count, tf.uint64),
        )
        return state[0] // _RAISED_BY

    def take_stream(self, has_room: Tensor | bool = True) -> Tensor:
        """Take the stream of the next step; see `stream`.

        With a key from the operating system its number is used up now, with a seeded one by
        `count_seeded`, beside the ledger.

        Args:
            has_room: Whether there will be a step; else the one after has the stream.

        Returns:
            See `stream`.
        """
        # Whatever comes between this and the noise has other numbers. Those of a seeded key
        # follow the ledger, after which it goes on in another process: `skip_to`.
        if self.noise_seed is None:
            return self.stream(self._take_number(has_room))
        return self.stream(self.number)

    def count_seeded(self) -> None:
        """Count a step, if the key is a seeded one."""
        if self.noise_seed is not None:
            self._take_number()

    def skip_to(self, number: int) -> None:
        """Leave out the numbers before this one: a seeded key may have used them."""
        # Not assigned: it can only rise, whatever other threads take meanwhile.
        missing = number - int(self.number)
        if missing > 0:
            self._take_number(missing)

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[Callable[[], None]]:
        """Draw with a key of its own within, then be as before: for rehearsals.

        Yields:
            A function after which the noise of the first step within comes again.
        """
        held = tf.nest.flatten(list(vars(self).values()))
        kinds = (tf.Variable, keras.Variable)
        held = [each for each in held if isinstance(each, kinds)]
        key = np.frombuffer(secrets.token_bytes(16), np.int64)
        with _keras.values_kept(held) as put_back:

            def begin() -> None:
                put_back()
                self._key.assign(key)

            begin()
            yield begin

    def stream(self, step: Tensor) -> Tensor:
        """Return what all the noise of a step is a function of, with this key.

        Who knows it can subtract the noise: it is as secret as the key.

        Args:
            step: Scalar int64 tensor, a number that never repeats for this key.

        Returns:
            int64, shape ``(2,)``.
        """
        # The first word tells steps apart, the second what is noised in one: `seed_of`.
        return self._key + tf.stack([step, tf.zeros_like(step)])

    def build(self, variables: list[Variable]) -> None:  # noqa: B027 (most keep none)
        """Make what the mechanism remembers, before the first step of a training.

        Args:
            variables: The trainable variables.
        """

    def check(self, scheme: Scheme) -> None:
        """Refuse batches for which the noise is not accounted.

        Args:
            scheme: How the batches are drawn.

        Raises:
            ValueError: If steps share noise and the batches make no such passes.
        """
        if self.correlates_steps and not scheme.allows_shared_noise:
            raise ValueError(
                f"`{type(self).__name__}` shares noise between the steps of a pass, so an "
                "example must occur at most once in a pass, which counts in full. Received: "
                f"{scheme}. Use `DPModel(model, sampling='shuffle')`."
            )

    def counted(self, noise_multiplier: Tensor) -> Tensor:
        """Return the noise multiplier that the ledger counts for a release.

        Nobody checks it: too large a value is an epsilon too small.

        Args:
            noise_multiplier: That of the steps, float64, of any shape.

        Returns:
            What it counts as, of that shape: the same, where no steps share noise.
        """
        return noise_multiplier

    @abc.abstractmethod
    def noised(
        self,
        clipped_sum: ClippedSum,
        *,
        noise_multiplier: Tensor,
        stream: Tensor,
        begins: Tensor | bool = True,
    ) -> list[Tensor]:
        """Add the noise of a step, as operations of the graph.

        Args:
            clipped_sum: What to noise; its own C is the one that counts.
            noise_multiplier: Scalar tensor; 0 adds nothing.
            stream: Of the step, from `stream`.
            begins: Whether a new pass begins with the step: nothing that is remembered
                may enter its noise.

        Returns:
            The noised sums, in order, of the sums' shapes; float64 where the sum is,
            float32 otherwise.
        """

    def get_config(self) -> Config:
        """Return the arguments that rebuild the mechanism."""
        return {"noise_seed": self.noise_seed}

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Rebuild a mechanism from `get_config`."""
        return cls(**config)


@keras.saving.register_keras_serializable("tfdp")
class Gaussian(Mechanism):
    """Independent Gaussian noise in every step [1]_.

    Args:
        noise_seed: See `Mechanism`.

    Example:
        >>> optimizer = tfdp.optimizers.DPSGD(
        ...     0.1,
        ...     l2_norm_clip=1.0,
        ...     noise_multiplier=1.1,
        ...     mechanism=tfdp.mechanisms.Gaussian(),
        ... )

    References:
        .. [1] Abadi et al., "Deep Learning with Differential Privacy", CCS 2016,
           Algorithm 1. https://arxiv.org/abs/1607.00133
    """

    def noised(
        self,
        clipped_sum: ClippedSum,
        *,
        noise_multiplier: Tensor,
        stream: Tensor,
        begins: Tensor | bool = True,
    ) -> list[Tensor]:
        """Add to each sum noise of standard deviation ``noise_multiplier * C``."""
        del begins
        return add_noise(clipped_sum, noise_multiplier=noise_multiplier, stream=stream)


def add_noise(
    clipped_sum: ClippedSum, *, noise_multiplier: Tensor, stream: Tensor
) -> list[Tensor]:
    """Add to each sum Gaussian noise of ``noise_multiplier * C``.

    Args:
        clipped_sum: What to noise; its own C is the one that counts.
        noise_multiplier: Scalar tensor; 0 adds nothing.
        stream: Of the step.

    Returns:
        The noised sums, in order, of the sums' shapes; float64 where the sum
        is, float32 otherwise.
    """
    clip = clipped_sum.l2_norm_clip
    stddev = tf.cast(noise_multiplier, clip.dtype) * clip
    noised: list[Tensor] = []
    gradients = list(map(at_least_float32, clipped_sum.gradients))
    for number, together in enumerate(_drawn_together(gradients)):
        sizes = [gradient.shape.num_elements() for gradient in together]
        dtype = together[0].dtype
        noise = standard_normal(tf.TensorShape([sum(sizes)]), seed_of(stream, number))
        noise = tf.cast(noise, dtype) * tf.cast(stddev, dtype)
        parts = [noise] if len(sizes) == 1 else tf.split(noise, sizes)
        noised += [
            gradient + tf.reshape(part, gradient.shape)
            for gradient, part in zip(together, parts, strict=True)
        ]
    return noised


def _drawn_together(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group neighbours of one dtype, whose noise one draw gives.

    A draw takes some thirty operations. So small variables share one; large ones, whose
    noise is to be dropped before the next is drawn, do not. XLA, which compiles each draw by
    itself, has large ones share too.

    Yields:
        Gradients that are next to each other.
    """
    together: list[Tensor] = []
    numbers = 0
    is_compiled = _keras.inside_xla()
    most = _MOST_DRAWN_TOGETHER_BY_XLA if is_compiled else _MOST_DRAWN_TOGETHER
    for gradient in gradients:
        size = gradient.shape.num_elements()
        is_full = numbers + size > most
        if together and (is_full or gradient.dtype != together[0].dtype):
            yield together
            together, numbers = [], 0
        together.append(gradient)
        numbers += size
    if together:
        yield together


def noise_of_query(
    shape: tuple[int, ...], *, stream: Tensor, number: int = 0
) -> Tensor:
    """Draw noise for what a step releases beside its gradients.

    Args:
        shape: Of the release.
        stream: See `add_noise`.
        number: Of the query, from 0; another one for each query of a step.

    Returns:
        Standard normal numbers, float32, independent of the gradients' noise.
    """
    return standard_normal(tf.TensorShape(shape), seed_of(stream, -1 - number))


def seed_of(stream: Tensor, number: int) -> Tensor:
    """Return the seed of one of the draws of a step, or of a query's noise."""
    return stream + tf.constant([0, number], tf.int64)


def standard_normal(shape: tf.TensorShape, seed: Tensor) -> Tensor:
    """Draw standard normal numbers with tails that reach past 7 sigma.

    Box and Muller's method on Philox bits. The radius gets 39 random bits: on a
    float32 uniform it would end at 5.65 sigma, which alone is worth more than a
    delta of 1e-5 over a long training.

    Args:
        shape: A fully defined shape.
        seed: int64, shape ``(2,)``. Distinct seeds give independent streams.

    Returns:
        float32 tensor of that shape.
    """
    draw = _standard_normals
    if tf.executing_eagerly():
        # A function runs in threads, which a forked process has not got.
        draw = draw.python_function
    return tf.reshape(draw(shape.num_elements(), seed), shape)


# A function of its own, for any number of them: it is traced once in a process, where
# each variable would else bring as many operations to every graph of a step.
@tf.function(
    autograph=False,
    input_signature=[tf.TensorSpec([], tf.int32), tf.TensorSpec([2], tf.int64)],
)
def _standard_normals(numbers: Tensor, seed: Tensor) -> Tensor:
    # Two draws: TensorFlow unstacks and adds int32 on the host, also what is on a GPU.
    half = tf.expand_dims((numbers + 1) // 2, 0)
    first = philox_bits(half, seed, tf.int32)
    second = philox_bits(half, seed, tf.int32, first_block=_BLOCK_OF_ANGLES)
    coarse = tf.cast(first & 0x7FFFFFFF, tf.float32) * 2.0**-31
    fine = (tf.cast(second & 255, tf.float32) + 1.0) * 2.0**-39
    # No logarithm of more than 1: rounding leaves 1 + 2^-31 at 1.
    radius = tf.sqrt(-2.0 * tf.math.log(coarse + fine))
    angle = tf.cast(second & ~255, tf.float32) * (math.pi * 2.0**-31)
    return box_muller(radius, angle)[:numbers]


def philox_bits(
    shape: Sequence[int] | Tensor,
    seed: Tensor,
    dtype: tf.DType,
    *,
    first_block: int = 0,
) -> Tensor:
    """Draw bits from Philox [1]_: every word of the seed is a word of its input.

    `tf.random.stateless_uniform` hashes its seed first, with some forty operations in each draw.
    Philox needs no hash, and without one no two seeds share a block of bits, by
    construction: the first word is the key, the second the upper half of the counter, whose
    lower half numbers the blocks of a draw.

    Args:
        shape: Of the draw.
        seed: int64, shape ``(2,)``.
        dtype: `tf.int32` or `tf.int64`.
        first_block: Where the draw begins, in blocks of 128 bits: draws of one seed must
            not share any.

    Returns:
        Integers in which every bit is random.

    References:
        .. [1] Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
           https://doi.org/10.1145/2063384.2063405
    """
    # Not by `tf.split`, which is not there on GPUs for integers.
    words = tf.bitcast(seed, tf.uint64)
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=shape,
        key=words[:1],
        counter=tf.concat([tf.constant([first_block], tf.uint64), words[1:]], 0),
        alg=_PHILOX,
        dtype=dtype,
    )


def box_muller(radius: Tensor, angle: Tensor) -> Tensor:
    """Take Box and Muller's two numbers from each radius and angle."""
    return tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], 0)
