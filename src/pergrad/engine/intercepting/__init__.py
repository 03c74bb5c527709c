"""Intercepts every torch function and derives per-sample gradients for calls that use a weight."""
