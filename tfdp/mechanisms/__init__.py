"""Noise, and what it costs."""

from tfdp.mechanisms.mechanism import Gaussian as Gaussian
from tfdp.mechanisms.mechanism import Mechanism as Mechanism
