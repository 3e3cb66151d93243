"""Gradients taken a step uphill of the weights: who asks for them, and SAT's own step.

BAM's step is another one for each unit: `tfdp.engines.uphill` takes it.
"""
