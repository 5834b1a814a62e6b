"""torchvision's compiled operators, declared where the installed build of them cannot be loaded.

A torchvision wheel fits one build of torch. Beside another (the usual wheel beside the CPU build of torch) its compiled
part is not loaded, and importing it fails. The models themselves are Python, and so is all that a run on `meta` tensors
asks of the operators: what they return, how they are differentiated and what autocast does to them. The compiled part
gives these their schemas alone, which is what is declared here in its place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

SCHEMAS = (
    "_cuda_version() -> int",
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "_roi_align_backward(Tensor grad, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "SymInt batch_size, SymInt channels, SymInt height, SymInt width, int sampling_ratio, bool aligned) -> Tensor",
    "qroi_align(Tensor input, Tensor rois, float input_scale, int input_zero_point, float rois_scale, "
    "int rois_zero_point, float spatial_scale, SymInt pooled_height, SymInt pooled_width, int sampling_ratio, "
    "bool aligned) -> Tensor",
    "roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) "
    "-> (Tensor, Tensor)",
    "_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, float spatial_scale, SymInt pooled_height, "
    "SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width) -> Tensor",
    "ps_roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio) -> (Tensor, Tensor)",
    "_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, float spatial_scale, "
    "SymInt pooled_height, SymInt pooled_width, int sampling_ratio, SymInt batch_size, SymInt channels, SymInt height, "
    "SymInt width) -> Tensor",
    "ps_roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) "
    "-> (Tensor, Tensor)",
    "_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, float spatial_scale, "
    "SymInt pooled_height, SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width) "
    "-> Tensor",
    "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, "
    "SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, "
    "SymInt offset_groups, bool use_mask) -> Tensor",
    "_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
    "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, "
    "SymInt groups, SymInt offset_groups, bool use_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "box_iou_rotated(Tensor boxes1, Tensor boxes2) -> Tensor",
)
"""What torchvision 0.28 declares in C++ (csrc/ops/*.cpp)."""

_declared: list[torch.library.Library] = []
"""A library's operators last as long as it does."""


def declare() -> None:
    """Import torchvision, its operators declared if they cannot be loaded; nothing where it is not installed."""
    try:
        version("torchvision")
    except PackageNotFoundError:
        return
    with _declaring_what_cannot_be_loaded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchvision  # noqa: F401


@contextmanager
def _declaring_what_cannot_be_loaded() -> Iterator[None]:
    """While open, loading torchvision's operators succeeds either way."""
    load: Callable[..., Any] = torch.ops.load_library

    def load_or_declare(path: str) -> None:
        try:
            load(path)
        except OSError:
            if Path(path).parts[-2:-1] != ("torchvision",) or not Path(path).name.startswith("_C"):
                raise
            declare_schemas()

    torch.ops.load_library = load_or_declare  # type: ignore[method-assign]
    try:
        yield
    finally:
        del torch.ops.load_library


def declare_schemas() -> torch.library.Library:
    """Declare the operators as the compiled part would; only where nothing else has, and for good."""
    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    library.impl("_cuda_version", lambda: -1, "CompositeExplicitAutograd")  # not a build for CUDA
    _declared.append(library)
    return library
