"""The phases of a generation by a pipeline of diffusers: text encoding, denoising, decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from torch import nn

from memsize.loading.hubs.diffusion import Pipeline
from memsize.records.trace import Trace

_FORWARD: Final = "forward"
DENOISING: Final = "denoising"
_PHASES: Final = {
    "text_encoder": "text encoding",
    "image_encoder": "image encoding",
    "unet": DENOISING,
    "transformer": DENOISING,
    "vae": "decoding",
}


def phases_of(model: nn.Module) -> dict[str, str]:
    """The phase in which each part of a pipeline runs, by its name; nothing for any other model.

    A part with a number, such as ``text_encoder_2``, runs in the phase of the first; one of another name in its own.
    """
    if not isinstance(model, Pipeline):
        return {}
    names = [name for name, _ in model.named_children()]
    return {name: _PHASES.get(name.rstrip("_0123456789"), name) for name in names}


def in_phases(trace: Trace, phases: Mapping[str, str]) -> Trace:
    """Divide the forward of `trace` into `phases`, each of which begins with the first event in one of its parts.

    Events outside every part (the scheduler's step, guidance) belong to the phase that they follow, and those before
    the first part to the phase that it begins.
    """
    if not phases:
        return trace
    parts = [phases.get(layer.path.partition(".")[0]) for layer in trace.layers]
    current, names = _FORWARD, []
    for event in trace.events:
        name = trace.phases[event.phase]
        if name == _FORWARD:
            name = current = (parts[event.layer] if event.layer >= 0 else None) or current
        names.append(name)
    first = next(filter(set(phases.values()).__contains__, names), _FORWARD)
    names = [first if name == _FORWARD else name for name in names]
    index = {name: number for number, name in enumerate(dict.fromkeys(names))}
    events = (event._replace(phase=index[name]) for event, name in zip(trace.events, names, strict=True))
    return replace(trace, phases=tuple(index), events=tuple(events))
