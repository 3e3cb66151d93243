"""All that tfdp takes from the private parts of Keras and TensorFlow.

Everything else in the package uses public names, so that a release that moves
something breaks this file and nothing else.
"""

import contextlib
import functools
import inspect
import os
import platform
import random
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import core as keras_core
from keras.src.backend.tensorflow import nn as keras_nn
from keras.src.layers.preprocessing.image_preprocessing.base_image_preprocessing_layer import (
    BaseImagePreprocessingLayer,
)
from keras.src.losses import loss as loss_module
from keras.src.models.functional import Functional
from keras.src.random.seed_generator import global_seed_generator
from keras.src.saving.serialization_lib import SafeModeScope
from keras.src.trainers import compile_utils
from keras.src.trainers.compile_utils import CompileLoss, get_loss, get_metric
from keras.src.trainers.data_adapters import tf_dataset_adapter
from keras.src.trainers.trainer import model_supports_jit
from keras.src.utils.naming import to_snake_case
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context, record, tape
from tensorflow.python.framework import function_def_to_graph, smart_cond
from tensorflow.python.ops import (
    array_grad,
    array_ops,
    control_flow_util,
    gen_nn_ops,
    gradients_util,
    resource_variable_ops,
    tensor_array_ops,
)
from tensorflow.python.ops.parallel_for import control_flow_ops, pfor
from tensorflow.python.util import _pywrap_util_port

from tfdp._types import Loss, Nest, Tensor, Variable

_Function = TypeVar("_Function", bound=Callable[..., object])

# From what TensorFlow gives a converter of an operation to the stacked output, or None.
_Converter = Callable[[pfor._PforInput], Tensor | None]


@contextlib.contextmanager
def attributes_replaced(of: object, **attributes: object) -> Iterator[None]:
    """Let a layer, a variable, a module, or whatever it is have other attributes.

    They are entries of the instance, which Keras does not track.
    """
    own = vars(of)
    original = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(original)


@contextlib.contextmanager
def values_kept(variables: Iterable[Variable]) -> Iterator[Callable[[], None]]:
    """Let variables have the values again that they had, also after an error.

    Args:
        variables: Keras's or TensorFlow's.

    Yields:
        A function that gives them their values before.
    """
    held = list({id(each): each for each in variables}.values())
    values = [np.array(each.numpy()) for each in held]

    def put_back() -> None:
        for each, value in zip(held, values, strict=True):
            each.assign(value)

    try:
        yield put_back
    finally:
        put_back()


class _NoMetrics:
    """Stands in for Keras's metrics where none are wanted."""

    @staticmethod
    def Mean(name: str) -> None:  # noqa: N802
        """Make no metric."""


class PerExampleCompileLoss(CompileLoss):
    """Keras's alignment of losses, outputs, targets and weights, without metrics.

    Keras adds a running mean per output, which would be assigned once per
    example inside a vectorized map.
    """

    def build(self, y_true: Nest, y_pred: Nest) -> None:
        """Resolve the losses, without variables: this may happen in any graph."""
        with attributes_replaced(compile_utils, metrics_module=_NoMetrics):
            super().build(y_true, y_pred)

    @property
    def metrics(self) -> list[None]:
        """No metric for any of the losses."""
        return [None] * len(self._flat_losses or ())


def resolve_loss(identifier: Loss, y_true: Nest, y_pred: Nest) -> keras.losses.Loss:
    """Return the `keras.losses.Loss` that `compile` would use for `identifier`."""
    return get_loss(identifier, y_true, y_pred)


def resolve_metric(
    identifier: Nest, y_true: Nest = None, y_pred: Nest = None
) -> keras.metrics.Metric:
    """Return the metric that `compile` would use for `identifier`.

    Args:
        identifier: As in `compile`.
        y_true: Targets, of which shapes are read; only of `"accuracy"`.
        y_pred: Predictions, likewise.
    """
    return get_metric(identifier, y_true, y_pred)


def is_mean_over_examples(metric: keras.metrics.Metric) -> bool:
    """Tell whether a metric is the mean of a function of each example."""
    kind = keras.metrics.MeanMetricWrapper
    return isinstance(metric, kind) and all(
        getattr(type(metric), name) is getattr(kind, name)
        for name in ("update_state", "result")
    )


def function_of_metric(metric: keras.metrics.Metric) -> Callable[..., Tensor]:
    """Return the function of which a metric is the mean."""
    # Not a partial one: Keras asks functions for their names.
    return lambda y_true, y_pred: metric._fn(y_true, y_pred, **metric._fn_kwargs)


@contextlib.contextmanager
def without_tapes() -> Iterator[None]:
    """Let tapes see which variables are used inside, and record nothing else.

    For the forward pass of what has a gradient of its own: in a graph, a tape would have
    every loop differentiated too, and its steps kept.
    """
    with record.VariableWatcher() as used, record.stop_recording():
        yield
    for variable in used.watched_variables():
        tape.variable_accessed(variable)


@contextlib.contextmanager
def paused(tapes: Iterable[tf.GradientTape]) -> Iterator[None]:
    """Let some tapes record nothing, those that do not already; others do."""
    with contextlib.ExitStack() as entered:
        for each in tapes:
            if each._recording:
                entered.enter_context(each.stop_recording())
        yield


def is_recorded(tensor: Tensor) -> bool:
    """Tell whether some tape that records now knows what a tensor comes from."""
    known = gradients_util.PossibleTapeGradientTypes([tensor])
    return bool(known != gradients_util.POSSIBLE_GRADIENT_TYPES_NONE)


