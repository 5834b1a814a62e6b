"""Images and clips: pixels, or patches of them with the grid that they are cut by."""

from __future__ import annotations

import inspect
import math
from typing import Any

from memsize.loading.hubs.huggingface_inputs.makers import makes
from memsize.loading.hubs.huggingface_inputs.need import Need, ones, rows, unknown
from memsize.loading.hubs.huggingface_inputs.reading import both, entry, whole

SIDE = 224
"""Pixels of an image's side, where neither model nor processor has one."""
PATCHES = 2048
"""Patches of a page of text, as processors cut it."""
_LINE = (48, 320)
"""Height and width of a line of text that is to be read."""
FRAMES = 16
"""Frames of a clip, where the model does not say."""

_FILMS = ("timesformer", "tvp", "xclip")
"""Models of clips that say of themselves that they take images."""
_VIDEO = ("num_frames", "frames_per_clip")
_CHANNELS = ("num_channels", "in_channels", "in_chans", "channels", "image_channels")
_SIZES = ("image_size", "max_img_size", "crop_size", "img_size", "input_size")
_MERGES = (
    "spatial_merge_size", "merge_size", "merge_kernel_size", "spatial_patch_merge", "pooling_kernel_size",
    "downsample_factor", "window_kernel_size", "scale_factor", "pixel_shuffle_factor",
)  # fmt: skip
SEVERAL = {
    "idefics": 1, "idefics2": 1, "idefics3": 1, "smolvlm": 1, "superglue": 2, "lightglue": 2,
    "efficientloftr": 2, "instructblipvideo": 4, "modernvbert": 1, "pi0": 1, "colmodernvbert": 1, "granite_docling": 1,
}  # fmt: skip
"""Images of one sample, for models whose pixels have a dimension for them: an image in tiles and as a whole, a pair."""


@makes("pixel_values", "image_pixel_values", "high_res_pixel_values", "image", "prompt_pixel_values")
def pixels(need: Need) -> Any:
    """Pixels (batch, channels, height, width); frames or several images stand before the channels.

    For models that take patches with their grid: (patches of all samples, values of one patch).
    """
    cut = patches(need)
    if cut is not None:
        return cut
    if "aspect_ratio_ids" in need.taken:
        return unknown(need.batch, 1, whole(need.vision, "max_num_tiles", default=1), channels(need), *sides(need))
    if need.kind == "xclip_vision_model":  # each frame is an image
        return unknown(need.batch * whole(need.vision, *_VIDEO, default=FRAMES), channels(need), *sides(need))
    several = _several(need)
    before = frames(need) if several is None else (several,)
    return unknown(need.batch, *before, channels(need), *sides(need))


