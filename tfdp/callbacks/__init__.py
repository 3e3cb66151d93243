"""Callbacks of private training."""

from tfdp.callbacks.privacy_budget import PrivacyBudget as PrivacyBudget
from tfdp.callbacks.schedulers import ClipNormScheduler as ClipNormScheduler
