"""Analyses the rows of a finished pass and writes tables, previews and the summary."""
