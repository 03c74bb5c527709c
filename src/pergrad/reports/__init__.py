"""Writes reports of an audit: an HTML page, and a summary for the terminal."""

from pergrad.reports.page import write_report
from pergrad.reports.terminal import headline, overview

__all__ = ["headline", "overview", "write_report"]
