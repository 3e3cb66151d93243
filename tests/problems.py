"""Problems as data: small models with their examples and losses, by name.

A problem draws its examples one by one, so a longer batch starts with the shorter
one. Weights and examples are the same numbers under every dtype (all are exact in
float32), so a float32 engine can be compared with a float64 reference.
"""

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from keras import layers, losses, ops

from tfdp.layers import WSConv2D

register = keras.saving.register_keras_serializable(package="tests")


# --------------------------------------------------------------------- machinery


class Batch(NamedTuple):
    """What `fit` takes; every leaf has the examples on its leading axis."""

    x: Any
    y: Any
    sample_weight: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A model, how to draw one example of its data, and its loss.

    Args:
        name: Test id; also the seed of the weights and of the examples.
        make_model: Builds the model under the current floatx and dtype policy.
        make_example: Draws ``(x, y)`` or ``(x, y, sample_weight)`` of one example,
            without a batch axis.
        loss_template: What ``compile`` takes, with ``Loss`` classes or partials of
            them in place of ``Loss`` objects, since an object keeps its dtype.
        loss_weights: As in ``compile``.
        tags: What a test selects by: keys of `TAGS`.
    """

    name: str
    make_model: Callable[[], keras.Model]
    make_example: Callable[[np.random.Generator], tuple[Any, ...]]
    loss_template: Any
    loss_weights: Any = None
    tags: frozenset[str] = frozenset()

    def build(self, dtype: str = "float32") -> keras.Model:
        """A fresh model under dtype policy ``dtype``; equal weights every time."""
        with precision(dtype):
            model = self.make_model()
            model(self.batch(1, dtype).x)
        rng = np.random.default_rng(self._seed())
        for variable in model.weights:
            # What starts at one, as scales and variances do, stays around one.
            center = np.all(variable.numpy() == 1)
            value = center + rng.uniform(-0.5, 0.5, variable.shape)
            variable.assign(value.astype("float32"))
        return model

    def loss(self, dtype: str = "float32") -> Any:
        """A fresh loss, as ``compile`` takes it, that computes in ``dtype``."""
        with precision(dtype):
            return keras.tree.map_structure(
                lambda leaf: leaf() if _is_factory(leaf) else leaf, self.loss_template
            )

    def batch(self, n: int = 5, dtype: str = "float32") -> Batch:
        """The first ``n`` examples; ``n`` may be 0."""
        floatx = keras.DTypePolicy(dtype).variable_dtype
        examples = [
            self.make_example(np.random.default_rng([self._seed(), index]))
            for index in range(max(n, 1))
        ]
        stacked = keras.tree.map_structure(
            lambda *leaves: _stack(leaves, floatx)[:n], *examples
        )
        return Batch(*stacked)

    def _seed(self) -> int:
        return zlib.crc32(self.name.encode())


def _is_factory(leaf: Any) -> bool:
    return isinstance(leaf, (type, functools.partial))


def _stack(leaves: Iterable[Any], floatx: str) -> np.ndarray:
    array = np.stack(leaves)
    if array.dtype.kind == "f":
        return array.astype("float32").astype(floatx)
    return array.astype("int32")


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Keras's floatx and dtype policy, which do not follow each other, both set.

    Args:
        dtype: Name of a dtype policy; floatx becomes its variable dtype.
    """
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(keras.DTypePolicy(dtype).variable_dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def cases(
    having: Iterable[str] = (),
    lacking: Iterable[str] = (),
    *,
    is_slow: bool = False,
    is_few: bool = False,
) -> list[Any]:
    """Pytest parameters: the problems with all of one set of tags, none of another.

    Args:
        having: Tags that a problem must have.
        lacking: Tags that it must not have.
        is_slow: Whether only problems with a tag that none before them has are for
            the quick tests.
        is_few: Whether the others are left out altogether.
    """
    found, seen = [], set()
    for problem in PROBLEMS.values():
        if problem.tags.issuperset(having) and problem.tags.isdisjoint(lacking):
            is_new = not found or not seen.issuperset(problem.tags)
            seen |= problem.tags
            marks = [pytest.mark.slow] if is_slow and not is_new else []
            if is_new or not is_few:
                found.append(pytest.param(problem, id=problem.name, marks=marks))
    return found


TAGS = {
    "attention": "an attention layer",
    "conv": "a convolution",
    "coupled": "Keras's loss of a batch is neither mean nor sum over its examples",
    "compiled": "an operation that Keras compiles with XLA at each eager call on CPU",
    "custom": "a leaf layer that no rule can know",
    "embedding": "a gradient that TensorFlow gives as `IndexedSlices`",
    "frozen": "a variable that does not train",
    "lora": "low-rank adapters, which Keras 3.15 keeps in float32",
    "mask": "a Keras mask that reaches a layer or the loss",
    "norm": "a normalisation layer",
    "random": "another output for each call in training",
    "regularized": "a weight regulariser",
    "rnn": "a loop over time",
    "scalar": "a loss of rank 0, whatever its reduction",
    "shared": "a layer called twice",
    "structure": "several inputs or outputs",
    "sum": "Keras's loss of a batch is the sum over its examples, not the mean",
    "tied": "a variable used outside its layer",
    "unused": "a variable that the loss does not depend on",
}


# ------------------------------------------------------------------ changed batches


def take(batch: Batch, rows: Any) -> Batch:
    """The examples ``rows`` (a slice or indices): of every leaf that is not None."""
    return Batch(
        *keras.tree.map_structure(
            lambda leaf: None if leaf is None else leaf[rows], tuple(batch)
        )
    )


def drop(batch: Batch, row: int) -> Batch:
    """All examples but one."""
    return take(batch, np.arange(size(batch)) != row)


def size(batch: Batch) -> int:
    """Number of examples."""
    return len(keras.tree.flatten(batch.x)[0])


def scale_outlier(batch: Batch, row: int, factor: float = 1e6) -> Batch:
    """Multiply one example's float inputs, or its sample weight if there are none."""

    def scaled(leaf: Any) -> Any:
        if not _is_float(leaf):
            return leaf
        leaf = leaf.copy()
        leaf[row] *= factor
        return leaf

    if any(map(_is_float, keras.tree.flatten(batch.x))):
        return batch._replace(x=keras.tree.map_structure(scaled, batch.x))
    weight = batch.sample_weight
    if weight is None:
        weight = np.ones(size(batch), "float32")
    return batch._replace(sample_weight=keras.tree.map_structure(scaled, weight))


def blank_row(batch: Batch, row: int) -> Batch:
    """Make one example's inputs zero; of masked token ids nothing is left."""

    def blanked(leaf: np.ndarray) -> np.ndarray:
        leaf = leaf.copy()
        leaf[row] = 0
        return leaf

    return batch._replace(x=keras.tree.map_structure(blanked, batch.x))


def nan_row(batch: Batch, row: int) -> Batch:
    """Make one example's float inputs, or else its sample weight, NaN."""
    return scale_outlier(batch, row, np.nan)


def _is_float(leaf: Any) -> bool:
    return leaf is not None and leaf.dtype.kind == "f"


# -------------------------------------------------------------------------- layers


@register
class Scale(layers.Layer):
    """A leaf that no rule knows: ``tanh(x * scale)``."""

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(input_shape[-1],), name="scale")

    def call(self, x):
        return ops.tanh(x * self.scale)


