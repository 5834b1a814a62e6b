"""Every architecture of transformers whose config builds with defaults, with few layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.case import BATCH, Case
from benchmarks.zoo.counting import counted
from benchmarks.zoo.inputs import inputs
from memsize.errors import TargetError
from memsize.loading.hubs import quiet

LAYERS = 2
"""Layers that are left of each stack: more are more of the same. As many more as it takes to have one of each kind."""

ABOUT = (
    f"transformers: every model type whose config has defaults, with {LAYERS} layers per stack and one of each kind of "
    "layer, or unmodified if that does not run. Models that transformers itself cannot build or run with its defaults "
    "are listed separately."
)
DISTRIBUTIONS = ("transformers",)

_DEPTHS = frozenset({
    "decoder_layers", "decoder_num_hidden_layers", "decoder_num_layers", "depth", "encoder_layers",
    "encoder_num_hidden_layers", "layers", "n_layer", "n_layers", "num_decoder_layers", "num_encoder_layers",
    "num_hidden_layers", "num_layers",
})  # fmt: skip
_STAGED = frozenset({"backbone_out_indices", "out_features", "out_indices", "stage_names"})
"""Entries of backbones, whose users name the layers that they take by their places."""

_GLM = "its rotary sections (8, 12 and 12) are for heads of another size than its own"
_SCANS = "its config has no layer with attention, which its cache asks for"
_LINES = "its default backbone is not the one that its head is made for"
MISFITS = {
    "bamba": _SCANS,
    "granitemoehybrid": _SCANS,
    "lw_detr": "its config asks for no map of its projector (projector_scale_factors)",
    "tvp": "its code adds positions to a batch of one only",
    "blt": "its config has no num_hidden_layers, which its cache asks for",
    "deepseek_ocr2_vision": "its two encoders differ in width (896 and 4096)",
    "deepseek_v2": "its config does not say how many experts a token goes to",
    "edgetam": "its backbone, a ResNet-50, is wider than its neck takes",
    "edgetam_video": "its backbone, a ResNet-50, is wider than its neck takes",
    "edgetam_vision_model": "its backbone, a ResNet-50, is wider than its neck takes",
    **dict.fromkeys(("glm46v", "glm4v", "glm4v_moe", "glm4v_moe_text", "glm4v_text", "glm_image", "glmga"), _GLM),
    "glm_image_text": _GLM,
    "llama4_vision_model": "its adapter takes 5632 values and its encoder gives 3072",
    "pe_audio_video": "its code asks an output of its own for an entry that it does not have",
    "pp_doclayout_v2": "its config has no class_thresholds",
    "pp_ocrv5_mobile_rec": _LINES,
    "pp_ocrv5_server_rec": _LINES,
    "pp_ocrv6_small_det": _LINES,
    "pp_ocrv6_small_rec": _LINES,
    "qwen2_5_omni_thinker": "its config has no vision_start_token_id, which its code asks for",
    "qwen3_omni_moe_text": "its rotary sections are for heads of another size than its own",
    "qwen3_omni_moe_thinker": "its config has no vision_start_token_id, which its code asks for",
    "step3p5": "its config has no sliding_window, which its layers ask for",
    "step3p7": "its config has no sliding_window, which its layers ask for",
    "uvdoc": "its head is made for another width than its backbone's",
}
"""Types whose default config does not fit together, and how; each is seen to fail in transformers itself."""


def cases() -> Iterator[Case]:
    """Every model type of transformers' config mapping whose config class can be made without arguments."""
    import transformers

    for name in transformers.CONFIG_MAPPING:
        with quiet():
            try:
                entries = _accepted(name, reduced(transformers.CONFIG_MAPPING[name]()))
            except Exception:  # configs check themselves, each in its own words
                continue
        yield Case("hf", name, entries)


def _accepted(name: str, entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """`entries` where the config of that name takes them, else none."""
    try:
        _config(Case("hf", name, entries))
    except Exception:  # configs check themselves, each in its own words
        return {}
    return entries


def reduced(config: Any) -> dict[str, Any]:
    """The entries of `config` and of its parts that leave few layers of each stack."""
    entries = config.to_dict()
    if _STAGED & entries.keys():
        return {}
    depths = {name: n for name, n in entries.items() if name in _DEPTHS and type(n) is int and n > LAYERS}
    kinds = {name: v for name, v in entries.items() if isinstance(v, list) and len(v) in depths.values()}
    few = max([LAYERS, *(_first_with_all(kind) for kind in kinds.values())])
    changed: dict[str, Any] = {name: min(few, depth) for name, depth in depths.items()}
    changed |= {name: kind[:few] for name, kind in kinds.items()}
    for name, part in vars(config).items():
        if hasattr(part, "to_dict") and hasattr(part, "model_type") and (fewer := reduced(part)):
            changed[name] = part.to_dict() | fewer
    return changed


def _first_with_all(kinds: list[Any]) -> int:
    """How many of `kinds`, one per layer, it takes from the first on to have each of them."""
    return max(kinds.index(kind) for kind in kinds) + 1


def parameters(case: Case) -> int:
    """What the constructor of the class that memsize chose makes of the same config, counted."""
    kind, config = _chosen(case)
    return counted(lambda: kind(config))


def refusal(case: Case) -> str:
    """What transformers itself says to its own class with its own defaults; empty where that runs, or may."""
    try:
        with quiet():
            kind, config = _chosen(case)
    except TargetError as error:
        return str(error)
    try:
        with quiet(), torch.device("meta"):
            model = kind(config)
    except (RuntimeError, NotImplementedError):
        return ""  # it may be about a number that meta tensors do not have
    except Exception as error:
        return f"transformers cannot build it: {_first_line(error)}"
    if kind.forward is nn.Module.forward:
        return "the class has no forward, it only generates"
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return "each of its parameters is frozen: there is nothing to train"
    return MISFITS[case.name] if case.name in MISFITS and _fails(model, case) else ""


def _fails(model: Any, case: Case) -> bool:
    """Whether transformers' own model fails too, with the inputs that it is given here."""
    from memsize.loading import InputRequest, load

    own, maker = inputs(case), load(case.target, case.arguments).inputs
    assert maker is not None  # a library's model comes with one
    try:
        arguments: Any = own(BATCH, False) if own else maker.make(InputRequest(BATCH, training=False))
        with torch.device("meta"), torch.no_grad():
            model.eval()(**{name: value.to("meta") for name, value in arguments.items()})
    except Exception:  # whatever its code raises
        return True
    return False


def _chosen(case: Case) -> tuple[Any, Any]:
    """The class that memsize chooses, and the config."""
    import transformers

    from memsize.loading.hubs.huggingface import model_class

    config = _config(case)
    return model_class(transformers, config, case.target), config


def _config(case: Case) -> Any:
    import transformers

    kind = transformers.CONFIG_MAPPING[case.name]
    return kind.from_dict(dict(case.arguments)) if case.arguments else kind()


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
