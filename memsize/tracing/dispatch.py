"""Answers every op without computing it.

A `TorchDispatchMode` below autograd. An op is answered by a shape rule where there is one, by PyTorch's own `meta`
kernel otherwise, and by one run on the CPU where PyTorch has no such kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memsize.constants.propagation import Values
from memsize.cuda.kernels import refuse_mixed
from memsize.meta_kernels import rules
from memsize.tracing import overrides as faces

DETACH = torch.ops.aten.detach.default
_NO_DISPATCH = torch.Tensor.__torch_dispatch__


class Answers(TorchDispatchMode):
    """Ops on `meta` tensors are answered by shape; on the CPU (`device="cpu"`) they are really computed."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default imports torch._dynamo, which takes as long as importing torch.
        return False

    def __init__(self, device: str = "meta") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = torch.device(device)
        self.values = Values()
        self._computes = device != "meta"
        self._rules = rules()

    def __enter__(self) -> Self:
        if not self._computes:
            faces.enter(self.values.notes)
        try:
            entered: Self = super().__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._leave_faces()
            raise
        return entered

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._leave_faces()

    def _leave_faces(self) -> None:
        if not self._computes:
            faces.leave()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and answers_itself(types):
            return NotImplemented
        if func is DETACH:
            return self.values.carry(args[0], func(*args))
        return self.answer(func, args, kwargs or {})

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What `func` returns, with the values of the result beside it where they are known."""
        if self._computes:
            return func(*args, **kwargs)
        refuse_mixed(func, args)
        rule = self._rules[func]
        result = NotImplemented if rule is None else rule(*args, **kwargs)
        if result is NotImplemented:
            result = self.values.run(func, args, kwargs)
        self.values.follow(func, args, kwargs, result)
        return result


def answers_itself(types: Iterable[Any]) -> bool:
    """Whether one of the argument types is a wrapper with a dispatch of its own.

    It answers first; the ops that it makes on its inner tensors come back to the mode.
    """
    return any(kind.__torch_dispatch__ is not _NO_DISPATCH for kind in types)
