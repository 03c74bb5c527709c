"""Tells which rows of a tensor belong to which sample, and how functions move them."""
