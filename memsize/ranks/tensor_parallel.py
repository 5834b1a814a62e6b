"""Tensor parallelism by a model's own plan, as transformers ships it, and views that fail because heads are divided.

Source: transformers' ``PreTrainedModel.tp_plan`` and its distributed/tensor_parallel.py (5.20 to 5.23).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from memsize.errors import InputError
from memsize.records.finding import join_names

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
import math
import re

from memsize.records.trace import Trace

_HEADS: Final = {"num_attention_heads": "attention heads", "num_key_value_heads": "key and value heads"}
_ATTENTION: Final = (".q_proj", ".k_proj", ".qkv_proj", ".query_key_value")


def divide(model: Any, mesh: DeviceMesh) -> None:
    """Divide the layers of `model` over `mesh` by its own plan, with the library's own code."""
    plan = plan_of(model, mesh.size())
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError:
        raise InputError("tensor parallelism by a model's own plan wants transformers 5.20 or newer") from None
    apply_tensor_parallelism(model, mesh, _apart(model, model._expand_parallel_plan(plan)))


def _apart(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Return `plan` without layers that share another's weight: the library ties weights after dividing them."""
    there = {name for name, _ in model.named_parameters()}
    tied = {name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False) if name not in there}
    return {name: style for name, style in plan.items() if not tied & {name, name.rpartition(".")[0]}}


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
        if isinstance(heads, int) and heads % size:
            largest = max(number for number in range(1, size) if heads % number == 0)
            raise InputError(f"{heads} {words} cannot be divided evenly over tp={size}: over tp={largest} they can")
    return dict(plan)


def plan_in_words(model: nn.Module, size: int) -> str:
    """Describe the plan that divides `model` over `size` GPUs, for the report."""
    styles = Counter(plan_of(model, size).values())
    tied = len([*model.parameters()]) < len([*model.named_parameters(remove_duplicate=False)])
    whole = "; layers whose weights are tied stay whole" if tied else ""
    return f"tp: the model's own tp_plan ({join_names(tuple(f'{n} x {style}' for style, n in styles.items()))}){whole}"


# -- tp head split ---------------------------------------------------------------------------------------------------

_VIEW: Final = re.compile(r"shape '\[([-\d, ]+)\]' is invalid for input of size (\d+)")
_DISTRIBUTED: Final = "torch DTensor"
"""The `wrapper` that a trace records for parameters divided among processes."""


def undivided(failure: str, trace: Trace, ranks: int) -> tuple[str, str] | None:
    """Explain a view that fails because heads are divided over `ranks` processes: return a sentence with the
    placeholder ``{shape}``, and the shape that the view asks for. Return `None` if the run in `trace` failed for
    another reason.
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
