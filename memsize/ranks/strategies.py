"""A model spread over GPUs by PyTorch's own code: `fully_shard`, `DistributedDataParallel` or `DataParallel`; and its
blocks, which are sharded one by one, or put on stages: its own hints, else the layers that repeat.

Source: transformers' ``PreTrainedModel.tp_plan`` and ``ep_plan``, its distributed/tensor_parallel.py (5.20 to 5.23),
and expert_parallel.py and fsdp.py beside it (5.21 to 5.23).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch import nn

from memsize.errors import InputError
from memsize.model.experts import expert_parameters
from memsize.ranks.sharding import with_own_buckets
from memsize.records.finding import join_names
from memsize.records.trace import Trace
from memsize.spec.parallel import Parallel
from memsize.spec.scenario import Scenario
from memsize.units import format_bytes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy


def spread(
    model: nn.Module,
    parallel: Parallel,
    scenario: Scenario,
    aside: Callable[[], AbstractContextManager[None]] = nullcontext,
    *,
    apart: bool = False,
) -> nn.Module:
    """Return `model` as one process of `parallel` holds it, under ddp with a bucket for each tensor if `apart`. The
    process group must exist already.

    `model` itself is changed, and for ``dp`` must come from `wrapped`; call the returned module in its place. Layers
    are divided by tensor parallelism within `aside`, where nothing is recorded: only their shards are stored.
    """
    if parallel.kind == "dp":
        wrapped = nn.DataParallel(cast(nn.DataParallel[Any], model).module)
        vars(model).update((name, value) for name, value in vars(wrapped).items() if not name.startswith("_"))
        return model
    mesh = mesh_of(parallel)
    with aside():
        if parallel.tensor > 1:
            divide(model, mesh["tp"], expert_plan_of(model, parallel.experts) if parallel.experts > 1 else ())
        if parallel.experts > 1:
            divide_experts(model, parallel, mesh["tp"], scenario)
    if apart:
        return with_own_buckets(model, mesh["replicate"].get_group(), parallel.views)
    return shared_out(model, blocks_of(model).modules, parallel, mesh, scenario)


def mesh_of(parallel: Parallel) -> DeviceMesh:
    """Return the mesh of all processes: those that divide a layer are neighbours, stages are furthest apart."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {"pp": parallel.stages, "replicate": parallel.replicas, "shard": parallel.shards, "tp": parallel.tensor}
    extra = {name for name in ("pp", "tp") if sizes[name] > 1} | ({"tp"} if parallel.experts > 1 else set())
    axes = [name for name in sizes if name in _AXES[parallel.kind] or name in extra]
    return init_device_mesh("cuda", tuple(sizes[name] for name in axes), mesh_dim_names=tuple(axes))


_MATTERS: Final = 0.1
"""Padding is reported from this share of a model's bytes on."""
_AXES: Final[dict[str, tuple[str, ...]]] = {
    "ddp": ("replicate",),
    "fsdp": ("shard",),
    "hsdp": ("replicate", "shard"),
    "tp": ("tp",),
    "pp": ("pp",),
}


def shared_out(
    model: nn.Module, blocks: Iterable[nn.Module], parallel: Parallel, mesh: DeviceMesh, scenario: Scenario
) -> nn.Module:
    """Return `model` divided over data-parallel processes: replicated, sharded block by block, or unchanged."""
    if parallel.kind == "ddp":
        group = mesh["replicate"].get_group()
        return nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=parallel.views)
    if parallel.shards_parameters:
        from torch.distributed.fsdp import fully_shard

        options = _sharding(mesh[_AXES[parallel.kind]], parallel, scenario)
        for block in blocks:  # a stage would gather them anew for each microbatch
            fully_shard(block, **options, reshard_after_forward=not parallel.is_pipeline)
        fully_shard(model, **options)
    return model


def compile_blocks(model: nn.Module, blocks: Sequence[nn.Module], scenario: Scenario) -> None:
    """Compile each of the `blocks` by itself, as the calls of `model`, before they are sharded; without blocks all of
    it. A block inside of another is part of that one.
    """
    if scenario.compile:
        inside = {part for block in blocks for part in block.modules() if part is not block}
        for block in [block for block in blocks if block not in inside] or [model]:
            block.compile(mode=scenario.compile)


def _sharding(mesh: DeviceMesh, parallel: Parallel, scenario: Scenario) -> dict[str, Any]:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    offload = CPUOffloadPolicy() if parallel.offload else OffloadPolicy()
    return {"mesh": mesh, "mp_policy": policy_of(scenario), "offload_policy": offload}


def wrapped(model: nn.Module, parallel: Parallel) -> nn.Module:
    """Wrap `model` in `nn.DataParallel` for ``dp``, before its GPUs exist, unless it is wrapped already."""
    return nn.DataParallel(model) if parallel.kind == "dp" and not isinstance(model, nn.DataParallel) else model


