"""Plans a run, and counts its epsilon."""
