"""Judges functions without a handler: on the graph of a call, and by running it on other values."""
