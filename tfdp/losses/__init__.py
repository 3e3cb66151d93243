"""Losses of single examples, and losses that change what is clipped."""

from tfdp.ascent.losses import BAM as BAM
from tfdp.ascent.losses import SAT as SAT
from tfdp.losses.per_example import PerExampleLoss as PerExampleLoss
