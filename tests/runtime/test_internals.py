"""Private names of torch and Triton: all in one place, all there, and what happens where one is not."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms import Joinable
from torch.overrides import TorchFunctionMode

import pergrad
from pergrad.errors import PergradError
from pergrad.runtime import internals, triton_internals
from pergrad.runtime.boundary import TESTED, Entry, find

OF_NAMED_TUPLES = {"_asdict", "_fields", "_replace"}  # documented by Python
SOURCE = Path(pergrad.__file__).parent
OF_CUDA = {"current_device", "current_stream", "current_raw_stream"}
# What no small step on a CPU asks for: names for GPUs, for the compiler and for one kind of model.
UNASKED = OF_CUDA | {"fused_lstm_cell", "fused_lstm_cell_backward", "grouped_mm"}
UNASKED |= {"compile_fx", "force_stride_order", "unsafe_view", "vmapped"}
UNASKED |= {"join_config_of", "fsdp_state_of", "fsdp_groups_of", "begin_fsdp"}  # for many processes
UNASKED |= {"is_managed_by_fsdp"}
UNASKED |= {"add_mapped_dim", "outside_of_transform"}  # names for torch.vmap
UNASKED |= {"replacing_operators"}  # of an audit
UNASKED |= {"pop_uppermost_mode", "push_mode"}  # for modes of the user


# Where the names are


@pytest.mark.filterwarnings("ignore")  # the compiler's own, when it is imported
@pytest.mark.parametrize("alias", internals.ENTRIES)
def test_the_installed_torch_has_the_name(alias: str) -> None:
    if alias in OF_CUDA and torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA")
    assert internals.ENTRIES[alias].found() is not None


@pytest.mark.parametrize("alias", triton_internals.ENTRIES)
def test_the_installed_triton_has_the_name(alias: str) -> None:
    pytest.importorskip("triton")
    assert triton_internals.ENTRIES[alias].found() is not None


def sources() -> list[Path]:
    return [
        path for path in SOURCE.rglob("*.py") if "runtime" not in path.relative_to(SOURCE).parts
    ]


def test_every_entry_is_used() -> None:
    text = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    used = {*re.findall(r"\binternals\.(\w+)", text), *re.findall(r"present\(\"(\w+)\"\)", text)}
    assert internals.ENTRIES.keys() - used == set()
    used = {*re.findall(r"\btriton_internals\.(\w+)", text)}
    assert triton_internals.ENTRIES.keys() - used == set()


def is_private(name: str) -> bool:
    """Whether the name begins with an underscore; of Python's own, torch's version is public elsewhere."""
    is_pythons_own = name.startswith("__") and name.endswith("__") and name != "__version__"
    return name.startswith("_") and name != "_" and not is_pythons_own


def own_names(trees: list[ast.Module]) -> set[str]:
    """Attributes that pergrad's own classes and modules define."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def private_names(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """What a module takes of torch or Triton that they do not promise."""
    of_tensors = {e.path.rpartition(".")[2] for e in internals.ENTRIES.values() if e.make}
    roots = {"torch", "triton", "tl", "nn", "F", "Tensor", "Function", "_aten"}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                dotted = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                dotted = [f"{module}.{alias.name}" for alias in names]
            case ast.keyword(arg=str(name)) if is_private(name):
                yield f"{name}="
                continue
            case ast.Attribute(value=ast.Name(id=root), attr=name) if root in roots:
                dotted = [f"torch.{name}"]
            case ast.Attribute(value=ast.Name(id="os"), attr="_exit"):  # documented by Python
                continue
            case ast.Attribute(value=value, attr=name) if is_private(name):
                is_of_self = isinstance(value, ast.Name) and value.id in ("self", "cls")
                is_of_torch = name in of_tensors or name not in own
                if not is_of_self and is_of_torch:
                    yield ast.unparse(node)
                continue
            case ast.Constant(value=str(text)):
                yield from re.findall(r"(?:torch|triton)[\w.]*\._\w+", text)
                continue
            case _:
                continue
        for name in dotted:
            first, *rest = name.split(".")
            if first in ("torch", "triton") and any(map(is_private, rest)):
                yield name
            if name.startswith(("triton.knobs", "triton.runtime", "triton.compiler")):
                yield name


