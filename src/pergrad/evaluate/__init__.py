"""Evaluates data attribution: do scores predict what training on other data would have given?"""

try:
    from pergrad.evaluate.datamodeling import correlations, draw_subsets, lds
    from pergrad.evaluate.labels import flipped, mislabelled
    from pergrad.evaluate.planting import duplicates, facts
    from pergrad.evaluate.removing import removal
    from pergrad.evaluate.results import Estimate, Evaluation
    from pergrad.evaluate.task import Task
    from pergrad.evaluate.training import Trainer
except ModuleNotFoundError as error:
    if error.name is not None and error.name.partition(".")[0] in ("numpy", "scipy"):
        raise ModuleNotFoundError(
            f"pergrad.evaluate needs {error.name}: pip install 'pergrad[evaluate]'", name=error.name
        ) from error
    raise

__all__ = [
    "Estimate",
    "Evaluation",
    "Task",
    "Trainer",
    "correlations",
    "draw_subsets",
    "duplicates",
    "facts",
    "flipped",
    "lds",
    "mislabelled",
    "removal",
]
