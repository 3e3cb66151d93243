"""Optimizers that train with differential privacy."""

from tfdp.optimizers.dp_optimizer import DPOptimizer as DPOptimizer
from tfdp.optimizers.families import DPSGD as DPSGD
from tfdp.optimizers.families import DPAdagrad as DPAdagrad
from tfdp.optimizers.families import DPAdam as DPAdam
from tfdp.optimizers.families import DPAdamW as DPAdamW
from tfdp.optimizers.families import DPNadam as DPNadam
from tfdp.optimizers.families import DPRMSprop as DPRMSprop
from tfdp.optimizers.tf_privacy import (
    DPKerasAdagradOptimizer as DPKerasAdagradOptimizer,
)
from tfdp.optimizers.tf_privacy import DPKerasAdamOptimizer as DPKerasAdamOptimizer
from tfdp.optimizers.tf_privacy import DPKerasSGDOptimizer as DPKerasSGDOptimizer
from tfdp.optimizers.tf_privacy import (
    VectorizedDPKerasAdagradOptimizer as VectorizedDPKerasAdagradOptimizer,
)
from tfdp.optimizers.tf_privacy import (
    VectorizedDPKerasAdamOptimizer as VectorizedDPKerasAdamOptimizer,
)
from tfdp.optimizers.tf_privacy import (
    VectorizedDPKerasSGDOptimizer as VectorizedDPKerasSGDOptimizer,
)