@register
class WideDense(layers.Dense):
    """A subclass of a known layer that computes something else: twice Dense."""

    def call(self, x, training=None):
        return 2 * super().call(x, training=training)


@register
class Subclassed(keras.Model):
    """Layers joined in Python."""

    def __init__(self, **options):
        super().__init__(**options)
        self.hidden = layers.Dense(4, activation="tanh")
        self.head = layers.Dense(2)

    def call(self, x):
        return self.head(ops.concatenate([self.hidden(x), x], axis=-1))


@register
class WithUnused(keras.Model):
    """A layer and a weight that the loss does not depend on."""

    def __init__(self, **options):
        super().__init__(**options)
        self.spare = self.add_weight(shape=(3, 2), name="spare")
        self.idle = layers.Dense(2)
        self.head = layers.Dense(2)

    def call(self, x):
        self.idle(x)
        return self.head(x)


@register
class TiedEmbedding(keras.Model):
    """Language-model head: logits are products with the embedding's own rows."""

    def __init__(self, **options):
        super().__init__(**options)
        self.embedding = layers.Embedding(6, 3)
        self.hidden = layers.Dense(3, activation="tanh")

    def call(self, ids):
        hidden = self.hidden(self.embedding(ids))
        return ops.matmul(hidden, ops.transpose(self.embedding.embeddings))


# -------------------------------------------------------------------------- models


def sequential(shape, *stack, dtype=None):
    return keras.Sequential([keras.Input(shape, dtype=dtype), *stack])


def with_ids(*stack, mask_zero=False, ids=6, width=3):
    """A model of token ids; ``ids`` tokens embedded in ``width`` numbers."""
    embedding = layers.Embedding(ids, width, mask_zero=mask_zero)
    return sequential((None,), embedding, *stack, dtype="int32")


def frozen(layer):
    layer.trainable = False
    return layer


def frozen_kernel():
    model = sequential((3,), layers.Dense(4, activation="tanh"), layers.Dense(2))
    for layer in model.layers:
        layer.kernel.trainable = False
    return model


def low_rank():
    model = sequential((4,), layers.Dense(5, activation="tanh"), layers.Dense(3))
    for layer in model.layers:
        layer.enable_lora(2)
    return model


def low_rank_embedding():
    model = with_ids(layers.GlobalAveragePooling1D(), layers.Dense(3))
    model.layers[0].enable_lora(2)
    return model


def attention(make_attention):
    inputs = keras.Input((4, 6))
    attended = make_attention()(inputs, inputs)
    hidden = layers.LayerNormalization()(inputs + attended)
    hidden = hidden + layers.Dense(6, activation="gelu")(hidden)
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(hidden)))


def causal_attention():
    ids = keras.Input((4,), dtype="int32")
    hidden = layers.Embedding(6, 4, mask_zero=True)(ids)
    attend = layers.MultiHeadAttention(2, 2)
    hidden = hidden + attend(hidden, hidden, use_causal_mask=True)
    return keras.Model(ids, layers.Dense(3)(layers.GlobalAveragePooling1D()(hidden)))


def cross_attention():
    query, value = keras.Input((2, 4)), keras.Input((5, 3))
    attended = layers.MultiHeadAttention(2, 2, value_dim=3)(query, value)
    return keras.Model([query, value], layers.Dense(2)(layers.Flatten()(attended)))


def called_twice():
    inputs = keras.Input((3,))
    shared = layers.Dense(3, activation="tanh", name="shared")
    return keras.Model(inputs, layers.Dense(2)(shared(shared(inputs))))


def siamese():
    left, right = keras.Input((4, 4, 1)), keras.Input((4, 4, 1))
    encoder = sequential(
        (4, 4, 1), layers.Conv2D(2, 2, activation="tanh"), layers.Flatten()
    )
    return keras.Model([left, right], layers.Dense(1)(encoder(left) - encoder(right)))


def shared_embedding():
    question, answer = (
        keras.Input((3,), dtype="int32"),
        keras.Input((2,), dtype="int32"),
    )
    embedding, pool = layers.Embedding(5, 3), layers.GlobalAveragePooling1D()
    product = pool(embedding(question)) * pool(embedding(answer))
    return keras.Model([question, answer], layers.Dense(1)(product))


def nested():
    inputs = keras.Input((3,))
    block = sequential((3,), layers.Dense(4, activation="tanh"), layers.Dense(3))
    outer = sequential((3,), block, layers.LayerNormalization())
    return keras.Model(inputs, layers.Dense(2)(inputs + outer(inputs)))


def two_heads(pack):
    """Two inputs and two outputs ("value", "label"), in the container ``pack``."""
    wide, deep = keras.Input((3,), name="wide"), keras.Input((2,), name="deep")
    hidden = layers.Dense(4, activation="tanh")(layers.concatenate([wide, deep]))
    value = layers.Dense(1, name="value")(layers.concatenate([hidden, wide]))
    label = layers.Dense(3, name="label")(hidden)
    return keras.Model(
        pack({"wide": wide, "deep": deep}), pack({"value": value, "label": label})
    )


def nested_inputs():
    inputs = {
        "user": {"age": keras.Input((1,)), "tags": keras.Input((3,), dtype="int32")},
        "item": [keras.Input((2,)), keras.Input((2,))],
    }
    tags = layers.GlobalAveragePooling1D()(
        layers.Embedding(4, 2)(inputs["user"]["tags"])
    )
    features = layers.concatenate([inputs["user"]["age"], tags, *inputs["item"]])
    return keras.Model(inputs, layers.Dense(2)(layers.Dense(3, "tanh")(features)))


def tagger(**embedding):
    return with_ids(layers.Dense(4, activation="tanh"), layers.Dense(3), **embedding)


def einsum(shape, *equations, **options):
    """EinsumDense layers in a row, each ``(equation, output shape, bias axes)``."""
    model = sequential(shape)
    for equation, output_shape, bias_axes in equations:
        layer = layers.EinsumDense(equation, output_shape, bias_axes=bias_axes)
        model.add(layer)
    for layer in model.layers if options.get("lora") else ():
        layer.enable_lora(options["lora"])
    return model