def test_private_names_are_used_in_the_runtime_alone() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sources()}
    own = own_names([*trees.values()]) | OF_NAMED_TUPLES
    found = {
        str(path.relative_to(SOURCE)): names
        for path, tree in trees.items()
        if (names := sorted(set(private_names(tree, own))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch.overrides import _pop_mode",
        "from torch._ops import OpOverload",
        "from torch.utils import _pytree as pytree",
        "torch._C._current_graph_task_id()",
        "torch.ops.aten._to_copy.default",
        "t._version",
        "model.layer._parameters.items()",
        "make_fx(step, _allow_non_fake_inputs=True)",
        "Tensor._make_subclass(cls, t)",
        "torch.__version__",
        "'as in torch.nn.utils._per_sample_grad'",
    ],
)
def test_the_search_finds_a_private_name(code: str) -> None:
    own = own_names([ast.parse("self._parameters = 1")])
    assert list(private_names(ast.parse(code), own))


# What happens without one


@pytest.fixture(scope="module")
def without() -> dict[str, Any]:
    """What a run without each entry has given, by alias; "import": by importing pergrad without all."""
    script = Path(__file__).with_name("boundary_run.py")
    paths = [entry.path for entry in internals.ENTRIES.values() if "(" not in entry.path]
    found = subprocess.run(
        [sys.executable, str(script), *paths],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(SOURCE.parent), "OMP_NUM_THREADS": "1"},
    )
    imported, resolved, *runs = map(json.loads, found.stdout.splitlines())
    of_each = {run["alias"]: run for run in runs if "alias" in run}
    crashes = [run["crash"] for run in runs if "alias" not in run]
    assert crashes == []
    return {"import": imported, "resolved": resolved, **of_each}


def test_import_needs_no_private_name(without: dict[str, Any]) -> None:
    assert isinstance(without["import"], list), without["import"]["crash"]
    assert len(without["import"]) > 10  # were deleted indeed


def test_import_resolves_nothing(without: dict[str, Any]) -> None:
    assert without["resolved"] == []


@pytest.mark.parametrize("alias", internals.ENTRIES)
def test_without_the_name_numbers_are_right_or_an_error_says_so(
    without: dict[str, Any], alias: str
) -> None:
    run, entry = without[alias], internals.ENTRIES[alias]
    assert run["asked"] == (alias not in UNASKED)
    for stage, error in run["outcome"].items():
        if error is not None:
            assert entry.instead is None, f"{stage}: {error}"
            assert re.fullmatch(
                rf"PergradError: this version of torch has no `{re.escape(entry.path)}`, which pergrad "
                rf"needs to [^;]+; it is tested with torch {re.escape(TESTED['torch'])}: install one of "
                r"these",
                error,
            ), f"{stage}: {error}"


def test_an_entry_without_a_public_way_is_an_error_that_names_it() -> None:
    entry = Entry("torch._C._nothing_of_that_name", "to test it", "an error")
    with pytest.raises(PergradError, match=r"no `torch._C._nothing_of_that_name`.*2\.11 and 2\.13"):
        entry.resolve()


def test_a_name_that_is_no_entry_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = internals.nothing_of_that_name


def test_a_new_call_of_tritons_leaves_launches_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    entry = triton_internals.ENTRIES["CompiledKernel"]
    assert entry.resolve() is find("triton.compiler.CompiledKernel")
    monkeypatch.setattr(triton_internals, "_CALL", "kernel.run(grid, stream, kernel)")
    assert entry.resolve() is entry.instead


# What the names do


class Seeing(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **kwargs or {})


def test_disabled_modes_see_nothing() -> None:
    with Seeing() as mode, internals.DisableTorchFunction():
        torch.ones(2).sum()
    assert mode.seen == []


