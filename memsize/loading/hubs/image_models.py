"""``timm:NAME`` and ``torchvision:NAME``: the models of two libraries, without weights, with inputs of their kind.

timm's models take images of the size in their own default config. torchvision's sizes come from the model where it
takes one only (ViT, SSD) or resizes its images (detection), else from the transforms that belong to its weights
(``crop_size``), or from the least that its weights ask for. No weights are loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from memsize.errors import InputError, TargetError
from memsize.loading.building import LoadedModel
from memsize.loading.hubs import build_library_model, import_library, unknown_name
from memsize.loading.hubs.image_inputs import FRAMES
from memsize.loading.hubs.input_batch import unknown
from memsize.spec.inputs import InputMaker, InputRequest

_FLOW_SIZE = (520, 960)
_OBJECTS = 2
_KEYPOINTS = 17


# -- timm -------------------------------------------------------------------------------------------------------------


def load_timm_model(name: str, arguments: Mapping[str, object]) -> LoadedModel:
    """The model that timm builds by `name` without pretrained weights, and one batch of its images."""
    timm = import_library("timm")
    if ":" in name or "/" in name:
        raise TargetError(f"timm:{name} would be downloaded: name a model of timm.list_models()")
    if not timm.is_model(name):
        raise unknown_name("timm", name, timm.list_models())
    if arguments.get("pretrained"):
        raise TargetError("memsize loads no pretrained weights: it only needs their shapes")
    label = f"timm:{name}"

    module, notes = build_library_model(partial(timm.create_model, name), label, {"pretrained": False, **arguments})
    config = getattr(module, "pretrained_cfg", None) or {}
    channels, *sides = config.get("input_size", (3, 224, 224))
    side: Any = arguments.get("img_size", sides)
    sides = [side, side] if isinstance(side, int) else list(side)
    depth: Any = arguments.get("in_chans", channels)
    size = (int(depth), *sides)

    def make(request: InputRequest) -> Any:
        _refuse_seq_len(request, label)
        return (unknown(request.batch_size, *size),)

    return LoadedModel(module, label, notes, inputs=InputMaker(make))


# -- torchvision ------------------------------------------------------------------------------------------------------


def load_torchvision_model(name: str, arguments: Mapping[str, object]) -> LoadedModel:
    """The model that torchvision builds by `name` without weights, and one batch of its inputs."""
    models = import_library("torchvision").models
    if name not in models.list_models():
        raise unknown_name("torchvision", name, models.list_models())
    label = f"torchvision:{name}"
    builder = models.get_model_builder(name)
    if any(value for key, value in arguments.items() if key.startswith("weights")):
        raise TargetError("memsize loads no pretrained weights: it only needs their shapes")
    none = {key: None for key in ("weights", "weights_backbone") if key in inspect.signature(builder).parameters}

    module, notes = build_library_model(partial(models.get_model, name), label, none | dict(arguments))
    detects, is_flow = ".detection" in builder.__module__, ".optical_flow" in builder.__module__
    if detects:
        shape = _detection_size(module)
    else:
        shape = (3, *_FLOW_SIZE) if is_flow else _size(models, name, builder.__module__, module)

    def make(request: InputRequest) -> Any:
        _refuse_seq_len(request, label)
        if detects:  # a list of images; in training also the objects in each, which a detector then wants
            images = [unknown(*shape) for _ in range(request.batch_size)]
            return (images, [_objects(shape, module) for _ in images]) if request.training else (images,)
        # The flow is looked for between two frames.
        return tuple(unknown(request.batch_size, *shape) for _ in range(2 if is_flow else 1))

    return LoadedModel(module, label, notes, inputs=InputMaker(make))


def _size(models: Any, name: str, module_name: str, module: Any) -> tuple[int, ...]:
    weights = getattr(models.get_model_weights(name), "DEFAULT", None)
    options = getattr(weights.transforms, "keywords", None) or {} if weights is not None else {}
    meta = weights.meta if weights is not None else {}
    own = getattr(module, "image_size", None)
    side = own or options.get("crop_size") or options.get("resize_size") or meta.get("min_size") or 224
    sides = (side, side) if isinstance(side, int) else (tuple(side) * 2)[:2]
    if ".video" in module_name:
        return (3, max(FRAMES, meta.get("min_temporal_size", 1)), *sides)
    return (3, *sides)


def _detection_size(module: Any) -> tuple[int, ...]:
    """The size of an image that the model's transform does not resize: its fixed size, or its shorter side in 4:3."""
    transform = module.transform
    if getattr(transform, "fixed_size", None):
        width, height = transform.fixed_size
        return (3, height, width)
    short = transform.min_size[-1] if isinstance(transform.min_size, (list, tuple)) else transform.min_size
    return (3, short, min(short * 4 // 3, transform.max_size))


def _objects(shape: tuple[int, ...], module: Any) -> dict[str, Any]:
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


def _refuse_seq_len(request: InputRequest, label: str) -> None:
    if request.seq_len is not None:
        raise InputError(f"{label} takes images: --seq-len has no effect")
