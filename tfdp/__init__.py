"""Differential privacy for Keras 3 on TensorFlow."""

from tfdp import accounting as accounting
from tfdp import audit as audit
from tfdp import callbacks as callbacks
from tfdp import data as data
from tfdp import errors as errors
from tfdp import export as export
from tfdp import federated as federated
from tfdp import layers as layers
from tfdp import losses as losses
from tfdp import mechanisms as mechanisms
from tfdp import models as models
from tfdp import optimizers as optimizers
from tfdp import rules as rules
from tfdp import sampling as sampling
from tfdp import tuning as tuning
from tfdp import variational as variational
from tfdp.accounting import (
    calibrate_noise_multiplier as calibrate_noise_multiplier,
)
from tfdp.accounting import compute_dp_sgd_privacy as compute_dp_sgd_privacy
from tfdp.accounting import (
    compute_dp_sgd_privacy_statement as compute_dp_sgd_privacy_statement,
)
from tfdp.clipping import ClippedSum as ClippedSum
from tfdp.fixing import fix_model as fix_model
from tfdp.model import DPModel as DPModel
from tfdp.training.loops import clipped_gradients as clipped_gradients
from tfdp.validation import validate_model as validate_model

__version__ = "0.1.0"
