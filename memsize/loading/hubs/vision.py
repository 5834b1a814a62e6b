"""``torchvision:NAME``: any model of `torchvision.models.list_models()`, with inputs of its kind.

Sizes come from the model where it takes one only (ViT, SSD) or resizes what it is given (detection), else from the
transforms that belong to its weights (``crop_size``), or from what its weights ask for at least. No weights are loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from memsize.errors import InputError, TargetError
from memsize.loading.hubs import Named, constructed, imported, unknown
from memsize.spec.input_maker import InputMaker, InputRequest

FRAMES = 16
"""Frames of a clip, where the weights do not ask for more."""
_FLOW_SIZE = (520, 960)
_OBJECTS = 2
_KEYPOINTS = 17


def names() -> list[str]:
    """The models that torchvision has."""
    found: list[str] = imported("torchvision").models.list_models()
    return found


def load(name: str, arguments: Mapping[str, object]) -> Named:
    """The model that torchvision builds by `name` without weights, and one batch of what it takes."""
    models = imported("torchvision").models
    if name not in models.list_models():
        raise unknown("torchvision", name, models.list_models())
    label = f"torchvision:{name}"
    builder = models.get_model_builder(name)
    if any(value for key, value in arguments.items() if key.startswith("weights")):
        raise TargetError("memsize loads no pretrained weights: it only needs their shapes")
    none = {key: None for key in ("weights", "weights_backbone") if key in inspect.signature(builder).parameters}

    def get_model(**options: object) -> Any:
        return models.get_model(name, **options)

    module, notes = constructed(get_model, label, none | dict(arguments))
    return Named(module, label, InputMaker(_maker(models, name, module, builder.__module__, label)), notes)


def _maker(models: Any, name: str, module: Any, place: str, label: str) -> Callable[[InputRequest], Any]:
    arguments = _detection if ".detection" in place else _pair if ".optical_flow" in place else _images
    shape = _detection_size(module) if arguments is _detection else _size(models, name, place, module)

    def make(request: InputRequest) -> Any:
        if request.seq_len is not None:
            raise InputError(f"{label} takes images: --seq-len means nothing to it")
        return arguments(request, shape, module)

    return make


def _size(models: Any, name: str, place: str, module: Any) -> tuple[int, ...]:
    """Channels, for clips frames, height and width."""
    if ".optical_flow" in place:
        return (3, *_FLOW_SIZE)
    weights = getattr(models.get_model_weights(name), "DEFAULT", None)
    options = getattr(weights.transforms, "keywords", None) or {} if weights is not None else {}
    meta = weights.meta if weights is not None else {}
    own = getattr(module, "image_size", None)
    side = own or options.get("crop_size") or options.get("resize_size") or meta.get("min_size") or 224
    sides = (side, side) if isinstance(side, int) else (tuple(side) * 2)[:2]
    if ".video" in place:
        return (3, max(FRAMES, meta.get("min_temporal_size", 1)), *sides)
    return (3, *sides)


def _images(request: InputRequest, shape: tuple[int, ...], _: Any) -> Any:
    return (_unknown(request.batch_size, *shape),)


def _pair(request: InputRequest, shape: tuple[int, ...], _: Any) -> Any:
    """Two frames, between which the flow is looked for."""
    return tuple(_unknown(request.batch_size, *shape) for _ in range(2))


def _detection_size(module: Any) -> tuple[int, ...]:
    """An image that the model's own transform leaves as it is: its fixed size, else its shorter side in 4:3."""
    transform = module.transform
    if getattr(transform, "fixed_size", None):
        width, height = transform.fixed_size
        return (3, height, width)
    short = transform.min_size[-1] if isinstance(transform.min_size, (list, tuple)) else transform.min_size
    return (3, short, min(short * 4 // 3, transform.max_size))


def _detection(request: InputRequest, shape: tuple[int, ...], module: Any) -> Any:
    """A list of images; in training also the objects in each, which a detector then wants."""
    images = [_unknown(*shape) for _ in range(request.batch_size)]
    return (images, [_objects(shape, module) for _ in images]) if request.training else (images,)


def _objects(shape: tuple[int, ...], module: Any) -> dict[str, Any]:
    """The boxes, labels, and where the model predicts them masks and keypoints, of a few objects in one image."""
    import torch

    _, height, width = shape
    corners = [
        [width * i / 8, height * i / 8, width * (i + 4) / 8, height * (i + 4) / 8] for i in range(1, 1 + _OBJECTS)
    ]
    objects = {"boxes": torch.tensor(corners), "labels": torch.ones(_OBJECTS, dtype=torch.int64)}
    heads = getattr(module, "roi_heads", None)
    if getattr(heads, "mask_head", None) is not None:
        objects["masks"] = torch.empty((_OBJECTS, height, width), dtype=torch.uint8, device="meta")
    if getattr(heads, "keypoint_head", None) is not None:
        objects["keypoints"] = torch.ones(_OBJECTS, _KEYPOINTS, 3)
    return objects


def _unknown(*shape: int) -> Any:
    import torch

    return torch.empty(shape, device="meta")