def policy_of(scenario: Scenario) -> MixedPrecisionPolicy:
    """Return FSDP's mixed-precision policy for `scenario`, which replaces autocast for a sharded model.

    Shards and optimizer state are float32, layers run on parameters that are gathered in the lower precision, and
    gradients are reduced in float32. Scenarios without autocast cast nothing.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if scenario.autocast is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=getattr(torch, scenario.autocast), reduce_dtype=torch.float32)


def how(model: nn.Module, parallel: Parallel, scenario: Scenario) -> tuple[str, ...]:
    """Describe how `model` will be divided, for the report."""
    shown = f"this is rank {parallel.world.rank}"
    if parallel.kind == "dp":
        return (
            f"dp: nn.DataParallel splits the batch over {parallel.size} GPUs, and copies the model to each for every "
            f"forward; this is GPU {parallel.world.rank}",
        )
    notes = []
    if parallel.is_pipeline:
        blocks = blocks_in_line(model)
        per_stage, more = divmod(len(blocks.modules), parallel.stages)
        size = f"{per_stage + 1} or {per_stage}" if more else str(per_stage)
        notes.append(
            f"pp: {parallel.stages} stages, each with {size} of {blocks}, {blocks.source}, under PyTorch's "
            "Schedule1F1B; the batch is that of one microbatch"
        )
    if parallel.tensor > 1:
        styles = Counter(plan_of(model, parallel.tensor).values())
        tied = len([*model.parameters()]) < len([*model.named_parameters(remove_duplicate=False)])
        whole = "; layers whose weights are tied stay whole" if tied else ""
        words = join_names(tuple(f"{n} x {style}" for style, n in styles.items()))
        notes.append(f"tp: the model's own tp_plan ({words}){whole}")
    if parallel.experts > 1:
        expert_plan_of(model, parallel.experts)
        notes.append(
            f"ep: by the model's own ep_plan, each GPU has 1/{parallel.experts} of the experts of a layer and gets "
            "their tokens by an all-to-all"
        )
    if parallel.kind == "tp":
        notes.append("the optimizer updates one parameter after the other (foreach=False), as some are divided")
    if parallel.kind == "ddp":
        notes.append(
            f"ddp: {parallel.replicas} GPUs hold each stage, in DistributedDataParallel"
            if parallel.is_pipeline
            else f"ddp: each GPU holds the whole model, in DistributedDataParallel; {shown}"
        )
    if parallel.views:
        notes.append("views: gradient_as_bucket_view=True, gradients are views of the reduction buckets")
    if scenario.compile and (parallel.shards_parameters or parallel.is_pipeline):
        notes.append("compiled: each block by itself (block.compile()), before it is sharded; the rest runs eagerly")
    return (*notes, *(_sharded(model, parallel, scenario, shown) if parallel.shards_parameters else ()))


def _sharded(model: nn.Module, parallel: Parallel, scenario: Scenario, shown: str) -> Iterator[str]:
    if parallel.is_pipeline:
        yield (
            f"{parallel.kind}: fully_shard on each block of a stage, gathered once for all microbatches "
            "(reshard_after_forward=False), and on the stage"
        )
    else:
        blocks = blocks_of(model)
        units = f"{blocks}, {blocks.source}" if blocks.modules else "the whole model at once: no layers repeat in it"
        yield f"{parallel.kind}: fully_shard on {units}; {shown}"
        yield from _padded(model, parallel)
    if scenario.autocast:
        yield (
            f"{scenario.name} is FSDP's mixed precision here, not autocast: shards in float32, layers in "
            f"{scenario.autocast}, gradients reduced in float32"
        )
    if parallel.offload:
        yield (
            "offload: CPUOffloadPolicy keeps shards, their gradients and the optimizer's state in the host's memory, "
            "where the optimizer runs"
        )


def _padded(model: nn.Module, parallel: Parallel) -> Iterator[str]:
    """Yield a note on the parameter with the most padding: each GPU gets at least one row of it."""
    padded = {
        name: (parallel.shards - len(parameter)) * parameter[0].nbytes
        for name, parameter in model.named_parameters()
        if parameter.dim() and 0 < len(parameter) < parallel.shards
    }
    whole = sum(parameter.nbytes for parameter in model.parameters())
    if parallel.tensor > 1 or parallel.experts > 1 or sum(padded.values()) < _MATTERS * whole:
        return
    name = max(padded, key=lambda path: padded[path])
    weight = model.get_parameter(name)
    rows = "1 row" if len(weight) == 1 else f"{len(weight):,} rows"
    yield (
        f"{name} has {rows}, which FSDP divides: each GPU holds at least one, and {format_bytes(weight[0].nbytes)} are "
        "gathered for each of them (shard_placement_fn divides another dimension, where that goes evenly)"
    )


# -- blocks ------------------------------------------------------------------------------------------------------------

_LISTS = (nn.ModuleList, nn.Sequential)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)


class Blocks(NamedTuple):
    """The modules to shard, the innermost first, and a description of their source."""

    modules: tuple[nn.Module, ...]
    source: str

    def __str__(self) -> str:
        kinds = Counter(type(module).__name__ for module in self.modules)
        return join_names(tuple(f"{count:,} x {kind}" for kind, count in kinds.items()))


def blocks_of(model: nn.Module) -> Blocks:
    """Return the modules that the library lists in ``_no_split_modules``, or else the children of one class in a
    ModuleList or Sequential, preferably those that have children themselves. May be empty.
    """
    hints = (getattr(module, "_no_split_modules", None) for module in model.modules())
    hinted = {name for names in hints if isinstance(names, (list, tuple, set)) for name in names}
    own = [module for module in model.modules() if type(module).__name__ in hinted and module is not model]
    if own:
        return Blocks(_inner_first(own), "the model's own _no_split_modules")
    repeated: list[nn.Module] = []
    for module in model.modules():
        children = list(dict.fromkeys(module.children())) if isinstance(module, _LISTS) else []
        is_one_class = len({type(child) for child in children}) == 1 and len(children) > 1
        if is_one_class and not isinstance(children[0], _WITHOUT_FORWARD):
            repeated += [child for child in children if any(True for _ in child.parameters())]
    nested = [module for module in repeated if any(True for _ in module.children())]
    return Blocks(_inner_first(nested or repeated), "the layers that repeat in a list or a sequence")


def blocks_in_line(model: nn.Module) -> Blocks:
    """Return the blocks that pipeline stages consist of: the layers in the lists that the library's plan names
    (transformers' ``pp_plan``), or else those of `blocks_of` without branches of a block and without blocks that
    contain others.
    """
    if planned := [block for several in _planned(model) for block in several]:
        return Blocks(tuple(planned), "the model's own pp_plan")
    blocks, source = blocks_of(model)
    branches = set(_branches(blocks))
    blocks = tuple(block for block in blocks if block not in branches)
    return Blocks(tuple(block for block in blocks if {*block.modules()}.isdisjoint({*blocks} - {block})), source)


def _branches(blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield what all blocks of a class hold in ModuleLists of equal lengths: experts, which do not run in order."""
    kinds: dict[type, list[list[nn.ModuleList]]] = {}
    for block in blocks:
        lists = [module for module in block.modules() if isinstance(module, nn.ModuleList)]
        kinds.setdefault(type(block), []).append(lists)
    for alike in kinds.values():
        lengths = {tuple(map(len, lists)) for lists in alike}
        if len(alike) > 1 and len(lengths) == 1:
            yield from (branch for lists in alike for several in lists for branch in several)


def _planned(model: Any) -> Iterator[nn.ModuleList]:
    base = getattr(model, "base_model", model)  # whose names the plan uses
    plan = getattr(base, "_pp_plan", None) or getattr(getattr(model, "config", None), "base_model_pp_plan", None)
    for name in plan or ():
        children = getattr(base, name, None)
        if isinstance(children, nn.ModuleList):
            yield children


def _inner_first(modules: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    return tuple(reversed(dict.fromkeys(modules)))


# -- tensor parallelism by a model's own plan, as transformers ships it -----------------------------------------------

_HEADS: Final = {"num_attention_heads": "attention heads", "num_key_value_heads": "key and value heads"}
_ATTENTION: Final = (".q_proj", ".k_proj", ".qkv_proj", ".query_key_value")


def divide(model: Any, mesh: DeviceMesh, without: Iterable[str] = ()) -> None:
    """Divide the layers of `model` but those of `without` over `mesh` by its own plan, with the library's own code."""
    plan = plan_of(model, mesh.size())
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError:
        raise InputError("tensor parallelism by a model's own plan wants transformers 5.20 or newer") from None
    # Layers that share another's weight stay whole: the library ties weights after dividing them.
    there = {name for name, _ in model.named_parameters()}
    tied = {name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False) if name not in there}
    styles = model._expand_parallel_plan(plan).items()
    whole = tied | set(without)
    plan = {name: style for name, style in styles if not whole & {name, name.rpartition(".")[0]}}
    apply_tensor_parallelism(model, mesh, plan)


def plan_of(model: Any, size: int) -> dict[str, str]:
    """Return the style of each layer by its name, ``*`` for numbers. Raises `InputError` if there is no such plan."""
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, dict) or not plan or not hasattr(model, "_expand_parallel_plan"):
        raise InputError(
            f"{type(model).__name__} has no plan for tensor parallelism (transformers' tp_plan): divide it in a step= "
            "of your own, with memsize.trace(world=…) and parallelize_module"
        )
    divides_heads = any(name.endswith(_ATTENTION) and style == "colwise" for name, style in plan.items())
    config = model.config.get_text_config()
    for name, words in _HEADS.items() if divides_heads else ():
        heads = getattr(config, name, None)
        if isinstance(heads, int):
            _refuse_unequal_parts(heads, words, "tp", size)
    return dict(plan)