def record_loop(outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """Let tapes know what a loop comes from that was made without them.

    With tapes that may be asked twice, TensorFlow would put the loop into a function and
    prepare for gradients of gradients, which takes most of a second.

    Args:
        outputs: What the loop has made, in the graph that is being made.
        inputs: What it was made of.
    """
    inputs = list(filter(is_recorded, inputs))

    def backward(*upstream: Tensor | None) -> Nest:
        known = [
            (output, gradient)
            for output, gradient in zip(outputs, upstream, strict=True)
            if gradient is not None
        ]
        return tf.gradients(
            [output for output, _ in known],
            inputs,
            [gradient for _, gradient in known],
            stop_gradients=inputs,
        )

    record.record_operation("While", outputs, inputs, backward)


def identity_with_gradient(
    tensor: Tensor, gradient: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return a tensor as another one, with a gradient of its own, at no operation's cost.

    Args:
        tensor: The tensor.
        gradient: From the gradient of what is returned to that of the tensor. A tape
            keeps it, for as long as the tape lives.

    Returns:
        A tensor of the same values.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    with contextlib.ExitStack() as entered:
        entered.enter_context(record.stop_recording())
        if graph is not None:
            # Symbolic gradients, `tf.gradients`, ask no tape.
            entered.enter_context(graph.gradient_override_map({"Identity": _OWN}))
        own = tf.identity(tensor)
    if graph is not None:
        _gradients.setdefault(graph, {})[own.op.name] = gradient
    record.record_operation(
        "Identity", [own], [tensor], lambda of_own: [gradient(of_own)]
    )
    return own


_OWN = "tfdpIdentityWithGradient"
_gradients: weakref.WeakKeyDictionary[
    tf.Graph, dict[str, Callable[[Tensor], Tensor]]
] = weakref.WeakKeyDictionary()


@tf.RegisterGradient(_OWN)
def _own_gradient(op: tf.Operation, gradient: Tensor) -> Tensor:
    own = _gradients.get(op.graph, {}).get(op.name)
    return gradient if own is None else own(gradient)


def has_own_gradient(op: tf.Operation) -> bool:
    """Tell whether an operation has another gradient than that of its type."""
    return "_gradient_op_type" in op.node_def.attr


@contextlib.contextmanager
def gradients_of_rows() -> Iterator[None]:
    """Let gradients be made as rows of a batch need them.

    Those of sums are spread by `tf.broadcast_to`: where lengths are static TensorFlow makes
    tiles, which on CPUs takes many times as long. And the gradient of what each row has
    gathered of its own stays in the row, whatever the numbers are: on a GPU, one that is out
    of range would lead to another row.
    """
    with (
        attributes_replaced(array_ops, tile=_spread),
        attributes_replaced(array_grad, _BatchGatherGrad=_gathered_gradient),
    ):
        yield


def has_gpus() -> bool:
    """Whether TensorFlow may run an operation on a GPU."""
    return bool(tf.config.list_logical_devices("GPU"))


def convolutions_replaced(
    check: Callable[..., None],
) -> contextlib.AbstractContextManager[None]:
    """Let convolutions on CPUs, and gradients of kernels anywhere, be made in float32.

    In bfloat16 oneDNN reads memory that other rows may have left, and TensorFlow leaves
    entries of gradients that see nothing but padding as they are in memory. On CPUs those of
    inputs that are shorter than their windows fail, as oneDNN reads such memory there too.
    What calls `tf.raw_ops` is not reached, and has to give them float32, as rules do.

    Args:
        check: Called for each convolution with its inputs, kernel, outputs and strides.

    Returns:
        A context within which they are made so.
    """

    def checked(convolution: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def convolve(
            input: Tensor,  # noqa: A002 (TensorFlow's name)
            filter: Tensor,  # noqa: A002
            strides: Sequence[int],
            padding: str,
            **options: Nest,
        ) -> Tensor:
            tensors = [tf.convert_to_tensor(each) for each in (input, filter)]
            dtype = tensors[0].dtype
            if not has_gpus():
                tensors = _in_float32(*tensors)
            if _is_of_single_pixels(tensors[1], strides, padding, **options):
                # The gradient of such a kernel writes beyond its memory.
                (_, down, right, _), strides = strides, [1, 1, 1, 1]
                tensors[0] = tensors[0][:, ::down, ::right]
            tensors[0] = _as_long_as_windows(*tensors, padding=padding, **options)
            outputs = convolution(*tensors, strides, padding, **options)
            check(*tensors, outputs, strides)
            return tf.cast(outputs, dtype)

        return convolve

    convolutions = {name: checked(of) for name, of in _CONVOLUTIONS.items()}
    return attributes_replaced(
        gen_nn_ops,
        depthwise_conv2d_native=_depthwise,
        **_FILTER_GRADIENTS,
        **convolutions,
    )


def _is_of_single_pixels(
    kernel: Tensor,
    strides: Sequence[int],
    padding: str,
    *,
    data_format: str | None = None,
    **others: Nest,
) -> bool:
    """Tell whether a kernel of one number slides by two different strides."""
    del others
    is_one = kernel.shape.rank == 4 and kernel.shape[:2] == (1, 1)
    is_last = data_format in (None, "NHWC") and len(strides) == 4
    is_plain = is_last and padding != "EXPLICIT"
    return is_one and is_plain and strides[1] != strides[2]


def _as_long_as_windows(
    inputs: Tensor,
    kernel: Tensor,
    *,
    padding: str,
    data_format: str | None = None,
    dilations: Sequence[int] | None = None,
    explicit_paddings: Sequence[int] = (),
    **others: Nest,
) -> Tensor:
    """Return inputs that fail where they are shorter than windows along open axes."""
    del others
    rank = kernel.shape.rank
    # TensorFlow's own gradients give bytes.
    is_same = padding in ("SAME", b"SAME")
    if is_same or has_gpus() or rank is None or inputs.shape.rank != rank:
        return inputs
    first = 1 if (data_format or "C").endswith("C") else 2
    every = [1] * rank if dilations is None else dilations
    rims = list(explicit_paddings) or [0] * (2 * rank)
    missing = [
        every[axis] * (_length(kernel, place) - 1)
        + 1
        - sum(rims[2 * axis : 2 * axis + 2])
        - _length(inputs, axis)
        for place, axis in enumerate(range(first, first + rank - 2))
        if None in (inputs.shape[axis], kernel.shape[place])
        and kernel.shape[place] != 1
    ]
    if not missing:
        return inputs
    check = tf.debugging.Assert(
        tf.reduce_max(tf.stack(missing)) <= 0, [_TOO_SHORT], name=_HAS_A_PLACE
    )
    with tf.control_dependencies([check]):
        return tf.identity(inputs)


def _length(tensor: Tensor, axis: int) -> int | Tensor:
    known: int | None = tensor.shape[axis]
    return tf.shape(tensor)[axis] if known is None else known


_HAS_A_PLACE = "tfdp_has_a_place"
# No lengths: those of a drawn batch are not public.
_TOO_SHORT = (
    "A convolution must have a place for its window. Received: a batch that is shorter than "
    "a window along an open axis. Use `padding='same'`, or leave out what is shorter."
)


def fails_without_a_place(convolution: tf.Operation) -> bool:
    """Tell whether a convolution of what is shorter than its window fails."""
    return any(
        before.type == "Assert" and _HAS_A_PLACE in before.name
        for before in convolution.inputs[0].op.control_inputs
    )


_CONVOLUTIONS = {name: getattr(gen_nn_ops, name) for name in ("conv2d", "conv3d")}
_depthwise_of_tensorflow = gen_nn_ops.depthwise_conv2d_native


def _depthwise(
    input: Tensor,  # noqa: A002 (TensorFlow's name)
    filter: Tensor,  # noqa: A002
    strides: Sequence[int],
    padding: str,
    **options: Nest,
) -> Tensor:
    """Convolve each channel by itself, if there is a place for the kernel."""
    inputs, kernel = tf.convert_to_tensor(input), tf.convert_to_tensor(filter)
    inputs = _as_long_as_windows(inputs, kernel, padding=padding, **options)
    return _depthwise_of_tensorflow(inputs, kernel, strides, padding, **options)


def _in_float32(*tensors: Tensor) -> list[Tensor]:
    """Return tensors in float32, if they are in bfloat16."""
    return [
        tf.cast(each, tf.float32) if each.dtype == tf.bfloat16 else each
        for each in tensors
    ]


def _of_kernel_in_float32(of_kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def gradient(
        inputs: Tensor, sizes: Tensor, out_backprop: Tensor, *args: Nest, **kwargs: Nest
    ) -> Tensor:
        inputs, g = _in_float32(inputs, out_backprop)
        found = of_kernel(inputs, sizes, g, *args, **kwargs)
        # Gradients have the dtype of what they are of.
        return tf.cast(found, out_backprop.dtype)

    return gradient


_FILTER_GRADIENTS = {
    name: _of_kernel_in_float32(getattr(gen_nn_ops, name))
    for name in (
        "conv2d_backprop_filter",
        "conv3d_backprop_filter_v2",
        "depthwise_conv2d_native_backprop_filter",
    )
}


def maps_run_in(
    context: Callable[[], contextlib.AbstractContextManager[None]],
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which TensorFlow's vectorized map runs in contexts of one's own.

    It calls a function once, and makes copies of its operations.

    Args:
        context: Makes one, for each map.
    """
    original = control_flow_ops.pfor

    def run(*args: object, **kwargs: object) -> Nest:
        with context():
            return original(*args, **kwargs)

    return attributes_replaced(control_flow_ops, pfor=run)


@contextlib.contextmanager
def models_run_plainly() -> Iterator[None]:
    """Let models run by TensorFlow's plain operations, in this thread.

    Of a condition that is known its branch is taken, which has known lengths. What asks to
    be computed again on the way back is not: rules keep what goes into its layers anyway.
    Products along an axis are made of pairs: TensorFlow's gradient of them asks how many
    rows there are. And convolutions in groups and updates of slices are not given to XLA:
    that compiles them for each number of rows, and on CPUs they then take many times as long.
    """
    # Outside of these contexts the replacements do what the originals do.
    tf.cond, tf.reduce_prod, keras_nn.conv = _cond, _reduce_prod, _conv
    keras_core.dynamic_update_slice = _update_slice
    before, _plainly.is_on = _plainly.is_on, True
    try:
        yield
    finally:
        _plainly.is_on = before


class _Plainly(threading.local):
    is_on = False


_plainly = _Plainly()
_cond_of_tensorflow, _conv_of_keras = tf.cond, keras_nn.conv
_recompute_of_tensorflow = tf.recompute_grad
_reduce_prod_of_tensorflow = tf.reduce_prod
_update_slice_of_xla = keras_core.dynamic_update_slice


@functools.wraps(_cond_of_tensorflow)
def _cond(pred: Tensor, *args: Nest, **kwargs: Nest) -> Nest:
    # Variables are not hashable, and have no value that is known.
    may_be_known = _plainly.is_on and isinstance(pred, tf.Tensor)
    if not may_be_known or tf.executing_eagerly():
        return _cond_of_tensorflow(pred, *args, **kwargs)
    return tf.nest.map_structure(
        _as_of_a_branch, smart_cond.smart_cond(pred, *args, **kwargs)
    )


def _as_of_a_branch(output: Nest) -> Nest:
    """Make a tensor of what a branch of a graph would make one of."""
    as_they_are = tf.Tensor, tf.__internal__.CompositeTensor, tf.TensorArray
    if output is None or isinstance(output, (*as_they_are, tf.Operation)):
        return output
    return tf.convert_to_tensor(output)


@functools.wraps(_reduce_prod_of_tensorflow)
def _reduce_prod(
    input_tensor: Tensor,
    axis: Nest = None,
    keepdims: bool = False,
    name: str | None = None,
) -> Tensor:
    is_composite = isinstance(input_tensor, tf.__internal__.CompositeTensor)
    if not _plainly.is_on or axis is None or tf.is_tensor(axis) or is_composite:
        return _reduce_prod_of_tensorflow(input_tensor, axis, keepdims, name)
    product = tf.convert_to_tensor(input_tensor)
    rank, given = product.shape.rank or 0, [int(each) for each in np.ravel(axis)]
    axes = [each % rank for each in given if -rank <= each < rank]
    is_known = bool(axes) and len({*axes}) == len(given)
    is_known = is_known and all(product.shape[each] for each in axes)
    if not product.dtype.is_floating or not is_known:
        return _reduce_prod_of_tensorflow(input_tensor, axis, keepdims, name)
    for along in axes:
        while (length := product.shape[along]) > 1:
            half = length // 2
            *pair, rest = tf.split(product, [half, half, length - 2 * half], along)
            product = tf.multiply(*pair)
            product = tf.concat([product, rest], along) if length % 2 else product
    return product if keepdims else tf.squeeze(product, axes)


@functools.wraps(_conv_of_keras)
def _conv(
    inputs: Tensor,
    kernel: Variable,
    strides: int | Sequence[int] = 1,
    padding: str = "valid",
    data_format: str | None = None,
    dilation_rate: int | Sequence[int] = 1,
) -> Tensor:
    """Do what Keras's convolution does, in groups without XLA where channels come last."""
    data_format = data_format or keras.config.image_data_format()
    is_known = data_format == "channels_last" and inputs.shape[-1] is not None
    groups = inputs.shape[-1] // kernel.shape[-2] if is_known else 1
    if not _plainly.is_on or groups == 1:
        return _conv_of_keras(
            inputs, kernel, strides, padding, data_format, dilation_rate
        )
    inputs, kernel = tf.convert_to_tensor(inputs), tf.convert_to_tensor(kernel)
    *size, depth, _ = kernel.shape
    strides, dilations = (
        tuple(np.broadcast_to(each, len(size)).tolist())
        for each in (strides, dilation_rate)
    )
    if depth == 1 and len(size) < 3 and len(set(strides)) == 1:
        kernel = tf.reshape(kernel, [*size, groups, -1])
        return keras_nn.depthwise_conv(
            inputs, kernel, strides, padding, data_format, dilations
        )
    convolve = functools.partial(
        tf.nn.convolution,
        strides=strides,
        padding=padding.upper(),
        dilations=dilations,
    )
    # On CPUs only oneDNN has the gradients, of these. All else goes group by group.
    has_onednn = _pywrap_util_port.IsMklEnabled() and inputs.dtype == tf.float32
    if inside_xla() or (has_onednn and len(size) < 3):
        return convolve(inputs, kernel)
    # In half precision TensorFlow's are wrong on CPUs, for some strides in three dimensions.
    dtype = tf.float32 if inputs.dtype.size < 4 else inputs.dtype
    parts = (tf.split(tf.cast(each, dtype), groups, -1) for each in (inputs, kernel))
    outputs = [convolve(*pair) for pair in zip(*parts, strict=True)]
    return tf.cast(tf.concat(outputs, -1), inputs.dtype)


def _update_slice(inputs: Tensor, updates: Tensor, begin: Nest) -> Tensor:
    """Do what XLA does, where all lengths but that of the rows are known."""
    if not _plainly.is_on:
        return _update_slice_of_xla(inputs, updates, begin)
    inputs, begin = tf.convert_to_tensor(inputs), tf.convert_to_tensor(begin)
    updates = tf.convert_to_tensor(updates, inputs.dtype)
    if None in (inputs.shape.rank, updates.shape.rank):
        return _update_slice_of_xla(inputs, updates, begin)
    lengths = dict(enumerate(zip(inputs.shape, updates.shape, strict=True)))
    # Of two open lengths nobody knows whether they are the same, but of rows.
    known = {n: p for n, p in lengths.items() if n or p != (None, None)}
    if any(None in pair for pair in known.values()):
        return _update_slice_of_xla(inputs, updates, begin)
    parts = {axis: pair for axis, pair in known.items() if pair[0] != pair[1]}
    if not parts:
        return updates
    more = [whole - part for whole, part in parts.values()]
    # XLA moves what would reach beyond the end.
    begins = tf.clip_by_value(tf.gather(begin, list(parts)), 0, more)

    def placed(tensor: Tensor) -> Tensor:
        pairs = lengths.values()
        behind = [[0, w - p if n in parts else 0] for n, (w, p) in enumerate(pairs)]
        return tf.roll(tf.pad(tensor, behind), begins, list(parts))

    is_new = tf.ones([parts.get(axis, (1, 1))[1] for axis in lengths], tf.bool)
    return tf.where(placed(is_new), placed(updates), inputs)


@functools.wraps(_recompute_of_tensorflow)
def _recompute(f: Callable[..., Nest]) -> Callable[..., Nest]:
    recomputed = _recompute_of_tensorflow(f)

    @functools.wraps(recomputed)
    def run(*args: Nest, **kwargs: Nest) -> Nest:
        return (f if _plainly.is_on else recomputed)(*args, **kwargs)

    return run


# What is wrapped by it may be made long before it runs.
tf.recompute_grad = _recompute


_gathered_gradient_of_tensorflow = array_grad._BatchGatherGrad


def _gathered_gradient(
    shape: Tensor, values: Nest, indices: Tensor, batch_dims: int, length: Tensor
) -> Tensor:
    # On a GPU nobody checks a number: one beyond its own row is another row's.
    if batch_dims:
        indices = tf.clip_by_value(indices, 0, tf.cast(length, indices.dtype) - 1)
    return _gathered_gradient_of_tensorflow(shape, values, indices, batch_dims, length)


def _spread(tensor: Nest, multiples: Nest, name: str | None = None) -> Tensor:
    """Do what `tf.tile` does, by broadcasting where each axis has one entry or one copy."""
    copies = tf.get_static_value(tf.convert_to_tensor(multiples))
    shape = tensor.shape if tf.is_tensor(tensor) and tensor.dtype.is_floating else None
    if copies is None or not (shape and shape.is_fully_defined()):
        return tf.tile(tensor, multiples, name)
    if any(length > 1 < number for length, number in zip(shape, copies, strict=True)):
        return tf.tile(tensor, multiples, name)
    return tf.broadcast_to(tensor, [int(n) for n in copies * shape.as_list()], name)


@contextlib.contextmanager
def outside_of_graphs() -> Iterator[None]:
    """Run eagerly what is called while a graph is built.

    Unlike in `tf.init_scope`, gradient tapes record.
    """
    with tf.init_scope():
        stopped = pywrap_tfe.TFE_Py_TapeSetIsStopped()
        if stopped:
            pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
        try:
            yield
        finally:
            if stopped:
                pywrap_tfe.TFE_Py_TapeSetStopOnThread()


def without_autograph(function: _Function) -> _Function:
    """Let a function be called as it is inside of a `tf.function`."""
    # AutoGraph would read and rewrite all that it calls, which takes seconds, and print
    # warnings of what it cannot read.
    unconverted: _Function = tf.autograph.experimental.do_not_convert(function)
    return unconverted


@contextlib.contextmanager
def names_begin_again() -> Iterator[None]:
    """Let names that Keras gives within it be given again: they number what was made."""
    before = global_state.get_global_attribute("object_name_uids")
    kept = None if before is None else before.copy()
    try:
        yield
    finally:
        global_state.set_global_attribute("object_name_uids", kept)


def onednn_is_off() -> bool:
    """Tell whether convolutions on this CPU do without oneDNN, by nobody's decision."""
    is_x86 = platform.machine() in {"x86_64", "AMD64"}
    is_asked = "TF_ENABLE_ONEDNN_OPTS" in os.environ
    return is_x86 and not is_asked and not _pywrap_util_port.IsMklEnabled()


def inside_xla() -> bool:
    """Tell whether XLA will compile what is being traced."""
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def arguments_of(operation: keras.Operation) -> dict[str, Nest]:
    """Return what an operation was made with; nothing unless all is numbers and texts."""
    config = getattr(operation, "_auto_config", None)
    return {} if config is None else dict(config.config)


def flatten_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """List the model and all the layers in it, at every depth, each once."""
    return list(model._flatten_layers())


def layers_in(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """List the layers that a layer has itself, not those in them."""
    return list(layer._layers)


def layers_by_path(model: keras.Model) -> list[tuple[str, keras.layers.Layer]]:
    """Return the model and all the layers in it, with the names that lead to them.

    Every layer comes after all that contain it; a shared one is listed once, with
    the path that was found first. Only the model itself goes by the model's name.
    """
    found: dict[int, tuple[str, keras.layers.Layer]] = {}

    def visit(layer: keras.layers.Layer, path: str) -> None:
        found[id(layer)] = found.pop(id(layer), (path, layer))
        prefix = "" if layer is model else f"{path}/"
        for child in layer._layers:
            visit(child, prefix + child.name)

    visit(model, model.name)
    return list(found.values())


def is_only_its_layers(model: keras.layers.Layer) -> bool:
    """Tell whether a model does what its layers do, and nothing by its own code."""
    names = ("call", "compute_loss", "train_step", "test_step", "compute_metrics")
    for kind in (keras.Sequential, Functional):
        if isinstance(model, kind):
            return all(
                getattr(type(model), name) is getattr(kind, name) for name in names
            )
    return False


def become(layer: keras.layers.Layer, other: keras.layers.Layer) -> None:
    """Turn a layer into another one, wherever it is kept and whatever calls it.

    Args:
        layer: To be turned.
        other: What it becomes; not to be used any more.
    """
    calls = {name: vars(layer)[name] for name in ("_inbound_nodes", "_outbound_nodes")}
    taken = inspect.signature(other.call).parameters
    for call in calls["_inbound_nodes"]:
        for name in call.arguments.kwargs.keys() - taken:
            del call.arguments.kwargs[name]
    layer.__class__ = type(other)
    vars(layer).clear()
    vars(layer).update(vars(other) | calls)


def trusted_configs() -> contextlib.AbstractContextManager[None]:
    """Let layers be rebuilt from configs that contain Python code."""
    scope: contextlib.AbstractContextManager[None] = SafeModeScope(safe_mode=False)
    return scope


def input_signature(model: keras.Model) -> Nest:
    """Describe the inputs of a model, nested as it takes them.

    Args:
        model: A Keras model.

    Returns:
        A nest of `tf.TensorSpec` with the names that inputs were given, without one
        where Keras has made it up; None for a model that is not functional.
    """
    functional = _functional(model)
    if functional is None:
        return None
    return keras.tree.map_structure(
        lambda tensor: tf.TensorSpec(
            tensor.shape,
            tensor.dtype,
            _given_name(tensor.name, "keras_tensor", "input_layer"),
        ),
        functional._inputs_struct,
    )


def output_names(model: keras.Model) -> list[str | None] | None:
    """List the names of a model's outputs; None for one that is not functional.

    Args:
        model: A Keras model.

    Returns:
        The names of the layers that they come from; None in place of those that Keras
        has made up.
    """
    functional = _functional(model)
    if functional is None:
        return None
    operations = [tensor._keras_history[0] for tensor in functional.outputs]
    return [
        _given_name(each.name, to_snake_case(type(each).__name__))
        for each in operations
    ]


def _given_name(name: str | None, *automatic: str) -> str | None:
    """Return a name, unless Keras has made it up and numbered it in this process."""
    made_up = rf"({'|'.join(automatic)})(_\d+)?(CLONE)*"
    return None if name is None or re.fullmatch(made_up, name) else name


def trained_by(optimizer: keras.optimizers.Optimizer) -> list[Variable]:
    """List the variables that an optimizer was built with."""
    return list(optimizer._trainable_variables)


def _functional(model: keras.Model) -> keras.Model | None:
    if isinstance(model, keras.Sequential):
        return model._functional
    return model if hasattr(model, "_inputs_struct") else None


@functools.cache
def _own_generator() -> keras.random.SeedGenerator:
    """Return the one generator: a graph that is traced again may make no variable."""
    with tf.init_scope(), unmirrored_variables():
        return keras.random.SeedGenerator(seed=0, name="tfdp_own")


@contextlib.contextmanager
def own_global_seed() -> Iterator[keras.random.SeedGenerator]:
    """Let nothing that is random here change what is drawn later.

    Yields:
        A generator that stands in for the one of unseeded random functions.
    """
    original = global_state.get_global_attribute(_GLOBAL_SEED)
    # Keras seeds new generators and initializers by Python's numbers.
    chance = random.getstate()
    generator = _own_generator()
    with tf.init_scope():
        generator.state.assign([0, 0])
    global_state.set_global_attribute(_GLOBAL_SEED, generator)
    try:
        yield generator
    finally:
        global_state.set_global_attribute(_GLOBAL_SEED, original)
        random.setstate(chance)


def tensorflow_seed() -> int | None:
    """Return the seed of TensorFlow's own random operations; None if nobody has set it."""
    seed: int | None = context.global_seed()
    return seed


def make_global_seed() -> None:
    """Make the generator of unseeded random functions, which Keras makes at first use.

    That may be inside a graph that never runs, where its state would stay without a
    value.
    """
    is_replica = tf.distribute.has_strategy() and tf.distribute.get_replica_context()
    # Keras makes one for each thread, and strategies run replicas in threads: there no
    # graph may make a variable that others have copies of.
    scope = unmirrored_variables() if is_replica else contextlib.nullcontext()
    with tf.init_scope(), scope:
        global_seed_generator()


def with_global_seed(function: _Function) -> _Function:
    """Let a function have the generator of unseeded random functions in any thread.

    Keras makes one for each thread, and strategies run replicas in threads.

    Args:
        function: To run.

    Returns:
        It, as TensorFlow is to run it: without a conversion of its code.
    """
    with tf.init_scope():
        generator = global_seed_generator()

    def run(*args: Nest) -> Nest:
        global_state.set_global_attribute(_GLOBAL_SEED, generator)
        return function(*args)

    return without_autograph(run)  # type: ignore[return-value]


_GLOBAL_SEED = "global_seed_generator"


def _generators(model: keras.Model) -> list[keras.random.SeedGenerator]:
    """List the seed generators of a model's layers."""
    return [
        generator
        for layer in flatten_layers(model)
        for generator in layer._seed_generators
    ]


def seed_states(model: keras.Model) -> list[keras.Variable]:
    """List the states of all seed generators that a model's layers may use."""
    states = [global_seed_state(), *(each.state for each in _generators(model))]
    return list({id(each): each for each in states}.values())


def global_seed_state() -> keras.Variable:
    """Return the state of the generator that draws where no seed is given."""
    return global_seed_generator().state


def assigns(op: tf.Operation) -> bool:
    """Tell whether an operation gives a variable another value."""
    return any(part in op.type for part in ("Assign", "ResourceScatter"))


def shared_seed_states(model: keras.Model) -> list[keras.Variable]:
    """List the states of seed generators from which all examples of a step draw alike.

    Args:
        model: A Keras model.

    Returns:
        Those of generators with a true attribute `is_same_for_all_rows`.
    """
    return [
        generator.state
        for generator in _generators(model)
        if getattr(generator, "is_same_for_all_rows", False)
    ]


# Not every Keras has both.
_MIXING = tuple(
    getattr(keras.layers, name)
    for name in ("MixUp", "CutMix")
    if hasattr(keras.layers, name)
)


def changes_images(layer: object) -> bool:
    """Tell whether a layer of Keras's makes other images of images, each of one."""
    is_of_keras = type(layer).__module__.startswith("keras.")
    is_of_images = isinstance(layer, BaseImagePreprocessingLayer)
    return is_of_keras and is_of_images and not mixes_images(layer)


def mixes_images(layer: object) -> bool:
    """Tell whether a layer of Keras's makes an image of two, and a target of two."""
    return isinstance(layer, _MIXING)


def draws_numbers(model: keras.Model) -> bool:
    """Tell whether layers of a model draw random numbers."""
    return bool(_generators(model))


def states(model: keras.Model) -> list[keras.Variable]:
    """List the variables that a pass through a model in training may change.

    Args:
        model: A Keras model.

    Returns:
        Seeds and other state, but not frozen weights.
    """
    found = {id(state): state for state in seed_states(model)}
    for layer in flatten_layers(model):
        found |= {id(state): state for state in layer._non_trainable_variables}
    return list(found.values())


def loss_tracker(model: keras.Model) -> keras.metrics.Mean:
    """Return the metric that a compiled model logs as `loss`."""
    return model._loss_tracker


def build_metrics(model: keras.Model, y: Nest, y_pred: Nest) -> None:
    """Make the metrics that `compile` was given, unless they are there.

    Keras makes them in the first graph of a step; TensorFlow traces what makes variables
    twice.

    Args:
        model: A compiled model.
        y: Targets, of which structure, shapes and dtypes are read.
        y_pred: Predictions, likewise.
    """
    metrics = model._compile_metrics
    if metrics is not None and not metrics.built and y is not None:
        metrics.build(y, y_pred)


def run_model(model: keras.Model, x: Nest, *, training: bool | None) -> Nest:
    """Call a model; that of some takes no argument `training`."""
    with contextlib.ExitStack() as entered:
        # XLA cannot compile cuDNN, nor do engines see the time steps in it.
        for layer in _with_cudnn(model) if training else ():
            entered.enter_context(attributes_replaced(layer, use_cudnn=False))
        if "training" in inspect.signature(model.call).parameters:
            return model(x, training=training)
        return model(x)


def _with_cudnn(model: keras.Model) -> list[keras.Layer]:
    """List the layers that take cuDNN where there is one."""
    return [
        layer
        for layer in flatten_layers(model)
        if isinstance(layer, (keras.layers.LSTM, keras.layers.GRU)) and layer.use_cudnn
    ]


def compiles_training(model: keras.Model, jit_compile: bool | str) -> bool:
    """Tell whether XLA compiles passes for training, which do without cuDNN.

    Keras compiles no model that takes cuDNN.

    Args:
        model: A model after `compile`.
        jit_compile: What its `compile` was given.

    Returns:
        What Keras would decide if there were no cuDNN.
    """
    refused = [layer for layer in _with_cudnn(model) if not layer.supports_jit]
    if model.run_eagerly or not refused:
        return bool(model.jit_compile)
    with contextlib.ExitStack() as entered:
        for layer in refused:
            entered.enter_context(attributes_replaced(layer, supports_jit=True))
        if jit_compile == "auto":
            return bool(model._resolve_auto_jit_compile())
        return bool(jit_compile) and bool(model_supports_jit(model))


def compute_loss(
    model: keras.Model,
    x: Nest,
    y: Nest,
    y_pred: Nest,
    weights: Nest,
    *,
    training: bool = True,
) -> Tensor:
    """Call a model's own `compute_loss`, old signatures included."""
    if "training" in inspect.signature(model.compute_loss).parameters:
        return model.compute_loss(x, y, y_pred, weights, training=training)
    return model.compute_loss(x, y, y_pred, weights)


def keras_mask(tensor: Tensor) -> Tensor | None:
    """Return the mask that Keras attached to `tensor`, or None."""
    return getattr(tensor, "_keras_mask", None)


def with_mask(tensor: Tensor, mask: Tensor) -> Tensor:
    """Attach a mask to `tensor`, as Keras does."""
    tensor._keras_mask = mask
    return tensor


_OF_LOGITS = {"Softmax": tf.nn.softmax, "Sigmoid": tf.nn.sigmoid}


def keras_logits(tensor: Tensor) -> Tensor | None:
    """Return what Keras's losses take in the place of probabilities, or None.

    It is attached to them, or what an operation made them of.
    """
    logits = getattr(tensor, "_keras_logits", None)
    if (
        logits is None
        and tf.is_symbolic_tensor(tensor)
        and tensor.op.type in _OF_LOGITS
    ):
        logits = tensor.op.inputs[0]
    return logits


def with_logits(tensor: Tensor, logits: Tensor, like: Tensor) -> Tensor:
    """Return probabilities of which Keras's losses know what they were made of.

    Args:
        tensor: The probabilities.
        logits: What they were made of.
        like: Other probabilities, of which they know it.
    """
    if not hasattr(like, "_keras_logits"):
        return _OF_LOGITS[like.op.type](logits)
    tensor._keras_logits = logits
    return tensor


def with_mask_of(tensor: Tensor, other: Tensor) -> Tensor:
    """Attach to `tensor` the mask that Keras attached to `other`, if any."""
    mask = keras_mask(other)
    return tensor if mask is None else with_mask(tensor, mask)


@contextlib.contextmanager
def without_regularizers(variables: list[Variable]) -> Iterator[None]:
    """Hide the weight regularizers of `variables` from `Layer.losses`."""
    with contextlib.ExitStack() as hidden:
        for variable in variables:
            hidden.enter_context(attributes_replaced(variable, _regularizer=None))
        yield


def added_losses(model: keras.Model) -> list[Tensor]:
    """List what layers have added to a model's loss in their calls, no regularizers."""
    return [loss for each in flatten_layers(model) for loss in each._get_own_losses()]


def clear_losses(model: keras.Model) -> None:
    """Forget what the layers of a model have added to `Layer.losses`."""
    model._clear_losses()


def with_losses(
    model: keras.Model, losses: list[Tensor]
) -> contextlib.AbstractContextManager[None]:
    """Let `Model.losses` be others."""
    return attributes_replaced(model, _losses_override=losses)


@contextlib.contextmanager
def pfor_converters(converters: Mapping[str, _Converter]) -> Iterator[None]:
    """Replace conversions that `tf.vectorized_map` makes of operations.

    Args:
        converters: Functions from TensorFlow's converter input to the stacked
            output, by the name of the operation. One that returns None leaves the
            operation to TensorFlow, which must have a conversion of its own then.
    """
    registry = pfor._pfor_converter_registry
    original = {name: registry[name] for name in converters if name in registry}

    def wrapped(name: str) -> _Converter:
        def convert(pfor_input: pfor._PforInput) -> pfor.WrappedTensor:
            output = converters[name](pfor_input)
            if output is None:
                return original[name](pfor_input)
            return pfor.wrap(output, True)

        return convert

    registry.update({name: wrapped(name) for name in converters})
    try:
        yield
    finally:
        for name in converters:
            del registry[name]
        registry.update(original)


def _update_slice_gradient(
    operation: tf.Operation, gradient: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, None]:
    _, update, begin = operation.inputs
    shape = tf.shape(update, out_type=begin.dtype)
    of_update = tf.slice(gradient, begin, shape)
    zeros = tf.zeros_like(of_update)
    of_input = gen_xla_ops.xla_dynamic_update_slice(gradient, zeros, begin)
    return of_input, of_update, None


# Under XLA this is what a slice gets for a gradient, which lacks one itself. Some later
# TensorFlow may have it.
with contextlib.suppress(KeyError):
    tf.RegisterGradient("XlaDynamicUpdateSlice")(_update_slice_gradient)


# Where there are several replicas.


class ReplicatedModel(keras.Model):
    """A Keras model that is built before it trains on replicas, not by its batches."""

    def build_all(self, data_batch: Nest) -> None:
        """Build model, optimizer, loss and metrics for all replicas, symbolically.

        Args:
            data_batch: ``(x, y, sample_weight)`` of any rows.
        """
        super()._maybe_symbolic_build(data_batch=data_batch)

    def _maybe_symbolic_build(
        self,
        iterator: Iterable[tuple[Nest, ...]] | None = None,
        data_batch: Nest = None,
    ) -> None:
        # Keras averages the rows of all replicas here, which may differ in number.
        strategy = self._distribute_strategy
        if strategy is None or self._is_all_built():
            return
        for _, _, batches in iterator or ():
            data_batch = tf.nest.map_structure(
                lambda rows: strategy.experimental_local_results(rows)[0],
                next(batches),
            )
            break
        super()._maybe_symbolic_build(data_batch=data_batch)

    def _is_all_built(self) -> bool:
        parts = (self.optimizer, self._compile_loss, self._compile_metrics)
        return self.built and all(part is None or part.built for part in parts)


def strategy_of_model(model: keras.Model) -> tf.distribute.Strategy | None:
    """Return the strategy in whose scope a model was made, or None."""
    return model._distribute_strategy


def strategy_of_optimizer(
    optimizer: keras.optimizers.Optimizer,
) -> tf.distribute.Strategy:
    """Return the strategy in whose scope an optimizer was made, or TensorFlow's."""
    return optimizer._distribution_strategy


def tensorflow_variables(variable: Variable) -> list[tf.Variable]:
    """List what tapes know a Keras variable by: a copy of it on each device, too."""
    # Not `value`, which in a call of a layer may be a tensor: cast, or what stands for it.
    value = variable._value
    return [value, *getattr(value, "values", ())]


def handles_of(variable: Variable) -> list[Tensor]:
    """List what graphs capture of a Keras variable, on each device, if it is there yet."""
    value, *copies = tensorflow_variables(variable)
    return [each.handle for each in copies or [value] if each is not None]


@contextlib.contextmanager
def unmirrored_variables() -> Iterator[None]:
    """Let no strategy copy the TensorFlow variables that are made here.

    They are the same for all replicas of a process, and only to be assigned outside
    of what runs on each of them.
    """

    def make(_: object, **options: object) -> tf.Variable:
        known = {name: options.get(name) for name in _OF_VARIABLES}
        return resource_variable_ops.ResourceVariable(**known)

    with tf.variable_creator_scope(make):
        yield


_OF_VARIABLES = ("initial_value", "trainable", "name", "dtype", "shape")


def losses_of_one_replica() -> contextlib.AbstractContextManager[None]:
    """Keep Keras from dividing losses by the number of replicas.

    An example's loss must not depend on how many others work beside it.

    Returns:
        A context in which it does not.
    """
    return attributes_replaced(
        loss_module,
        scale_loss_for_distribution=_unchanged,
        unscale_loss_for_distribution=_unchanged,
    )


def gradients_are_summed(
    optimizer: keras.optimizers.Optimizer,
) -> contextlib.AbstractContextManager[None]:
    """Keep an optimizer from adding the gradients of all replicas up once more."""
    return attributes_replaced(optimizer, _all_reduce_sum_gradients=_unchanged)


def _unchanged(what: Nest) -> Nest:
    return what


def with_class_weights(class_weight: dict[int, float], x: Nest, y: Nest) -> Nest:
    """Return ``(x, y, sample_weight)`` with the weight of each row's class."""
    return tf_dataset_adapter.make_class_weight_map_fn(class_weight)(x, y)


def array_with_flow(array: tf.TensorArray, flow: Tensor) -> tf.TensorArray:
    """Return an array as another one, after what a loop has done to it."""
    return tensor_array_ops.build_ta_with_new_flow(array, flow)


def function_graph(graph: tf.Graph, name: str) -> tf.Graph:
    """Return the graph of a function that a graph calls.

    Args:
        graph: The calling graph.
        name: The name of the function.

    Returns:
        The graph of its body.

    Raises:
        LookupError: If there is no such function.
    """
    while graph is not None:
        function = graph._get_function(name)
        if function is not None:
            own: tf.Graph | None = getattr(function, "graph", None)
            if own is not None:
                return own
            # Those of TensorFlow 1, which its CTC loss is made of, keep none.
            with graph.as_default():
                return function_def_to_graph.function_def_to_graph(function.definition)
        graph = getattr(graph, "outer_graph", None)
    raise LookupError(name)


def is_function(graph: tf.Graph, name: str) -> bool:
    """Tell whether a kind of operation is a function, as TensorFlow 1 calls them."""
    while graph is not None:
        if graph._get_function(name) is not None:
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def metrics_of(model: keras.Model) -> Iterator[keras.metrics.Metric]:
    """Yield the metrics that a model and its layers keep."""
    for layer in flatten_layers(model):
        yield from layer._metrics


_logged: weakref.WeakSet[keras.metrics.Metric] = weakref.WeakSet()


def note_metrics(model: keras.Model, *given: Nest) -> None:
    """Note whose variables a training will fill with data.

    Args:
        model: Compiled, with metrics of its own.
        *given: What its `compile` was given as metrics.
    """
    found = [*keras.tree.flatten(given), *model.metrics]
    _logged.update(each for each in found if isinstance(each, keras.metrics.Metric))


def metrics_handles(model: keras.Model) -> list[Tensor]:
    """List the handles of the variables of metrics: a model's, and all that were noted."""
    metrics = (*metrics_of(model), *_logged)
    return [
        each for metric in metrics for v in metric.variables for each in handles_of(v)
    ]


def is_of_seed(handle: Tensor) -> bool:
    """Tell whether a variable is like the state of a `keras.random.SeedGenerator`."""
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.shape_and_type:
        return False
    (first, *_) = data.shape_and_type
    dtypes = [each.as_datatype_enum for each in (tf.uint32, tf.int64)]
    return first.dtype in dtypes and [axis.size for axis in first.shape.dim] == [2]


def reset_metrics(model: keras.Model) -> None:
    """Reset the metrics that a model and its layers keep, of whatever they have seen."""
    for metric in metrics_of(model):
        metric.reset_state()
