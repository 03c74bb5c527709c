"""Rewrites the graph of a traced step, for its backends: strides, casts, layouts, memory."""
