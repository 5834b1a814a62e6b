"""Collectives without the other ranks: results, moved tensors and bytes of each operator of `c10d`.

Nothing is sent. We assume that the other ranks have sent the same as this one (`alike`). A broadcast leaves its buffers
unchanged. Where this assumption does not determine the result, it is unknown on the GPU, and unchanged on the CPU.

Programs read some of the values of gathered, exchanged or reduced tensors (`received`). Mixture-of-experts layers first
exchange the number of tokens for each expert, which decides the size of the tensors exchanged next. Whether any rank
has an infinite gradient decides whether the optimizer makes a step.

The operators of `c10d` take the reduction in a form that Python cannot read, so the public functions of
`torch.distributed` note it (`RunningReduction`).

The schemas are those of torch/csrc/distributed/c10d/Ops.cpp and Functional.cpp.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from memsize.errors import InputError
from memsize.known_values.data_dependent import EXCHANGED_ARE_ALIKE, REDUCED_IS_ONE
from memsize.known_values.values import ConstantState, constant_of, is_small, set_constant, set_unknown
from memsize.processes.patches import Patch, calling
from memsize.processes.simulation import running_part
from memsize.records.world import CollectiveKind
from memsize.torch_internals.meta import is_meta
from memsize.torch_internals.pytree import arguments_in

_OPERATORS: Final[dict[str, dict[CollectiveKind | None, str]]] = {
    "c10d": {
        "all-reduce": "allreduce_ allreduce_coalesced_",
        "all-gather": "allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_",
        "reduce-scatter": "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_",
        "all-to-all": "alltoall_ alltoall_base_",
        "broadcast": "broadcast_",
        "reduce": "reduce_",
        "gather": "gather_",
        "scatter": "scatter_",
        "send": "send",
        "receive": "recv_ recv_any_source_",
        "barrier": "barrier monitored_barrier_",
        None: "check_for_nan",
    },
    "_c10d_functional": {
        "all-reduce": "all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_",
        "all-gather": "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced",
        "reduce-scatter": "reduce_scatter_tensor reduce_scatter_tensor_out reduce_scatter_tensor_coalesced",
        "all-to-all": "all_to_all_single",
        "broadcast": "broadcast broadcast_",
        "send": "isend batch_p2p_ops",
        "receive": "irecv",
        None: "wait_tensor _wrap_tensor_autograd",
    },
    "_dtensor": {"all-to-all": "shard_dim_alltoall"},
}
_KINDS: Final[dict[str, CollectiveKind | None]] = {
    f"{namespace}::{name}": kind
    for namespace, operators in _OPERATORS.items()
    for kind, names in operators.items()
    for name in names.split()
}
NAMESPACES: Final = frozenset(_OPERATORS)
_LEFT: Final = (None, "broadcast", "send", "barrier")
"""Kinds that leave the buffers unchanged if all ranks hold the same; `None` moves nothing."""
_IN_PLACE: Final = ("all-reduce", "reduce")
_RECEIVED: Final = "what this rank receives on the CPU stays as it is before"
_ROOT: Final = 3
"""Position of the root rank, which gets the result, in the arguments of ``c10d::reduce_``."""
_WAITING: Final = ("wait_tensor", "_wrap_tensor_autograd")
_ASYNCHRONOUS: Final = ("async_op", "asyncOp")
_ON_BUFFERS: Final = "c10d"
"""Namespace of operators that write to existing buffers. The others return new ones, and have `meta` kernels."""


def kind_of(func: Any) -> CollectiveKind | None:
    """Return the kind of an operator in `NAMESPACES`, `None` if it moves nothing. Raises `InputError` if unknown."""
    name = f"{func.namespace}::{func._overloadpacket.__name__}"
    if name not in _KINDS:
        raise InputError(f"no known collective: {name}, which memsize would have to answer for the other ranks")
    return _KINDS[name]


def is_given_buffers(func: Any) -> bool:
    """Whether `func` works on buffers that its caller passes, and returns no new ones."""
    return bool(func.namespace == _ON_BUFFERS)


def is_asynchronous(func: Any, args: Any) -> bool:
    """Whether the program goes on while a collective runs: each that makes its result, and others that say so."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name in _ASYNCHRONOUS:
            return bool(value)
    return True


