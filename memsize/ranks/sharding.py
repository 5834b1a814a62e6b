"""Patches for PyTorch's sharding code (DTensor, FSDP, DDP, pipelines): internal work unrecorded, roles for buffers.

DTensor finds the shape of a result by running each op once more, on tensors of the full size that never exist. FSDP's
collectives work on buffers, from which it fills the gathered parameters. FSDP1 gathers parameters into one flat tensor,
and reduces one flat gradient.

An optimizer updates hundreds of parameters in one op, and for each of them DTensor processes the whole list again. Most
elements are equal, as layers repeat: `each_once` lets it process each distinct element once.

Source: torch/distributed/tensor/_sharding_prop.py and _ops/single_dim_strategy.py, torch/distributed/fsdp/_fully_shard,
_flat_param.py and _runtime_utils.py of torch/distributed/fsdp (2.11 to 2.14).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final, NoReturn

import torch
import torch.distributed
import torch.nn.parallel.distributed
from torch import Tensor, nn

from memsize.errors import InputError
from memsize.processes.patches import Patch, assigned, calling
from memsize.tracing.ledger import Ledger

Region = Callable[[], AbstractContextManager[None]]


def replacements(in_pytorch: Region) -> Iterator[Patch]:
    """Patch `DistributedDataParallel`: within `in_pytorch`, tensors without a named device are on the GPU."""
    from torch.nn.parallel import DistributedDataParallel

    for name in ("_ddp_init_helper", "_pre_forward"):  # makes the buckets, and makes them once more
        original = getattr(DistributedDataParallel, name)
        yield DistributedDataParallel, name, calling(partial(_within, in_pytorch), original)
    # It knows clocks of CPUs and CUDA only, and warns.
    distributed: Any = torch.distributed
    yield distributed.Logger, "set_runtime_stats_and_log", lambda logger: None
    # It compares shapes on the CPU with those that the other processes send.
    yield torch.nn.parallel.distributed, "_verify_param_shape_across_processes", lambda *args, **options: None


def later(ledger: Ledger, aside: Region, alone: bool = True) -> dict[str, Callable[[Any], Iterator[Patch]]]:
    """Return the patches of sharding, by module name, for when the program imports it: importing takes a second, and
    most programs never do. Within `aside` nothing is recorded. A rank that is `alone` cannot ask others.
    """
    fsdp, pipelining, tensor = (f"torch.distributed.{name}" for name in ("fsdp", "pipelining", "tensor"))
    wrappers: dict[str, dict[str, Callable[..., Any]]] = {
        f"{pipelining}.schedules": {"_PipelineSchedule._warmup_p2p": partial(_warmed_up, alone)},
        f"{pipelining}.stage": {
            "PipelineStage._warmup_backward_result": _voted,
            **({"PipelineStage._shape_inference": _would_ask} if alone else {}),
        },
        f"{tensor}._sharding_prop": {
            "ShardingPropagator._propagate_tensor_meta_non_cached": partial(_within, aside),
            "ShardingPropagator.propagate_op_sharding_non_cached": each_once,
        },
        f"{tensor}._random": {
            # Each rank would be given its part of one sequence of random numbers; none are drawn here.
            "OffsetBasedRNGTracker.distribute_region_enabled": lambda _: property(lambda _: False, lambda *_: None),
            # PyTorch 2.11 enters it all the same.
            "OffsetBasedRNGTracker._distribute_region": lambda *_, **__: nullcontext(),
            "OffsetBasedRNGTracker._set_device_state": lambda *_: None,
        },
        f"{fsdp}._flat_param": {"FlatParamHandle._alloc_padded_unsharded_flat_param": partial(_gathering, ledger)},
        f"{fsdp}._runtime_utils": {"_post_backward_hook": partial(_reducing_flat, ledger)},
        f"{fsdp}._fully_shard._fsdp_param": {
            "_chunk_with_empty": partial(_chunked, aside),
            "FSDPParam.init_all_gather_outputs": partial(_gathering, ledger),
        },
        f"{fsdp}._fully_shard._fsdp_param_group": {"FSDPParamGroup.post_backward": partial(_reducing, ledger)},
    }
    return {module: partial(_wrapped, functions) for module, functions in wrappers.items()}


_NOT_IN_ALL_RELEASES: Final = ("_warmup_p2p", "_warmup_backward_result", "_shape_inference")


def _wrapped(functions: dict[str, Callable[..., Any]], module: Any) -> Iterator[Patch]:
    """Patch functions of `module`, and methods and properties of its classes, by their paths."""
    for path, wrapper in functions.items():
        kind, _, name = path.rpartition(".")
        owner = getattr(module, kind) if kind else module
        if name not in _NOT_IN_ALL_RELEASES or hasattr(owner, name):
            original = getattr(owner, name)
            yield owner, name, calling(wrapper, original) if callable(original) else wrapper(original)


def _within(region: Region, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with region():
        return original(*args, **options)


def _chunked(aside: Region, _: Any, tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """Chunk a parameter for FSDP: ranks without rows share one empty part, as thousands of them would take minutes."""
    with aside():
        chunks = list(torch.chunk(tensor, num_chunks, dim=dim))
        return chunks + [chunks[0].new_empty(0)] * (num_chunks - len(chunks))


def _gathering(ledger: Ledger, original: Callable[..., Any], owner: Any, *args: Any, **options: Any) -> Any:
    flat = original(owner, *args, **options)  # None for a parameter of its own, which has the tensors then
    for tensor in owner.all_gather_outputs if flat is None else (flat,):
        ledger.mark(tensor, "gathered parameter")
    return flat


def _reducing(ledger: Ledger, original: Callable[..., None], group: Any, *args: Any) -> None:
    for parameter in group.fsdp_params:
        whole = getattr(parameter, "_unsharded_param", None)
        for gradient in (getattr(whole, "grad", None), parameter.unsharded_accumulated_grad):
            if gradient is not None:
                ledger.mark(gradient, "unsharded gradient")
    original(group, *args)
    for parameter in group.fsdp_params:
        if parameter.sharded_param.grad is not None:
            ledger.mark(parameter.sharded_param.grad, "gradient")


def _reducing_flat(ledger: Ledger, original: Callable[..., None], state: Any, handle: Any, *args: Any) -> None:
    parameter = handle.flat_param
    if parameter.grad is not None:
        ledger.mark(parameter.grad, "unsharded gradient" if handle.uses_sharded_strategy else "gradient")
    original(state, handle, *args)
    if (shard := getattr(parameter, "_saved_grad_shard", None)) is not None:
        ledger.mark(shard, "gradient")


def _warmed_up(
    alone: bool,
    original: Callable[..., None],
    schedule: Any,
    stages: list[Any],
    has_backward: bool,
    *args: Any,
    **options: Any,
) -> None:
    """Wrap a schedule's warm-up: stages without known shapes ask their neighbours. A rank that is `alone` raises."""
    module: Any = sys.modules["torch.distributed.pipelining.schedules"]
    is_dynamic = module.InferenceMode.needs_dynamic
    own = [stage for stage in stages if isinstance(stage, module.PipelineStage)]
    asking = [stage for stage in own if is_dynamic(stage._user_meta, has_backward)]
    if asking and alone:
        _would_ask(original, asking[0])
    original(schedule, stages, has_backward, *args, **options)
    for stage in stages if asking else ():
        stage._inference_mode = module.InferenceMode.DYNAMIC


