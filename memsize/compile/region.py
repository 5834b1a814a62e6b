"""The region in which `torch.compile` compiles the code of a run.

Dynamo runs on the run's own stand-ins, and breaks graphs where it would. While it traces, PyTorch's functions are the
originals, by whose identity it knows them.

Source: torch/_dynamo/convert_frame.py (`CatchErrorsWrapper`), torch/_dynamo/trace_rules.py.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch._dynamo as dynamo
from torch._dynamo import trace_rules
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch._subclasses.fake_tensor import FakeTensorMode

from memsize.compile.backend import Compiler
from memsize.processes.patches import Patch, wrapping
from memsize.processes.simulation import current, open_simulation
from memsize.spec.scenario import CompileMode
from memsize.tracing.overrides import Compiles, suspended_overrides
from memsize.tracing.run import Run

_PACKAGE: Final = f"{Path(__file__).parents[1]}/"


@contextmanager
def compiling() -> Iterator[None]:
    """While open, functions and modules that were compiled are compiled; afterwards nothing of it is left."""
    trace_rules.SKIP_DIRS.append(_PACKAGE)
    trace_rules._recompile_re()
    patches: list[Patch] = [
        wrapping(CatchErrorsWrapper, "__call__", _without_overrides),
        wrapping(FakeTensorMode, "__init__", _accepting),
    ]
    try:
        with (
            open_simulation() as simulation,
            simulation.with_part(Compiles, Compiles()),
            simulation.patches.applied(patches),
            _quiet(),
        ):
            yield
    finally:
        trace_rules.SKIP_DIRS.remove(_PACKAGE)
        trace_rules._recompile_re()
        dynamo.reset()


_RULES: Final = (
    "compiled by the rules of PyTorch {}: what torch.compile recomputes, fuses and reuses differs between releases; "
    "choices that it makes by measured times are left out"
)
_LOGGERS: Final = ("torch._dynamo", "torch._functorch", "torch._inductor")


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the compiler's warnings: they are about speed on a GPU that isn't there."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _without_overrides(original: Callable[..., Any], *args: Any) -> Any:
    with suspended_overrides():
        result = original(*args)
    if (simulation := current()) and (compiles := simulation.get(Compiles)) and result.guarded_code is not None:
        compiles.leaves_cycles = True
    return result


def _collected(function: Callable[..., Any]) -> Callable[..., Any]:
    """Collect what tracing leaves: cycles that hold the values of frames, which the paused collector would keep."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        finally:
            if (simulation := current()) and (compiles := simulation.get(Compiles)) and compiles.leaves_cycles:
                compiles.leaves_cycles = False
                gc.collect()

    return call


def _accepting(original: Callable[..., None], mode: FakeTensorMode, **options: Any) -> None:
    """``torch.tensor([1], device="meta")`` makes its tensor below the dispatcher, and so no fake."""
    original(mode, **{**options, "allow_non_fake_inputs": True})


def _guarded(guards: Sequence[Any]) -> list[bool]:
    """Leave out guards on PyTorch's own functions, in whose place others stand while the code runs."""
    return [not (guard.has_value and _is_function_of_torch(guard.value)) for guard in guards]


def _is_function_of_torch(value: object) -> bool:
    return callable(value) and (getattr(value, "__module__", None) or "").partition(".")[0] in ("torch", "builtins")


@contextmanager
def compiled_model(run: Run, mode: CompileMode, capability: tuple[int, int]) -> Iterator[None]:
    """Compile the calls of the model of `run` while open, as its method `compile` does."""
    model = run.setup.model
    with compiling():
        run.note(_RULES.format(torch.__version__.partition("+")[0]))
        options: dict[str, Any] = {"guard_filter_fn": _guarded}
        compiled = torch.compile(model._call_impl, backend=Compiler(capability, run.note), options=options)
        vars(model)["_call_impl"] = _collected(compiled)
        try:
            yield
        finally:
            del vars(model)["_call_impl"]
