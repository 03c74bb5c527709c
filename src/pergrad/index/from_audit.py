"""Makes an index of the rows that an audit has computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pergrad.audit.streaming.chunks import Chunk as AuditChunk
from pergrad.audit.streaming.chunks import kept_spans, read_chunk
from pergrad.audit.streaming.fingerprint import fingerprint_of_data
from pergrad.audit.streaming.folder import ResultsFolder
from pergrad.audit.streaming.loading import Loader
from pergrad.audit.subject.options import AuditOptions
from pergrad.audit.subject.spec import Spec
from pergrad.errors import IndexingError
from pergrad.index.building import row_maker
from pergrad.index.options import IndexOptions
from pergrad.index.preconditioning.choosing import Preconditioning
from pergrad.index.store.chunks import Chunk, Facts
from pergrad.index.store.manifest import MANIFEST, Manifest, Part
from pergrad.index.store.numbers import as_stored
from pergrad.index.store.states import write_states
from pergrad.index.store.store import Store
from pergrad.index.subject import Placed, Subject, identity_of, in_eval_mode, made_subject

__all__ = ["index_of_audit"]

_COMPARED = 4  # rows that are computed again to check the mode


def index_of_audit(
    folder: Path,
    spec: Spec,
    options: AuditOptions,
    path: Path,
    reference: tuple[str, str | None] | None = None,
) -> Subject:
    """Writes the sketches of an audit as an index of the same width.

    Gradients are not computed again, but for a few of a model in training mode, which must be the same in
    eval mode.
    """
    spans = kept_spans(folder / "chunks")
    if not spans:
        raise IndexingError(
            f"the rows of the audit {folder} were removed: audit again with force=True (--force)"
        )
    chosen = IndexOptions(
        dim=options.sketch_dim,
        seed=options.seed,
        subset=options.subset,
        compute_dtype=options.dtype,
        device=options.device,
    )
    subject = made_subject(Spec(spec.model, spec.dataset, spec.loss, **_shown(spec)))
    placed = subject.placed(chosen)
    data, repeats = fingerprint_of_data(spec.dataset, options.seed)
    stop = spans[-1][1]
    manifest = Manifest(
        identity_of(subject, placed, chosen),
        (Part(0, stop, 0, len(spec.dataset), data, spec.title, options.subset),),
        batch_size=1,
        chunk=max(b - a for a, b in spans),
        positions=stop,
        width=options.sketch_dim,
        about={
            "model": type(spec.model).__name__,
            "parameters": sum(p.numel() for p in spec.model.parameters() if p.requires_grad),
            "repeats": repeats,
            "certificate": (ResultsFolder(folder).open() or {}).get("certificate", {}),
            **({} if reference is None else {"reference": list(reference)}),
        },
        preconditioner=Preconditioning().as_json(),
    )
    if (path / MANIFEST).exists():  # of an earlier run of the same audit
        before = Store(path)
        same = before.manifest.identity == manifest.identity and not before.missing()
        if same and before.manifest.parts == manifest.parts:
            return subject
        raise IndexingError(
            f"{path} holds an index of another audit: remove it, or choose another folder"
        )
    if any(module.training for module in spec.model.modules()):
        first = read_chunk(folder / "chunks" / f"{spans[0][0]:010d}-{spans[0][1]:010d}.npz")
        _refuse_training_mode(subject, placed, chosen, first)
    path.mkdir(parents=True, exist_ok=True)
    store = Store.begin(path, manifest)
    write_states(path, placed.models, placed.fingerprints)
    for span in spans:
        found = read_chunk(folder / "chunks" / f"{span[0]:010d}-{span[1]:010d}.npz")
        stored, scale = as_stored(torch.from_numpy(found.rows.sketch), chosen.dtype)
        facts = Facts(
            found.index,
            found.rows.loss[:, None],
            found.rows.norm[:, None],
            scale[:, None],
            labels=found.labels,
            skipped=found.skipped,
        )
        store.add(Chunk(span, stored, facts))
    return subject


def _refuse_training_mode(
    subject: Subject, placed: Placed, options: IndexOptions, audited: AuditChunk
) -> None:
    """Refuses rows of an audit that are not those of the model in eval mode, by the first few."""
    count = min(_COMPARED, len(audited.index))
    with in_eval_mode(placed.models):
        loaded = Loader(subject.spec, audited.index, options.seed).load(0, count)
        (rows,) = row_maker(subject, placed, options).rows(loaded.arguments, loaded.count).rows
    before = torch.from_numpy(audited.rows.sketch[:count]).to(rows)
    if not torch.allclose(rows, before, rtol=1e-2, atol=1e-2 * float(before.abs().max())):
        raise IndexingError(
            "an index needs gradients in eval mode, but the audit's are not: call model.eval() and audit "
            "again"
        )


def _shown(spec: Spec) -> dict[str, Any]:
    names = ("show", "label", "collate", "name", "logits", "target", "classes")
    return {name: getattr(spec, name) for name in names}
