"""Keeps rows on disk: chunks that are complete or missing, a manifest, and a list of deleted samples."""
