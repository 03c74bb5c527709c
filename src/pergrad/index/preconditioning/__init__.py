"""Preconditioners: curvature that a query's gradient is divided by before it meets the rows."""
