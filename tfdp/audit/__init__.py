"""Audits: what a training does, tried out, beside what is claimed of it."""

from tfdp.audit.canaries import CanaryReport as CanaryReport
from tfdp.audit.canaries import GradientCanaries as GradientCanaries
from tfdp.audit.comparison import Finding as Finding
from tfdp.audit.lower_bound import epsilon_lower_bound as epsilon_lower_bound
from tfdp.audit.members import AttackResult as AttackResult
from tfdp.audit.members import MembershipReport as MembershipReport
from tfdp.audit.members import membership as membership
from tfdp.audit.replays import ReplayReport as ReplayReport
from tfdp.audit.replays import replay as replay
