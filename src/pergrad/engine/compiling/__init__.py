"""Traces a whole step and runs it compiled, by the eager backend or as a CUDA graph."""
