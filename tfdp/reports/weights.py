"""Which weights a report is about."""

import hashlib
from collections.abc import Iterable

import keras

from tfdp._types import Variable

HOW = (
    "SHA-256 of the sorted SHA-256 digests of all weights, one after the other; each of "
    "the text '<dtype> <shape>', such as 'float32 (64, 10)', and the numbers behind it, "
    "little-endian, row by row"
)


def weights_sha256(weights: Iterable[Variable]) -> str:
    """Return a digest of the values of weights, the same in every file of a model.

    Names are not in it: Keras numbers them anew in every process. Nor is the order,
    which a SavedModel does not keep; so it tells models apart by their values, not by
    which of two weights of one shape has which.

    Args:
        weights: Keras variables.

    Returns:
        64 hexadecimal digits.

    Example:
        >>> weights_sha256([keras.Variable([1.0, 2.0])])[:12]
        '3a598e976a59'
    """
    digests = []
    for weight in weights:
        value = keras.ops.convert_to_numpy(weight.value)
        kind = f"{value.dtype.name} {value.shape}".encode()
        # On the machines that TensorFlow runs on, numbers are little-endian.
        digests.append(hashlib.sha256(kind + value.tobytes()).digest())
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()
