"""Times pergrad and its peers on the same models in one process; see ``benchmarks.run``."""
