"""Proves, on the graph that trains, that the rows of a batch do not meet."""
