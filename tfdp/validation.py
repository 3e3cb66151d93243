"""Checks that a model treats every example of a batch by itself."""

from tfdp.checks.model import validate_model as validate_model
from tfdp.checks.problems import Problem as Problem
