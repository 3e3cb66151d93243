"""Versions of private models for TensorFlow Serving, each with a privacy report."""

from tfdp.export.private_model import export_private_model as export_private_model
from tfdp.export.private_model import next_version as next_version
