"""Infers a spec from a model and a data set alone: data, loss, labels, previews; says what it infers."""

from pergrad.audit.subject.inferring.showing import inferred_show
from pergrad.audit.subject.inferring.specs import inferred_spec

__all__ = ["inferred_show", "inferred_spec"]
