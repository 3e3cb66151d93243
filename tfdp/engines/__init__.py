"""Engines turn a batch and a clip norm into a clipped sum."""

from tfdp.engines.apart import ApartEngine as ApartEngine
from tfdp.engines.bookkeeping import BookkeepingEngine as BookkeepingEngine
from tfdp.engines.bookkeeping import GhostEngine as GhostEngine
from tfdp.engines.engine import Engine as Engine
from tfdp.engines.vectorized import VectorizedEngine as VectorizedEngine

_BY_NAME: dict[str, type[Engine]] = {
    "auto": BookkeepingEngine,
    "bookkeeping": BookkeepingEngine,
    "ghost": GhostEngine,
    "apart": ApartEngine,
    "vectorized": VectorizedEngine,
}


def get(engine: object) -> Engine:
    """Return an engine by its name, or the engine object itself.

    Args:
        engine: `"auto"`, `"bookkeeping"`, `"ghost"`, `"apart"`, `"vectorized"` or an
            engine.

    Raises:
        ValueError: If there is no engine of that name.
    """
    if isinstance(engine, Engine):
        return engine
    if not isinstance(engine, str) or engine not in _BY_NAME:
        names = ", ".join(f"'{name}'" for name in _BY_NAME)
        raise ValueError(
            f"`engine` must be an engine or one of {names}. Received: "
            f"engine={engine!r}. Use `engine='auto'`."
        )
    return _BY_NAME[engine]()
