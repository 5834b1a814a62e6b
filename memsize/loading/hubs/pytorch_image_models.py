"""``timm:NAME``: any model of `timm.list_models()`, with the input size of its own default config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memsize.errors import InputError, TargetError
from memsize.loading.hubs import Named, constructed, imported, unknown
from memsize.spec.input_maker import InputMaker, InputRequest


def names() -> list[str]:
    """The models that timm has."""
    found: list[str] = imported("timm").list_models()
    return found


def load(name: str, arguments: Mapping[str, object]) -> Named:
    """The model that timm builds by `name` without pretrained weights, and one batch of its images."""
    timm = imported("timm")
    if ":" in name or "/" in name:
        raise TargetError(f"timm:{name} would be downloaded: name a model of timm.list_models()")
    if not timm.is_model(name):
        raise unknown("timm", name, timm.list_models())
    if arguments.get("pretrained"):
        raise TargetError("memsize loads no pretrained weights: it only needs their shapes")
    label = f"timm:{name}"

    def create_model(**options: object) -> Any:
        return timm.create_model(name, **options)

    module, notes = constructed(create_model, label, {"pretrained": False, **arguments})
    size = input_size(module, arguments)

    def make(request: InputRequest) -> Any:
        import torch

        if request.seq_len is not None:
            raise InputError(f"{label} takes images: --seq-len means nothing to it")
        return (torch.empty((request.batch_size, *size), device="meta"),)

    return Named(module, label, InputMaker(make), notes)


def input_size(module: Any, arguments: Mapping[str, object]) -> tuple[int, ...]:
    """Channels, height and width: what `arguments` ask for, else what the model's own config says."""
    config = getattr(module, "pretrained_cfg", None) or {}
    channels, *sides = config.get("input_size", (3, 224, 224))
    asked = arguments.get("img_size", sides)
    sides = [asked, asked] if isinstance(asked, int) else list(asked)  # type: ignore[call-overload]
    return (_whole(arguments.get("in_chans", channels)), *sides)


def _whole(value: Any) -> int:
    return int(value)