def _refuse_unequal_parts(number: int, words: str, kind: str, size: int) -> None:
    if number % size:
        largest = max(parts for parts in range(1, size) if number % parts == 0)
        raise InputError(f"{number} {words} cannot be divided evenly over {kind}={size}; {kind}={largest} works")


# -- expert parallelism by a model's own plan --------------------------------------------------------------------------

_DISPATCHING: Final = "ep_dispatch_experts"


def divide_experts(model: Any, parallel: Parallel, tp_mesh: DeviceMesh, scenario: Scenario) -> None:
    """Divide the experts of each layer over GPUs by the model's own plan, with the library's own code. GPUs with the
    same experts shard them.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    try:
        from transformers.distributed.expert_parallel import apply_expert_parallelism
    except ImportError:
        raise InputError("expert parallelism by a model's own plan wants transformers 5.21 or newer") from None
    plan = expert_plan_of(model, parallel.experts)
    sizes = parallel.replicas, parallel.shards * parallel.tensor // parallel.experts, parallel.experts
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=("replicate", "shard", "ep"))
    apply_expert_parallelism(model, mesh["ep"], tp_mesh, plan)
    axes = _AXES[parallel.kind]
    for name, style in plan.items() if parallel.shards_parameters else ():
        if style == _DISPATCHING:
            experts: Any = fully_shard(model.get_submodule(name), **_sharding(mesh[axes], parallel, scenario))
            experts.set_gradient_divide_factor(float(parallel.replicas * parallel.shards))
            experts.set_force_sum_reduction_for_comms(sizes[1] > 1)


def count_all_experts(model: nn.Module, gpus: int) -> None:
    """Restore the number of experts of each module, which the library's code replaces by the number on one GPU."""
    for module in model.modules():
        if vars(module).get("_is_expert_parallel"):
            vars(module).update(num_experts=vars(module)["num_experts"] * gpus, _is_expert_parallel=False)


