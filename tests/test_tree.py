"""Nested structures: None stays where it is."""

import numpy as np
import tensorflow as tf

from tfdp import _tree

TREE = {"a": [1, None], "b": (None, {"c": 2})}


def test_none_is_no_tensor():
    assert _tree.tensors(TREE) == [1, 2]
    assert _tree.tensors(None) == []


def test_a_function_never_sees_none():
    assert _tree.map_tensors(lambda leaf: leaf + 1, TREE) == {
        "a": [2, None],
        "b": (None, {"c": 3}),
    }
    assert _tree.map_tensors(lambda leaf: leaf + 1, None) is None


def test_pack_undoes_tensors():
    assert _tree.pack(_tree.tensors(TREE), like=TREE) == TREE
    assert _tree.pack(iter("xy"), like=TREE) == {
        "a": ["x", None],
        "b": (None, {"c": "y"}),
    }


def test_a_signature_has_all_of_the_arrays_but_their_rows():
    tree = {"a": np.zeros([4, 2], np.int32), "b": None}
    spec = tf.TensorSpec([None, 2], tf.int32)
    assert _tree.signature_of(tree) == {"a": spec, "b": None}
    assert _tree.signature_of(tree, 3)["a"].shape == [3, 2]
