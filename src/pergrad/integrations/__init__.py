"""Per-sample gradients in the trainers of other packages: `accelerate`, `hf` and `lightning`.

Each module is imported by its own name, because it needs the package that it is for.
"""
