"""Passes over the data once: loads batches, computes their rows, and saves them so that it can resume."""
