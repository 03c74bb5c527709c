"""Norms and random projections of gradients, computed together."""
