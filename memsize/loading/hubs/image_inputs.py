"""Images and clips as arguments of transformers models: pixels, or patches with the grid that they are cut by."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from memsize.loading.hubs.input_batch import Batch, Maker, both, entry, ones, rows, unknown, whole

SIDE = 224
"""Pixels of an image's side, where neither model nor processor has one."""
PATCHES = 2048
"""Patches of a page of text, as processors cut it."""
FRAMES = 16
"""Frames of a clip, where the model does not say."""
LINE = (48, 320)
"""Height and width of a line of text that is to be read."""

_FRAMES = ("num_frames", "frames_per_clip")
_CHANNELS = ("num_channels", "in_channels", "in_chans", "channels", "image_channels")
_SIZES = ("image_size", "max_img_size", "crop_size", "img_size", "input_size")
_MERGES = (
    "spatial_merge_size", "merge_size", "merge_kernel_size", "spatial_patch_merge", "pooling_kernel_size",
    "downsample_factor", "window_kernel_size", "scale_factor", "pixel_shuffle_factor",
)  # fmt: skip

# What configs do not say and only the models' code shows:
_OF_CLIPS = ("timesformer", "tvp", "xclip")
"""Models of clips that declare images as their input."""
_SEVERAL = {
    "idefics": 1, "idefics2": 1, "idefics3": 1, "smolvlm": 1, "superglue": 2, "lightglue": 2,
    "efficientloftr": 2, "instructblipvideo": 4, "modernvbert": 1, "granite_docling": 1,
}  # fmt: skip
"""Images of one sample, for models whose pixels have a dimension for them: an image in tiles and as a whole, a pair."""
_UNFLATTENED = ("kimi_k25", "paddleocr_vl")
"""Models that embed their patches by a convolution, which takes each as an image."""

_PATCHES_IN_A_ROW = ("image_grid_thw", "grid_thw", "video_grid_thw", "image_grid_hw")
_PATCHES_PER_IMAGE = ("spatial_shapes", "image_position_ids", "image_grids")
"""Arguments by which a forward says how it takes patches: those of all images in a row, or in a row per image."""


def pixels(batch: Batch) -> Tensor:
    """Pixels (batch, channels, height, width); frames or several images stand before the channels.

    For models that take patches with their grid: (patches of all samples, values of one patch).
    """
    cut = patches(batch)
    if cut is not None:
        return cut
    if "aspect_ratio_ids" in batch.taken:
        return unknown(batch.size, 1, _tiles(batch), channels(batch), *sides(batch))
    several = _several(batch)
    before = frames(batch) if several is None else (several,)
    return unknown(batch.size, *before, channels(batch), *sides(batch))


def clip(batch: Batch) -> Tensor:
    """Pixels of a clip (batch, frames, channels, height, width)."""
    cut = patches(batch)
    return unknown(batch.size, *(frames(batch) or (FRAMES,)), channels(batch), *sides(batch)) if cut is None else cut


def flattened(batch: Batch) -> Tensor:
    """Patches with their row and column before them (batch, patches, 2 + values)."""
    count = whole(batch.vision, "max_num_patches", "seq_len", default=PATCHES)
    values = channels(batch) * whole(batch.vision, "patch_size", default=16) ** 2
    return unknown(batch.size, min(count, PATCHES), 2 + values)