def low_rank_conv():
    model = sequential(
        (5, 4, 2),
        layers.Conv2D(3, 2, strides=2, padding="same", activation="tanh"),
        layers.Conv2D(4, (1, 2), use_bias=False),
        layers.Flatten(),
    )
    for layer in model.layers[:2]:
        layer.enable_lora(2)
    return model


def ws_conv_called_twice():
    inputs = keras.Input((5, 5, 3))
    conv = WSConv2D(3, 3, padding="same", activation="tanh")
    outputs = layers.GlobalAveragePooling2D()(conv(conv(inputs)))
    return keras.Model(inputs, outputs)


def conv_called_twice():
    """One kernel on its own outputs, and on inputs of another size."""
    image, small = keras.Input((4, 4, 2)), keras.Input((3, 2, 2))
    shared = layers.Conv2D(2, 2, padding="same", activation="tanh")
    pool = layers.GlobalAveragePooling2D()
    return keras.Model(
        [image, small], pool(shared(shared(image))) - pool(shared(small))
    )


def called_on_many_shapes():
    """One matrix for vectors and for positions."""
    vector, positions = keras.Input((3,)), keras.Input((4, 3))
    shared = layers.Dense(2, activation="tanh")
    outputs = shared(vector) * layers.GlobalAveragePooling1D()(shared(positions))
    return keras.Model([vector, positions], outputs)


def language_model(hidden, **options):
    ids = keras.Input((4,), dtype="int32")
    embedding = layers.ReversibleEmbedding(6, 3, **options)
    return keras.Model(ids, embedding(hidden()(embedding(ids)), reverse=True))


def low_rank_language_model():
    model = language_model(lambda: layers.Dense(3, "tanh"))
    (embedding,) = [each for each in model.layers if hasattr(each, "embeddings")]
    embedding.enable_lora(2)
    return model


def with_states(make_layer, states):
    """A recurrent layer that starts where inputs say, and returns where it ends."""
    sequence = keras.Input((4, 2))
    initial = [keras.Input((3,)) for _ in range(states)]
    layer = make_layer(return_sequences=True, return_state=True)
    outputs, *ends = layer(sequence, initial_state=initial)
    pooled = layers.GlobalAveragePooling1D()(outputs)
    return keras.Model([sequence, *initial], layers.concatenate([pooled, *ends]))


def time_distributed_shared():
    """One matrix at every time step, and once outside of time."""
    sequence, vector = keras.Input((3, 2)), keras.Input((2,))
    shared = layers.Dense(2, activation="tanh")
    steps = layers.TimeDistributed(shared)(sequence)
    return keras.Model(
        [sequence, vector], steps * layers.RepeatVector(3)(shared(vector))
    )


def padded_attention(**options):
    """Attention within and between two masked sequences, with a mask of its own."""
    query, value = (
        keras.Input((3,), dtype="int32"),
        keras.Input((4,), dtype="int32"),
    )
    allowed = keras.Input((3, 4), dtype="bool")
    embedding = layers.Embedding(6, 4, mask_zero=True)
    attend = layers.MultiHeadAttention(2, 3, **options)
    hidden = attend(embedding(query), embedding(value), attention_mask=allowed)
    # The pooling layer divides by the number of positions that the mask leaves: 0.
    pooled = keras.ops.mean(hidden, axis=1)
    return keras.Model([query, value, allowed], layers.Dense(2)(pooled))


def scored(make_attention):
    query, value = keras.Input((3, 2)), keras.Input((4, 2))
    attended = make_attention()([layers.Dense(2)(query), value])
    return keras.Model([query, value], layers.Flatten()(attended))


# ------------------------------------------------------------------------ examples


def floats(shape, targets):
    """Normal inputs, normal targets."""
    return lambda rng: (rng.normal(size=shape), rng.normal(size=targets))


def labelled(shape, classes):
    """Normal inputs, one of ``classes`` labels."""
    return lambda rng: (rng.normal(size=shape), rng.integers(classes))


def words(length, classes, ids=6):
    """Token ids, of which some repeat, and a label."""
    return lambda rng: (rng.integers(ids, size=length), rng.integers(classes))


def padded(rng, length=5, ids=6):
    """Token ids with a tail of zeros; at least one is not zero."""
    words = rng.integers(1, ids, size=length)
    return words * (np.arange(length) <= rng.integers(length))


def padded_labelled(classes):
    return lambda rng: (padded(rng), rng.integers(classes))


def padded_tags(rng):
    return padded(rng), rng.integers(3, size=5)


def two_head_example(pack):
    def example(rng):
        x = {"wide": rng.normal(size=3), "deep": rng.normal(size=2)}
        return pack(x), pack({"value": rng.normal(size=1), "label": rng.integers(3)})

    return example


def floats_of(*shapes, targets):
    """Several normal inputs, normal targets."""

    def example(rng):
        return [rng.normal(size=shape) for shape in shapes], rng.normal(size=targets)

    return example


def weighted(example, shape=()):
    """The example with a positive weight, or with one weight for each position."""
    return lambda rng: (*example(rng), rng.uniform(0.5, 2, size=shape))


def values(dictionary):
    return list(dictionary.values())


# -------------------------------------------------------------------------- losses


@register
def pseudo_huber(y_true, y_pred):
    """A loss as people write them: one number for each example."""
    return ops.sum(ops.sqrt(1 + ops.square(y_true - y_pred)) - 1, axis=-1)


@register
def scalar_squares(y_true, y_pred):
    """A loss of rank 0."""
    return ops.mean(ops.square(y_true - y_pred))


logits = functools.partial(losses.SparseCategoricalCrossentropy, from_logits=True)


# ----------------------------------------------------------------------- the table


def _problem(name, model, example, loss, *, tags="", loss_weights=None):
    return Problem(name, model, example, loss, loss_weights, frozenset(tags.split()))


