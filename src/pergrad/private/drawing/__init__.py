"""Draws batches and random numbers by key and step, on every rank."""
