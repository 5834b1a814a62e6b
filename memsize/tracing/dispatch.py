"""The dispatch mode of a run: the result of each op has the right shape, and nothing is computed.

It is a `TorchDispatchMode` below autograd. The result of an op comes from a rule of `memsize.kernels` where there
is one, otherwise from PyTorch's `meta` kernel, and from one run on the CPU where PyTorch has none.

Autograd runs some ops in place on a GPU, but out of place while a mode looks on; the mode runs them in place
(`memsize.tracing.in_place`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import repeat
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memsize.errors import first_line
from memsize.kernels import rules, sparse_rules
from memsize.kernels.convolution import BACKWARD, FORWARD
from memsize.kernels.matmul import CUBLAS, CUBLASLT
from memsize.kernels.multiply_adds import formula_of
from memsize.kernels.registry import COPIES, LAST_FIRST, REDUCTIONS, RESULT_FIRST, SAME_DTYPE, TEMPORARIES, refuse_mixed
from memsize.known_values.evaluation import SPECIAL, Evaluator
from memsize.known_values.op_traits import traits_of
from memsize.known_values.propagation import carry_over, propagate, tell_sign
from memsize.known_values.values import state_of
from memsize.processes.patches import assigned
from memsize.torch_internals.pytree import arguments_in
from memsize.torch_internals.sparse_tensors import with_parts
from memsize.tracing.in_place import IN_PLACE, is_written_in_place, owners_of_sum
from memsize.tracing.overrides import compilation, overridden

DETACH = torch.ops.aten.detach.default
_CLONE = torch.ops.aten.clone.default
_SINGLE: dict[str, Any] = {
    f"aten::_foreach_{name}": getattr(torch.ops.aten, {"norm": "linalg_vector_norm"}.get(name, name))
    for name in "add add_ sub sub_ mul mul_ div div_ neg neg_ zero_ copy_ norm".split()
}
"""Ops over lists, and what does the same with a single tensor."""
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_NO_DISPATCH = torch.Tensor.__torch_dispatch__


class OpFacts:
    """The facts about one overload, collected once in a run: each look-up by an overload calls its hash, in Python."""

    def __init__(self, func: Any) -> None:
        self.name: str = func._overloadpacket.__name__
        self.in_place = IN_PLACE.get(func)
        self.writes: bool = func._schema.is_mutable
        self.rule = rules()[func]
        self.sparse_rule = sparse_rules()[func]
        self.traits = traits_of(func)
        # Autograd runs the ops that an op only calls, except where a tensor's own dispatch is below it.
        name, has = self.traits.name, torch._C._dispatch_has_kernel_for_dispatch_key
        only_calls = has(name, "CompositeImplicitAutograd") and not has(name, "CPU")
        self.composite = self.rule is None and name not in SPECIAL and only_calls
        self.body = body_of(func)
        self.single = _SINGLE.get(func.name().partition(".")[0])
        self.same = SAME_DTYPE.get(func)
        self.copies = COPIES.get(func)
        self.flops = formula_of(func)
        self.temporaries = TEMPORARIES.get(func) or TEMPORARIES.get(self.traits.name)
        self.reduction = REDUCTIONS.get(func)
        self.is_cublas = func in CUBLAS
        self.is_cublaslt = func in CUBLASLT
        self.result_first = func in RESULT_FIRST
        self.last_first = func in LAST_FIRST
        self.is_forward = func is FORWARD
        self.is_backward = func is BACKWARD
        is_convolution = self.is_forward or self.is_backward
        has_more = any(facts is not None for facts in (self.copies, self.temporaries, self.reduction))
        self.allocates_result_alone = not (is_convolution or self.is_cublaslt or self.last_first or has_more)


class _OpTable(dict[Any, OpFacts]):
    def __missing__(self, func: Any) -> OpFacts:
        op = self[func] = OpFacts(func)
        return op


class MetaDispatchMode(TorchDispatchMode):
    """Ops on `meta` tensors return `meta` tensors; with ``device="cpu"`` they are really computed."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default imports torch._dynamo, which takes as long as importing torch.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return compilation() is not None

    def __init__(self, device: str = "meta") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        owners_of_sum()
        self.device = torch.device(device)
        self.evaluator = Evaluator()
        self._computes = device != "meta"
        self.op_facts = _OpTable()
        self._regions: list[ExitStack] = []
        """The contexts that each entry opened: a mode may be entered again while it is active."""

    def __enter__(self) -> Self:
        with ExitStack() as regions:
            if not self._computes:
                regions.enter_context(overridden(self.evaluator.notes))
            entered: Self = super().__enter__()  # type: ignore[no-untyped-call]
            self._regions.append(regions.pop_all())
        return entered

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._regions.pop().close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and has_own_dispatch(types):
            return NotImplemented
        if func is DETACH:
            return carry_over(args[0], func(*args))
        return self.run_op(func, args, kwargs or {})

    def run_op(self, func: Any, args: Any, kwargs: Any, op: OpFacts | None = None) -> Any:
        """The result of `func`, with its constants beside it. `op` are its facts, where they were looked up."""
        if func is _CLONE and args[0].layout is torch.sparse_coo and _is_new_gradient(args[0]):
            return with_parts(args[0], lambda part: part)
        op = op or self.op_facts[func]
        if op.in_place is not None and not kwargs and is_written_in_place(op.in_place, args):
            return self.run_op(op.in_place.op, args, kwargs)
        if op.single is not None:
            lists = [items for items in args[:2] if isinstance(items, (list, tuple))]
            if any(isinstance(e, Tensor) and e.layout is torch.sparse_coo for items in lists for e in items):
                with self:  # as CUDA's list kernels do, entry by entry
                    columns = [values if isinstance(values, (list, tuple)) else repeat(values) for values in args]
                    results = [op.single(*values, **kwargs) for values in zip(*columns, strict=False)]
                    return None if op.single.__name__.endswith("_") else results
        if self._computes:
            return func(*args, **kwargs)
        if op.composite:
            with self:
                return func.decompose(*args, **kwargs)
        if op.same is not None:
            refuse_mixed(func, args[op.same])
        result = NotImplemented if op.rule is None else op.rule(*args, **kwargs)
        if result is NotImplemented and op.sparse_rule is not None:
            result = op.sparse_rule(*args, **kwargs)
        if result is NotImplemented:
            result = self.evaluator.evaluate(op.traits, func, args, kwargs)
        propagate(op.traits, func, args, kwargs, result)
        if self.evaluator.lenient and op.traits.comparison is not None:
            tell_sign(op.traits, args, result)
        return result


