"""Audits of models that `fully_shard` shards, on several ranks, against those of the whole model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

import pergrad
from pergrad.audit import AuditOptions, Spec, run_audit
from pergrad.audit import run as running
from pergrad.audit.streaming import gradients
from pergrad.audit.streaming.chunks import kept_spans, read_chunk
from pergrad.audit.streaming.fingerprint import fingerprint_of_model
from pergrad.audit.streaming.memory import bytes_kept
from pergrad.audit.streaming.sketching.norms_and_sketch import NormsAndSketch
from pergrad.engine.recording.recording import is_recording
from pergrad.errors import AuditError, IndexingError, InterruptedAuditError
from tests.audit.cases import data, losses

OPTIONS = AuditOptions(batch_size=8, save_every=0)
SIZE = 50  # seven batches: one rank of two runs one more than the other


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    inner = nn.Sequential(nn.Linear(8, 9), nn.Tanh())
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), inner, nn.Linear(9, 3)).double().eval()


def sharded(
    model: nn.Sequential, shape: tuple[int, ...] | None = None, **options: Any
) -> nn.Module:
    names = None if shape is None else ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)
    fully_shard(model[2], mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def logits(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    found: Tensor = model(x)
    return found


def target(x: Tensor, y: Tensor) -> Tensor:
    return y


def spec(model: nn.Module, **changes: Any) -> Spec:
    made = {"dataset": data(SIZE, dtype=torch.float64), "loss": losses, **changes}
    return Spec(model, **made)


@contextmanager
def folder() -> Iterator[Path]:
    """Yields a folder that all ranks see."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    assert made[0] is not None
    try:
        yield Path(made[0])
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(made[0])


def rows_in(path: Path) -> dict[str, np.ndarray]:
    """Returns the rows of all samples that are written."""
    chunks = [
        read_chunk(path / "chunks" / f"{start:010d}-{stop:010d}.npz")
        for start, stop in kept_spans(path / "chunks")
    ]
    parts = [{"index": chunk.index, **vars(chunk.rows)} for chunk in chunks if len(chunk.index)]
    names = [name for name, value in parts[0].items() if value is not None]
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def alone(made: Spec, options: AuditOptions = OPTIONS) -> tuple[dict[str, np.ndarray], Any]:
    """Audits in this process alone."""
    with tempfile.TemporaryDirectory() as path:
        summary = run_audit(made, path, options)
        return rows_in(Path(path)), summary


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        np.testing.assert_allclose(found[name], want, rtol=1e-10, atol=1e-10, err_msg=name)


def check_rows_are_those_of_the_whole_model() -> None:
    wanted, before = alone(spec(network()))
    for shape, reshards in ((None, True), ((dist.get_world_size(), 1), False)):
        with folder() as path:
            model = sharded(network(), shape, reshard_after_forward=reshards)
            summary = run_audit(spec(model), path, OPTIONS)
            assert_same(rows_in(path), wanted)
        assert summary["certificate"]["ok"], summary["certificate"]
        assert summary["model"] == before["model"]
        assert summary["processes"] == dist.get_world_size()
        assert len(wanted["index"]) == SIZE


def check_the_memory_of_a_batch_is_that_of_the_whole_model() -> None:
    x, y = data(4, dtype=torch.float64).tensors
    found = []
    for model in (network(), sharded(network())):
        found.append(bytes_kept(model, lambda model=model: losses(model, x, y)))
    assert found[0] == found[1] > 0
    with folder() as path:
        summary = run_audit(spec(sharded(network())), path, AuditOptions(save_every=0))
        assert summary["samples"] == SIZE


def check_label_free_rows_and_checkpoints() -> None:
    of_classifier = {"logits": logits, "target": target}
    wanted, _ = alone(spec(network(), checkpoints=[network(1)], **of_classifier))
    with folder() as path:
        made = spec(sharded(network()), checkpoints=[sharded(network(1))], **of_classifier)
        run_audit(made, path, OPTIONS)
        assert_same(rows_in(path), wanted)
        assert wanted["free"].shape[1] == 2