_TABLE = (
    # Dense.
    _problem(
        "linear_regression",
        lambda: sequential((3,), layers.Dense(1)),
        floats(3, 1),
        "mse",
    ),
    _problem(
        "mlp_softmax",
        lambda: sequential(
            (4,), layers.Dense(5, "tanh"), layers.Dense(3, activation="softmax")
        ),
        labelled(4, 3),
        "sparse_categorical_crossentropy",
    ),
    _problem(
        "mlp_logits",
        lambda: sequential((4,), layers.Dense(5, "relu"), layers.Dense(3)),
        labelled(4, 3),
        logits,
    ),
    _problem(
        "mlp_weighted",
        lambda: sequential((4,), layers.Dense(5, "relu"), layers.Dense(3)),
        weighted(labelled(4, 3)),
        logits,
    ),
    _problem(
        "mlp_one_hot",
        lambda: sequential(
            (4,),
            layers.Dense(5, "silu", use_bias=False),
            layers.Dense(3, "softmax", use_bias=False),
        ),
        lambda rng: (rng.normal(size=4), np.eye(3)[rng.integers(3)]),
        "categorical_crossentropy",
    ),
    _problem(
        "mlp_binary",
        lambda: sequential((4,), layers.Dense(5, "tanh"), layers.Dense(1, "sigmoid")),
        lambda rng: (rng.normal(size=4), rng.integers(2, size=1)),
        "binary_crossentropy",
    ),
    _problem(
        "dense_grid",
        lambda: sequential((2, 3, 4), layers.Dense(3, "tanh"), layers.Dense(2)),
        floats((2, 3, 4), (2, 3, 2)),
        "mse",
    ),
    _problem(
        "einsum_dense",
        lambda: sequential(
            (4, 3),
            layers.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de"),
            layers.Activation("tanh"),
            layers.EinsumDense("abde,def->abf", (None, 2), bias_axes="f"),
        ),
        floats((4, 3), (4, 2)),
        "mse",
    ),
    _problem(
        "prelu",
        lambda: sequential(
            (4,), layers.Dense(3), layers.PReLU("uniform"), layers.Dense(2)
        ),
        floats(4, 2),
        "mae",
    ),
    # Convolutions.
    _problem(
        "cnn",
        lambda: sequential(
            (6, 6, 2),
            layers.Conv2D(3, 3, activation="relu"),
            layers.MaxPool2D(2),
            layers.Flatten(),
            layers.Dense(3),
        ),
        labelled((6, 6, 2), 3),
        logits,
        tags="conv",
    ),
    _problem(
        "conv2d_strided",
        lambda: sequential(
            (6, 7, 2),
            layers.Conv2D(3, (3, 2), strides=2, padding="same", activation="tanh"),
            layers.Conv2D(2, 2, strides=(1, 2), use_bias=False),
            layers.GlobalAveragePooling2D(),
        ),
        floats((6, 7, 2), 2),
        "mse",
        tags="conv",
    ),
    _problem(
        "conv2d_dilated",
        lambda: sequential(
            (6, 6, 2),
            layers.Conv2D(3, 2, dilation_rate=(2, 3), activation="tanh"),
            layers.Conv2D(2, 3, dilation_rate=2, padding="same"),
        ),
        floats((6, 6, 2), (4, 3, 2)),
        "mse",
        tags="conv",
    ),
    _problem(
        "conv2d_grouped",
        lambda: sequential(
            (5, 5, 4),
            layers.Conv2D(6, 2, strides=2, padding="same", groups=2),
            layers.GlobalMaxPooling2D(),
        ),
        floats((5, 5, 4), 6),
        "mse",
        tags="compiled conv",
    ),
    _problem(
        "ws_conv",
        lambda: sequential(
            (6, 6, 2),
            WSConv2D(4, 3, padding="same", activation="tanh"),
            layers.GroupNormalization(2),
            WSConv2D(6, (3, 2), strides=2, use_bias=False),
            layers.Activation("tanh"),
            WSConv2D(3, 1, padding="same"),
            layers.GlobalAveragePooling2D(),
        ),
        floats((6, 6, 2), 3),
        "mse",
        tags="conv",
    ),
    _problem(
        "ws_conv_grouped",
        lambda: sequential(
            (6, 6, 4),
            # Short kernels are not divided by their length.
            WSConv2D(4, 3, groups=2, dilation_rate=2, epsilon=2.0),
            layers.GlobalMaxPooling2D(),
        ),
        floats((6, 6, 4), 4),
        "mse",
        tags="conv",
    ),
    _problem(
        "ws_conv_called_twice",
        ws_conv_called_twice,
        floats((5, 5, 3), 3),
        "mse",
        tags="conv",
    ),
    _problem(
        "conv1d",
        lambda: sequential(
            (8, 2),
            layers.Conv1D(3, 3, padding="causal", dilation_rate=2, activation="tanh"),
            layers.Conv1D(2, 2, strides=2),
        ),
        floats((8, 2), (4, 2)),
        "mse",
        tags="conv",
    ),
    _problem(
        "conv3d",
        lambda: sequential(
            (3, 3, 4, 2),
            layers.Conv3D(2, 2, strides=(1, 1, 2), activation="tanh"),
            layers.Flatten(),
            layers.Dense(2),
        ),
        floats((3, 3, 4, 2), 2),
        "mse",
        tags="conv",
    ),
    _problem(
        "conv_transpose",
        lambda: sequential(
            (3, 2, 2),
            layers.Conv2DTranspose(3, (2, 3), strides=2, activation="tanh"),
            layers.Conv2DTranspose(2, 3, padding="same"),
            layers.GlobalAveragePooling2D(),
        ),
        floats((3, 2, 2), 2),
        "mse",
        tags="conv",
    ),
    _problem(
        "conv1d_transpose",
        lambda: sequential((4, 3), layers.Conv1DTranspose(2, 3, strides=2)),
        floats((4, 3), (9, 2)),
        "mse",
        tags="conv",
    ),
    _problem(
        "depthwise_conv",
        lambda: sequential(
            (5, 5, 2),
            layers.DepthwiseConv2D(2, depth_multiplier=2, activation="tanh"),
            layers.DepthwiseConv2D(3, strides=2, padding="same"),
            layers.Flatten(),
            layers.Dense(2),
        ),
        floats((5, 5, 2), 2),
        "mse",
        tags="conv",
    ),
    _problem(
        "depthwise_conv1d",
        lambda: sequential(
            (6, 3),
            layers.DepthwiseConv1D(2, depth_multiplier=2, activation="tanh"),
            layers.GlobalAveragePooling1D(),
        ),
        floats((6, 3), 6),
        "mse",
        tags="conv",
    ),
    _problem(
        "separable_conv",
        lambda: sequential(
            (5, 5, 2),
            layers.SeparableConv2D(3, 2, depth_multiplier=2, activation="tanh"),
            layers.Flatten(),
            layers.Dense(2),
        ),
        floats((5, 5, 2), 2),
        "mse",
        tags="conv",
    ),
    _problem(
        "separable_conv1d",
        lambda: sequential(
            (6, 2),
            layers.SeparableConv1D(3, 3, padding="same", activation="tanh"),
            layers.GlobalMaxPooling1D(),
        ),
        floats((6, 2), 3),
        "mse",
        tags="conv",
    ),
    # Normalisation.
    _problem(
        "layer_norm",
        lambda: sequential(
            (3, 4),
            layers.Dense(4),
            layers.LayerNormalization(),
            layers.LayerNormalization(axis=[1, 2], center=False),
            layers.Flatten(),
            layers.Dense(2),
        ),
        floats((3, 4), 2),
        "mse",
        tags="norm",
    ),
    _problem(
        "group_norm",
        lambda: sequential(
            (4, 4, 2),
            layers.Conv2D(4, 2),
            layers.GroupNormalization(2),
            layers.Activation("relu"),
            layers.Flatten(),
            layers.Dense(2),
        ),
        floats((4, 4, 2), 2),
        "mse",
        tags="conv norm",
    ),
    _problem(
        "rms_norm",
        lambda: sequential(
            (3, 4), layers.Dense(4), layers.RMSNormalization(), layers.Dense(2)
        ),
        floats((3, 4), (3, 2)),
        "mse",
        tags="norm",
    ),
    _problem(
        "frozen_batch_norm",
        lambda: sequential(
            (4,),
            layers.Dense(4, "relu"),
            frozen(layers.BatchNormalization()),
            layers.Dense(2),
        ),
        floats(4, 2),
        "mse",
        tags="frozen norm",
    ),
    # Tokens and time.
    _problem(
        "embedding_mean",
        lambda: with_ids(layers.GlobalAveragePooling1D(), layers.Dense(3)),
        words(5, 3),
        logits,
        tags="embedding",
    ),
    _problem(
        "embedding_lstm",
        lambda: with_ids(layers.LSTM(3), layers.Dense(2), mask_zero=True),
        padded_labelled(2),
        logits,
        tags="embedding mask rnn",
    ),
    _problem(
        "lstm_bidirectional",
        lambda: sequential(
            (4, 2), layers.Bidirectional(layers.LSTM(2)), layers.Dense(2)
        ),
        floats((4, 2), 2),
        "mse",
        tags="rnn",
    ),
    _problem(
        "gru_stacked",
        lambda: sequential(
            (4, 2),
            layers.GRU(3, return_sequences=True),
            layers.GRU(2, go_backwards=True),
        ),
        floats((4, 2), 2),
        "mse",
        tags="rnn",
    ),
    _problem(
        "gru_reset_before",
        lambda: sequential((4, 2), layers.GRU(3, reset_after=False), layers.Dense(1)),
        floats((4, 2), 1),
        "mse",
        tags="rnn",
    ),
    _problem(
        "simple_rnn",
        lambda: sequential((4, 2), layers.SimpleRNN(3), layers.Dense(1)),
        floats((4, 2), 1),
        "mse",
        tags="rnn",
    ),
    _problem(
        "time_distributed",
        lambda: sequential(
            (3, 4, 4, 1),
            layers.TimeDistributed(layers.Conv2D(2, 2, activation="tanh")),
            layers.TimeDistributed(layers.Flatten()),
            layers.TimeDistributed(layers.Dense(2)),
        ),
        floats((3, 4, 4, 1), (3, 2)),
        "mse",
        tags="conv rnn",
    ),
    # Attention.
    _problem(
        "attention",
        lambda: attention(lambda: layers.MultiHeadAttention(2, 3)),
        labelled((4, 6), 3),
        logits,
        tags="attention norm",
    ),
    _problem(
        "grouped_query_attention",
        lambda: attention(lambda: layers.GroupQueryAttention(3, 4, 2)),
        labelled((4, 6), 3),
        logits,
        tags="attention norm",
    ),
    _problem(
        "causal_attention",
        causal_attention,
        lambda rng: (padded(rng, length=4), rng.integers(3)),
        logits,
        tags="attention embedding mask",
    ),
    _problem(
        "cross_attention",
        cross_attention,
        lambda rng: (
            [rng.normal(size=(2, 4)), rng.normal(size=(5, 3))],
            rng.normal(size=2),
        ),
        "mse",
        tags="attention structure",
    ),
    # Which variables train, and where they are used.
    _problem(
        "frozen_layer",
        lambda: sequential(
            (3,),
            layers.Dense(4, "tanh"),
            frozen(layers.Dense(4, "tanh")),
            layers.Dense(2),
        ),
        floats(3, 2),
        "mse",
        tags="frozen",
    ),
    _problem("frozen_kernel", frozen_kernel, floats(3, 2), "mse", tags="frozen"),
    _problem("lora", low_rank, labelled(4, 3), logits, tags="frozen lora"),
    _problem(
        "lora_embedding",
        low_rank_embedding,
        words(5, 3),
        logits,
        tags="frozen lora",
    ),
    _problem("unused", WithUnused, floats(3, 2), "mse", tags="unused"),
    _problem("called_twice", called_twice, floats(3, 2), "mse", tags="shared"),
    _problem(
        "siamese",
        siamese,
        lambda rng: (
            [rng.normal(size=(4, 4, 1)), rng.normal(size=(4, 4, 1))],
            rng.normal(size=1),
        ),
        "mse",
        tags="conv shared structure",
    ),
    _problem(
        "shared_embedding",
        shared_embedding,
        lambda rng: (
            [rng.integers(5, size=3), rng.integers(5, size=2)],
            rng.normal(size=1),
        ),
        "mse",
        tags="embedding shared structure",
    ),
    _problem(
        "tied_embedding",
        TiedEmbedding,
        lambda rng: (rng.integers(6, size=4), rng.integers(6, size=4)),
        logits,
        tags="tied",
    ),
    _problem("subclassed", Subclassed, floats(3, 2), "mse"),
    _problem("nested", nested, floats(3, 2), "mse", tags="norm"),
    _problem(
        "custom_layer",
        lambda: sequential((3,), layers.Dense(4), Scale(), layers.Dense(2)),
        floats(3, 2),
        "mse",
        tags="custom",
    ),
    _problem(
        "dense_subclass",
        lambda: sequential((3,), WideDense(4, "tanh"), layers.Dense(2)),
        floats(3, 2),
        "mse",
        tags="custom",
    ),
    _problem(
        "regularized",
        lambda: sequential(
            (3,),
            layers.Dense(4, "tanh", kernel_regularizer="l2"),
            layers.Dense(2, bias_regularizer="l2"),
        ),
        floats(3, 2),
        "mse",
        tags="regularized",
    ),
    _problem(
        "dropout",
        lambda: sequential(
            (6,), layers.Dense(8, "tanh"), layers.Dropout(0.5, seed=3), layers.Dense(2)
        ),
        floats(6, 2),
        "mse",
        tags="random",
    ),
    _problem(
        "gaussian_noise",
        lambda: sequential((3,), layers.GaussianNoise(1.0, seed=3), layers.Dense(2)),
        floats(3, 2),
        "mse",
        tags="random",
    ),
    _problem(
        "lstm_dropout",
        lambda: sequential(
            (4, 3), layers.LSTM(3, dropout=0.5, recurrent_dropout=0.5, seed=3)
        ),
        floats((4, 3), 3),
        "mse",
        tags="random rnn",
    ),
    _problem(
        "attention_dropout",
        lambda: attention(lambda: layers.MultiHeadAttention(2, 3, dropout=0.5, seed=3)),
        labelled((4, 6), 3),
        logits,
        tags="attention norm random",
    ),
    # Several inputs and outputs.
    _problem(
        "list_losses",
        lambda: two_heads(values),
        two_head_example(values),
        ["mse", logits],
        loss_weights=[0.5, 2.0],
        tags="structure",
    ),
    _problem(
        "list_weighted",
        lambda: two_heads(values),
        lambda rng: (
            *two_head_example(values)(rng),
            [rng.uniform(0.5, 2), rng.uniform(0.5, 2)],
        ),
        ["mse", logits],
        tags="structure",
    ),
    _problem(
        "dict_losses",
        lambda: two_heads(dict),
        weighted(two_head_example(dict)),
        {"value": "mse", "label": logits},
        loss_weights={"value": 0.5, "label": 2.0},
        tags="structure",
    ),
    _problem(
        "named_losses",
        lambda: two_heads(values),
        two_head_example(values),
        {"label": logits, "value": "mse"},
        loss_weights={"label": 2.0, "value": 0.5},
        tags="structure",
    ),
    _problem(
        "none_loss",
        lambda: two_heads(values),
        two_head_example(values),
        ["mse", None],
        tags="structure unused",
    ),
    _problem(
        "nested_inputs",
        nested_inputs,
        lambda rng: (
            {
                "user": {"age": rng.normal(size=1), "tags": rng.integers(4, size=3)},
                "item": [rng.normal(size=2), rng.normal(size=2)],
            },
            rng.normal(size=2),
        ),
        "mse",
        tags="embedding structure",
    ),
    # One label a position, and reductions.
    _problem(
        "positions",
        lambda: sequential((4, 2), layers.Dense(3)),
        lambda rng: (rng.normal(size=(4, 2)), rng.integers(3, size=4)),
        logits,
    ),
    _problem(
        "positions_weighted",
        tagger,
        weighted(padded_tags, shape=5),
        logits,
        tags="embedding",
    ),
    _problem(
        "positions_example_weighted",
        tagger,
        weighted(padded_tags),
        logits,
        tags="coupled embedding",
    ),
    _problem(
        "masked",
        lambda: tagger(mask_zero=True),
        padded_tags,
        logits,
        tags="coupled embedding mask",
    ),
    _problem(
        "masked_weighted",
        lambda: tagger(mask_zero=True),
        weighted(padded_tags, shape=5),
        functools.partial(logits, reduction="sum"),
        tags="embedding mask sum",
    ),
    _problem(
        "masked_lstm",
        lambda: with_ids(
            layers.LSTM(3, return_sequences=True), layers.Dense(3), mask_zero=True
        ),
        padded_tags,
        logits,
        tags="coupled embedding mask rnn",
    ),
    _problem(
        "ignored_class",
        lambda: sequential((4, 2), layers.Dense(3)),
        lambda rng: (rng.normal(size=(4, 2)), rng.integers(-1, 3, size=4)),
        functools.partial(logits, ignore_class=-1),
        tags="coupled mask",
    ),
    _problem(
        "sum_reduction",
        lambda: sequential((3, 2), layers.Dense(4, "tanh"), layers.Dense(2)),
        floats((3, 2), (3, 2)),
        functools.partial(losses.MeanSquaredError, reduction="sum"),
        tags="sum",
    ),
    _problem(
        "no_reduction",
        lambda: sequential((3, 2), layers.Dense(4, "tanh"), layers.Dense(2)),
        floats((3, 2), (3, 2)),
        functools.partial(losses.LogCosh, reduction=None),
        tags="sum",
    ),
    _problem(
        "weighted_mean",
        lambda: sequential((4, 2), layers.Dense(3)),
        weighted(
            lambda rng: (rng.normal(size=(4, 2)), rng.integers(3, size=4)), shape=4
        ),
        functools.partial(logits, reduction="mean_with_sample_weight"),
        tags="coupled",
    ),
    _problem(
        "custom_loss",
        lambda: sequential((3,), layers.Dense(4, "tanh"), layers.Dense(2)),
        floats(3, 2),
        pseudo_huber,
    ),
    _problem(
        "scalar_loss",
        lambda: sequential((3,), layers.Dense(4, "tanh"), layers.Dense(2)),
        floats(3, 2),
        scalar_squares,
        tags="scalar",
    ),
    _problem(
        "dice",
        lambda: sequential((3,), layers.Dense(4, "tanh"), layers.Dense(2, "sigmoid")),
        lambda rng: (rng.normal(size=3), rng.integers(2, size=2)),
        losses.Dice,
        tags="coupled scalar",
    ),
    # Equations.
    _problem(
        "einsum_ellipsis_first",
        lambda: einsum(
            (2, 3, 4), ("...x,xy->...y", 3, "y"), ("...x,xy->...y", 2, None)
        ),
        floats((2, 3, 4), (2, 3, 2)),
        "mse",
    ),
    _problem(
        "einsum_ellipsis_last",
        lambda: einsum((3, 2, 2), ("ab...,bc->ac...", 4, "c")),
        floats((3, 2, 2), (4, 2, 2)),
        "mse",
    ),
    _problem(
        "einsum_reversed_kernel",
        lambda: einsum(
            (3, 2, 2),
            ("abcd,efcd->abef", (3, 2, 3), "ef"),
            ("abef,gef->abg", (3, 2), "g"),
        ),
        floats((3, 2, 2), (3, 2)),
        "mse",
    ),
    _problem(
        "einsum_mixed_kernel",
        lambda: einsum(
            (3, 2), ("abc,dce->abde", (3, 2, 3), "e"), ("abde,bdf->abf", (3, 2), "bf")
        ),
        floats((3, 2), (3, 2)),
        "mse",
    ),
    _problem(
        "einsum_bias_of_positions",
        lambda: einsum((3, 2), ("abc,cde->abde", (3, 2, 3), "bd")),
        floats((3, 2), (3, 2, 3)),
        "mse",
    ),
    _problem(
        "einsum_lora",
        lambda: einsum(
            (3, 2),
            ("abc,cde->abde", (3, 2, 3), "de"),
            ("abde,def->abf", (3, 4), "f"),
            ("abf,gf->abg", (3, 2), None),
            lora=2,
        ),
        floats((3, 2), (3, 2)),
        "mse",
        tags="frozen lora",
    ),
    _problem(
        "called_on_many_shapes",
        called_on_many_shapes,
        floats_of(3, (4, 3), targets=2),
        "mse",
        tags="shared structure",
    ),
    _problem(
        "prelu_shared_axes",
        lambda: sequential(
            (3, 2, 4),
            layers.Dense(2),
            layers.PReLU("uniform", shared_axes=[1, 2]),
            layers.PReLU("uniform", shared_axes=[1]),
        ),
        floats((3, 2, 4), (3, 2, 2)),
        "mse",
    ),
    _problem(
        "prelu_as_activation",
        lambda: sequential(
            (4,),
            layers.Dense(3, activation=layers.PReLU("uniform")),
            layers.Dense(2),
        ),
        floats(4, 2),
        "mse",
    ),
    # More convolutions.
    _problem(
        "conv_no_bias",
        lambda: sequential(
            (4, 4, 2),
            layers.Conv2D(3, 2, use_bias=False, activation="tanh"),
            layers.Reshape((9, 3)),
            layers.Conv1D(2, 3, use_bias=False, activation="tanh"),
            layers.Reshape((7, 1, 1, 2)),
            layers.Conv3D(2, (2, 1, 1), use_bias=False),
        ),
        floats((4, 4, 2), (6, 1, 1, 2)),
        "mse",
        tags="conv",
    ),
    _problem(
        "conv2d_even",
        lambda: sequential(
            (6, 5, 1),
            layers.Conv2D(2, (4, 2), strides=2, padding="same", activation="tanh"),
            layers.Conv2D(2, (2, 3), strides=(1, 2), padding="same"),
        ),
        floats((6, 5, 1), (3, 2, 2)),
        "mse",
        tags="conv",
    ),
    _problem(
        "conv2d_pointwise",
        lambda: sequential(
            (5, 4, 3),
            layers.Conv2D(4, 1, strides=2, activation="tanh"),
            layers.Conv2D(2, 1),
        ),
        floats((5, 4, 3), (3, 2, 2)),
        "mse",
        tags="conv",
    ),
    _problem(
        "conv1d_same",
        lambda: sequential(
            (7, 2),
            layers.Conv1D(3, 4, strides=3, padding="same", activation="tanh"),
            layers.Conv1D(2, 2, dilation_rate=2, padding="same"),
        ),
        floats((7, 2), (3, 2)),
        "mse",
        tags="conv",
    ),
    _problem(
        "conv3d_strided",
        lambda: sequential(
            (4, 3, 5, 1),
            layers.Conv3D(2, (2, 2, 3), strides=2, padding="same", activation="tanh"),
            layers.Conv3D(2, 1, strides=(1, 2, 2)),
        ),
        floats((4, 3, 5, 1), (2, 1, 2, 2)),
        "mse",
        tags="conv",
    ),
    _problem(
        "conv3d_transpose",
        lambda: sequential(
            (2, 2, 1, 2),
            layers.Conv3DTranspose(2, 2, strides=(2, 1, 1), padding="same"),
        ),
        floats((2, 2, 1, 2), (4, 2, 1, 2)),
        "mse",
        tags="conv",
    ),
    _problem(
        "conv_transpose_padded",
        lambda: sequential(
            (3, 2, 2),
            layers.Conv2DTranspose(
                3, 3, strides=2, padding="same", output_padding=1, activation="tanh"
            ),
            layers.Conv2DTranspose(
                2, 2, strides=(2, 3), output_padding=(1, 2), use_bias=False
            ),
            layers.GlobalAveragePooling2D(),
        ),
        floats((3, 2, 2), 2),
        "mse",
        tags="conv",
    ),
    _problem(
        "separable_conv_strided",
        lambda: sequential(
            (6, 5, 2),
            layers.SeparableConv2D(
                3, 3, strides=2, padding="same", depth_multiplier=2, activation="tanh"
            ),
            layers.SeparableConv2D(2, 2, use_bias=False),
        ),
        floats((6, 5, 2), (2, 2, 2)),
        "mse",
        tags="conv",
    ),
    _problem(
        "separable_conv1d_dilated",
        lambda: sequential(
            (6, 2), layers.SeparableConv1D(3, 2, padding="same", dilation_rate=2)
        ),
        floats((6, 2), (6, 3)),
        "mse",
        tags="conv",
    ),
    _problem(
        "depthwise_conv_dilated",
        lambda: sequential(
            (6, 5, 2),
            layers.DepthwiseConv2D(2, dilation_rate=(2, 2), activation="tanh"),
            layers.DepthwiseConv2D(
                2, dilation_rate=(2, 1), padding="same", use_bias=False
            ),
        ),
        floats((6, 5, 2), (4, 3, 2)),
        "mse",
        tags="conv",
    ),
    _problem(
        "conv1d_grouped",
        lambda: sequential(
            (5, 4),
            layers.Conv1D(6, 2, groups=2, activation="tanh"),
            layers.Conv1D(2, 1),
        ),
        floats((5, 4), (4, 2)),
        "mse",
        tags="compiled conv",
    ),
    _problem(
        "conv_called_twice",
        conv_called_twice,
        floats_of((4, 4, 2), (3, 2, 2), targets=2),
        "mse",
        tags="conv shared structure",
    ),
    _problem(
        "conv_lora",
        low_rank_conv,
        floats((5, 4, 2), 12),
        "mse",
        tags="conv frozen lora",
    ),
    # More normalisation.
    _problem(
        "layer_norm_axes",
        lambda: sequential(
            (3, 4),
            layers.Dense(4),
            layers.LayerNormalization(axis=[1]),
            layers.LayerNormalization(axis=1, scale=False),
            layers.LayerNormalization(axis=[1, 2]),
            layers.LayerNormalization(center=False, scale=False),
        ),
        floats((3, 4), (3, 4)),
        "mse",
        tags="norm",
    ),
    _problem(
        "group_norm_axes",
        lambda: sequential(
            (4, 3),
            layers.Dense(4),
            layers.GroupNormalization(2, axis=1),
            layers.GroupNormalization(1, scale=False),
            layers.GroupNormalization(-1, center=False),
            layers.GroupNormalization(1, center=False, scale=False),
        ),
        floats((4, 3), (4, 4)),
        "mse",
        tags="norm",
    ),
    _problem(
        "rms_norm_axes",
        lambda: sequential(
            (3, 2, 4), layers.Dense(4), layers.RMSNormalization(axis=[-2, -1])
        ),
        floats((3, 2, 4), (3, 2, 4)),
        "mse",
        tags="norm",
    ),
    # More tokens and time.
    _problem(
        "embedding_of_one",
        lambda: sequential((), layers.Embedding(6, 3), layers.Dense(2), dtype="int32"),
        lambda rng: (rng.integers(6), rng.normal(size=2)),
        "mse",
        tags="embedding",
    ),
    _problem(
        "embedding_negative",
        lambda: sequential(
            (2, 3),
            layers.Embedding(6, 3, mask_zero=True),
            layers.Dense(2, activation="tanh"),
            dtype="int32",
        ),
        lambda rng: (rng.integers(-6, 6, size=(2, 3)), rng.normal(size=(2, 3, 2))),
        functools.partial(losses.MeanSquaredError, reduction="sum"),
        tags="embedding mask sum",
    ),
    _problem(
        "gru_no_bias",
        lambda: sequential(
            (3, 2),
            layers.GRU(3, use_bias=False, return_sequences=True),
            layers.GRU(2, use_bias=False, reset_after=False),
        ),
        floats((3, 2), 2),
        "mse",
        tags="rnn",
    ),
    _problem(
        "gru_reset_before_masked",
        lambda: with_ids(
            layers.GRU(3, reset_after=False, return_sequences=True),
            layers.GRU(2, go_backwards=True),
            mask_zero=True,
        ),
        lambda rng: (padded(rng), rng.normal(size=2)),
        "mse",
        tags="embedding mask rnn",
    ),
    _problem(
        "gru_states",
        lambda: with_states(functools.partial(layers.GRU, 3), 1),
        floats_of((4, 2), 3, targets=6),
        "mse",
        tags="rnn structure",
    ),
    _problem(
        "lstm_states",
        lambda: with_states(functools.partial(layers.LSTM, 3), 2),
        floats_of((4, 2), 3, 3, targets=9),
        "mse",
        tags="rnn structure",
    ),
    _problem(
        "lstm_backwards_masked",
        lambda: with_ids(
            layers.LSTM(3, go_backwards=True, return_sequences=True),
            layers.LSTM(2, use_bias=False),
            mask_zero=True,
        ),
        lambda rng: (padded(rng), rng.normal(size=2)),
        "mse",
        tags="embedding mask rnn",
    ),
    _problem(
        "lstm_unrolled",
        lambda: sequential(
            (3, 2),
            layers.LSTM(3, unroll=True, return_sequences=True),
            layers.GRU(2, unroll=True),
        ),
        floats((3, 2), 2),
        "mse",
        tags="rnn",
    ),
    _problem(
        "lstm_unrolled_masked",
        lambda: sequential(
            (4,),
            layers.Embedding(6, 3, mask_zero=True),
            layers.LSTM(3, unroll=True),
            dtype="int32",
        ),
        lambda rng: (padded(rng, length=4), rng.normal(size=3)),
        "mse",
        tags="embedding mask rnn",
    ),
    _problem(
        "simple_rnn_masked",
        lambda: with_ids(
            layers.SimpleRNN(3, activation="elu", return_sequences=True),
            layers.SimpleRNN(2, use_bias=False, go_backwards=True),
            mask_zero=True,
        ),
        lambda rng: (padded(rng), rng.normal(size=2)),
        "mse",
        tags="embedding mask rnn",
    ),
    _problem(
        "bidirectional_masked",
        lambda: with_ids(
            layers.Bidirectional(layers.LSTM(2, return_sequences=True), "mul"),
            layers.Bidirectional(layers.GRU(3), "sum"),
            mask_zero=True,
        ),
        lambda rng: (padded(rng), rng.normal(size=3)),
        "mse",
        tags="embedding mask rnn",
    ),
    _problem(
        "bidirectional_modes",
        lambda: sequential(
            (3, 2),
            layers.Bidirectional(layers.SimpleRNN(2, return_sequences=True), "ave"),
            layers.Bidirectional(
                layers.GRU(2, return_sequences=True),
                "concat",
                backward_layer=layers.LSTM(3, go_backwards=True, return_sequences=True),
            ),
        ),
        floats((3, 2), (3, 5)),
        "mse",
        tags="rnn",
    ),
    _problem(
        "time_distributed_lstm",
        lambda: sequential(
            (2, 3, 2),
            layers.TimeDistributed(layers.LSTM(3)),
            layers.TimeDistributed(layers.Dense(2)),
        ),
        floats((2, 3, 2), (2, 2)),
        "mse",
        tags="rnn",
    ),
    _problem(
        "time_distributed_shared",
        time_distributed_shared,
        floats_of((3, 2), 2, targets=(3, 2)),
        "mse",
        tags="rnn shared structure",
    ),
    # More attention.
    _problem(
        "attention_padded",
        lambda: padded_attention(value_dim=2, output_shape=5),
        lambda rng: (
            [
                padded(rng, length=3),
                padded(rng, length=4),
                rng.integers(2, size=(3, 4)),
            ],
            rng.normal(size=2),
        ),
        "mse",
        tags="attention embedding mask structure",
    ),
    _problem(
        "attention_no_bias",
        lambda: attention(
            lambda: layers.MultiHeadAttention(2, 3, value_dim=2, use_bias=False)
        ),
        labelled((4, 6), 3),
        logits,
        tags="attention norm",
    ),
    _problem(
        "dot_attention",
        lambda: scored(lambda: layers.Attention(use_scale=True, score_mode="concat")),
        floats_of((3, 2), (4, 2), targets=6),
        "mse",
        tags="attention structure",
    ),
    _problem(
        "additive_attention",
        lambda: scored(layers.AdditiveAttention),
        floats_of((3, 2), (4, 2), targets=6),
        "mse",
        tags="attention structure",
    ),
)

