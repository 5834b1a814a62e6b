"""liger_kernel 0.8.5: its losses, norms, MLPs and rotary embedding, and its patches of transformers' decoders.

Kernels work in place where Liger's do: the gradients of a norm, of a gated product and of a rotary embedding take the
memory of those that come in. Patches of transformers last until the run is over.

Source: Liger-Kernel 0.8.5, `ops/rms_norm.py`, `ops/swiglu.py`, `ops/geglu.py`, `ops/rope.py`, `ops/cross_entropy.py`,
`transformers/monkey_patch.py`, and `transformers/model/`. Known limit: models with recurrent layers, and those of
several modalities but Qwen2.5-VL and Qwen3-VL, have no patch here.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn

from memsize.kernels.linear_losses import IGNORED, LigerCrossEntropy
from memsize.processes.patches import Patch
from memsize.processes.simulation import running
from memsize.virtual.packages.liger_experts import LigerExperts


def _contiguous(*tensors: Tensor) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors]


# -- losses ------------------------------------------------------------------------------------------------------------


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """The loss of a linear layer's hidden states."""

    def __init__(self, *_: Any, reduction: str = "mean", accum_dtype: torch.dtype | None = None, **__: Any) -> None:
        super().__init__()
        self.reduction, self.accum_dtype = reduction, accum_dtype

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None, **_: Any) -> Any:
        return LigerCrossEntropy.apply(_input, lin_weight, bias, target, self.reduction, self.accum_dtype)  # type: ignore[no-untyped-call]


class _InPlace(torch.autograd.Function):
    """Cross-entropy that writes the logits' gradient over them, in the forward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, reduction: str) -> Tensor:
        losses = torch.zeros(len(logits), dtype=logits.dtype, device=logits.device)
        counted = target != IGNORED
        counted.sum()
        ctx.save_for_backward(logits.detach())
        del counted
        return losses if reduction == "none" else losses.sum()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return *ctx.saved_tensors, None, None


class LigerCrossEntropyLoss(nn.Module):
    def __init__(self, *_: Any, reduction: str = "mean", **__: Any) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, _input: Tensor, target: Tensor, *_: Any) -> Any:
        return _InPlace.apply(_input, target, self.reduction)  # type: ignore[no-untyped-call]


def liger_cross_entropy(input: Tensor, target: Tensor, *_: Any, reduction: str = "mean", **__: Any) -> Any:
    """The same in place of ``torch.nn.functional.cross_entropy``."""
    return _InPlace.apply(input, target, reduction)  # type: ignore[no-untyped-call]


# -- layers ------------------------------------------------------------------------------------------------------------


class _Norm(torch.autograd.Function):
    """``[…, width]``: keeps the input and a float32 number per row; each multiprocessor sums the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, in_place: bool) -> Tensor:
        (x,) = _contiguous(x)
        rows = x.view(-1, x.shape[-1])
        out = torch.empty_like(rows)
        scales = torch.empty(len(rows), dtype=torch.float32, device=x.device)
        ctx.in_place = in_place
        ctx.save_for_backward(rows, weight, scales)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = _contiguous(*gradients)
        x, weight, _ = ctx.saved_tensors
        of_weight = None
        if ctx.needs_input_grad[1]:
            processors = torch.cuda.get_device_properties(x.device).multi_processor_count
            sums = torch.empty((processors, x.shape[-1]), dtype=torch.float32, device=x.device)
        rows = gradient.view(-1, x.shape[-1])
        # Autograd adds no other gradient to a view in place, since the view holds its base.
        of_x = (rows if ctx.in_place else torch.zeros_like(rows)).view(gradient.shape)
        if ctx.needs_input_grad[1]:
            of_weight = sums.sum(dim=0).to(weight.dtype)
            del sums
        return of_x, of_weight, None


