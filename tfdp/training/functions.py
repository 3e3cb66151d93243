"""How the functions are made that `fit` and `evaluate` call for each batch."""

import abc
import threading
from collections.abc import Callable

import tensorflow as tf

from tfdp import _keras
from tfdp._types import Logs, Nest, Tensor
from tfdp.distribute.replicas import Replicas, function_of_batches
from tfdp.distribute.shares import Share
from tfdp.errors import NotPrivateError
from tfdp.runs.counter import UNDECLARED
from tfdp.training.arguments import check_protects
from tfdp.training.sessions import Sessions


class TrainingFunctions(_keras.ReplicatedModel, abc.ABC):
    """The part of a private model that brings batches to its steps.

    Attributes:
        train_function: As in Keras; None where the next training is to make one.
        test_function: As in Keras.
    """

    _replicas: Replicas
    sessions: Sessions
    unit: str
    # The thread in which the training function runs now, if it does.
    _training_thread: int | None = None
    train_function: Nest = None
    test_function: Callable[[Nest], Logs] | None = None

    @property
    def _is_in_train_function(self) -> bool:
        """Whether this thread is in the training function.

        TensorFlow runs Python code of a graph (a generator of a pipeline, `tf.py_function` in a
        metric) in other threads, or eagerly.
        """
        is_eager = self.run_eagerly or tf.config.functions_run_eagerly()
        if tf.executing_eagerly() and not is_eager:
            return False
        return self._training_thread == threading.get_ident()

    @abc.abstractmethod
    def _take_step(
        self, data: Nest, fingerprint: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Take one private step; replicas share what is done here, once for all."""

    def make_train_function(self, force: bool = False) -> Callable[[Nest], Logs]:
        """Make the training function; XLA compiles the passes in it, not all of it.

        Args:
            force: As in Keras.

        Returns:
            The function.

        Raises:
            NotPrivateError: When a callback of `fit` calls the function.
            ValueError: When it is called with batches of nobody knows whose rows, and users
                are protected.
        """
        known: Callable[[Nest], Logs] | None = self.train_function
        if known is not None and not force:
            return known
        if self._replicas.strategy is not None:
            function = function_of_batches(
                self._train_together, is_eager=self.run_eagerly
            )
        else:
            # The passes are compiled one by one; in a whole step XLA would compile
            # anew for each size that a Poisson batch has.
            jit_compile = self.jit_compile  # type: ignore[has-type]
            self.jit_compile = False
            try:
                super().make_train_function(force)
                function = self.train_function  # Keras has put it there.
            finally:
                self.jit_compile = jit_compile

        def train(batches: Nest) -> Logs:
            sessions = self.sessions
            if not sessions.expects_batch:
                if sessions.acting is not None:
                    raise NotPrivateError(
                        "While `fit` runs its training function takes the batches that it "
                        f"has drawn. Received: others, in a callback of model={self.name!r}. "
                        "Use `private.train_on_batch(x, y)`, of which each step counts in "
                        "full."
                    )
                # Nobody has said whose rows these are.
                check_protects(self.unit, UNDECLARED)
            sessions.expects_batch = False
            # Only what this calls takes the batches that `fit` has counted on: callbacks
            # may take steps of their own meanwhile.
            was, self._training_thread = self._training_thread, threading.get_ident()
            try:
                logs: Logs = function(batches)
                return logs
            finally:
                self._training_thread = was

        self.train_function = train
        return train

    def _train_together(self, share: Nest) -> dict[str, Tensor]:
        """Take one step with all replicas, each with its share of a batch."""
        if not isinstance(share, Share):  # From `train_on_batch`.
            logs: dict[str, Tensor] = self.train_step(share)
            return logs
        return self._take_step(share.batch(), share.fingerprint)

    def make_test_function(self, force: bool = False) -> Callable[[Nest], Logs]:
        """Make the function that evaluates; its metrics are those of all replicas."""
        if self._replicas.strategy is None:
            function: Callable[[Nest], Logs] = super().make_test_function(force)
            return function
        if self.test_function is None or force:
            self.test_function = function_of_batches(
                self._test_together, is_eager=self.run_eagerly
            )
        return self.test_function

    def _test_together(self, data: Nest) -> dict[str, Tensor]:
        self._replicas.run(self.test_step, data)
        logs: dict[str, Tensor] = self.get_metrics_result()
        return logs