_KERAS = tuple(map(int, keras.__version__.split(".")[:2]))

if hasattr(layers, "ReversibleEmbedding"):
    _TABLE += tuple(
        _problem(
            name,
            functools.partial(language_model, hidden, **options),
            lambda rng: (padded(rng, length=4), rng.integers(6, size=4)),
            logits,
            tags=f"shared {tags}",
        )
        for name, hidden, options, tags in (
            (
                "reversible_tied",
                lambda: layers.Dense(3, "tanh"),
                {"logit_soft_cap": 2.0},
                "",
            ),
            (
                "reversible_untied",
                lambda: layers.Dense(3, "tanh"),
                {"tie_weights": False},
                "embedding",
            ),
            (
                "reversible_masked",
                lambda: layers.LSTM(3, return_sequences=True),
                {"mask_zero": True},
                "mask rnn",
            ),
        )
        # Keras 3.12 loses its own mask there.
        if name != "reversible_masked" or _KERAS >= (3, 15)
    )
    _TABLE += (
        _problem(
            "reversible_lora",
            low_rank_language_model,
            lambda rng: (padded(rng, length=4), rng.integers(6, size=4)),
            logits,
            tags="shared frozen lora",
        ),
    )

PROBLEMS = {problem.name: problem for problem in _TABLE}
