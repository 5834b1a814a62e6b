"""A way to import a torchvision that does not fit the installed torch.

A torchvision wheel fits one build of torch. Beside another (the usual wheel beside the CPU build of torch) its compiled
part is not loaded, importing it fails, and timm and parts of transformers fail with it. The models themselves are
Python, and so is all that a run on `meta` tensors asks of the operators: what they return, how they are differentiated
and what autocast does to them. The compiled part gives these their schemas alone, which are declared here in its place.

What was declared stays for good, as what was imported does: torchvision remains importable in a process that could not
have used it, and an operator that is asked to compute says that it cannot.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from memsize.processes.simulation import Function, Override, ThreadPatches

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

_DIFFERENTIABLE = "roi_align roi_pool ps_roi_align ps_roi_pool deform_conv2d"
_IN_PYTHON = "_autograd_registrations.py"
"""The file with torchvision's gradient formulas; before 0.27 they were in the compiled part."""

_declared: list[torch.library.Library] = []
"""A library's operators last as long as it does."""


@contextmanager
def torchvision_importable() -> Iterator[None]:
    """Let this thread import torchvision: operators that cannot be loaded are declared instead."""
    _forget_failed_import()
    with _patches.active():
        yield


def _forget_failed_import() -> None:
    """Python keeps the parts of a package whose import failed; `torchvision.extension` would not try to load again."""
    if "torchvision" not in sys.modules:
        for name in [name for name in sys.modules if name.startswith("torchvision.")]:
            del sys.modules[name]


def _or_declared(load: Function, path: str) -> None:
    try:
        load(path)
    except OSError:
        file = Path(path)
        if file.parent.name != "torchvision" or not file.name.startswith("_C"):
            raise
        if not _declared:
            declare_schemas(file.with_name(_IN_PYTHON).is_file())


_patches = ThreadPatches(lambda: (Override(torch.ops, "load_library", _or_declared),))


def declare_schemas(differentiated: bool = True) -> torch.library.Library:
    """Declare the operators as the compiled part would; only where nothing else has, and for good.

    Unless they are `differentiated` in Python, those with gradients refuse to run: they would come out without.
    """
    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    library.impl("_cuda_version", lambda: -1, "CompositeExplicitAutograd")  # not a build for CUDA
    for name in () if differentiated else _DIFFERENTIABLE.split():
        library.impl(name, _refuse, "Autograd")
    _declared.append(library)
    return library


def _refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError(f"this operator needs the compiled part of torchvision, which cannot be loaded: {remedy()}")


def remedy() -> str:
    """How to get the torchvision that fits the installed torch."""
    release = matching_release(torch.__version__)
    return (
        f"torch {torch.__version__} goes with torchvision {release} from the same index: "
        f"pip install --force-reinstall --no-deps torchvision=={release}{_index()}"
    )


def matching_release(torch_version: str) -> str:
    """The torchvision for a release of torch 2: 0.28.0 for 2.13.0, as the wheels of torchvision require it."""
    minor, patch = re.findall(r"\d+", torch_version)[1:3]
    return f"0.{int(minor) + 15}.{patch}"


def _index() -> str:
    """A build that names its platform does not come from the default index."""
    _, _, build = torch.__version__.partition("+")
    return f" --index-url URL, where URL is the index of {build} builds" if build else ""
