"""Runs a function on every unit of a batch, all units at once where TensorFlow can."""

from collections.abc import Callable

import keras
import tensorflow as tf
from absl import logging

from tfdp import _keras, _seeds, _tree
from tfdp._mapping import vectorized_map
from tfdp._tracing import unit_check
from tfdp._types import Nest, Tensor
from tfdp.engines.vectorization import efficient_vectorization
from tfdp.losses.batch import Batch

_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)


def of_each_unit(
    function: Callable[[Batch], tuple[list[Tensor], Nest]],
    units: Batch,
    model: keras.Model,
) -> tuple[list[Tensor], Nest]:
    """Apply a function to each unit of a batch, which draws for itself.

    Args:
        function: Takes a unit; returns tensors, and the outputs of the model for its rows.
        units: The rows, stacked.
        model: What the function runs.

    Returns:
        The tensors, units on their first axis, and the outputs for all rows.
    """
    # Known as soon as one unit is traced: a map returns nothing but tensors.
    advance_seeds: list[Callable[[], None]] = []

    def of_unit(elements: Nest) -> tuple[list[Tensor], Nest]:
        number, leaves = elements
        with _seeds.seeds_of_row(number) as advance:
            made = function(_tree.pack(leaves, units))
        advance_seeds[:] = [advance]
        return made

    numbers = tf.range(tf.shape(units.is_padding)[0])
    tensors, y_pred = map_units(
        of_unit, (numbers, _tree.tensors(units)), must_rehearse=_may_fail(model)
    )
    advance_seeds[0]()
    return tensors, _tree.map_tensors(_tree.joined, y_pred)


def map_units(
    function: Callable[[Nest], Nest], elements: Nest, *, must_rehearse: bool
) -> tuple[list[Tensor], Nest]:
    """Apply a function to every element, all at once where TensorFlow can."""

    def vectorized(elements: Nest) -> Nest:
        with efficient_vectorization():
            return vectorized_map(function, elements)

    # A function of its own: what a failed attempt leaves behind must not run.
    run_all = tf.function(vectorized, autograph=False)
    reason = None
    if any(each.dtype == tf.string for each in keras.tree.flatten(elements)):
        # It would run, and stop where two rows have not as many words.
        reason = (
            "strings may have any number of words. With "
            "`TextVectorization(..., output_sequence_length=200)` rows go together"
        )
    elif must_rehearse and not _rehearse(run_all, elements):
        reason = "a loop over time or a convolution in groups cannot be vectorized"
    else:
        # Whatever stops the tracing: an error of the model itself comes again.
        try:
            traced = run_all.get_concrete_function(elements)
        except Exception as error:  # noqa: BLE001
            # Of what TensorFlow says on several lines the last one says what it is.
            lines = [line.strip(" .") for line in str(error).splitlines()]
            reason = next(filter(None, lines[::-1]), type(error).__name__)
    if reason is None:
        _look_into(traced.graph, elements, in_turn=False)
        mapped: tuple[list[Tensor], Nest] = run_all(elements)
        return mapped
    # What a unit returns has other shapes than its rows, and `map_fn` has to be told.
    of_first = keras.tree.map_structure(
        lambda tensor: tf.TensorSpec(tensor.shape[1:], tensor.dtype), elements
    )
    traced = tf.function(function, autograph=False).get_concrete_function(of_first)
    # Without one example, those behind it would see other values.
    _look_into(traced.graph, elements, in_turn=True)
    logging.warning(
        "tfdp takes the gradients of this model one example after the other, "
        "which is slow: %s.",
        reason,
    )
    signature = keras.tree.map_structure(
        lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype),
        traced.structured_outputs,
    )

    in_turn: tuple[list[Tensor], Nest] = tf.map_fn(
        function, elements, fn_output_signature=signature
    )
    return in_turn


def _look_into(graph: tf.Graph, elements: Nest, *, in_turn: bool) -> None:
    """Refuse what a unit would leave for others, if somebody looks."""
    check = unit_check()
    if check is not None:
        check(graph, len(keras.tree.flatten(elements)), in_turn=in_turn)


def _rehearse(
    vectorized: tf.types.experimental.PolymorphicFunction, elements: Nest
) -> bool:
    """Run a vectorized map on two elements of zeros, to see whether it can."""
    shapes = [tensor.shape[1:] for tensor in keras.tree.flatten(elements)]
    if _keras.inside_xla() or not all(shape.is_fully_defined() for shape in shapes):
        return False
    signature = _tree.signature_of(elements, None)
    with _keras.outside_of_graphs():
        zeros = keras.tree.map_structure(
            lambda tensor: tf.zeros([2, *tensor.shape[1:]], tensor.dtype), elements
        )
        try:
            # The trace that the elements themselves will run, made once.
            vectorized.get_concrete_function(signature)
            vectorized(zeros)
        except Exception:  # noqa: BLE001 (whatever it is, map_fn does without)
            return False
    return True


def _may_fail(model: keras.Model) -> bool:
    """Tell whether the vectorized model may be traced, and then fail when it runs."""
    # Loops over time do with XLA, and those with masks without; convolutions in groups
    # may without XLA, if they are left to Keras.
    layers = _keras.flatten_layers(model)
    has_loop = any(
        isinstance(layer, keras.layers.RNN) and not layer.unroll for layer in layers
    )
    has_groups = any(
        isinstance(layer, _CONVOLUTIONS)
        and layer.groups != 1
        and layer.data_format == "channels_first"
        for layer in layers
    )
    return has_loop or (has_groups and not _keras.inside_xla())


def stacked(rows: Tensor, rows_per_unit: int | Tensor) -> Tensor:
    """(N, ...) -> (U, rows_per_unit, ...)."""
    shape = tf.concat([[-1, rows_per_unit], tf.shape(rows)[1:]], 0)
    stacked = tf.reshape(rows, shape)
    known = rows_per_unit if isinstance(rows_per_unit, int) else None
    return tf.ensure_shape(stacked, [None, known, *rows.shape[1:]])
