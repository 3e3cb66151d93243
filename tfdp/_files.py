"""Files that a kill leaves whole."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def replaced(path: Path, mode: str = "w", **options: Any) -> Iterator[IO[Any]]:
    """Open a file that takes the place of another when it is complete, and on disk.

    Args:
        path: The file to replace; need not exist.
        mode: As for `open`.
        options: Likewise.

    Yields:
        The file to write to.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open(mode, **options) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    # The new name too, which is the folder's.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
