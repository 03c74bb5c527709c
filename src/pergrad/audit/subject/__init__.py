"""Defines what to audit and how: the spec, the options, the model's device and dtype."""