class HalfUnreadable(TensorDataset):
    """All items of the last ranks, and a few of the first, cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 3 or index >= SIZE // 2 - 1:
            raise OSError("no such picture")
        return super().__getitem__(index)


def check_items_that_cannot_be_read_are_skipped() -> None:
    broken = HalfUnreadable(*data(SIZE, dtype=torch.float64).tensors)
    wanted, before = alone(spec(network(), dataset=broken))
    with folder() as path:
        summary = run_audit(spec(sharded(network()), dataset=broken), path, OPTIONS)
        assert_same(rows_in(path), wanted)
    assert summary["samples"] == before["samples"] < SIZE // 2
    assert len(summary["skipped"]) == SIZE - summary["samples"]


def check_batches_of_a_token_budget() -> None:
    options = AuditOptions(tokens=48, save_every=0)
    made = {"length": lambda item: 5 + int(item[1])}
    wanted, _ = alone(spec(network(), **made), options)
    with folder() as path:
        run_audit(spec(sharded(network()), **made), path, options)
        assert_same(rows_in(path), wanted)


def check_an_audit_resumes_sharded_or_not() -> None:
    wanted, _ = alone(spec(network()))
    with folder() as path:
        if dist.get_rank() == 0:
            run_audit(spec(network()), path, OPTIONS)
            for removed in (path / "summary.json", *(path / "chunks").glob("*[26]-*.npz")):
                removed.unlink()
        dist.barrier()
        before = {p: p.stat().st_mtime_ns for p in (path / "chunks").glob("*.npz")}
        assert 1 <= len(before) < 7
        dist.barrier()
        run_audit(spec(sharded(network())), path, OPTIONS)
        assert_same(rows_in(path), wanted)
        assert all(p.stat().st_mtime_ns == when for p, when in before.items())
        again = run_audit(spec(sharded(network())), path, OPTIONS)
        assert again["samples"] == SIZE
        with pytest.raises(AuditError, match="another model"):
            run_audit(spec(sharded(network(1))), path, OPTIONS)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    half = sharded(network(), mp_policy=policy)
    assert fingerprint_of_model(half) != fingerprint_of_model(network())
    assert fingerprint_of_model(sharded(network())) == fingerprint_of_model(network())


def check_out_of_memory_stops_all_and_the_next_run_has_smaller_batches() -> None:
    rows = gradients.Gradients.rows

    def short_of_memory(self: Any, batch: tuple[Any, ...], count: int) -> Any:
        if count > 4:
            raise torch.OutOfMemoryError("out of memory")
        return rows(self, batch, count)

    with folder() as path:
        with (
            mock.patch.object(gradients.Gradients, "rows", short_of_memory),
            pytest.raises(InterruptedAuditError, match="batch of 8 samples of a sharded model"),
        ):
            run_audit(spec(sharded(network())), path, OPTIONS)
        dist.barrier()
        summary = run_audit(spec(sharded(network())), path, OPTIONS)
        assert summary["batch_size"] == 4


def without_memory() -> Any:
    """Within, the last rank has no memory to gather the model."""
    free = 0 if dist.get_rank() == dist.get_world_size() - 1 else 2**40
    return mock.patch.object(running, "free_bytes", return_value=free)


def check_a_model_that_is_too_large_to_be_gathered_is_proved_in_shards() -> None:
    for policy, dtype in ((None, "float64"), (torch.bfloat16, "bfloat16")):
        options = {} if policy is None else {"mp_policy": MixedPrecisionPolicy(param_dtype=policy)}
        model = sharded(network(), **options)
        with folder() as path, without_memory():
            certificate = run_audit(spec(model), path, OPTIONS)["certificate"]
        assert certificate["ok"], certificate
        assert certificate["proved_in"] == dtype
        assert certificate["parameters"] == 6
        assert "sharded" in certificate["notes"][0]
        assert all(p.grad is None for p in model.parameters())


def off_when_recorded(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    found = losses(model, x, y)
    return found * torch.where(torch.arange(len(x)) == 1, 1.01, 1.0) if is_recording() else found


def meeting(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return losses(model, x - x.mean(0), y)


def check_wrong_gradients_of_a_sharded_model_are_found() -> None:
    with folder() as path, without_memory():
        with pytest.raises(AuditError, match=r"are wrong .*0\.weight"):
            run_audit(spec(sharded(network()), loss=off_when_recorded), path, OPTIONS)
        with pytest.raises(AuditError, match=r"are wrong .*mixes samples"):
            run_audit(spec(sharded(network()), loss=meeting), path, OPTIONS)

        def twice(self: Any, number: int, gradient: Any) -> Any:
            told = report(self, number, gradient)
            return told._replace(found=told.found * 2)

        report = NormsAndSketch.sample_report
        with (
            mock.patch.object(NormsAndSketch, "sample_report", twice),
            pytest.raises(AuditError, match="NormsAndSketch of sample"),
        ):
            run_audit(spec(sharded(network())), path, OPTIONS)


def check_values_that_are_not_finite_are_noted_by_whoever_holds_them() -> None:
    broken = network()
    with torch.no_grad():
        broken[3].bias[-1] = torch.inf
    with folder() as path:
        summary = run_audit(spec(sharded(broken)), path, OPTIONS)
    assert any("'3.bias' has values that are not finite" in note for note in summary["notes"])


class OneBad(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        if index == SIZE - 3:
            raise OSError("no such picture")
        return super().__getitem__(index)


def check_an_error_of_one_process_stops_all() -> None:
    broken = OneBad(*data(SIZE, dtype=torch.float64).tensors)
    options = AuditOptions(batch_size=8, save_every=0, strict=True)
    with folder() as path:
        with pytest.raises(AuditError, match="cannot load item 47"):
            run_audit(spec(sharded(network()), dataset=broken), path, options)
        dist.barrier()
        assert 0 < len(list((path / "chunks").glob("*.npz"))) < 7


def check_refusals_say_what_to_do() -> None:
    with folder() as path:
        made = spec(sharded(network()), checkpoints=[network(1).state_dict()], logits=logits)
        with pytest.raises(AuditError, match=r"pass spec\.checkpoints as modules"):
            run_audit(made, path, OPTIONS)
        options = AuditOptions(batch_size=8, dtype="float32")
        with pytest.raises(AuditError, match=r"'0.weight' in torch.float64.*before fully_shard"):
            run_audit(spec(sharded(network())), path, options)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        spread = parallelize_module(network(), mesh, {"0": ColwiseParallel()})
        with pytest.raises(AuditError, match="an audit gives every rank samples of its own"):
            run_audit(spec(spread), path, OPTIONS)
        items = data(SIZE, dtype=torch.float64)
        with pytest.raises(IndexingError, match="an index does not take a model that fully_shard"):
            pergrad.Index.build(sharded(network()), items, path / "index", losses, quiet=True)
        with pytest.raises(IndexingError, match="fully_shard"):
            pergrad.Audit.run(sharded(network()), items, path, losses, keep_index=True, quiet=True)
        with pytest.raises(AuditError, match="pass path="):
            pergrad.Audit.run(sharded(network()), items, loss=losses, quiet=True)


def check_one_call_audits_a_sharded_model() -> None:
    items = data(SIZE, dtype=torch.float64)
    wanted = pergrad.Audit.run(network(), items, quiet=True, batch_size=8).samples
    with folder() as path:
        model = sharded(network())
        found = pergrad.Audit.run(model, items, path / "out", quiet=True, batch_size=8)
        assert found.samples.equals(wanted)
        assert "FSDP" not in (path / "out/report.html").read_text()