def _is_new_gradient(tensor: Tensor) -> bool:
    """Whether autograd copies a sparse first gradient only because a mode looks on, by which its parts have a second
    owner then (accumulate_grad.h). Known limit: a hook that keeps the gradient, for which it is copied, is not seen.
    """
    node: Any = torch._C._current_autograd_node()
    if node is None or torch.is_grad_enabled() or type(node).name(node) != _ACCUMULATE:
        return False
    is_first = node.variable.grad is None
    return bool(is_first and tensor._indices().is_contiguous() and tensor._values().is_contiguous())


def has_own_dispatch(types: Iterable[Any]) -> bool:
    """Whether an argument type has its own ``__torch_dispatch__``, whose ops on inner tensors come back to the mode."""
    return any(kind.__torch_dispatch__ is not _NO_DISPATCH for kind in types)


# -- ops that a Python function defines --------------------------------------------------------------------------------


_OF_PYTORCH: Final = frozenset(
    """aten prims prim profiler c10d _c10d_functional _c10d_functional_autograd c10d_functional _dtensor device_mesh
    fsdp symm_mem bucketing streams inductor export quantized quantized_decomposed semi_structured flex_lib torch_attn
    torchvision higher_order rngprims debugprims""".split()
)
"""Namespaces of ops whose Python kernels are PyTorch's own: memsize knows what these do on a GPU."""
_KERNEL: Final = re.compile(r"^(\w+)(?:\[alias\])?: registered at (.+):\d+ ::", re.MULTILINE)
_KEYS: Final = {name: torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in ("CUDA", "CPU")}
TRITON: Final = "triton.runtime.autotuner", "triton.runtime.jit"
"""Modules of Triton with the classes `Autotuner` and `JITFunction`, whose `run` launches a kernel."""


def body_of(func: Any, backend: str = "CUDA") -> Any:
    """Return the dispatch key of the Python function that runs `func` on a backend, None without one."""
    if func.namespace in _OF_PYTORCH:
        return None
    return _KEYS[backend] if _runs_python(func.name(), backend) else None


@cache
def _runs_python(op: str, backend: str) -> bool:
    """Whether the kernel of `op` for a backend is a Python function, by where it was registered."""
    files = dict(_KERNEL.findall(torch._C._dispatch_dump(op)))
    return str(files.get(backend) or files.get("CompositeExplicitAutograd", "")).endswith(".py")


def replaced_by_fake(func: Any, error: Exception) -> str:
    """Say that the body of `func` could not run without a GPU."""
    return (
        f"the body of {func.name()} needs a real GPU ({type(error).__name__}: {first_line(error)}): only the results "
        "of its fake are in these figures"
    )


def left_out(*args: Any, **options: Any) -> None:
    """Replace the launch of a Triton kernel: it writes to tensors that are there, whose values are unknown then."""
    for tensor in arguments_in((args, options)):
        state = state_of(tensor)
        if state is not None:
            state.invalidate()


@contextmanager
def without_launches() -> Iterator[None]:
    """While open, Triton kernels are not launched."""
    with ExitStack() as regions:
        for module, name in zip(TRITON, ("Autotuner", "JITFunction"), strict=True):
            if module in sys.modules:
                launcher = getattr(sys.modules[module], name)
                regions.enter_context(assigned(launcher, "run", left_out))
        yield
