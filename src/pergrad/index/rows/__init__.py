"""Computes the rows of an index: projected gradients, a row for each sample or each token."""
