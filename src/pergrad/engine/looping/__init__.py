"""Runs batches by plain autograd: whole or sample by sample, from the same random state."""
