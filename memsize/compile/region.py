"""The region in which `torch.compile` compiles the code of a run.

Dynamo runs on the run's own stand-ins, and breaks graphs where it would. While it traces, PyTorch's functions are the
originals, by whose identity it knows them.

Source: torch/_dynamo/convert_frame.py (`CatchErrorsWrapper`), torch/_dynamo/trace_rules.py.
"""

from __future__ import annotations

import gc
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, Final, cast

import torch
import torch._dynamo as dynamo
from torch._dynamo import compiled_autograd, convert_frame, device_interface, symbolic_convert, trace_rules
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch._dynamo.external_utils import wrap_inline
from torch._dynamo.guards import CheckFunctionManager
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.variables import (
    ConstantVariable,
    TensorVariable,
    UnspecializedNNModuleVariable,
    torch as functions_of_torch,
)
from torch._dynamo.variables.ctx_manager import CUDADeviceVariable
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter
from torch.optim import Optimizer, optimizer
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memsize.compile.backend import Compiler
from memsize.compile.devices import CPU, META
from memsize.compile.generated import running_ledger
from memsize.compile.gpu import forget_device, lacking
from memsize.compile.shortcuts import tracing_shortcuts
from memsize.device.cards import DeviceProperties
from memsize.processes.patches import Patch, assigned, calling, wrapping
from memsize.processes.simulation import open_simulation
from memsize.spec.scenario import CompileMode
from memsize.spec.stack import Release
from memsize.torch_internals.meta import KEY
from memsize.torch_internals.pytree import tensors_in
from memsize.tracing.named_devices import named_gpu
from memsize.tracing.overrides import Compiles, compilation
from memsize.tracing.run import Run
from memsize.tracing.saved_tensors import functional_transforms_suspended

_PACKAGE: Final = Path(__file__).parents[1]
_PACKAGES: Final = _PACKAGE / "virtual" / "packages"
_TRACED: Final = {_PACKAGES / "flash_attn.py", _PACKAGES / "flash_attn_3.py"}
"""Simulated packages that Dynamo traces, as it does the real ones, whose kernels are operators."""
_SKIPPED: Final = [
    str(path)
    for folder in (_PACKAGE, _PACKAGES.parent, _PACKAGES)
    for path in folder.iterdir()
    if path not in {_PACKAGES.parent, _PACKAGES, *_TRACED}
]


@contextmanager
def compiling(compiler: Compiler, part: Compiles | None = None) -> Iterator[None]:
    """While open, `torch.compile` compiles with `compiler`; afterwards nothing of it is left."""
    trace_rules.SKIP_DIRS.extend(_SKIPPED)
    trace_rules._recompile_re()
    dynamo.utils.common_constant_types.add(DeviceProperties)
    forget_device()
    patches: list[Patch] = [
        wrapping(CatchErrorsWrapper, "__call__", _traced, compiler),
        wrapping(convert_frame, "_compile", _compiled_frame),
        wrapping(convert_frame, "exceeds_recompile_limit", _limited, compiler),
        wrapping(CheckFunctionManager, "__init__", _guarding),
        wrapping(DDPOptimizer, "compile_fn", _divided),
        wrapping(FakeTensorMode, "__init__", _accepting),
        wrapping(FakeTensorMode, "dispatch", _on_stand_ins),
        wrapping(torch._ops, "_compute_keyset", _beneath_kernels),
        (TensorVariable, "specialize", staticmethod(calling(_specialized, TensorVariable.specialize))),
        wrapping(dynamo.utils, "run_node", _run_on_stand_ins),
        wrapping(Interpreter, "call_function", _call_on_stand_ins),
        wrapping(Interpreter, "call_method", _call_on_stand_ins),
        wrapping(UnspecializedNNModuleVariable, "call_function", _inlined),
        wrapping(OptimizerVariable, "call_method", _grouped),
        wrapping(symbolic_convert.InstructionTranslatorBase, "import_source", _imported),
        wrapping(torch._TorchCompileInductorWrapper, "__call__", _compiled, compiler),
        wrapping(dynamo, "optimize", _optimized),
        wrapping(torch._C._autograd, "_saved_tensors_hooks_disable", _disabled_for_others),
        (compiled_autograd, "_enable", contextmanager(partial(_backward_by_graph, compiler))),
        # `with torch.cuda.device(…)` in a graph, which allocates on the GPU of its inputs
        (CUDADeviceVariable, "enter", lambda *_: ConstantVariable.create(None)),
        (CUDADeviceVariable, "exit", lambda *_: ConstantVariable.create(False)),
        (device_interface, "caching_worker_device_properties", {}),
        (device_interface, "caching_worker_current_devices", {}),
        *tracing_shortcuts(),
    ]
    try:
        with (
            open_simulation() as simulation,
            simulation.with_part(Compiles, part or Compiles()),
            simulation.patches.applied(patches),
            dynamo.config.patch(run_gc_after_compile=False),
            torch.compiler.set_stance("default"),
            _quiet(),
        ):
            yield
            compiler.conclude()
    finally:
        dynamo.utils.common_constant_types.discard(DeviceProperties)
        del trace_rules.SKIP_DIRS[-len(_SKIPPED) :]
        trace_rules._recompile_re()
        forget_device()
        dynamo.reset()


