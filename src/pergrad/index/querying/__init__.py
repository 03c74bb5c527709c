"""Queries an index: gradients of new inputs, exact and approximate products, what is shown of a match."""