def waits(func: Any) -> bool:
    """Whether `func` only waits for the result of a collective, or wraps the result until somebody waits for it."""
    return func._overloadpacket.__name__ in _WAITING


def waited(func: Any, tensor: Tensor) -> Tensor:
    """Return the result of a wait: the same memory, where the `meta` kernel would return new memory."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if func._overloadpacket.__name__ != "wait_tensor":
        return AsyncCollectiveTensor(tensor)
    return tensor if is_meta(tensor) else func(tensor)


def bytes_moved(args: Any, result: Any) -> int:
    """Return the bytes of the largest argument (a tensor or a list) of a collective, or of its result if larger."""
    sides = [sum(tensor.numel() * tensor.element_size() for tensor in _tensors(side)) for side in (*args, result)]
    return max(sides, default=0)


def group_of(args: Any) -> dist.ProcessGroup:
    """Return the process group of a collective with these arguments; the default group if they name none."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in argument._type().name():  # type: ignore[attr-defined]
            return dist.ProcessGroup.unbox(argument)
    names = [argument for argument in args if isinstance(argument, str)]
    groups: Any = dist.distributed_c10d
    group: dist.ProcessGroup = groups._resolve_process_group(names[-1]) if names else groups._get_default_group()
    return group


def answer(kind: CollectiveKind | None, func: Any, args: Any) -> Any:
    """Return the result of a ``c10d`` operator on existing buffers: the buffers, and work that is already done."""
    buffers, group = list(_tensors(args[:1])), group_of(args)
    sent = buffers if kind in _IN_PLACE else list(_tensors(args[1:2]))
    if kind not in _LEFT and (kind != "reduce" or group.rank() == args[_ROOT]):
        for tensor, value in received(kind, buffers, sent, args[3:5], running_part(RunningReduction).name, group):
            write(tensor, value)
    # DistributedDataParallel's reducer waits for the future of the work.
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(buffers)
    work = torch._C._distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]
    results = [work if "Work" in str(result.type) else args[0] for result in func._schema.returns]
    return results[0] if len(results) == 1 else tuple(results)


def carry_over(kind: CollectiveKind, args: Any, result: Any) -> None:
    """Set the values of a collective's new tensors, if all ranks sent the same; those not determined are unknown."""
    sent, results = list(_tensors(args[:1])), list(_tensors((result,)))
    reduction = next((argument for argument in args[1:2] if isinstance(argument, str)), "")
    for tensor, value in received(kind, results, sent, args[1:3], reduction, group_of(args)):
        write(tensor, value)


def write(
    tensor: Tensor, value: Tensor | None, read_as: str = REDUCED_IS_ONE, assumption: str | None = EXCHANGED_ARE_ALIKE
) -> None:
    """Set the `value` of `tensor`, which rests on `assumption`. Without a value, a CPU tensor stays unchanged; a GPU
    tensor becomes unknown, and a program that reads it gets the value that `read_as` describes.
    """
    if not is_meta(tensor):
        if value is not None:
            tensor.detach().copy_(value)
        return
    set_unknown(tensor, read_as)
    if value is not None:
        set_constant(tensor, value.clone(), ConstantState(assumption))


def _tensors(value: Any) -> Any:
    return arguments_in(value if isinstance(value, (list, tuple)) else (value,))


def alike(kind: CollectiveKind) -> str | None:
    """Return the assumption behind a value that a collective writes on the CPU."""
    return None if kind in _LEFT else _RECEIVED if kind == "receive" else EXCHANGED_ARE_ALIKE


# -- reduced values --------------------------------------------------------------------------------------------------

_NAMES: Final = """
    all_reduce all_reduce_coalesced reduce reduce_scatter reduce_scatter_tensor reduce_scatter_single"""
"""The functions that take a reduction. PyTorch 2.13 renames the last but one to the last."""


