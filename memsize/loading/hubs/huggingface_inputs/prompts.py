"""What stands beside an image: another image with its mask, a depth map, the boxes that were found in it."""

from __future__ import annotations

from typing import Any

from memsize.loading.hubs.huggingface_inputs.images import channels, sides
from memsize.loading.hubs.huggingface_inputs.makers import makes
from memsize.loading.hubs.huggingface_inputs.need import Need, unknown

REGIONS = 36
"""Regions that a detector found in an image."""


@makes("prompt_masks")
def prompt_masks(need: Need) -> Any:
    return unknown(need.batch, channels(need), *sides(need))


@makes("prompt_depth")
def prompt_depth(need: Need) -> Any:
    """A coarse map of distances (batch, 1, height, width)."""
    height, width = sides(need)
    return unknown(need.batch, 1, height, width)


@makes("visual_feats")
def regions(need: Need) -> Any:
    """What a detector says of each region (batch, regions, features)."""
    return unknown(need.batch, REGIONS, need.number("visual_feat_dim", default=2048))


@makes("visual_pos")
def region_boxes(need: Need) -> Any:
    return unknown(need.batch, REGIONS, need.number("visual_pos_dim", default=4))
