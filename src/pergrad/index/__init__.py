"""Finds the training samples behind what a model does: stored, projected gradients that can be queried."""

try:
    from pergrad.index.curating import read_list, write_list
    from pergrad.index.in_run import InRunValues
    from pergrad.index.index import Index
    from pergrad.index.options import IndexOptions
    from pergrad.index.streamed import scores_without_store
except ModuleNotFoundError as error:
    if error.name in ("numpy", "pyarrow", "PIL", "jinja2", "rich"):
        raise ModuleNotFoundError(
            f"pergrad.index needs {error.name}: pip install 'pergrad[audit]'", name=error.name
        ) from error
    raise

__all__ = [
    "InRunValues",
    "Index",
    "IndexOptions",
    "read_list",
    "scores_without_store",
    "write_list",
]
