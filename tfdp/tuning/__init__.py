"""Settings that are chosen privately."""

from tfdp.accounting.tries import Geometric as Geometric
from tfdp.accounting.tries import Poisson as Poisson
from tfdp.accounting.tries import (
    TruncatedNegativeBinomial as TruncatedNegativeBinomial,
)
from tfdp.tuning.private_search import PrivateSearch as PrivateSearch