def test_subclasses_have_functions_of_their_own_unless_they_are_disabled() -> None:
    assert internals.has_subclass_functions()
    with internals.DisableTorchFunctionSubclass():
        assert not internals.has_subclass_functions()


def test_the_modes_are_those_that_are_open_and_can_be_popped() -> None:
    assert internals.function_modes() == []
    with Seeing() as outer, Seeing() as inner:
        assert internals.function_modes() == [outer, inner]
        with internals.pop_mode() as popped:
            assert popped is inner
            assert internals.function_modes() == [outer]


def in_a_backward(look: Callable[[], Any], **options: Any) -> list[Any]:
    seen: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(look()))
    y.sum().backward(**options)
    return seen


def test_a_graph_task_has_a_number_in_a_backward_alone() -> None:
    assert internals.current_graph_task_id() == -1
    (number,) = in_a_backward(internals.current_graph_task_id)
    assert number >= 0


@pytest.mark.parametrize("keep", [True, False])
def test_a_backward_tells_whether_its_graph_is_kept(keep: bool) -> None:
    assert in_a_backward(internals.keeps_graph, retain_graph=keep) == [keep]


def test_hooks_on_saved_tensors_are_seen() -> None:
    assert internals.top_saved_tensors_hooks(False) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert internals.top_saved_tensors_hooks(False) is not None


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return t * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def ways(alias: str) -> Any:
    """The private and the public way, to be tested for the same."""
    entry = internals.ENTRIES[alias]
    return pytest.mark.parametrize("way", [entry.found(), entry.instead], ids=["private", "public"])


@ways("bind_apply")
def test_a_function_is_applied(way: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    way(None, Triple)(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3]


@ways("batched_gradients")
def test_the_gradients_of_all_samples_are_pulled_back_at_once(way: Any) -> None:
    x, w = torch.rand(3, 1, 2), torch.rand(4, 2, requires_grad=True)
    unused = torch.rand(2, requires_grad=True)
    y, each = torch.cdist(x, w), torch.rand(3, 3, 1, 4)
    found, nothing = way([y], [w, unused], [each], 3)
    expected = [torch.autograd.grad(y, w, g, retain_graph=True)[0] for g in each]
    torch.testing.assert_close(found, torch.stack(expected))
    assert nothing is None


@ways("vmapped")
def test_a_function_runs_on_all_samples_at_once(way: Any) -> None:
    x, y = torch.arange(6.0).view(3, 2), torch.arange(6.0).view(2, 3)
    found = way(lambda a, b, c: [a * b.sum(), c + 1], [x, y, torch.ones(1)], [0, 1, None], 3)
    assert torch.equal(found[0], x * y.sum(0).unsqueeze(1))
    assert torch.equal(found[1], torch.full((3, 1), 2.0))
    with pytest.raises(RuntimeError, match="random"):
        way(lambda a: [a + torch.rand(2)], [x], [0], 3)
    torch.vmap(torch.sin)(x)  # the failed call has left no level behind


@ways("exchange_stance")
def test_compiled_functions_run_eagerly_until_the_old_stance_is_back(way: Any) -> None:
    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    function = torch.compile(lambda x: 2 * x, backend=backend)
    with torch.compiler.set_stance("fail_on_recompile"):
        before = way()
        assert function(torch.ones(1)).item() == 2
        way(before)
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            function(torch.ones(1))
    assert not compiled
    torch.compiler.reset()


def test_a_write_changes_the_version() -> None:
    t = torch.zeros(2)
    before = internals.version_of(t)
    t.add_(1)
    assert internals.version_of(t) == before + 1


def test_a_view_has_a_base() -> None:
    t = torch.zeros(2, 2)
    assert internals.base_of(t) is None
    assert internals.base_of(t[0]) is t
    assert internals.storage_id(t[0].untyped_storage()) == internals.storage_id(t.untyped_storage())
    assert internals.storage_id(t.untyped_storage()) != internals.storage_id(
        t.clone().untyped_storage()
    )


@ways("hooks_of")
def test_hooks_are_called_until_they_are_taken_off(way: Any) -> None:
    seen: list[Tensor] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: None)  # leaves a dictionary
    way(x)[-1] = seen.append
    x.sum().backward()
    way(x).pop(-1, None)
    x.sum().backward()
    assert len(seen) == 1


