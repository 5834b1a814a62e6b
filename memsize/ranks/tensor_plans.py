"""Tensor parallelism by a model's own plan: which of its layers are divided, and how, as transformers ships it.

Source: transformers' ``PreTrainedModel.tp_plan`` and its distributed/tensor_parallel.py (5.20 to 5.23).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from memsize.errors import InputError
from memsize.records.finding import join_names

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

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
    """`plan` without layers whose weight is another's: the library ties weights after it has divided them."""
    there = {name for name, _ in model.named_parameters()}
    tied = {name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False) if name not in there}
    return {name: style for name, style in plan.items() if not tied & {name, name.rpartition(".")[0]}}


def plan_of(model: Any, size: int) -> dict[str, str]:
    """The plan by which `model` is divided over `size` GPUs: the style of each layer by its name, with ``*`` for
    numbers.

    Raises `InputError` for a model that has none, and where its heads cannot be divided.
    """
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
    """The plan for a reader."""
    styles = Counter(plan_of(model, size).values())
    tied = len([*model.parameters()]) < len([*model.named_parameters(remove_duplicate=False)])
    whole = "; layers whose weights are tied stay whole" if tied else ""
    return f"tp: the model's own tp_plan ({join_names(tuple(f'{n} x {style}' for style, n in styles.items()))}){whole}"
