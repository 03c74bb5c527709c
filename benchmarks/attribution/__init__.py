"""Measures how well scores predict retraining: pergrad, baselines and other libraries on the same models."""