def test_the_keys_of_hooks_are_listed() -> None:
    x = torch.ones(2, requires_grad=True)
    handle = x.register_hook(lambda _: None)
    assert list(internals.hooks_of(x)) == [handle.id]
    public = internals.ENTRIES["hooks_of"].instead
    assert public is not None
    assert list(public(x)) == []  # those of others are not seen
    public(x)[-3] = lambda _: None
    assert list(public(x)) == [-3]
    assert list(public(x.clone())) == []
    public(x).pop(-3, None)
    assert list(public(x)) == []


def test_hooks_that_wait_for_a_gradient_are_seen_until_they_are_taken_off() -> None:
    x = torch.ones(2, requires_grad=True)
    assert not internals.post_accumulate_hooks_of(x)
    handle = x.register_post_accumulate_grad_hook(lambda _: None)
    assert internals.post_accumulate_hooks_of(x)
    handle.remove()
    assert not internals.post_accumulate_hooks_of(x)


@ways("hook_forward")
def test_hooks_of_a_forward_run_first_and_last_and_are_removed(way: Any) -> None:
    layer, seen = nn.Linear(2, 2), []
    layer.register_forward_pre_hook(lambda *_: seen.append("own before"))
    layer.register_forward_hook(lambda *_: seen.append("own after"))
    remove = way(
        layer,
        lambda module, args, kwargs: seen.append(("before", len(args), *kwargs)),
        lambda module, args, output: seen.append(("after", len(args))),
    )
    layer(input=torch.ones(1, 2))
    assert seen == [("before", 0, "input"), "own before", "own after", ("after", 0)]
    seen.clear()
    with pytest.raises(RuntimeError, match="shapes"):
        layer(torch.ones(1, 3))
    assert seen == [("before", 1), "own before", ("after", 1)]
    remove()
    seen.clear()
    layer(torch.ones(1, 2))
    assert seen == ["own before", "own after"]


def test_backward_hooks_of_modules_are_seen_and_may_be_replaced() -> None:
    layer, seen = nn.Linear(2, 2), []
    assert not internals.backward_hooks_of(layer)
    assert not internals.backward_pre_hooks_of(layer)
    layer.register_full_backward_hook(lambda *_: seen.append("after"))
    layer.register_full_backward_pre_hook(lambda *_: seen.append("before"))
    for hooks in (internals.backward_hooks_of(layer), internals.backward_pre_hooks_of(layer)):
        (key,) = hooks
        own = hooks[key]
        hooks[key] = lambda *args, own=own: (seen.append("guarded"), own(*args))[0]
    layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert seen == ["guarded", "before", "guarded", "after"]


@pytest.mark.parametrize(
    "alias", ["post_accumulate_hooks_of", "backward_hooks_of", "backward_pre_hooks_of"]
)
def test_without_its_name_no_hook_is_noticed(alias: str) -> None:
    public = internals.ENTRIES[alias].instead
    assert public is not None
    assert public(nn.Linear(2, 2)) is None


def test_tensors_inside_of_a_transformation_are_told_apart() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(internals.is_transformed(x))
        return x.sum()

    x = torch.ones(3, 2)
    look(x)
    torch.vmap(look)(x)
    torch.func.grad(look)(x)
    look(x)
    assert seen == [False, True, True, False]


def test_a_module_tells_whether_ranks_may_have_left() -> None:
    class Joined(Joinable):
        join_device = join_process_group = join_hook = None

        def __init__(self) -> None:
            super().__init__()

    public = internals.ENTRIES["join_config_of"].instead
    assert public is not None
    for config_of in (internals.join_config_of, public):
        assert config_of(Joined()).enable is False


