"""Writes reports of an audit: an HTML page, and a summary for the terminal."""

from pergrad.reports.page import html_of, write_report
from pergrad.reports.reading import read_results
from pergrad.reports.terminal import headline, kept_words, overview

__all__ = ["headline", "html_of", "kept_words", "overview", "read_results", "write_report"]
