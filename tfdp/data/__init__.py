"""Data whose sampling is known: drawn by tfdp, or declared by the user."""

from tfdp.data.balls_in_bins import BallsInBins
from tfdp.data.declared import DeclaredDataset, declare
from tfdp.data.poisson_dataset import PoissonDataset
from tfdp.data.users import bound_contributions

__all__ = [
    "BallsInBins",
    "DeclaredDataset",
    "PoissonDataset",
    "bound_contributions",
    "declare",
]
