"""The filter gradients of a convolution, one for each example of a batch."""

import math

import tensorflow as tf

from tfdp import _keras

# Above this many numbers of patches per example the loop over the examples is
# faster and needs far less memory; below it the loop's overhead dominates.
_LARGEST_PATCHES = 1 << 16


def filter_gradients(
    inputs: tf.Tensor,
    output_gradients: tf.Tensor,
    *,
    kernel_shape: tuple[int, int, int, int],
    strides: tuple[int, int],
    dilations: tuple[int, int],
    padding: str,
) -> tf.Tensor:
    """Compute the gradient of a 2-D convolution's kernel for each example alone.

    Args:
        inputs: Input of the convolution, shape ``(N, U, H, W, C)`` where the U
            rows of an example are summed over; static but for ``N``.
        output_gradients: Gradient of the loss with respect to the output of the
            convolution, shape ``(N, U, H', W', O)``; static but for ``N``.
        kernel_shape: ``(kernel height, kernel width, C / groups, O)``.
        strides: Strides of height and width.
        dilations: Dilations of height and width.
        padding: ``"SAME"`` or ``"VALID"``.

    Returns:
        Gradients of shape ``(N, *kernel_shape)`` and the dtype of the inputs.
    """
    positions = math.prod(output_gradients.shape[1:4])
    if positions * math.prod(kernel_shape[:2]) * inputs.shape[-1] > _LARGEST_PATCHES:
        return _one_after_another(
            inputs, output_gradients, kernel_shape, strides, dilations, padding
        )
    height, width, _, filters = kernel_shape
    channels = inputs.shape[-1]
    groups = channels // kernel_shape[2]
    rows = tf.reshape(inputs, [-1, *inputs.shape[2:]])
    patches = _patches(rows, height, width, strides, dilations, padding)
    if groups == 1:
        a = tf.reshape(patches, [-1, positions, height * width * channels])
        g = tf.reshape(output_gradients, [-1, positions, filters])
        return tf.reshape(tf.matmul(a, g, transpose_a=True), [-1, *kernel_shape])
    a = tf.reshape(patches, [-1, positions, height * width, groups, kernel_shape[2]])
    g = tf.reshape(output_gradients, [-1, positions, groups, filters // groups])
    gradients = tf.einsum("npkgc,npgo->nkcgo", a, g)
    return tf.reshape(gradients, [-1, *kernel_shape])


def _patches(
    rows: tf.Tensor,
    height: int,
    width: int,
    strides: tuple[int, int],
    dilations: tuple[int, int],
    padding: str,
) -> tf.Tensor:
    """Lay out what each kernel position sees: ``(N, H', W', height*width*C)``."""
    channels = rows.shape[-1]
    size = height * width * channels
    if channels == 1 and size <= 128 and not _keras.inside_xla():
        # A convolution with the identity is three times faster than the patch
        # operation here, which copies one number at a time.
        identity = tf.reshape(
            tf.eye(size, dtype=rows.dtype), [height, width, channels, size]
        )
        return tf.nn.conv2d(rows, identity, strides, padding, dilations=dilations)
    return tf.image.extract_patches(
        rows, [1, height, width, 1], [1, *strides, 1], [1, *dilations, 1], padding
    )


def _one_after_another(
    inputs: tf.Tensor,
    output_gradients: tf.Tensor,
    kernel_shape: tuple[int, int, int, int],
    strides: tuple[int, int],
    dilations: tuple[int, int],
    padding: str,
) -> tf.Tensor:
    def of_one(example: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        return tf.raw_ops.Conv2DBackpropFilter(
            input=example[0],
            filter_sizes=kernel_shape,
            out_backprop=example[1],
            strides=[1, *strides, 1],
            dilations=[1, *dilations, 1],
            padding=padding,
        )

    return tf.map_fn(
        of_one,
        (inputs, output_gradients),
        fn_output_signature=tf.TensorSpec(kernel_shape, inputs.dtype),
    )
