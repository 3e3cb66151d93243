"""Small models with the patterns of Keras's code examples, each a line of a table.

``python -m tests.zoo`` prints the table: the engine that clips each model, and what the
start and a step of a private training cost beside the ordinary ones.
"""

from tests.zoo import generative, series, structured, text, vision, weights
from tests.zoo.entry import Entry as Entry

ZOO: dict[str, Entry] = {
    entry.name: entry
    for family in (vision, text, structured, series, generative, weights)
    for entry in family.ENTRIES
}
