"""Losses of single examples, and losses that change what is clipped."""

from tfdp.losses.ascent import BAM as BAM
from tfdp.losses.ascent import SAT as SAT
from tfdp.losses.per_example import PerExampleLoss as PerExampleLoss
