"""How batches are drawn, and what that costs: NumPy, SciPy and dp_accounting only."""

from tfdp.sampling.balls_in_bins import BallsInBins as BallsInBins
from tfdp.sampling.balls_in_bins import FixedBins as FixedBins
from tfdp.sampling.balls_in_bins import (
    RandomAllocationDpEvent as RandomAllocationDpEvent,
)
from tfdp.sampling.cyclic_poisson import CyclicPoisson as CyclicPoisson
from tfdp.sampling.poisson import Poisson as Poisson
from tfdp.sampling.poisson import fresh_key as fresh_key
from tfdp.sampling.poisson import poisson_indices as poisson_indices
from tfdp.sampling.poisson import poisson_probability as poisson_probability
from tfdp.sampling.poisson import seeded_key as seeded_key
from tfdp.sampling.poisson_users import PoissonUsers as PoissonUsers
from tfdp.sampling.scheme import Scheme as Scheme
from tfdp.sampling.scheme import samplings as samplings
from tfdp.sampling.scheme import scheme_of_kind as scheme_of_kind
from tfdp.sampling.shuffled import Shuffled as Shuffled
from tfdp.sampling.truncated_poisson import TruncatedPoisson as TruncatedPoisson
from tfdp.sampling.unknown import Unknown as Unknown
from tfdp.sampling.unknown import UnknownUsers as UnknownUsers
