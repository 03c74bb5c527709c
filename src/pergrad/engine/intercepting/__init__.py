"""Sees every torch function that runs and derives per-sample gradients for those that use a weight."""