def rules(release: Release | None) -> str:
    """Say whose rules compiled code follows where `release` of PyTorch was asked for; None is the installed one."""
    off = len(lacking(release))
    older = (
        f", without {off} of its optimizations, which {'.'.join(map(str, release))} lacks" if release and off else ""
    )
    return (
        f"compiled by the rules of PyTorch {torch.__version__.partition('+')[0]}{older}: what torch.compile "
        "recomputes, fuses and reuses differs between releases; choices that it makes by measured times are assumed"
    )


_LOGGERS: Final = ("torch._dynamo", "torch._functorch", "torch._inductor")


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the compiler's warnings: they are about speed on a GPU that isn't there."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


_STEP_WITH_HOOKS: Final = next(c for c in Optimizer.profile_hook_step.__code__.co_consts if isinstance(c, CodeType))


def _traced(compiler: Compiler, original: Callable[..., Any], wrapper: Any, frame: Any, *args: Any) -> Any:
    """Trace a frame, among PyTorch's own functions.

    The hooks by which a run watches its optimizers' steps are no part of what is compiled: Dynamo breaks the graph of a
    step within them in any case.
    """
    part = compilation()
    if part is None:
        return original(wrapper, frame, *args)
    if frame.f_code is _STEP_WITH_HOOKS:
        return ConvertFrameReturn()
    _fold(torch.is_autocast_enabled, torch.get_autocast_dtype)
    with (
        _disable_current_modes(),
        part.traced(),
        functional_transforms_suspended(),
        assigned(part, "is_tracing", True),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # PyTorch's, about its own reading of attributes
        try:
            return original(wrapper, frame, *args)
        except Exception:
            compiler.is_answered = True  # the program meets the reason
            raise
        finally:
            if part.leaves_cycles:
                part.leaves_cycles = False
                gc.collect(1)


def _fold(*answers: Callable[..., Any]) -> None:
    """Let Dynamo call these functions while it traces, as it does PyTorch's own in whose place they stand."""
    rules = trace_rules.get_torch_obj_rule_map()
    folded = cast("dict[Any, None]", functions_of_torch.constant_fold_functions)
    for answer in answers:
        rules[answer], folded[answer] = functions_of_torch.TorchInGraphFunctionVariable, None


def _compiled_frame(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Note that tracing leaves cycles, which hold the values of frames: PyTorch would collect while its own frames hold
    most of them.
    """
    if part := compilation():
        part.leaves_cycles = True
    return original(*args, **options)


def _limited(compiler: Compiler, original: Callable[..., tuple[bool, str]], *args: Any) -> tuple[bool, str]:
    """Note that code runs eagerly since it was compiled too often."""
    exceeded, limit = original(*args)
    if exceeded:
        compiler.note(_TOO_OFTEN.format(getattr(dynamo.config, limit), limit))
    return exceeded, limit


_TOO_OFTEN: Final = (
    "a function was compiled {} times, for arguments of other kinds or sizes, and runs eagerly for further ones, as on "
    "a GPU (torch._dynamo.config.{}); dynamic=True compiles it once for all sizes"
)


class _Transparent(TorchDispatchMode):
    """Changes nothing, but that tensors have the dispatch keys that they have in a run, beneath its own modes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _guarding(original: Callable[..., None], *args: Any, **options: Any) -> None:
    """Guards compare the dispatch keys of tensors, and run where the modes of the run are active: they see the keys of
    those that were entered before something was compiled.
    """
    with _Transparent() if _counts_modes() else nullcontext():  # type: ignore[no-untyped-call]
        original(*args, **options)


_counts_modes: Final[Callable[[], bool]] = getattr(
    _python_dispatch, "is_in_any_mode_without_ignore_compile_internals", lambda: True
)


def _backward_by_graph(compiler: Compiler, *_args: Any, **_options: Any) -> Iterator[None]:
    """In place of compiled autograd, whose one graph of a backward is made as autograd's engine would run it."""
    compiler.note(BY_GRAPH)
    yield


BY_GRAPH: Final = (
    "compiled autograd is not followed: the backward of each compiled graph is compiled, and the rest runs eagerly"
)


def _divided(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The graph that DDP's buckets divide runs as a function: it is no layer of the model."""
    compiled = original(*args, **options)
    return compiled.forward if isinstance(compiled, GraphModule) else compiled


def _compiled(
    compiler: Compiler,
    original: Callable[..., Any],
    wrapper: Any,
    module: GraphModule,
    inputs: Sequence[Any],
    *,
    config_patches: dict[str, Any] | None = None,
) -> Any:
    """Compile a graph with the options of its call of `torch.compile`."""
    return compiler(module, inputs, {**wrapper.config, **(config_patches or {})})


def _optimized(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return original(*args, **{**options, "guard_filter_fn": _guarded_by(options.get("guard_filter_fn"))})


def _imported(original: Callable[..., Any], translator: Any, module: str) -> Any:
    """Dynamo imports the module of a function once in a process, where several scripts may be run as `__main__`."""
    if module == "__main__":
        main = sys.modules[module]
        importing: Any = getattr(symbolic_convert, "_import_module", None)
        if hasattr(importing, "cache_clear") and importing(module) is not main:
            importing.cache_clear()
        if translator.output.global_scope.get(_ALIAS, main) is not main:
            del translator.output.global_scope[_ALIAS]
    return original(translator, module)


_ALIAS: Final = "__import___main__"
"""The global of compiled code that has that module (`import_source` of torch/_dynamo/symbolic_convert.py)."""


def _disabled_for_others(original: Callable[..., None], message: str, *_: bool) -> None:
    """Transforms of `torch.func` refuse saved-tensor hooks, among which are those of the run."""
    original(message, False)  # do not fail although there are some


def _specialized(original: Callable[..., dict[str, Any]], value: torch.Tensor) -> dict[str, Any]:
    """The facts of a tensor by which its attributes are answered while code is traced."""
    facts, part = original(value), compilation()
    if part and part.stands_for is not None and facts["device"].type == "meta":
        facts["device"] = part.stands_for
    return facts


def _run_on_stand_ins(original: Callable[..., Any], tracer: Any, node: Any, args: Any, kwargs: Any, *rest: Any) -> Any:
    """Make and move fakes where stand-ins are if traced code names a GPU: a build without CUDA refuses the device."""
    if node.op == "call_method" and node.target == "cuda" and compilation():
        return args[0].to(META, memory_format=kwargs.get("memory_format", torch.preserve_format))
    if node.op == "call_method" and node.target == "to" and compilation():
        args = [META if named_gpu(argument) else argument for argument in args]
    return original(tracer, node, args, _on_meta(kwargs), *rest)


def _call_on_stand_ins(original: Callable[..., Any], runner: Any, target: Any, args: Any, kwargs: Any) -> Any:
    """The same of a function in a graph inside another, as that of an autograd.Function; and make fakes of the tensors
    that `new_tensor` makes there, as it does on a GPU: 2.11 expects them.
    """
    result, mode = original(runner, target, args, _on_meta(kwargs)), active_fake_mode()
    if mode is not None and type(result) is torch.Tensor and result.is_meta:
        return mode.from_tensor(result)
    return result


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    part = compilation()
    return {**kwargs, "device": META} if part and part.is_tracing and named_gpu(kwargs.get("device")) else kwargs


def _beneath_kernels(original: Callable[..., Any], *args: Any) -> Any:
    """The dispatch keys of a call of an operator on functions (`torch.cond`, FlexAttention's), which has no kernel of
    ours: what it calls has.
    """
    return original(*args).remove(KEY)


def _inlined(original: Callable[..., Any], variable: Any, *args: Any) -> Any:
    if part := compilation():
        part.inline(variable.value)
    return original(variable, *args)


def _grouped(original: Callable[..., Any], variable: Any, translator: Any, name: str, *args: Any) -> Any:
    """Dynamo calls `_init_group` instead of tracing it: there a fused optimizer looks for a device with kernels for it,
    and optimizers make their state.
    """
    if name != "_init_group":
        return original(variable, translator, name, *args)
    devices = getattr(optimizer, _FUSED)
    with assigned(optimizer, _FUSED, lambda: [*devices(), META.type]):
        result = original(variable, translator, name, *args)
    if ledger := running_ledger():
        for tensor in tensors_in(list(variable.value.state.values())):
            if tensor.device.type != CPU.type:
                ledger.enter(tensor, "optimizer state", "zeros_like")
    return result


_FUSED: Final = "_get_fused_kernels_supported_devices"


def _on_stand_ins(
    original: Callable[..., Any], mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """Make fakes where stand-ins are if traced code names a GPU."""
    return original(mode, func, types, args, _on_meta(kwargs or {}))


@contextmanager
def _existing_frozen() -> Iterator[None]:
    """While open, collections leave out what exists already, most of it of imported modules."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _accepting(original: Callable[..., None], mode: FakeTensorMode, **options: Any) -> None:
    """``torch.tensor([1], device="meta")`` makes its tensor below the dispatcher, and so no fake."""
    original(mode, **{**options, "allow_non_fake_inputs": True})


def _guarded_by(chosen: Callable[[Sequence[Any]], Sequence[bool]] | None) -> Callable[[Sequence[Any]], list[bool]]:
    """Leave out guards on PyTorch's own functions, in whose place others stand while the code runs."""

    def guarded(guards: Sequence[Any]) -> list[bool]:
        wanted = chosen(guards) if chosen else [True] * len(guards)
        return [
            bool(keep) and not (guard.has_value and _is_function_of_torch(guard.value))
            for keep, guard in zip(wanted, guards, strict=True)
        ]

    return guarded


def _is_function_of_torch(value: object) -> bool:
    return callable(value) and (getattr(value, "__module__", None) or "").partition(".")[0] in ("torch", "builtins")


@contextmanager
def compiled_model(
    run: Run, mode: CompileMode, capability: tuple[int, int], parts: Sequence[str] = ("",)
) -> Iterator[None]:
    """Compile the calls of `parts` of the model of `run` while open, as their method `compile` does."""
    modules = [run.setup.model.get_submodule(part) for part in parts]
    with compiling(Compiler(capability, run.note)), _existing_frozen():
        run.note(rules(run.setup.gpu.stack.release))
        for module in modules:
            call = module._call_impl
            # Dynamo skips a frame of PyTorch's own, such as that of nn.Sequential.
            if trace_rules.check(module.forward):
                call = wrap_inline(call)
            vars(module)["_call_impl"] = torch.compile(call, mode=mode)
        try:
            yield
        finally:
            for module in modules:
                del vars(module)["_call_impl"]
