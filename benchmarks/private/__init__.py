"""Measures private training: accuracy beside Opacus, audits end to end, and the cost of a step."""
