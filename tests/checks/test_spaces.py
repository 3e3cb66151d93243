"""How long spaces are that windows have slid over."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp.checks.node import Node
from tfdp.checks.operations import spaces
from tfdp.checks.sizes import Size
from tfdp.checks.values import FREE, PLAIN, Value

PLANE, VOLUME = (11, 8, 2), (7, 6, 5, 2)


def kernel(*shape):
    return np.ones((*shape, 2, 3), "float32")


WINDOWS = {
    "same": lambda x: tf.nn.conv2d(x, kernel(3, 2), (2, 3), "SAME"),
    "valid": lambda x: tf.nn.conv2d(x, kernel(3, 2), (2, 3), "VALID"),
    "dilated": lambda x: tf.nn.conv2d(x, kernel(3, 2), 1, "VALID", dilations=(2, 3)),
    "explicit": lambda x: tf.nn.conv2d(
        x, kernel(3, 2), 2, [(0, 0), (1, 2), (0, 3), (0, 0)]
    ),
    "volume": lambda x: tf.nn.conv3d(x, kernel(2, 3, 1), (1, 2, 1, 3, 1), "VALID"),
    "depthwise": lambda x: tf.nn.depthwise_conv2d(
        x, kernel(3, 2), (1, 2, 2, 1), "SAME"
    ),
    "max": lambda x: tf.nn.max_pool2d(x, (3, 2), (2, 1), "VALID"),
    "max_volume": lambda x: tf.nn.max_pool3d(x, 2, 2, "SAME"),
    "average": lambda x: tf.nn.avg_pool2d(x, (3, 2), (2, 1), "SAME"),
    "average_volume": lambda x: tf.nn.avg_pool3d(x, 3, 2, "VALID"),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_lengths_are_those_of_the_graph(name):
    shape = VOLUME if "volume" in name else PLANE
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, *shape])
        op = WINDOWS[name](x).op
    rows = Value(0, PLAIN, (Size(1), *shape))
    others = [FREE.with_lengths(each.shape.as_list()) for each in op.inputs[1:]]
    node = Node(op, [rows, *others], None, op, lambda tensor: FREE)
    found = spaces._slid_over(node)
    assert found is not None
    assert list(found[1:-1]) == op.outputs[0].shape.as_list()[1:-1]