class LigerRMSNorm(nn.Module):
    in_place = True

    def __init__(self, hidden_size: int, eps: float = 1e-6, *_: Any, in_place: bool = True, **__: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon, self.in_place = eps, in_place and type(self).in_place

    def forward(self, hidden_states: Tensor) -> Any:
        return _Norm.apply(hidden_states, self.weight, self.in_place)  # type: ignore[no-untyped-call]


class _SeparateGradient(LigerRMSNorm):
    """RMSNorm beside a residual that needs its incoming gradient."""

    in_place = False

    def __init__(self, dim: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(dim, eps)


class _GatedProduct(torch.autograd.Function):
    """``silu(a) * b`` or ``gelu(a) * b``: keeps both, and writes their gradients over them."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        a, b = _contiguous(a, b)
        ctx.save_for_backward(a, b)
        return torch.empty_like(a)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _contiguous(*gradients)
        return ctx.saved_tensors


class LigerSwiGLUMLP(nn.Module):
    """Llama's MLP, with the activation and the product in one kernel."""

    def __init__(self, config: Any, intermediate_size: int | None = None, **_: Any) -> None:
        super().__init__()
        size = intermediate_size or config.intermediate_size
        self.gate_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.down_proj = nn.Linear(size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(_GatedProduct.apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-untyped-call]


class LigerGEGLUMLP(LigerSwiGLUMLP):
    """Gemma's MLP, in the same way."""


class LigerPhi3SwiGLUMLP(nn.Module):
    """Phi-3's MLP, whose gate and values are halves of one product: the kernel copies both."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(_GatedProduct.apply(*self.gate_up_proj(x).chunk(2, dim=-1)))  # type: ignore[no-untyped-call]


class _Rotation(torch.autograd.Function):
    """Queries and keys ``[batch, heads, length, width]``, rotated where they are, unless they need a copy."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = _contiguous(q.transpose(1, 2), k.transpose(1, 2))
        ctx.save_for_backward(*_contiguous(cos, sin))
        return q.transpose(1, 2), k.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k = _contiguous(*(gradient.transpose(1, 2) for gradient in gradients))
        return q.transpose(1, 2), k.transpose(1, 2), None, None


def liger_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> Any:
    """The rotary embedding of transformers."""
    return _Rotation.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]


def _rotated_image(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """The rotary embedding of Qwen3-VL's images, ``[length, heads, width]``, in float32."""
    wide = (tensor.float().unsqueeze(0).transpose(1, 2) for tensor in (q, k))
    both = liger_rotary_pos_emb(*wide, cos.float(), sin.float())
    return tuple(out.transpose(1, 2).squeeze(0).to(x.dtype) for out, x in zip(both, (q, k), strict=True))


# -- models of transformers --------------------------------------------------------------------------------------------


def _causal_loss(model: Any, hidden: Tensor, labels: Tensor | None, shifted: Tensor | None, count: Any) -> Tensor:
    """The loss of the next tokens, divided by their number where the trainer passes it."""
    if shifted is None:
        assert labels is not None
        labels = nn.functional.pad(labels, (0, 1), value=IGNORED)  # alive until the loss is there, as Liger's own is
        shifted = labels[..., 1:].contiguous()
    hidden, shifted = hidden.view(-1, hidden.shape[-1]), shifted.view(-1).to(hidden.device)
    times = _DECODERS[model.config.model_type].logits_times
    loss: Tensor = LigerCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, model.lm_head.weight, None, shifted, "mean" if count is None else "sum", None, times
    )
    return loss if count is None else loss / count


def _forward(
    self: Any,
    input_ids: Tensor | None = None,
    labels: Tensor | None = None,
    logits_to_keep: int | Tensor = 0,
    skip_logits: bool | None = None,
    **options: Any,
) -> Any:
    """A causal language model that makes no logits while it trains."""
    from transformers import modeling_outputs

    shifted, count = options.pop("shift_labels", None), options.pop("num_items_in_batch", None)
    config = self.config.get_text_config()
    balances = options.get("output_router_logits")
    balances = getattr(config, "output_router_logits", False) if balances is None else balances
    outputs = self.model(input_ids=input_ids, **options | ({"output_router_logits": True} if balances else {}))
    positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    hidden = outputs[0][:, positions, :]
    learns = labels is not None or shifted is not None
    logits = loss = None
    if (self.training and learns) if skip_logits is None else skip_logits:
        loss = _causal_loss(self, hidden, labels, shifted, count)
    else:
        logits, cap = self.lm_head(hidden), getattr(config, "final_logit_softcapping", None)
        logits = logits if cap is None else torch.tanh(logits / cap) * cap
        if learns:
            passed = {"labels": labels, "shift_labels": shifted, "num_items_in_batch": count}
            loss = self.loss_function(logits=logits, vocab_size=config.vocab_size, **passed)
    module: Any = sys.modules[type(self).__module__]
    rest = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
    if balances:
        routed = outputs.router_logits, self.num_experts, self.num_experts_per_tok, options.get("attention_mask")
        rest["aux_loss"] = module.load_balancing_loss_func(*routed)
        loss = loss if loss is None else loss + self.router_aux_loss_coef * rest["aux_loss"]
    kind: Any = modeling_outputs.MoeCausalLMOutputWithPast
    if "router_logits" not in rest and "aux_loss" not in rest:
        own = type(self).__name__.removesuffix("ForConditionalGeneration") + "CausalLMOutputWithPast"
        kind = getattr(module, own, modeling_outputs.CausalLMOutputWithPast)
    return kind(loss=loss, logits=logits, **rest)


@dataclass(frozen=True)
class _Decoder:
    """The classes that Liger replaces in a kind of model, without the model's name or with it, and the functions.

    In a model that is there, modules called as in `passed` stay. Liger's loss makes `logits_times` as many bytes of
    logits at a time as the hidden states have.
    """

    classes: Mapping[str, Any]
    functions: Mapping[str, Any] = field(default_factory=lambda: {"apply_rotary_pos_emb": liger_rotary_pos_emb})
    passed: tuple[str, ...] = ()
    logits_times: int = 1


_LLAMA: Final = _Decoder({"RMSNorm": LigerRMSNorm, "MLP": LigerSwiGLUMLP})
_MIXTURE: Final = _Decoder({"RMSNorm": LigerRMSNorm, "Experts": LigerExperts})
_OLMO: Final = _Decoder({"RMSNorm": _SeparateGradient, "MLP": LigerSwiGLUMLP}, passed=("q_norm", "k_norm"))
_GEMMA: Final = _Decoder({"RMSNorm": _SeparateGradient, "MLP": LigerGEGLUMLP})
_DECODERS: Final = {
    **dict.fromkeys(("llama", "ministral", "mistral", "qwen2", "qwen3", "smollm3"), _LLAMA),
    **dict.fromkeys(("mixtral", "qwen3_moe"), _MIXTURE),
    **dict.fromkeys(("olmo2", "olmo3"), _OLMO),
    **dict.fromkeys(("gemma2", "gemma3_text"), _GEMMA),
    "gemma": _Decoder({"RMSNorm": LigerRMSNorm, "MLP": LigerGEGLUMLP}),
    "phi3": _Decoder({"RMSNorm": LigerRMSNorm, "MLP": LigerPhi3SwiGLUMLP}),
    "gpt_oss": _Decoder({"RMSNorm": LigerRMSNorm}, logits_times=8),
    "glm4": _Decoder({"RMSNorm": _SeparateGradient, "MLP": LigerPhi3SwiGLUMLP}, {}),
    "deepseek_v3": _Decoder({"RMSNorm": LigerRMSNorm, "MLP": LigerSwiGLUMLP, "Experts": LigerExperts}, {}),
    "qwen2_5_vl": _Decoder(
        {"Qwen2_5_VLRMSNorm": LigerRMSNorm, "Qwen2MLP": LigerSwiGLUMLP},
        {"apply_multimodal_rotary_pos_emb": liger_rotary_pos_emb},
        ("ln_q",),
    ),
    "qwen3_vl": _Decoder(
        {"Qwen3VLTextRMSNorm": LigerRMSNorm},
        {"apply_rotary_pos_emb": liger_rotary_pos_emb, "apply_rotary_pos_emb_vision": _rotated_image},
    ),
}
"""The replacements of each kind of model."""
_UNDO: Final = object()


def _patches(
    kind: str,
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    geglu: bool = True,
    model: Any = None,
) -> Iterator[Patch]:
    """Replace what Liger does in the module of transformers of a kind of model, and in a `model` that is there."""
    assert not (cross_entropy and fused_linear_cross_entropy), (
        "cross_entropy and fused_linear_cross_entropy cannot both be True."
    )
    name = kind.removesuffix("_text")
    module: Any = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    decoder = _DECODERS[kind]
    ends = ("ForConditionalGeneration", "ForCausalLM") if name.endswith("_vl") else ("ForCausalLM",)
    causal = next(attribute for attribute in vars(module) if attribute.endswith(ends))
    prefix = causal.removesuffix("ForCausalLM")
    classes: dict[str, Any] = {
        suffix if suffix in vars(module) else prefix + suffix: cls
        for suffix, cls in decoder.classes.items()
        if (rms_norm if suffix.endswith("RMSNorm") else swiglu and geglu)
    }
    if rope:
        yield from ((module, function, other) for function, other in decoder.functions.items())
    yield from ((module, attribute, cls) for attribute, cls in classes.items())
    if cross_entropy and name.endswith(("istral", "_5_vl")):
        yield module, "CrossEntropyLoss", LigerCrossEntropyLoss  # which today's models do not use
    elif cross_entropy:
        yield nn.functional, "cross_entropy", liger_cross_entropy
    if fused_linear_cross_entropy and model is None:
        yield getattr(module, causal), "forward", _forward
    if model is not None:
        if fused_linear_cross_entropy:
            model.forward = MethodType(_forward, model)
        for path, part in model.named_modules():
            cls = None if path.rpartition(".")[2] in decoder.passed else classes.get(type(part).__name__)
            if cls is not None:
                part.forward, part.in_place = MethodType(cls.forward, part), getattr(cls, "in_place", True)


def _apply(kind: str, **options: Any) -> None:
    simulation = running()
    assert simulation is not None
    simulation.patches.apply(_UNDO, _patches(kind, **options))


def restore() -> None:
    """Give transformers its own functions and classes back."""
    simulation = running()
    if simulation is not None:
        simulation.patches.restore(_UNDO)


def _apply_by_type(model_type: str, **options: Any) -> None:
    """Patch the models of a type if Liger has patches for it; options of others do nothing."""
    if model_type in _DECODERS:
        names = inspect.signature(_patches).parameters
        _apply(model_type, **{name: value for name, value in options.items() if name in names})


def _apply_to_instance(model: Any, **options: Any) -> None:
    _apply_by_type(getattr(model.config, "model_type", ""), model=model, **options)


def _late(name: str) -> Any:
    """The class of models that patches what it builds: transformers is imported for it."""
    if name != "AutoLigerKernelForCausalLM":
        raise AttributeError(f"memsize has no stand-in for liger_kernel's {name}: install liger-kernel")
    from transformers import AutoConfig, AutoModelForCausalLM

    def built(method: Callable[..., Any], source: Any, *args: Any, **options: Any) -> Any:
        config = AutoConfig.from_pretrained(source) if isinstance(source, str) else source
        _apply_by_type(config.model_type, **options)
        switches = inspect.signature(_patches).parameters
        return method(source, *args, **{key: value for key, value in options.items() if key not in switches})

    methods = {key: staticmethod(partial(built, getattr(AutoModelForCausalLM, key))) for key in _BUILDERS}
    return type(name, (AutoModelForCausalLM,), methods)


_BUILDERS: Final = ("from_pretrained", "from_config")
_CLASSES: Final = (
    LigerFusedLinearCrossEntropyLoss,
    LigerCrossEntropyLoss,
    LigerRMSNorm,
    LigerSwiGLUMLP,
    LigerGEGLUMLP,
    LigerPhi3SwiGLUMLP,
    LigerExperts,
)
MODULES: Final[dict[str, dict[str, Any]]] = {
    "liger_kernel": {"__version__": "0.8.5"},
    "liger_kernel.transformers": {
        **{cls.__name__: cls for cls in _CLASSES},
        **{f"apply_liger_kernel_to_{kind.removesuffix('_text')}": partial(_apply, kind) for kind in _DECODERS},
        "apply_liger_kernel_to_gemma3_text": partial(_apply, "gemma3_text"),
        "liger_rotary_pos_emb": liger_rotary_pos_emb,
        "_apply_liger_kernel": _apply_by_type,
        "_apply_liger_kernel_to_instance": _apply_to_instance,
        "__getattr__": _late,
    },
}