@ways("copy_each")
def test_tensors_are_copied(way: Any) -> None:
    targets = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3)]
    way(targets, [torch.ones(2), torch.ones(3)])
    assert [t.sum().item() for t in targets] == [2, 3]


@ways("is_any_autocast_enabled")
def test_autocast_is_noticed(way: Any) -> None:
    assert not way()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert way()


@ways("DisableAutocast")
def test_autocast_can_be_switched_off(way: Any) -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with way():
            assert (x @ x).dtype is torch.float32
        assert (x @ x).dtype is torch.bfloat16


@pytest.mark.parametrize("alias", ["children_of", "parameters_of", "buffers_of"])
def test_both_ways_to_walk_over_a_module_agree(alias: str) -> None:
    entry, norm = internals.ENTRIES[alias], nn.BatchNorm1d(2)
    model = nn.Sequential(norm, nn.ReLU())
    for module in (model, norm):
        assert entry.instead is not None
        of_private = {k: v for k, v in entry.found()(module).items() if v is not None}
        assert [*of_private] == [*entry.instead(module)]
        assert all(a is b for a, b in zip(of_private.values(), entry.instead(module).values()))  # noqa: B905


def test_nested_arguments_are_flattened() -> None:
    leaves, spec = internals.pytree.tree_flatten(((1, {"a": 2}), {}))
    assert leaves == [1, 2]
    assert internals.pytree.tree_unflatten([3, 4], spec) == ((3, {"a": 4}), {})


@ways("trace")
def test_a_trace_has_no_values(way: Any) -> None:
    seen: list[bool] = []

    def step(x: Tensor) -> Tensor:
        seen.append(isinstance(x, internals.FakeTensor))
        return x * 2

    graph = way(step)(torch.ones(2))
    assert seen == [True]
    assert graph(torch.ones(2)).tolist() == [2, 2]


def test_a_trace_may_close_over_tensors() -> None:
    weight = torch.ones(2)
    assert internals.trace(lambda x: x * weight)(torch.ones(2))(torch.ones(2)).tolist() == [1, 1]


@ways("BelowAutograd")
def test_below_autograd_there_is_no_graph(way: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    with way():
        assert not (x * 2).requires_grad


def test_a_schema_tells_what_is_written_to() -> None:
    arguments = internals.schema_of(torch.ops.aten.add_.Tensor).arguments
    assert [a.alias_info is not None and a.alias_info.is_write for a in arguments][:2] == [
        True,
        False,
    ]


def test_nodes_of_norms_have_their_statistics() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    for output in (F.layer_norm(x, (4,)), F.group_norm(x.view(3, 4, 1), 1)):
        mean, inverse = (
            getattr(output.grad_fn, internals.STATISTICS[name]) for name in ("mean", "inverse")
        )
        torch.testing.assert_close(mean.flatten(), x.mean(1))
        wanted = (x.var(1, correction=0) + 1e-5).rsqrt()
        torch.testing.assert_close(inverse.flatten(), wanted)


def test_backward_passes_call_the_engine_by_its_name() -> None:
    for function in (torch.autograd.backward, torch.autograd.grad):
        assert internals.ENGINE in function.__globals__
        assert internals.ENGINE in function.__code__.co_names


def test_experts_are_found_by_their_private_name() -> None:
    (grouped,) = internals.present("grouped_mm")
    assert grouped in pergrad.rules.registry.DECOMPOSITIONS


@pytest.mark.parametrize("alias", ["to_copy", "unsafe_view", "cpu_attention"])
def test_the_operator_is_in_a_trace(alias: str) -> None:
    q = torch.randn(2, 3, 8, 16)
    call = {
        "to_copy": lambda q: q.to(torch.bfloat16),
        "unsafe_view": lambda q: q.transpose(0, 1).contiguous() @ q[0, 0].T,
        "cpu_attention": functools.partial(F.scaled_dot_product_attention, key=q, value=q),
    }[alias]
    targets = {node.target for node in internals.trace(call)(q).graph.nodes}
    assert getattr(internals, alias) in targets