def _several(batch: Batch) -> int | None:
    """Images that one sample's pixels have a dimension for: a whole one and its tiles, a pair."""
    points: Any = getattr(batch.config, "image_grid_pinpoints", None)
    if not points:
        return _SEVERAL.get(batch.kind)
    from transformers.image_processing_utils import select_best_resolution

    (height, width), best = sides(batch), select_best_resolution(sides(batch), points)
    return int(1 + (best[0] // height) * (best[1] // width))


def image_sizes(batch: Batch) -> Tensor | None:
    """Height and width of each image (batch, 2), where `get_image_features`, or the tower that it calls, wants them."""
    model = batch.model
    method = getattr(getattr(model, "base_model", model), "get_image_features", None)
    method = method or getattr(model, "get_image_features", None)
    if method is not None:
        parameter = inspect.signature(method).parameters.get("image_sizes")
        towers = [module for name, module in model.named_modules() if name.endswith("vision_tower")]
        takes = any("image_sizes" in inspect.signature(tower.forward).parameters for tower in towers)
        if not takes and (parameter is None or parameter.default is not parameter.empty):
            return None
    return rows([list(sides(batch))] * batch.size)


# -- patches ----------------------------------------------------------------------------------------------------------


def patches(batch: Batch) -> Tensor | None:
    """Patches as the model takes them: (patches of all images, values of one), or (images, patches of one, values).

    None for a model of whole images.
    """
    (time, height, width), side = grid(batch), _patch_side(batch)
    count = time * height * width
    if "target_sizes" in batch.taken:  # a strip of patches side by side, for a convolution
        return unknown(1, channels(batch), side, side * batch.size * count)
    depth = whole(batch.vision, "temporal_patch_size", "patch_temporal", default=1)
    values = channels(batch) * depth * side * side
    if any(name in batch.taken for name in _PATCHES_IN_A_ROW):
        if batch.kind.removesuffix("_vision") in _UNFLATTENED:
            return unknown(batch.size * count, channels(batch), side, side)
        return unknown(batch.size * count, values)
    if any(name in batch.taken for name in _PATCHES_PER_IMAGE):
        return unknown(batch.size, count, values)
    return None


def grid(batch: Batch) -> tuple[int, int, int]:
    """Patches of one image in time, height and width: as many as the model merges into whole tokens."""
    count = entry(batch.vision, "num_patches")
    if isinstance(count, int) and "spatial_shapes" in batch.taken:
        return 1, math.isqrt(count), count // math.isqrt(count)
    merge = _merged(batch)
    height, width = (max(1, side // (_patch_side(batch) * merge)) * merge for side in sides(batch))
    return 1, height, width


def _patch_side(batch: Batch) -> int:
    return whole(batch.vision, "patch_size", "spatial_patch_size", default=14)


def _merged(batch: Batch) -> int:
    """Patches in a row that become one token, or one window; both where a model has both."""
    factors = [whole(batch.vision, name, default=1) for name in (*_MERGES, "num_windows_side", "num_windows")]
    if "target_sizes" in batch.taken:
        return math.prod(factors)
    *others, side, count = factors
    return max(*others, side, count if side == 1 else 1)


def shapes(batch: Batch) -> Tensor:
    """Patches of each image in height and width (batch, 2)."""
    return rows([list(grid(batch)[1:])] * batch.size)


def patch_positions(batch: Batch) -> Tensor:
    """Column and row of each patch (batch, patches, 2)."""
    _, height, width = grid(batch)
    return rows([[column, row] for row in range(height) for column in range(width)]).repeat(batch.size, 1, 1)


def patch_mask(batch: Batch) -> Tensor | None:
    """One for each patch (batch, patches), or for each tile (batch, tiles); whole images need none."""
    if "tile_fine_mask" in batch.taken:
        return ones(*batch.shape("pixel_values")[:2], dtype=torch.bool)
    return ones(*batch.shape("pixel_values")[:2]) if "spatial_shapes" in batch.taken else None


# -- sizes ------------------------------------------------------------------------------------------------------------


def channels(batch: Batch) -> int:
    return whole(batch.vision, *_CHANNELS, default=3)


def frames(batch: Batch) -> tuple[int, ...]:
    """The frames of a clip, where the model is one of clips."""
    kinds = getattr(batch.model, "input_modalities", ())
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    if batch.kind not in _OF_CLIPS and ("video" not in kinds or kinds & {"image", "text"}):
        return ()
    count = entry(batch.vision, *_FRAMES)
    return (count,) if isinstance(count, int) else ()


def sides(batch: Batch) -> tuple[int, int]:
    """Height and width of an image, by the model, its config or its processor, in whole windows of patches."""
    processor = batch.preprocessor
    cut = processor.get("crop_size") if processor.get("do_center_crop", True) else None
    stated = (*(getattr(config, name, None) for config in batch.vision for name in _SIZES), cut, processor.get("size"))
    height, width = _made_for(batch) or next(filter(None, map(both, stated)), (SIDE, SIDE))
    step = _patch_side(batch) * _merged(batch) if _merged(batch) > 1 else 1
    return max(height - height % step, step), max(width - width % step, step)


def _made_for(batch: Batch) -> tuple[int, int] | None:
    counts = getattr(batch.config, "projector_patch_to_query_dict", None)
    if counts:  # the numbers of patches that Aria's projector was made for
        return (math.isqrt(min(map(int, counts))) * _patch_side(batch),) * 2
    ratios = getattr(batch.config, "scaled_images_ratios", None)
    if ratios:  # Depth Pro's smallest copy of the image is one patch
        return (int(batch.number("patch_size", default=SIDE) / min(ratios)),) * 2
    if batch.kind.endswith("_rec"):
        return LINE
    for module in batch.model.modules():  # timm's models keep the size of their images
        if type(module).__module__.startswith("timm.") and both(getattr(module, "img_size", None)):
            return both(module.img_size)
    return None


def _tiles(batch: Batch) -> int:
    return whole(batch.vision, "max_num_tiles", default=1)


MAKERS: dict[str, Maker] = {
    "pixel_values": pixels,
    "image_pixel_values": pixels,
    "high_res_pixel_values": pixels,
    "pixel_values_videos": clip,
    "hidden_states": patches,  # of towers that take patches beside their grid
    "flattened_patches": flattened,
    "image_sizes": image_sizes,
    "spatial_shapes": shapes,
    "target_sizes": shapes,
    "image_grid_hw": shapes,
    "image_grid_thw": lambda batch: rows([list(grid(batch))] * batch.size),
    "grid_thw": lambda batch: rows([list(grid(batch))] * batch.size),
    "image_merge_sizes": lambda batch: ones(batch.size) * whole(batch.vision, *_MERGES, default=1),
    "image_position_ids": patch_positions,
    "pixel_attention_mask": patch_mask,
    # Mllama's only image is one tile alone, the first of the aspect ratios, and every token attends to it.
    "aspect_ratio_ids": lambda batch: ones(batch.size, 1),
    "aspect_ratio_mask": lambda batch: ones(batch.size, 1, _tiles(batch)),
    "cross_attention_mask": lambda batch: ones(*batch.shape("input_ids"), 1, _tiles(batch)),
    # So it does in IDEFICS; in its successors, the images stand among the ids.
    "image_attention_mask": lambda batch: ones(*batch.shape("input_ids"), 1) if batch.kind == "idefics" else None,
}
