"""Collects the factors of each parameter during a backward pass and feeds the quantities."""
