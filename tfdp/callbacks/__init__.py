"""Callbacks of private training."""

from tfdp.callbacks.adaptive import AdaptiveMedianClip as AdaptiveMedianClip
from tfdp.callbacks.adaptive import AdaptiveQuantileClip as AdaptiveQuantileClip
from tfdp.callbacks.bias_logger import BiasLogger as BiasLogger
from tfdp.callbacks.privacy_budget import PrivacyBudget as PrivacyBudget
from tfdp.callbacks.private_early_stopping import (
    PrivateEarlyStopping as PrivateEarlyStopping,
)
from tfdp.callbacks.private_evaluation import PrivateEvaluation as PrivateEvaluation
from tfdp.callbacks.schedulers import ClipNormScheduler as ClipNormScheduler
from tfdp.callbacks.schedulers import (
    NoiseMultiplierScheduler as NoiseMultiplierScheduler,
)
from tfdp.training.callback import NonprivateStep as NonprivateStep
from tfdp.training.callback import Query as Query
from tfdp.training.callback import Step as Step
from tfdp.training.callback import StepCallback as StepCallback