class RunningReduction(threading.local):
    """The reduction of the collective that runs in a thread: ``"sum"`` if C++ called it, as DDP's reducer does."""

    name = "sum"


def replacements() -> Iterator[Patch]:
    """Patch the functions that take a reduction, so that they note it while their collective runs."""
    for name in _NAMES.split():
        if original := getattr(dist, name, None):
            position = list(inspect.signature(original).parameters).index("op")
            noting = calling(partial(_note_reduction, position), original)
            yield from ((owner, name, noting) for owner in (dist, dist.distributed_c10d))


def _note_reduction(position: int, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    op = args[position] if len(args) > position else options.get("op", dist.ReduceOp.SUM)
    noted = running_part(RunningReduction)
    before, noted.name = noted.name, getattr(op, "op", op).name.lower()
    try:
        return original(*args, **options)
    finally:
        noted.name = before


# -- values, if each rank sends the same -------------------------------------------------------------------------------

_Value = Tensor | None
_PARTED: Final = ("all-to-all", "scatter", "reduce-scatter")
"""Collectives that give each rank only its own part of the tensors sent."""
_REDUCING: Final = ("all-reduce", "reduce", "reduce-scatter")
_OF_EQUALS: Final = ("min", "max", "avg", "band", "bor")
"""Reductions whose result equals the input if all ranks send the same."""


def received(
    kind: CollectiveKind | None,
    written: Sequence[Tensor],
    sent: Sequence[Tensor],
    splits: Any,
    reduction: str,
    group: dist.ProcessGroup,
) -> Iterator[tuple[Tensor, _Value]]:
    """Yield each tensor that a collective writes with its values, or with `None` if they are unknown.

    `sent` are the tensors that this rank sends. `splits` may contain lists with the number of rows for each rank.
    `reduction` is PyTorch's name of the reduction, for collectives that reduce.
    """
    rank, size = group.rank(), group.size()
    for position, output in enumerate(written):
        value = None
        if sent and (not is_meta(output) or is_small(output)):
            if kind in ("all-gather", "gather"):  # if several are gathered at once, `position` counts rank by rank
                value = _repeated(constant_of(sent[position % len(sent)]), output)
            elif kind in ("all-reduce", "reduce", "broadcast"):
                value = constant_of(sent[position])
            elif kind in _PARTED:
                value = _part(position, output, sent, splits, rank, size)
        yield output, _reduced(value, reduction, size) if kind in _REDUCING and value is not None else value


def _reduced(value: Tensor, reduction: str, size: int) -> _Value:
    """Reduce a `value` that each of `size` ranks has."""
    if reduction in _OF_EQUALS:
        return value
    if reduction == "bxor":
        return value if size % 2 else torch.zeros_like(value)
    if reduction not in ("sum", "product") or (value.dtype.itemsize == 1 and value.is_floating_point()):
        return None  # one that multiplies before, or a dtype that the CPU cannot reckon with
    return (value * size if reduction == "sum" else value**size).to(value.dtype)


def _part(position: int, output: Tensor, sent: Sequence[Tensor], splits: Any, rank: int, size: int) -> _Value:
    """Return this rank's part: a tensor of its own, or an equal share of one's rows; `None` if unknown or unequal."""
    whole = sent[position % len(sent)]
    if len(sent) > 1 and whole.numel() != size * output.numel():
        return _repeated(constant_of(sent[rank]) if len(sent) == size else None, output)
    rows, sizes = constant_of(whole), [lengths for lengths in splits if isinstance(lengths, (list, tuple))]
    if rows is None or not rows.dim() or len(rows) % size or any(len(set(lengths)) > 1 for lengths in sizes):
        return None
    return _repeated(rows.chunk(size)[rank], output)


def _repeated(value: _Value, output: Tensor) -> _Value:
    """Repeat `value` to fill `output`; `None` if `value` is unknown or `output` is no multiple of its size."""
    if value is None or not value.numel() or output.numel() % value.numel():
        return None
    return value.reshape(-1).repeat(output.numel() // value.numel()).reshape(output.shape)