def expert_plan_of(model: Any, size: int) -> dict[str, str]:
    """Return the style of each module of experts, and of its weights, by name. Raises `InputError` if there is no such
    plan, or it cannot divide the experts over `size` GPUs.
    """
    plan = getattr(model, "ep_plan", None)
    if not isinstance(plan, dict) or _DISPATCHING not in plan.values():
        if not expert_parameters(model)[0]:
            raise InputError(f"{type(model).__name__} has no experts to divide over ep={size}: ddp and fsdp spread it")
        raise InputError(
            f"{type(model).__name__} has no plan for expert parallelism (transformers' ep_plan): divide its experts in "
            "a step= of your own, with memsize.trace(world=…)"
        )
    plan = model._expand_parallel_plan(plan)
    for name in plan.keys() & dict(model.named_parameters()).keys():
        _refuse_unequal_parts(len(model.get_parameter(name)), "experts", "ep", size)
    return dict(plan)


# -- tp head split ---------------------------------------------------------------------------------------------------

_VIEW: Final = re.compile(r"shape '\[([-\d, ]+)\]' is invalid for input of size (\d+)")
_DISTRIBUTED: Final = "torch DTensor"
"""The `wrapper` that a trace records for parameters divided among processes."""


def undivided(failure: str, trace: Trace, ranks: int) -> tuple[str, str] | None:
    """Explain a view that fails because heads are divided over `ranks` processes: a sentence with the placeholder
    ``{shape}``, and the shape that the view asks for. `None` if the run in `trace` failed for another reason.
    """
    match = _VIEW.search(failure)
    if match is None or not any(tensor.wrapper == _DISTRIBUTED for tensor in trace.tensors):
        return None
    sizes, part = list(map(int, match[1].split(","))), int(match[2])
    unit = math.prod(size for size in sizes if size > 0)
    wholes = [part * count for count in range(2, ranks + 1) if ranks % count == 0]
    if -1 in sizes and any(whole % unit == 0 for whole in wholes):
        sentence = (
            "The view as {shape} finds no whole number of heads on this GPU: parallelize_module gives each an equal "
            "part of a layer's features, so the number of GPUs that share a layer has to divide its heads, and those "
            "of keys and values."
        )
    elif unit in wholes:
        sentence = (
            "The view as {shape} wants the heads of all GPUs, and finds the part of this one: write -1 for their "
            "number, or divide it by the number of GPUs that share the layer."
        )
    else:
        return None
    return sentence, f"[{match[1]}]"
