"""Optimizations that change a meta copy which is ready to run: frozen weights, adapters, a loss without logits, other
optimizers. The user's own model is never touched.

`Adam8bit` keeps Adam's state in 8 bits, as bitsandbytes lays it out. It is modelled: the bytes and their lifetimes are
those of the library, whose own kernels need a GPU. Source: bitsandbytes 0.43 to 0.49, `optim/optimizer.py`
(`Optimizer2State.init_state`: two uint8 tensors, a float32 absmax per block of 256, one table of 256 float32 each for
signed and unsigned values; parameters of fewer than 4,096 elements keep float32).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from memsize.analysis.remedies import NotApplicable
from memsize.errors import InputError
from memsize.kernels.linear_losses import CutCrossEntropy, LigerCrossEntropy
from memsize.model.tensor_storage import stored_tensors
from memsize.precision.adapters import add_adapters, has_adapters
from memsize.records.gpu import Card
from memsize.records.trace import Layer
from memsize.spec.scenario import scenario_named
from memsize.spec.training import Adapter
from memsize.torch_internals.pytree import tensors_in
from memsize.tracing.run import Setup
from memsize.virtual.region import VirtualMachine
from memsize.workloads.optimizers import make_optimizer
from memsize.workloads.served_parts import part_of

TOKENS = 1024
"""Tokens per part."""
LARGE = 8192
"""From this many classes on, a linear layer counts as a head over a vocabulary."""


HeadForward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class HeadLoss:
    """Let the head return the `loss` of its hidden states in place of their logits.

    `loss` takes the head's own forward, the head, the hidden states of all tokens, and their targets.
    """

    loss: Callable[[HeadForward, nn.Linear, torch.Tensor, torch.Tensor], torch.Tensor]

    def __call__(self, setup: Setup) -> Setup:
        head = _head(setup.model)
        forward = head.forward

        def fused(hidden: torch.Tensor) -> torch.Tensor:
            tokens = hidden.reshape(-1, hidden.shape[-1])
            target = torch.zeros(tokens.shape[0], dtype=torch.int64, device=tokens.device)
            return self.loss(forward, head, tokens, target)

        head.forward = fused  # type: ignore[method-assign,assignment]
        return setup


def in_chunks(forward: HeadForward, _: nn.Linear, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Head and cross-entropy, `TOKENS` at a time: each part's logits are computed again in backward."""
    from torch.utils.checkpoint import checkpoint

    def loss_of_part(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(forward(hidden).float(), target, reduction="sum")

    pairs = zip(tokens.split(TOKENS), target.split(TOKENS), strict=True)
    losses: list[torch.Tensor] = [checkpoint(loss_of_part, *pair, use_reentrant=False) for pair in pairs]
    return torch.stack(losses).sum() / tokens.shape[0]


def by_liger(_: HeadForward, head: nn.Linear, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Liger's fused linear cross-entropy."""
    loss: torch.Tensor = LigerCrossEntropy.apply(tokens, head.weight, head.bias, target)  # type: ignore[no-untyped-call]
    return loss


def by_cut_cross_entropy(_: HeadForward, head: nn.Linear, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Apple's cut cross-entropy. Under autocast both of its inputs are cast, as those of the head would be."""
    weight = head.weight
    if torch.is_autocast_enabled("cuda"):
        tokens, weight = (tensor.to(torch.get_autocast_dtype("cuda")) for tensor in (tokens, weight))
    loss: torch.Tensor = CutCrossEntropy.apply(tokens, weight, target)  # type: ignore[no-untyped-call]
    return loss


def check_cut_cross_entropy(setup: Setup, is_cast: bool) -> Setup:
    """Raise `NotApplicable` where cut cross-entropy would refuse the model's head, which autocast may cast."""
    head = _head(setup.model)
    if "bias" in dict(head.named_parameters(recurse=False)):
        raise NotApplicable("cut cross-entropy needs a head without a bias")
    if head.weight.dtype not in (torch.float16, torch.bfloat16) and not is_cast:
        raise NotApplicable("cut cross-entropy needs 16-bit hidden states")
    return setup


def keep_the_last_logits(setup: Setup) -> Setup:
    """Let the head make the logits of the last token of each sequence alone: no other is looked at."""
    model = setup.model
    if {"logits_to_keep", "num_logits_to_keep"} & set(inspect.signature(model.forward).parameters):
        raise NotApplicable("generate already asks for the logits of the last token only")
    head = _head(model)
    forward = head.forward
    head.forward = lambda hidden: forward(hidden[:, -1:])  # type: ignore[method-assign,assignment]
    return setup


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the model that one of `cards` holds; the head's parts of the logits are gathered."""

    cards: int

    def __call__(self, setup: Setup) -> Setup:
        model: Any = setup.model
        if scenario_named(setup.scenario).recipe == "quantized":
            raise NotApplicable("quantized weights are not divided here")
        part: Any = part_of(model, self.cards, setup.name)
        head = part.get_output_embeddings()
        forward = head.forward
        head.forward = lambda hidden: torch.cat([forward(hidden)] * self.cards, dim=-1)
        return replace(setup, model=part, stored=stored_tensors)


def loss_of_the_head(output: Any) -> torch.Tensor:
    """Find the loss of the chunked head in the model's output."""
    return next(t for t in tensors_in(output) if t.is_floating_point() and t.dim() == 0)


loss_of_the_head.is_regular = True  # type: ignore[attr-defined]


def _head(model: nn.Module) -> nn.Linear:
    """The last linear layer with as many outputs as a vocabulary has words."""
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features >= max(LARGE, m.in_features)]
    if not heads:
        raise NotApplicable(f"no linear layer has {LARGE:,} outputs or more")
    return heads[-1]


BLOCK = 256
LEAST = 4096


class Adam8bit(torch.optim.Optimizer):
    """Adam or AdamW with 8-bit state: 2 bytes per parameter and 8 per block of 256, updated in place."""

    is_regular = True

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self._tables: list[torch.Tensor] = []

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update. The only memory that it allocates is the state, in the first step."""
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        if parameter not in self.state:
                            self.state[parameter] = self._new_state(parameter)
                        parameter.add_(parameter.grad)
        return None

    def _new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = ("state1", "state2")
        if parameter.numel() < LEAST:
            return {name: torch.empty_like(parameter, dtype=torch.float32) for name in state}
        if not self._tables:
            self._tables = [torch.empty(256, dtype=torch.float32, device=parameter.device) for _ in state]
        blocks = -(-parameter.numel() // BLOCK)
        packed = {name: torch.empty_like(parameter, dtype=torch.uint8) for name in state}
        for name in ("absmax1", "absmax2"):
            packed[name] = torch.empty(blocks, dtype=torch.float32, device=parameter.device)
        return packed | dict(zip(("qmap1", "qmap2"), self._tables, strict=True))


_IN_PLACE = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.Hardtanh, nn.RReLU)
"""Activations whose backward needs only their output, so that writing it over the input loses nothing."""


def write_in_place(setup: Setup) -> Setup:
    """Let activations write over their input, where their backward does not need it."""
    activations = [module for module in setup.model.modules() if isinstance(module, _IN_PLACE) and not module.inplace]
    if not activations:
        raise NotApplicable("no activation module has an in-place form that is not in use already")
    for module in activations:
        module.inplace = True
    return setup


def switch_autoencoder(setup: Setup, method: str) -> Setup:
    """Call a `method` of diffusers' autoencoder, such as enable_tiling."""
    for module in autoencoders(setup.model):
        getattr(module, method)()
    return setup


def autoencoders(model: nn.Module) -> list[nn.Module]:
    """The modules inside `model` that can work in tiles."""
    return [module for module in model.modules() if hasattr(module, "enable_tiling")]


def freeze_all_but_head(setup: Setup) -> Setup:
    """Train only the last module that has parameters."""
    if has_adapters(setup.model):
        raise NotApplicable("only adapters are trained already")
    owners = [module for module in setup.model.modules() if module._parameters]
    trained = [module for module in owners if any(p.requires_grad for p in module.parameters(recurse=False))]
    if len(trained) < 2:
        raise NotApplicable("at most one module is trained")
    setup.model.requires_grad_(False)
    for parameter in trained[-1].parameters(recurse=False):
        parameter.requires_grad_(True)
    return setup


@dataclass(frozen=True, slots=True)
class LowRank:
    """LoRA of this rank beside every linear layer but the head, as ``--lora r=RANK`` trains it."""

    rank: int

    def __call__(self, model: nn.Module) -> None:
        if has_adapters(model):
            raise NotApplicable("adapters are trained already")
        try:
            add_adapters(model, Adapter(rank=self.rank))
        except InputError as error:
            raise NotApplicable(str(error)) from error


@dataclass(frozen=True, slots=True)
class StepInBackward:
    """Make an optimizer of `kind` for each parameter, which updates it as soon as its gradient is complete."""

    kind: str | Callable[[Any], Any]

    @property
    def is_regular(self) -> bool:
        """Whether the optimizer is none of the user's."""
        return isinstance(self.kind, str) or getattr(self.kind, "is_regular", False)

    def __call__(self, parameters: Iterable[torch.Tensor]) -> NoStep:
        for parameter in parameters:
            optimizer = make_optimizer(self.kind, [parameter])
            parameter.register_post_accumulate_grad_hook(partial(_step_and_free, optimizer))
        return NoStep()


def _step_and_free(optimizer: torch.optim.Optimizer, _: torch.Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


class NoStep:
    """The optimizer of a loop whose parameters are updated in backward."""

    def step(self) -> None:
        """Do nothing: every parameter has been updated."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: no gradient is left."""


# -- activations that are not kept -------------------------------------------------------------------------------------


_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_PRODUCTS: Final = frozenset(
    "mm addmm bmm baddbmm convolution _scaled_mm _grouped_mm _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention".split()
)
"""Ops whose results a selective checkpoint keeps: nearly all of a block's time is theirs."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """Checkpoint repeated blocks, the first `whole` or all: each keeps its input, and runs again in backward.

    The next `selective` blocks (None: all others) keep the results of products and attention too, so that these are not
    computed again.
    """

    whole: int | None = None
    selective: int | None = 0

    @property
    def tells_blocks_apart(self) -> bool:
        """Whether blocks are treated differently, so that a run of a few tells nothing about the others."""
        return self not in (Recompute(), SELECTIVE)

    def __call__(self, setup: Setup) -> Setup:
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

        blocks = repeated_blocks(setup.model)
        for block in (whole := blocks[: self.whole]):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        context = partial(create_selective_checkpoint_contexts, _keeping_products)
        for block in blocks[len(whole) :][: self.selective]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=context)
        config = getattr(setup.model, "config", None)
        if getattr(config, "use_cache", False):
            # Running a block twice would also write its keys and values to the cache twice.
            config.use_cache = False  # type: ignore[union-attr]
        return setup

    def share(self, model: nn.Module, layers: Iterable[Layer]) -> float | None:
        """The share of the forward's products that the backward of `model` computes again; None without products.

        `layers` are those of a trace, with the multiply-adds of a forward.
        """
        paths = {module: path for path, module in model.named_modules()}
        again = tuple(f"{paths[block]}." for block in repeated_blocks(model)[: self.whole])
        counts = [(f"{layer.path}.".startswith(again), layer.multiply_adds or 0) for layer in layers]
        total = sum(count for _, count in counts)
        return sum(count for is_again, count in counts if is_again) / total if total else None


SELECTIVE: Final = Recompute(0, None)
"""A selective checkpoint around all blocks."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Let PyTorch's compiler keep `percent` of the activations that it would keep: it recomputes what costs least.

    Source: torch/_functorch/partitioners.py, `choose_saved_values_set`.
    """

    percent: int

    def __call__(self, setup: Setup) -> Setup:
        forward = setup.precision.forward

        @contextmanager
        def region() -> Iterator[None]:
            from torch._functorch import config as functorch_config

            with functorch_config.patch(activation_memory_budget=self.percent / 100), forward():
                yield

        return replace(setup, precision=replace(setup.precision, forward=region))


def _keeping_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    is_product = op.namespace == "aten" and op._schema.name.removeprefix("aten::") in _PRODUCTS
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The non-leaf modules of one class that stand in lists or sequences: of the class that holds most parameters.
    Where no other class occurs twice, these are the innermost Sequentials.

    Raises `NotApplicable` where there are none either.
    """
    by_class: dict[type, list[nn.Module]] = {}
    sequences: list[nn.Sequential] = []
    for container in model.modules():
        if isinstance(container, _CONTAINERS):
            for child in container.children():
                if isinstance(child, nn.Sequential) and len(child) > 1:
                    sequences.append(child)
                elif not isinstance(child, _CONTAINERS) and any(True for _ in child.children()):
                    by_class.setdefault(type(child), []).append(child)
    innermost = [child for child in sequences if not any(isinstance(inner, nn.Sequential) for inner in child)]
    if not any(len(blocks) > 1 for blocks in by_class.values()):
        by_class = {nn.Sequential: [*innermost]}
    repeated = [blocks for blocks in by_class.values() if len(blocks) > 1]
    if not repeated:
        raise NotApplicable("no block of several layers repeats in a list or a sequence")
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
