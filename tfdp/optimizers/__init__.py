"""Optimizers that train with differential privacy."""

from tfdp.compat.tf_privacy_optimizers import (
    DPKerasAdagradOptimizer as DPKerasAdagradOptimizer,
)
from tfdp.compat.tf_privacy_optimizers import (
    DPKerasAdamOptimizer as DPKerasAdamOptimizer,
)
from tfdp.compat.tf_privacy_optimizers import DPKerasSGDOptimizer as DPKerasSGDOptimizer
from tfdp.compat.tf_privacy_optimizers import (
    VectorizedDPKerasAdagradOptimizer as VectorizedDPKerasAdagradOptimizer,
)
from tfdp.compat.tf_privacy_optimizers import (
    VectorizedDPKerasAdamOptimizer as VectorizedDPKerasAdamOptimizer,
)
from tfdp.compat.tf_privacy_optimizers import (
    VectorizedDPKerasSGDOptimizer as VectorizedDPKerasSGDOptimizer,
)
from tfdp.optimizers.dp_optimizer import DPOptimizer as DPOptimizer
from tfdp.optimizers.families import DPSGD as DPSGD
from tfdp.optimizers.families import DPAdagrad as DPAdagrad
from tfdp.optimizers.families import DPAdam as DPAdam
from tfdp.optimizers.families import DPAdamW as DPAdamW
from tfdp.optimizers.families import DPNadam as DPNadam
from tfdp.optimizers.families import DPRMSprop as DPRMSprop
