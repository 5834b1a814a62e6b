"""Optimizers on a meta copy, behaving as on CUDA."""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.optim import optimizer as torch_optimizer

from memsize.errors import InputError
from memsize.processes.patches import assigned
from memsize.spec.training import parse_optimizer
from memsize.torch_internals.pytree import tensors_in
from memsize.tracing.ledger import Ledger

_STEP = "Optimizer.step#"
"""How the names of the ranges begin in which PyTorch runs `step` (`Optimizer.profile_hook_step`)."""


def make_optimizer(kind: str | Callable[[Any], Any], parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimizer that `kind` names, or makes of the parameters. Raises `InputError` for unsuitable options."""
    try:
        if callable(kind):
            optimizer: torch.optim.Optimizer = kind(parameters)
            if not (hasattr(optimizer, "step") and hasattr(optimizer, "zero_grad")):
                raise TypeError(f"what was returned, {optimizer!r}, is not an optimizer")
            return optimizer
        spec = parse_optimizer(kind)
        make: Callable[..., torch.optim.Optimizer] = _without_compiler(getattr(torch.optim, spec.cls))
        return make(parameters, **spec.options)
    except (TypeError, ValueError, RuntimeError) as error:
        name = kind if isinstance(kind, str) else getattr(kind, "__name__", type(kind).__name__)
        raise InputError(f"the optimizer {name!r} cannot be made: {error}") from error


@cache
def _without_compiler(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """`cls` with the methods that PyTorch wraps for torch.compile replaced by the originals: the wrappers would import
    torch._dynamo, which takes as long as torch, and choose the gradient mode, which is done here instead.
    """
    written = inspect.unwrap(cls.step)

    def step(self: torch.optim.Optimizer, closure: Callable[[], float] | None = None) -> float | None:
        with torch.set_grad_enabled(self.defaults.get("differentiable", False)):
            result: float | None = written(self, closure)
            return result

    methods = {name: inspect.unwrap(getattr(cls, name)) for name in ("add_param_group", "zero_grad")}
    return type(cls.__name__, (cls,), {**methods, "step": step})


@contextmanager
def steps_watched(ledger: Ledger, everywhere: bool = False) -> Iterator[None]:
    """While open, every optimizer's `step` in this thread, or `everywhere`, is its own phase, but for a closure that it
    calls; the gradients that it takes and the state that it makes are marked.
    """
    phases: defaultdict[int, list[Any]] = defaultdict(list)
    thread = threading.get_ident()
    leave: Callable[..., Any] = record_function.__exit__

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        here = threading.get_ident()
        if not (everywhere or here == thread):
            return None
        mark_gradients(ledger, optimizer)
        phases[here].append(ledger.clock.during("optimizer"))
        phases[here][-1].__enter__()
        arguments = [_outside(ledger, value) for value in args[1:]]
        return (optimizer, *arguments), {name: _outside(ledger, value) for name, value in kwargs.items()}

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        here = threading.get_ident()
        if not (everywhere or here == thread):
            return
        phases[here].pop().__exit__(None, None, None)
        mark_state(ledger, optimizer)

    def left(record: record_function, *error: Any) -> Any:
        if error[0] is not None and record.name.startswith(_STEP) and phases[threading.get_ident()]:
            phases[threading.get_ident()].pop().__exit__(*error)
        return leave(record, *error)

    with ExitStack() as regions:
        regions.callback(torch_optimizer.register_optimizer_step_pre_hook(before).remove)
        regions.callback(torch_optimizer.register_optimizer_step_post_hook(after).remove)
        if everywhere:
            regions.enter_context(assigned(record_function, "__exit__", left))
        yield


def mark_gradients(ledger: Ledger, optimizer: torch.optim.Optimizer) -> None:
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.grad is not None:
            ledger.mark(parameter.grad, "gradient")


def mark_state(ledger: Ledger, optimizer: torch.optim.Optimizer) -> None:
    """Mark what `optimizer` keeps between its steps."""
    for tensor in tensors_in(list(optimizer.state.values())):
        ledger.mark(tensor, "optimizer state")


def _outside(ledger: Ledger, value: Any) -> Any:
    if not callable(value):
        return value

    def called(*args: Any, **kwargs: Any) -> Any:
        with ledger.clock.during("step"):
            return value(*args, **kwargs)

    return called
