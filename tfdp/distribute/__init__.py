"""Replicas that take every step together."""
