"""Several views of each example, whose mean gradient is clipped."""

from collections.abc import Callable, Hashable
from typing import TypeAlias

import keras
import tensorflow as tf

from tfdp import _keras, _tree, _validate
from tfdp._types import Nest, Tensor
from tfdp.checks.model import check_model
from tfdp.losses.batch import Batch
from tfdp.training.attributes import attributes_of

# Makes a view of each row of a batch of inputs.
Function: TypeAlias = keras.layers.Layer | Callable[[Nest], Nest]


class Augmentation:
    """Makes random views of examples.

    A unit's gradient is the mean over all views of its examples. It is clipped like
    any other, so what one example can do to the sum is what it can do without.

    Args:
        function: A Keras layer, or a function of a batch of inputs, that changes each
            row by itself and keeps its shape.
        multiplicity: Views of each example.

    Attributes:
        model: Runs the function as `fit` runs layers.

    Raises:
        TypeError: If `function` cannot be called, or `multiplicity` is no number.
        ValueError: If `multiplicity` is no whole number of at least 1, or `function`
            mixes examples by design.
    """

    def __init__(self, function: Function, multiplicity: int) -> None:
        """Check the arguments."""
        if not callable(function):
            raise TypeError(
                "`augmentation` must be a Keras layer or a function of a batch of "
                f"inputs. Received: augmentation={function!r}. Use `DPModel(model, "
                "augmentation=keras.layers.RandomFlip('horizontal'), "
                "augmentation_multiplicity=16)`."
            )
        if _keras.mixes_images(function):
            raise ValueError(
                "`augmentation` must make a view of one example at a time: a mixture "
                "of two has a gradient that both have a part in. Received: "
                f"augmentation={function!r}. Use `keras.layers.RandomFlip(...)`, "
                "`keras.layers.RandomTranslation(...)`."
            )
        self.function = function
        self.multiplicity = _validate.positive_int(
            "augmentation_multiplicity", multiplicity
        )
        # A model runs layers as `fit` does. Keras tracks no attribute of this class.
        self.model = _Augmenting(function)
        # What was traced to run eagerly, for which rows and attributes, and what it moves.
        self._known: list[
            tuple[Batch, Hashable, Callable[[Batch], Batch], frozenset[str]]
        ] = []

    @classmethod
    def of(
        cls, model: keras.Model, function: Function | None, multiplicity: int
    ) -> "Augmentation | None":
        """Return what makes the views that a training asks for, None for the rows alone.

        Args:
            model: That trains; without a function its own draws make views differ.
            function: See the class; may be None.
            multiplicity: See the class.

        Raises:
            TypeError: See the class.
            ValueError: See the class; and if all views would be alike.
        """
        if function is None:
            if multiplicity == 1:
                return None
            if not _keras.draws_numbers(model):
                raise ValueError(
                    "`augmentation_multiplicity` needs an augmentation where the model "
                    "draws nothing itself: all views would be alike. Received: "
                    f"augmentation_multiplicity={multiplicity!r}, "
                    "augmentation=None. Use `DPModel(model, "
                    "augmentation=keras.layers.RandomFlip('horizontal'), "
                    "augmentation_multiplicity=16)`."
                )
            function = keras.layers.Identity()
        return cls(function, multiplicity)

    def views(self, batch: Batch) -> Batch:
        """Return the views of all rows, those of one row next to each other.

        They are traced for any number of rows: the function's `x.shape[0]` is None.
        """
        signature = _tree.signature_of(batch)
        made: Batch = self._traced(signature)(batch)
        return made

    def proven_views(self, batch: Batch) -> tuple[Batch, frozenset[str]]:
        """Return views of which it was just proven that rows stay apart in them.

        Args:
            batch: See `views`.

        Returns:
            The views, and what making them moves on; see `prove`.

        Raises:
            UnsupportedLayerError: If it is not proven.
        """
        signature = _tree.signature_of(batch)
        is_eager = tf.executing_eagerly()
        attributes = attributes_of(self.model) if is_eager else None
        for known, of_known, make, moved in self._known if is_eager else ():
            if (known, of_known) == (signature, attributes):
                return make(batch), moved
        with _keras.outside_of_graphs():
            moved = self.prove(signature.x)
        make = self._traced(signature)
        if is_eager:
            # The last ones do: a change of attributes is rare.
            self._known[:] = [*self._known[-8:], (signature, attributes, make, moved)]
        return make(batch), moved

    def _traced(self, signature: Batch) -> Callable[[Batch], Batch]:
        """Trace what makes the views of rows."""

        def views(batch: Batch) -> Batch:
            x, *others = _tree.map_tensors(
                lambda tensor: tf.repeat(tensor, self.multiplicity, axis=0), batch
            )
            views = _keras.run_model(self.model, x, training=True)

            def with_shape_of(view: Nest, row: Tensor) -> Tensor:
                return tf.ensure_shape(tf.cast(view, row.dtype), row.shape)

            return Batch(keras.tree.map_structure(with_shape_of, views, x), *others)

        function = tf.function(views, autograph=False)
        traced: Callable[[Batch], Batch] = function.get_concrete_function(signature)
        return traced

    def first(self, outputs: Nest) -> Nest:
        """Return what the model gave for the first view of each row."""
        return _tree.map_tensors(lambda rows: rows[:: self.multiplicity], outputs)

    def check(self, x: Nest) -> None:
        """Refuse a function unless it is proven to keep examples apart.

        Args:
            x: A few rows of inputs.

        Raises:
            UnsupportedLayerError: If it is not.
            ValueError: If views have other shapes than their rows.
        """
        self.prove(x)
        x = _tree.map_tensors(lambda rows: tf.repeat(rows, self.multiplicity, 0), x)
        views = _keras.run_model(self.model, x, training=True)
        shapes, wanted = (
            [tuple(tensor.shape) for tensor in _tree.tensors(nest)]
            for nest in (views, x)
        )
        if shapes != wanted:
            raise ValueError(
                "`augmentation` must keep the shape of its inputs. Received: "
                f"augmentation={self.function!r}, which makes {shapes} of {wanted}. "
                "Crop or resize in the data pipeline."
            )

    def prove(self, x: Nest) -> frozenset[str]:
        """Prove that rows stay apart, and return what making views moves on.

        Args:
            x: Rows of inputs, or `tf.TensorSpec` of them.

        Returns:
            See `TracedPass`.

        Raises:
            UnsupportedLayerError: If it is not proven.
        """
        return check_model(self.model, x, views=self.multiplicity)

    def seed_states(self) -> list[keras.Variable]:
        """List the states of all seed generators that the function may use."""
        return _keras.seed_states(self.model)


class _Augmenting(keras.Model):
    """Runs a layer or a function as a model."""

    def __init__(self, function: Function) -> None:
        super().__init__(name="augmentation")
        self.function = function

    def call(self, x: Nest, training: bool | None = None) -> Nest:
        """Make one view of each row."""
        if isinstance(self.function, keras.layers.Layer):
            return self.function(x, training=training)
        return self.function(x)
