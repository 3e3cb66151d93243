"""Noise, and what it costs."""
