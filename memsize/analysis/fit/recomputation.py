"""Activations that are not kept on the GPU: recomputed, all of a block's or those between its products, or in the
host's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from memsize.analysis.remedies import NotApplicable
from memsize.records.gpu import Card
from memsize.tracing.run import Setup
from memsize.virtual.region import VirtualMachine

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_PRODUCTS: Final = frozenset(
    "mm addmm bmm baddbmm convolution _scaled_mm _grouped_mm _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention".split()
)
"""Ops whose results a selective checkpoint keeps: nearly all of a block's time is theirs."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """Checkpoint repeated blocks, the first `blocks` or all: each keeps its input, and runs again in backward.

    A `selective` checkpoint keeps the results of products and attention too, so that they are not computed again.
    """

    blocks: int | None = None
    selective: bool = False

    @property
    def tells_blocks_apart(self) -> bool:
        """Whether blocks are treated differently, so that a run of a few tells nothing about the others."""
        return self.blocks is not None

    def __call__(self, setup: Setup) -> Setup:
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

        options: dict[str, Any] = {"use_reentrant": False}
        if self.selective:
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _keeping_products)
        for block in repeated_blocks(setup.model)[: self.blocks]:
            block.forward = partial(checkpoint, block.forward, **options)
        config = getattr(setup.model, "config", None)
        if getattr(config, "use_cache", False):
            # Running a block twice would also write its keys and values to the cache twice.
            config.use_cache = False  # type: ignore[union-attr]
        return setup


def _keeping_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    is_product = op.namespace == "aten" and op._schema.name.removeprefix("aten::") in _PRODUCTS
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The non-leaf modules of one class that stand in lists or sequences: of the class that holds most parameters.

    Raises `NotApplicable` where no class occurs twice.
    """
    by_class: dict[type, list[nn.Module]] = {}
    for container in model.modules():
        if isinstance(container, _CONTAINERS):
            for child in container.children():
                if not isinstance(child, _CONTAINERS) and any(True for _ in child.children()):
                    by_class.setdefault(type(child), []).append(child)
    repeated = [blocks for blocks in by_class.values() if len(blocks) > 1]
    if not repeated:
        raise NotApplicable("no module of several layers stands more than once in a list or a sequence")
    return max(repeated, key=lambda blocks: sum(p.numel() for block in blocks for p in block.parameters()))


@dataclass(frozen=True, slots=True)
class OffloadActivations:
    """Copy all that the forward saves for backward to pinned memory of the host, on a run that tells it from `card`."""

    card: Card

    def __call__(self, setup: Setup) -> Setup:
        forward: Callable[..., Any] = setup.model.forward

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                return forward(*args, **kwargs)

        setup.model.forward = offloaded
        return replace(setup, machine=VirtualMachine(self.card))
