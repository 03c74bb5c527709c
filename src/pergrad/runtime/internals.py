"""Lists the private names of torch that pergrad uses, with their purpose and the behaviour without them.

Importing this module resolves nothing: `internals.FakeTensor` is looked up on first access and is an
attribute of this module from then on. Write `internals.name`, never `from ... import name`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from pergrad.runtime import boundary
from pergrad.runtime.boundary import Entry, find, resolver

__all__ = [
    "ALPHA",
    "CONTROL_FLOW",
    "DIMS",
    "ENGINE",
    "ENTRIES",
    "EXPONENT",
    "OPERANDS",
    "OWN_OPERATORS",
    "SIZES",
    "STATISTICS",
    "WEIGHT",
    "present",
]

# Attributes in which the autograd nodes of layer and group norms keep the mean and 1 / std. If a node lacks
# them, the rule computes both.
STATISTICS = {"mean": "_saved_result1", "inverse": "_saved_result2"}

# Attributes in which autograd nodes keep the operands of products and quotients, the factor on the second
# term of a sum, the weights of a loss, the exponent of a power, and the shape and dimensions that a sum runs
# over. Without them, terms that are averaged by hand before they are added up are not refused.
OPERANDS = ("_saved_self", "_saved_other")
ALPHA, WEIGHT, EXPONENT = "_saved_alpha", "_saved_weight", "_saved_exponent"
SIZES, DIMS = "_saved_self_sym_sizes", "_saved_dim"

# The global of `torch.autograd.backward` and `grad` that runs the autograd engine. Without it the recorder
# also intercepts their Python code, which takes longer.
ENGINE = "_engine_run_backward"

# Modules of torch's own operators, such as `torch.ops.aten.sin`. An operator of another module is treated as
# a function of the user, which takes longer.
OWN_OPERATORS = frozenset(["torch._ops.aten", "torch._ops.prims"])

# The module of torch's operators that are given functions, such as `torch.cond`. One of another module is
# not looked into: what its functions close over has no gradient.
CONTROL_FLOW = "torch.ops.higher_order"


# -- objects that callers use in place of the named ones


def _reader(attribute: str, owner: Callable[[], Any]) -> Callable[[], Callable[[Any], Any]]:
    """Returns a `make` for the getter of an attribute; `attrgetter` is as fast as plain access."""

    def make() -> Callable[[Any], Any]:
        getattr(owner(), attribute)
        return attrgetter(attribute)

    return make


def _apply_of_base() -> Callable[..., Any]:
    bind: Callable[..., Any] = find("torch._C._FunctionBase").__dict__["apply"].__get__
    return bind


def _trace() -> Callable[..., Any]:
    if "_allow_non_fake_inputs" not in inspect.signature(make_fx).parameters:
        raise AttributeError
    return functools.partial(make_fx, tracing_mode="fake", _allow_non_fake_inputs=True)


def _stance_exchanger() -> Callable[..., Any]:
    """Returns a function that sets the stance of the compiler, by default eager, and returns the old one."""
    compiler = find("torch._dynamo.eval_frame")
    eager = compiler.DynamoStance("force_eager")
    _ = compiler._stance  # an AttributeError if it has moved

    def exchange(stance: Any = eager) -> Any:
        before, compiler._stance = compiler._stance, stance
        return before

    return exchange


def _batched_gradients() -> Callable[..., Any]:
    """Returns `grad(is_grads_batched=True)` without the cycles that torch's own leaves.

    It has batching rules of its own; those of `torch.vmap` give a wrong gradient for `torch.cdist`.
    """
    enter, leave = map(
        find, ("torch._C._vmapmode_increment_nesting", "torch._C._vmapmode_decrement_nesting")
    )
    add, remove = find("torch._add_batch_dim"), find("torch._remove_batch_dim")

    def gradients(
        outputs: Sequence[Tensor],
        leaves: Sequence[Tensor],
        each: Sequence[Tensor],
        count: int,
    ) -> list[Tensor | None]:
        level = enter()
        try:
            given = [add(g, 0, level) for g in each]
            found = torch.autograd.grad(
                outputs, leaves, given, retain_graph=True, allow_unused=True
            )
            return [None if g is None else remove(g, level, count, 0) for g in found]
        finally:
            leave()

    return gradients


def _by_fsdp(function: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """Returns a `make` for a function of a module that `fully_shard` shards."""

    def make() -> Callable[..., Any]:
        find("torch.distributed.fsdp.FSDPModule._get_fsdp_state")
        return function

    return make


def _state_of_fsdp(unit: Any) -> Any:
    return unit._get_fsdp_state()


def _groups_of_fsdp(unit: Any) -> list[Any]:
    """Returns the groups of parameters of a module; older versions of torch have one."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _begin_fsdp(unit: Any) -> None:
    unit._get_fsdp_state()._lazy_init()


