"""Paragraphs of statements."""

import textwrap


def filled(paragraph: str) -> str:
    """Break a paragraph into lines of 80 characters.

    Args:
        paragraph: One line.

    Returns:
        The same words on several lines; words with hyphens stay whole.
    """
    return textwrap.fill(paragraph, 80, break_on_hyphens=False)
