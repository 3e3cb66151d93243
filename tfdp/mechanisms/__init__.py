"""Noise, and what it costs."""

from tfdp.mechanisms.gaussian import Gaussian as Gaussian
from tfdp.mechanisms.mechanism import Mechanism as Mechanism