def _is_managed_by_fsdp(module: nn.Module) -> bool:
    return bool(getattr(module, "_is_fsdp_managed_module", False))


def _vmapped() -> Callable[..., Any]:
    """Returns `torch.vmap` of a function that returns a list, without the cycles that torch's own leaves."""
    functorch = find("torch._C._functorch")
    enter, leave = functorch._vmap_increment_nesting, functorch._vmap_decrement_nesting
    add, remove = functorch._add_batch_dim, functorch._remove_batch_dim
    find("torch._functorch.vmap.lazy_load_decompositions")()

    def vmapped(
        function: Callable[..., list[Any]],
        tensors: Sequence[Tensor],
        dims: Sequence[int | None],
        count: int,
    ) -> list[Any]:
        level = enter(count, "error")
        try:
            pairs = zip(tensors, dims, strict=True)
            found = function(*[t if d is None else add(t, d, level) for t, d in pairs])
            return [remove(t, level, count, 0) if isinstance(t, Tensor) else t for t in found]
        finally:
            leave()

    return vmapped


def _forward_hooker() -> Callable[..., Callable[[], None]]:
    """Returns `boundary.hook_forward` without handles, whose weak references take most of its time."""
    tables_of = attrgetter(
        *("_forward_hooks", "_forward_hooks_always_called"),
        *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    )
    tables_of(nn.Module())  # an AttributeError if one has moved
    keys = itertools.count(-1, -1)  # those of torch's own handles are not negative
    public = nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook

    def hook(
        module: nn.Module, before: Callable[..., None], after: Callable[..., None]
    ) -> Callable[[], None]:
        kind = type(module)
        if (kind.register_forward_hook, kind.register_forward_pre_hook) != public:
            return boundary.hook_forward(module, before, after)
        key, tables = next(keys), tables_of(module)
        afters, always, befores, with_kwargs = tables
        afters[key], always[key], befores[key], with_kwargs[key] = after, True, before, True
        befores.move_to_end(key, last=False)

        def remove() -> None:
            for table in tables:
                table.pop(key, None)

        return remove

    return hook


