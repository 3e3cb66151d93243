"""Losses of single examples."""

from tfdp.losses.per_example import PerExampleLoss as PerExampleLoss
