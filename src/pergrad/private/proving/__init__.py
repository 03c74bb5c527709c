"""Audits private training from outside: lower bounds on epsilon, and sensitivity."""