def _watching_operators() -> Callable[..., Any]:
    """Returns a context, made from a function that sees each operator and its arguments before it runs."""
    mode: Any = find("torch.utils._python_dispatch.TorchDispatchMode")

    class Watching(mode):
        supports_higher_order_operators = True

        def __init__(self, see: Callable[..., None]) -> None:
            super().__init__()
            self._see = see

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self._see(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    return Watching


def _replacing_operators() -> Callable[..., Any]:
    """Returns a context, made from functions by operator, which get the operator and its arguments."""
    mode: Any = find("torch.utils._python_dispatch.TorchDispatchMode")

    class Replacing(mode):
        supports_higher_order_operators = True

        def __init__(self, by_operator: Mapping[Any, Callable[..., Any]]) -> None:
            super().__init__()
            self._by_operator = by_operator

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            other = self._by_operator.get(func)
            if other is None:
                return func(*args, **(kwargs or {}))
            return other(func, *args, **(kwargs or {}))

    return Replacing


def _plan_flushers() -> Callable[[], dict[type, Callable[[Any], None]]]:
    """Returns a function for the classes of scripted functions and methods, and what drops their plans."""
    classes = find("torch._C.ScriptFunction"), find("torch._C.ScriptMethod")
    flushers = {scripted: scripted._debug_flush_compilation_cache for scripted in classes}
    return flushers.copy


def _forward_level() -> Callable[[], int]:
    """Returns a function without a frame of Python, since it runs for every use of a weight."""
    module = find("torch.autograd.forward_ad")
    _ = module._current_level  # an AttributeError if it has moved
    return functools.partial(getattr, module, "_current_level")


def _tensor() -> type[Tensor]:
    return Tensor


def _joinable() -> Any:
    joinable = find("torch.distributed.algorithms.Joinable")

    def init(self: Any) -> None:
        joinable.__init__(self)  # sets the attribute

    return type(
        "_Any", (joinable,), dict.fromkeys(joinable.__abstractmethods__) | {"__init__": init}
    )()


def _operator() -> Any:
    return torch.ops.aten.detach.default


_ERROR = "an error that says which name is missing"

# -- the table

ENTRIES: Mapping[str, Entry] = {
    # Modes and subclasses
    "DisableTorchFunction": Entry(
        "torch._C.DisableTorchFunction",
        "to run functions unseen by modes and subclasses",
        _ERROR,
    ),
    "DisableTorchFunctionSubclass": Entry(
        "torch._C.DisableTorchFunctionSubclass",
        "to run functions on an ExpandedWeight's values",
        _ERROR,
    ),
    "has_subclass_functions": Entry(
        "torch._C._is_torch_function_enabled",
        "to let a subclass of Tensor change what a function returns, as long as it asks for that",
        _ERROR,
    ),
    "function_modes": Entry(
        "torch.overrides._get_current_function_mode_stack",
        "to ask whether a recording is open",
        _ERROR,
    ),
    "pop_mode": Entry(
        "torch.overrides._pop_mode_temporarily",
        "to handle an autograd.Function as a mode handles functions",
        _ERROR,
    ),
    "pop_uppermost_mode": Entry(
        "torch.overrides._pop_mode", "to record beneath modes that are active already", _ERROR
    ),
    "push_mode": Entry(
        "torch.overrides._push_mode", "to record beneath modes that are active already", _ERROR
    ),
    "FakeTensor": Entry(
        "torch._subclasses.fake_tensor.FakeTensor",
        "to tell tensors of a trace from those with values",
        "no tensor counts as traced, and steps are not compiled",
        instead=boundary.Never,
    ),
    "set_frame_callback": Entry(
        "torch._C._dynamo.eval_frame.set_eval_frame",
        "to run a recording inside of a compiled function eagerly",
        "a recording inside of a compiled function may fail",
        instead=boundary.unchanged_callback,
    ),
    "exchange_stance": Entry(
        "torch._dynamo.eval_frame._stance",
        "to run compiled functions eagerly, at a tenth of the public function's cost",
        "`torch.compiler.set_stance` is used",
        instead=boundary.exchange_stance,
        make=_stance_exchanger,
    ),
    # Autograd
    "current_graph_task_id": Entry(
        "torch._C._current_graph_task_id",
        "to tell a checkpoint's recomputation from a forward",
        _ERROR,
    ),
    "keeps_graph": Entry(
        "torch._C._autograd._get_current_graph_task_keep_graph",
        "to free the saved tensors of a function as soon as its backward has run",
        "they are freed with the graph",
        instead=boundary.yes,
    ),
    "top_saved_tensors_hooks": Entry(
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "to see whether saved tensors are packed, as in a checkpoint",
        _ERROR,
    ),
    "bind_apply": Entry(
        "torch._C._FunctionBase.apply",
        "to apply an autograd.Function without functorch's preparations",
        "it is applied with them",
        instead=boundary.apply_of,
        make=_apply_of_base,
    ),
    "batched_gradients": Entry(
        "torch._C._vmapmode_increment_nesting",
        "to pull back the gradients of all samples at once, and leave no garbage",
        "`is_grads_batched` is used, which leaves objects that a garbage collector frees",
        instead=boundary.batched_gradients,
        make=_batched_gradients,
    ),
    "vmapped": Entry(
        "torch._C._functorch._vmap_increment_nesting",
        "to run a function on all samples at once, and leave no garbage",
        "`torch.vmap` is used, which leaves objects that a garbage collector frees",
        instead=boundary.vmapped,
        make=_vmapped,
    ),
    # Tensors
    "is_transformed": Entry(
        "torch._C._functorch.is_functorch_wrapped_tensor",
        "to see whether torch.vmap or torch.func runs a function",
        _ERROR,
    ),
    "transforms": Entry(
        "torch._functorch.apis",
        "to give each sample its own copy of the weights inside of torch.vmap",
        _ERROR,
    ),
    "level_of_transform": Entry(
        "torch._C._functorch.maybe_current_level",
        "to know which torch.vmap maps the samples",
        _ERROR,
    ),
    "forward_level": Entry(
        "torch.autograd.forward_ad._current_level",
        "to refuse forward-mode differentiation, whose tangents no tap carries",
        _ERROR,
        make=_forward_level,
    ),
    "outside_of_transform": Entry(
        "torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack",
        "to make these copies outside of torch.vmap",
        _ERROR,
    ),
    "outside_of_trace": Entry(
        "torch.utils._python_dispatch._disable_current_modes",
        "to compute, while a step is traced, what does not depend on its inputs",
        "a step that indexes by such tensors is not compiled",
        instead=contextlib.nullcontext,
    ),
    "add_mapped_dim": Entry(
        "torch._C._functorch._add_batch_dim",
        "to map these copies over the samples",
        _ERROR,
    ),
    "post_accumulate_hooks_of": Entry(
        "torch.Tensor._post_accumulate_grad_hooks",
        "to refuse parameters whose hooks would not run",
        "such hooks are not noticed",
        instead=boundary.none,
        make=_reader("_post_accumulate_grad_hooks", _tensor),
    ),
    "version_of": Entry(
        "torch.Tensor._version",
        "to notice that a tensor was written to in place",
        _ERROR,
        make=_reader("_version", _tensor),
    ),
    "base_of": Entry(
        "torch.Tensor._base",
        "to find the tensor behind a view",
        _ERROR,
        make=_reader("_base", _tensor),
    ),
    "hooks_of": Entry(
        "torch.Tensor._backward_hooks",
        "to hook many tensors at once, and to notice hooks of the user",
        "tensors are hooked one by one, and hooks of the user are not noticed",
        instead=boundary.Hooks,
        make=_reader("_backward_hooks", _tensor),
    ),
    "storage_id": Entry(
        "torch.UntypedStorage._cdata",
        "to tell which tensors of a trace share their memory",
        _ERROR,
        make=_reader("_cdata", functools.partial(torch.UntypedStorage, 0)),
    ),
    "copy_each": Entry(
        "torch._foreach_copy_",
        "to copy many tensors in one launch",
        "tensors are copied one by one",
        instead=boundary.copy_each,
    ),
    # Autocast
    "is_any_autocast_enabled": Entry(
        "torch._C._is_any_autocast_enabled",
        "to check for autocast on all devices in one call",
        "each device is checked",
        instead=boundary.is_any_autocast_enabled,
    ),
    "DisableAutocast": Entry(
        "torch._C._DisableAutocast",
        "to run a traced step, which contains its casts, without autocast",
        "`torch.autocast(enabled=False)` is used",
        instead=boundary.without_autocast,
    ),
    # Modules
    "children_of": Entry(
        "torch.nn.Module._modules",
        "to walk over a model faster than its iterators do",
        "its iterators are used",
        instead=boundary.children,
        make=_reader("_modules", nn.Module),
    ),
    "parameters_of": Entry(
        "torch.nn.Module._parameters",
        "to walk over a model faster than its iterators do",
        "its iterators are used",
        instead=boundary.own_parameters,
        make=_reader("_parameters", nn.Module),
    ),
    "buffers_of": Entry(
        "torch.nn.Module._buffers",
        "to walk over a model faster than its iterators do",
        "its iterators are used",
        instead=boundary.own_buffers,
        make=_reader("_buffers", nn.Module),
    ),
    "hook_forward": Entry(
        "torch.nn.Module._forward_hooks",
        "to hook a module at a sixth of the cost of two handles",
        "hooks are registered by their functions",
        instead=boundary.hook_forward,
        make=_forward_hooker,
    ),
    "backward_hooks_of": Entry(
        "torch.nn.Module._backward_hooks",
        "to notice backward hooks of modules that change gradients",
        "such hooks are not noticed",
        instead=boundary.none,
        make=_reader("_backward_hooks", nn.Module),
    ),
    "backward_pre_hooks_of": Entry(
        "torch.nn.Module._backward_pre_hooks",
        "to notice backward hooks of modules that change gradients",
        "such hooks are not noticed",
        instead=boundary.none,
        make=_reader("_backward_pre_hooks", nn.Module),
    ),
    "pytree": Entry(
        "torch.utils._pytree",
        "to find the tensors in nested arguments",
        _ERROR,
    ),
    # Many processes
    "join_config_of": Entry(
        "torch.distributed.algorithms.Joinable._join_config",
        "to notice that ranks may have left a job in the context `Join`",
        "it is not noticed, and a reduction over ranks waits for them until it times out",
        instead=boundary.not_joining,
        make=_reader("_join_config", _joinable),
    ),
    "fsdp_state_of": Entry(
        "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
        "to turn off the casts of mixed-precision policies where a step is repeated in float32",
        _ERROR,
        make=_by_fsdp(_state_of_fsdp),
    ),
    "fsdp_groups_of": Entry(
        "torch.distributed.fsdp.FSDPModule._get_fsdp_state (its groups of parameters)",
        "to gather shards unseen, and to keep a module from communicating while its parameters are whole",
        _ERROR,
        make=_by_fsdp(_groups_of_fsdp),
    ),
    "begin_fsdp": Entry(
        "torch.distributed.fsdp.FSDPModule._get_fsdp_state (its _lazy_init)",
        "to find the outermost sharded module before its first call",
        _ERROR,
        make=_by_fsdp(_begin_fsdp),
    ),
    "is_managed_by_fsdp": Entry(
        "torch.distributed.fsdp.fully_shard (_is_fsdp_managed_module of a module)",
        "to notice that a module around the recorded one shards its parameters",
        "it is not noticed, and torch refuses the call",
        make=lambda: _is_managed_by_fsdp,
    ),
    # CUDA
    "current_device": Entry(
        "torch._C._cuda_getDevice",
        "to read the current GPU in each call of a backward",
        "torch.cuda is used",
        instead=torch.cuda.current_device,
    ),
    "current_stream": Entry(
        "torch._C._cuda_getCurrentStream",
        "to read the current stream in each call of a backward",
        "torch.cuda is used",
        instead=boundary.current_stream,
    ),
    "current_raw_stream": Entry(
        "torch._C._cuda_getCurrentRawStream",
        "to launch a kernel in the current stream",
        "torch.cuda is used",
        instead=boundary.current_raw_stream,
    ),
    # Compiled steps
    "trace": Entry(
        "torch.fx.experimental.proxy_tensor.make_fx(_allow_non_fake_inputs)",
        "to trace a step that closes over tensors",
        "such a step is not compiled",
        instead=functools.partial(make_fx, tracing_mode="fake"),
        make=_trace,
    ),
    "watching_operators": Entry(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "to notice that a traced step seeds the random numbers that it draws",
        "steps are not compiled",
        make=_watching_operators,
    ),
    "replacing_operators": Entry(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "to run max pooling with channels last in an audit on a CPU",
        "it takes two to four times as long",
        instead=contextlib.nullcontext,
        make=_replacing_operators,
    ),
    "plan_flushers": Entry(
        "torch._C.ScriptFunction._debug_flush_compilation_cache",
        "to trace scripted functions that earlier calls have fused into kernels",
        "on a GPU a step that calls such functions is not compiled",
        instead=dict,
        make=_plan_flushers,
    ),
    "compile_fx": Entry(
        "torch._inductor.compile_fx.compile_fx",
        "to compile a traced step",
        "traced steps run uncompiled, with a warning",
    ),
    "force_stride_order": Entry(
        "torch._inductor.inductor_prims.force_stride_order",
        "to make the compiler save the inputs of layer norms",
        "compiled steps take more memory",
        instead=boundary.unchanged,
    ),
    "BelowAutograd": Entry(
        "torch._C._AutoDispatchBelowAutograd",
        "to run a traced step without autograd's dispatch",
        "it runs under no_grad, which takes longer",
        instead=torch.no_grad,
    ),
    "schema_of": Entry(
        "torch._ops.OpOverload._schema",
        "to find the tensors that a traced step changes in place",
        _ERROR,
        make=_reader("_schema", _operator),
    ),
    "compiler_config": Entry(
        "torch._dynamo.config",
        "to trace a step that calls functions of `torch.compile`",
        "such a step is not compiled",
        instead=boundary.NoConfig,
    ),
    # Operators
    "grouped_mm": Entry(
        "torch._grouped_mm",
        "to recognise grouped matrix products, as of experts, by their private name",
        "only their public name is recognised",
    ),
    "to_copy": Entry(
        "torch.ops.aten._to_copy.default",
        "to find casts in a traced step",
        "casts are not joined",
        instead=boundary.Never,
    ),
    "unsafe_view": Entry(
        "torch.ops.aten._unsafe_view.default",
        "to find reshapes in a traced step",
        "products reshaped this way are not rewritten",
        instead=boundary.Never,
    ),
    "cpu_attention": Entry(
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default",
        "to find attention over few positions in a traced step",
        "it is not rewritten, which takes longer",
        instead=boundary.Never,
    ),
    "cpu_attention_backward": Entry(
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
        "to find attention over few positions in a traced step",
        "it is not rewritten, which takes longer",
        instead=boundary.Never,
    ),
    "fused_lstm_cell": Entry(
        "torch.ops.aten._thnn_fused_lstm_cell",
        "to run a step of an LSTM on a GPU",
        _ERROR,
    ),
    "fused_lstm_cell_backward": Entry(
        "torch.ops.aten._thnn_fused_lstm_cell_backward_impl",
        "to run a step of an LSTM's backward on a GPU",
        _ERROR,
    ),
}

__getattr__ = resolver(ENTRIES, globals())


def present(alias: str) -> tuple[Any, ...]:
    """Returns the object of an entry in a tuple, or () if this torch lacks it; for tables built on import."""
    try:
        return (ENTRIES[alias].found(),)
    except (AttributeError, ImportError):
        return ()
