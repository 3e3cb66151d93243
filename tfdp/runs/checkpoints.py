"""The ledger in TensorFlow's checkpoints."""

import concurrent.futures
import weakref
from collections.abc import Callable

import tensorflow as tf

from tfdp._types import Variable
from tfdp.accounting.runs import Runs
from tfdp.runs.histories import note_makers


class LedgerState(tf.train.experimental.PythonState):
    """Makes the ledger a part of every `tf.train.Checkpoint` of what has it.

    Args:
        get: Returns it as text.
        restore: Takes such a text.

    Attributes:
        variables: Those whose values a checkpoint brings with it.
    """

    variables: list[weakref.ref[Variable]]

    def __init__(self, get: Callable[[], str], restore: Callable[[str], None]) -> None:
        """Keep both; nothing runs before a checkpoint is written or read."""
        self._get, self._restore = get, restore
        self.variables = []

    def note_loaded(self, runs: Runs) -> None:
        """Let the variables depend on what a checkpoint has brought, their values too.

        Args:
            runs: By name.
        """
        note_makers((each() for each in self.variables), runs)

    def serialize(self) -> str:
        """Return what the checkpoint is to hold."""
        if tf.executing_eagerly():
            return self._get()
        # TensorFlow may ask while it builds a graph; another thread is in none.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            return thread.submit(self._get).result()

    def deserialize(self, string_value: str | bytes) -> None:
        """Take over what a checkpoint holds."""
        if isinstance(string_value, bytes):
            string_value = string_value.decode()
        self._restore(string_value)
