"""What was run and what it cost: NumPy, SciPy and dp_accounting, no TensorFlow."""

from tfdp.accounting.accountant import epsilon as epsilon
from tfdp.accounting.accountant import reported_epsilon as reported_epsilon
from tfdp.accounting.best_of import BestOf as BestOf
from tfdp.accounting.calibration import affordable_count as affordable_count
from tfdp.accounting.calibration import calibrate_gaussian as calibrate_gaussian
from tfdp.accounting.calibration import (
    calibrate_noise_multiplier as calibrate_noise_multiplier,
)
from tfdp.accounting.comparison import segments_by_sampling as segments_by_sampling
from tfdp.accounting.ledger import Ledger as Ledger
from tfdp.accounting.ledger import compose as compose
from tfdp.accounting.local import (
    calibrate_local_noise_multiplier as calibrate_local_noise_multiplier,
)
from tfdp.accounting.local import local_epsilon as local_epsilon
from tfdp.accounting.local import local_privacy_statement as local_privacy_statement
from tfdp.accounting.projects import Project as Project
from tfdp.accounting.segments import PoissonSteps as PoissonSteps
from tfdp.accounting.segments import Segment as Segment
from tfdp.accounting.segments import ShuffledPasses as ShuffledPasses
from tfdp.accounting.segments import UnamplifiedSteps as UnamplifiedSteps
from tfdp.accounting.statement import privacy_report as privacy_report
from tfdp.accounting.statement import privacy_statement as privacy_statement
from tfdp.accounting.tradeoff import true_positive_rate as true_positive_rate
from tfdp.accounting.users import user_epsilon as user_epsilon
from tfdp.compat.tf_privacy_accounting import (
    compute_dp_sgd_privacy as compute_dp_sgd_privacy,
)
from tfdp.compat.tf_privacy_accounting import (
    compute_dp_sgd_privacy_statement as compute_dp_sgd_privacy_statement,
)
from tfdp.compat.tf_privacy_comparison import (
    compare_with_tensorflow_privacy as compare_with_tensorflow_privacy,
)
