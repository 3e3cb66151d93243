"""Prints what a project has spent: ``python -m tfdp.accounting.project FILE``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tfdp.accounting.projects import Project


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the statement of a project, or settle a training that was killed.

    Args:
        arguments: Of the command line.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tfdp.accounting.project", description=__doc__
    )
    parser.add_argument("file", type=Path, help="File of the project.")
    parser.add_argument(
        "--delta", type=float, help="In (0, 1); by default that of the budget."
    )
    parser.add_argument(
        "--settle",
        metavar="TRAINING",
        help="Count for good all that a training which was killed may have run.",
    )
    options = parser.parse_args(arguments)
    try:
        if not options.file.exists():
            parser.error(f"there is no file {options.file}")
        project = Project(options.file)
        if options.settle is not None:
            project.settle(options.settle)
        sys.stdout.write(project.privacy_statement(options.delta))
    except (OSError, TypeError, ValueError) as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
