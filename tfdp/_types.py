"""Names for types that TensorFlow and Keras do not declare.

Neither ships types, so to a type checker each of these is `Any`. They are for readers.
"""

from typing import Any, NamedTuple, NoReturn, TypeAlias

import keras
import numpy as np
import tensorflow as tf

Tensor: TypeAlias = tf.Tensor
Array: TypeAlias = np.ndarray
Variable: TypeAlias = keras.Variable

# Tensors, arrays or None, or tuples, lists and dicts of nests.
Nest: TypeAlias = Any

# What Keras takes as `x`: a nest of arrays or array-like sources, or what brings
# batches, like a `tf.data.Dataset` or a `keras.utils.PyDataset`.
Data: TypeAlias = Any

# What Keras takes as a loss: a name, an object, a function, or a nest of them.
Loss: TypeAlias = Any

# What a Keras object is rebuilt from.
Config: TypeAlias = dict[str, Any]

# What Keras gives its callbacks.
Logs: TypeAlias = dict[str, Any] | None


class Padded(NamedTuple):
    """A batch on its way to a step, in which padding fills what has no rows.

    Attributes:
        rows: `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
        is_padding: Marks the rows that are none, bool, shape `(n,)`.
    """

    rows: Nest
    is_padding: Nest

    def __getitem__(self, index: Nest) -> NoReturn:
        """Refuse to be taken for ``(x, y)``, as Keras would in its own steps.

        Args:
            index: Of a part.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "A batch with padding is no `(x, y)`: only private training knows what is "
            f"padding. Received: part {index!r} of a batch of a "
            "`tfdp.data.PoissonDataset` with `max_batch_size` or `user_ids`. Use the "
            "arrays themselves, `private.evaluate(x, y)`, `private.predict(x)` or "
            "`validation_data=(x, y)`; or unpack it, `rows, is_padding = dataset[0]`."
        )
