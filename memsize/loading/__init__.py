"""Targets → models: ``load("model.py:Test")`` imports what the target names and builds its module.

Models that a library names (``timm:resnet18``) are built by `hubs`, and come with inputs that suit them. A module is
built without the memory of its weights where its constructor allows that (`weightless`): large parameters and buffers
are `meta` tensors.
"""

from memsize.loading.building import LoadedModel, input_maker
from memsize.loading.loader import GpuContextFactory, load, load_inputs, load_loop, targets_of
from memsize.loading.target import Target, parse_target
from memsize.spec.inputs import InputMaker, InputRequest

__all__ = [
    "GpuContextFactory",
    "InputMaker",
    "InputRequest",
    "LoadedModel",
    "Target",
    "input_maker",
    "load",
    "load_inputs",
    "load_loop",
    "parse_target",
    "targets_of",
]