def _several(need: Need) -> int | None:
    """Images that one sample's pixels have a dimension for: a whole one and its tiles, a pair."""
    points: Any = getattr(need.config, "image_grid_pinpoints", None)
    if not points:
        return SEVERAL.get(need.kind)
    from transformers.image_processing_utils import select_best_resolution

    (height, width), best = sides(need), select_best_resolution(sides(need), points)
    return int(1 + (best[0] // height) * (best[1] // width))


@makes("flattened_patches")
def flattened(need: Need) -> Any:
    """Patches with their row and column before them (batch, patches, 2 + values)."""
    count = whole(need.vision, "max_num_patches", "seq_len", default=PATCHES)
    values = channels(need) * whole(need.vision, "patch_size", default=16) ** 2
    return unknown(need.batch, min(count, PATCHES), 2 + values)


@makes("width", "height")
def side_of_each(need: Need) -> Any:
    return rows([[side] for side in sides(need)[:1] * need.batch])[:, 0]


@makes("pixel_values_videos")
def clip(need: Need) -> Any:
    """Pixels of a clip (batch, frames, channels, height, width)."""
    cut = patches(need)
    if cut is not None:
        return cut
    return unknown(need.batch, *(frames(need) or (FRAMES,)), channels(need), *sides(need))


@makes("image_sizes")
def image_sizes(need: Need) -> Any:
    """Height and width of each image (batch, 2), where what embeds images asks for it."""
    if not _asks_for_sizes(need.model):
        return None
    height, width = sides(need)
    return rows([[height, width]] * need.batch)


def _asks_for_sizes(model: Any) -> bool:
    """Whether `get_image_features`, or the tower that it calls, wants the images' sizes; models without it do."""
    body = getattr(model, "base_model", model)
    method = getattr(body, "get_image_features", getattr(model, "get_image_features", None))
    if method is None:
        return True
    parameter = inspect.signature(method).parameters.get("image_sizes")
    towers = [module for name, module in model.named_modules() if name.endswith("vision_tower")]
    takes = any("image_sizes" in inspect.signature(tower.forward).parameters for tower in towers)
    return takes or (parameter is not None and parameter.default is parameter.empty)


# -- patches ----------------------------------------------------------------------------------------------------------


_ROWED = ("molmo2_vision",)
"""Models of patches in a row per image whose forward takes nothing else."""
_UNFLATTENED = ("kimi_k25", "paddleocr_vl")
"""Models that embed their patches by a convolution, which takes each as an image."""
_MERGED = ("inkling2",)
"""Models whose patches are merged already as they come, with their channels last."""
_IN_A_ROW = ("image_grid_thw", "grid_thw", "video_grid_thw", "image_grid_hw")
_IN_ROWS = ("spatial_shapes", "pixel_position_ids", "image_position_ids", "image_grids")
"""Arguments of the forward that say how it takes patches: those of all images in a row, or in a row per image."""


def patches(need: Need) -> Any:
    """Patches as the model takes them: (patches of all images, values of one), or (images, patches of one, values).

    None for a model of whole images.
    """
    time, height, width = grid(need)
    if "target_sizes" in need.taken:  # a strip of patches side by side, for a convolution
        side = patch_side(need)
        return unknown(1, channels(need), side, side * need.batch * height * width)
    if any(name in need.taken for name in _IN_A_ROW):
        count, side = need.batch * time * height * width, patch_side(need)
        if need.kind.removesuffix("_vision") in _MERGED:
            return unknown(count, side * merged(need), side * merged(need), channels(need))
        if need.kind.removesuffix("_vision") in _UNFLATTENED:
            first = (1,) if need.kind == "paddleocr_vl_vision" else ()
            return unknown(*first, count, channels(need), side, side)
        return unknown(count, patch_values(need))
    if any(name in need.taken for name in _IN_ROWS) or need.kind in _ROWED:
        return unknown(need.batch, height * width, patch_values(need))
    return None


def patch_values(need: Need) -> int:
    side = patch_side(need)
    return channels(need) * whole(need.vision, "temporal_patch_size", "patch_temporal", default=1) * side * side


def patch_side(need: Need) -> int:
    return whole(need.vision, "patch_size", "spatial_patch_size", default=14)


def grid(need: Need) -> tuple[int, int, int]:
    """Patches of one image in time, height and width: as many as the model merges into whole tokens."""
    merge = merged(need)
    count = need.seen("num_patches")
    if isinstance(count, int) and "spatial_shapes" in need.taken:
        return 1, math.isqrt(count), count // math.isqrt(count)
    step = patch_side(need) * merge
    merge = 1 if need.kind.removesuffix("_vision") in _MERGED else merge
    height, width = (max(1, side // step) * merge for side in sides(need))
    return 1, height, width


def merged(need: Need) -> int:
    """Patches in a row that become one token, or one window; both where a model has both."""
    factors = [whole(need.vision, name, default=1) for name in (*_MERGES, "num_windows_side", "num_windows")]
    if need.taken.keys() & {"target_sizes"}:
        return math.prod(factors)
    *others, side, count = factors
    return max(*others, side, count if side == 1 else 1)


@makes("spatial_shapes", "target_sizes", "image_grid_hw")
def shapes(need: Need) -> Any:
    """Patches of each image in height and width (batch, 2)."""
    return rows([list(grid(need)[1:])] * need.batch)


@makes("pixel_attention_mask")
def patch_mask(need: Need) -> Any:
    """One for each patch (batch, patches), where images come in patches; whole images need none."""
    if "tile_fine_mask" in need.taken or need.kind == "pi0":  # one for each tile or camera
        return ones(*need.get("pixel_values").shape[:2], dtype="bool")
    return ones(*need.get("pixel_values").shape[:2]) if "spatial_shapes" in need.taken else None


@makes("image_position_ids", "pixel_position_ids")
def patch_places(need: Need) -> Any:
    """Column and row of each patch (batch, patches, 2)."""
    _, height, width = grid(need)
    places = rows([[column, row] for row in range(height) for column in range(width)])
    return places.expand(need.batch, -1, -1).clone()


@makes("image_grid_thw", "grid_thw", "video_grid_thw")
def grids(need: Need) -> Any:
    """Each image's grid (batch, 3); None beside pixels that are no patches."""
    return rows([list(grid(need))] * need.batch)


@makes("image_merge_sizes", "merge_sizes")
def merges(need: Need) -> Any:
    return rows([[whole(need.vision, *_MERGES, default=1)]] * need.batch)[:, 0]


# -- sizes ------------------------------------------------------------------------------------------------------------


def channels(need: Need) -> int:
    return whole(need.vision, *_CHANNELS, default=3)


def frames(need: Need) -> tuple[int, ...]:
    """The frames of a clip, where the model is one of clips."""
    kinds = getattr(need.model, "input_modalities", ())
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if need.kind not in _FILMS and ("video" not in kinds or "image" in kinds or "text" in kinds):
        return ()
    count = entry(need.vision, *_VIDEO)
    return (count,) if isinstance(count, int) else ()


def sides(need: Need) -> tuple[int, int]:
    """Height and width of an image: what the model was made for, else the config's, else its processor's. What would
    not divide into whole windows of patches is cut off.
    """
    height, width = _made_for(need) or _stated(need) or (SIDE, SIDE)
    step = patch_side(need) * merged(need) if merged(need) > 1 else 1
    return max(height - height % step, step), max(width - width % step, step)


def _made_for(need: Need) -> tuple[int, int] | None:
    """The size that follows from something else than an entry about sizes."""
    counts = getattr(need.config, "projector_patch_to_query_dict", None)
    if counts:  # the numbers of patches that a projector was made for
        return (math.isqrt(min(map(int, counts))) * patch_side(need),) * 2
    ratios = getattr(need.config, "scaled_images_ratios", None)
    if ratios:  # the smallest copy of the image is one patch
        return (int(need.number("patch_size", default=SIDE) / min(ratios)),) * 2
    multiples, count = getattr(need.config, "channel_multiplier", None), getattr(need.config, "num_patches", None)
    if multiples and isinstance(count, int):  # a codec of images halves them at each step but the first
        return (count * 2 ** (len(multiples) - 1),) * 2
    if "prompt_pixel_values" in need.taken:  # the image stands below its prompt
        height, width = _stated(need) or (2 * SIDE, SIDE)
        return height // 2, width
    if need.kind.endswith("_rec"):
        return _LINE
    for module in need.model.modules():  # timm's models keep the size of their images
        if type(module).__module__.startswith("timm.") and both(getattr(module, "img_size", None)):
            return both(module.img_size)
    return None


def _stated(need: Need) -> tuple[int, int] | None:
    cut = need.preprocessor.get("crop_size") if need.preprocessor.get("do_center_crop", True) else None
    stated = [getattr(config, name, None) for config in need.vision for name in _SIZES]
    sizes = map(both, (*stated, cut, need.preprocessor.get("size")))
    return next((found for found in sizes if found is not None), None)


# -- an image in tiles ------------------------------------------------------------------------------------------------


@makes("aspect_ratio_ids")
def aspect_ratio(need: Need) -> Any:
    """Which way an image was cut into tiles (batch, images): the first, one tile alone."""
    return ones(need.batch, 1)


@makes("aspect_ratio_mask")
def tile_mask(need: Need) -> Any:
    """Which tiles there are (batch, images, tiles)."""
    return ones(need.batch, 1, whole(need.vision, "max_num_tiles", default=1))


@makes("cross_attention_mask")
def cross_mask(need: Need) -> Any:
    """Which tiles each token looks at (batch, tokens, images, tiles): all."""
    return ones(*need.get("input_ids").shape, 1, whole(need.vision, "max_num_tiles", default=1))


@makes("image_attention_mask")
def image_mask(need: Need) -> Any:
    """Which images each token looks at (batch, tokens, images): the only one."""
    return ones(*need.get("input_ids").shape, 1) if need.kind == "idefics" else None