def _would_ask(_: Any, stage: Any, *__: Any, **___: Any) -> NoReturn:
    raise InputError(
        f"stage {stage.stage_index} of the pipeline would ask its neighbours for the shapes that they send: give "
        "PipelineStage its input_args and output_args, or use memsize run or memsize.trace where processes fork, as on "
        "Linux: they run those too"
    )


def _voted(original: Callable[..., Any], *args: Any, **options: Any) -> torch.Tensor:
    """Replace the vote of pipeline stages: assume that all stages vote like those of this rank."""
    original(*args, **options)
    return torch.ones(1, dtype=torch.int32)


# -- tensor lists ----------------------------------------------------------------------------------------------------

_BY_ELEMENT: Final = ("aten::_foreach_", "aten::_amp_foreach_", "aten::_fused_")
"""Prefixes of ops that treat each element of their lists alike."""


def each_once(original: Callable[[Any, Any], Any], propagator: Any, schema: Any) -> Any:
    """Wrap `ShardingPropagator`'s propagation so that it processes each distinct list element once."""
    places = _places(schema)
    if len(set(places)) == len(places):
        return original(propagator, schema)
    firsts = [places.index(number) for number in range(max(places) + 1)]
    sharding = original(propagator, _picked(schema, firsts, len(places)))
    suggested, results = sharding.redistribute_schema, sharding.output_spec
    return replace(
        sharding,
        output_spec=_pick(results, places, len(firsts)),
        redistribute_schema=suggested and _picked(suggested, places, len(firsts)),
    )


def _places(schema: Any) -> list[int]:
    """Return the index of each list element among the distinct elements; empty for ops without tensor lists."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    if not schema.op.name().startswith(_BY_ELEMENT):
        return []
    lists = [
        argument
        for argument in schema.args_schema
        if isinstance(argument, (list, tuple)) and argument and type(argument[0]) is DTensorSpec
    ]
    if len(set(map(len, lists))) != 1:
        return []
    numbers: dict[tuple[Any, ...], int] = {}
    return [numbers.setdefault(row, len(numbers)) for row in zip(*lists, strict=True)]


def _picked(schema: Any, places: Sequence[int], length: int) -> Any:
    args = tuple(_pick(argument, places, length) for argument in schema.args_schema)
    return type(schema)(schema.op, args, schema.kwargs_schema, schema_info=schema.schema_info)


def _pick(value: Any, places: Sequence[int], length: int) -> Any:
    if not isinstance(value, (list, tuple)) or len(value) != length:
        return value
    return type(value)(value[index] for index in places)


# -- buckets -----------------------------------------------------------------------------------------------------------


def with_own_buckets(model: nn.Module, group: Any, views: bool) -> nn.Module:
    """Wrap `model` in `DistributedDataParallel`, with a bucket for each of its tensors (`memsize.depth.buckets`)."""
    distributed: Any = torch.distributed
    wrapped = partial(nn.parallel.DistributedDataParallel, process_group=group, gradient_as_bucket_view=views)
    with (
        assigned(distributed, "_compute_bucket_assignment_by_size", _one_by_one),
        assigned(distributed, "_broadcast_coalesced", _sent_one_by_one),
    ):
        return wrapped(model, bucket_cap_mb=2**-20)


def _one_by_one(tensors: Sequence[Tensor], limits: Sequence[int], *_: Any) -> tuple[list[list[int]], list[int]]:
    return [[index] for index in range(len(tensors))], [limits[0]] * len(tensors)


def _sent_one_by_one(group: Any, tensors: Sequence[Tensor], _: int, rank: int = 0) -> None:
    for tensor in tensors:
        flat = torch.cat([tensor.contiguous().view(-1)])
        torch.distributed.broadcast(flat, group_src=rank, group=group)
        tensor.copy_(flat.view_as(tensor))
        del flat
