"""The second opinion: what the summaries that users already trust say of a model."""

from __future__ import annotations

from importlib.metadata import version

from torch import nn

from memsize.record import Reading
from memsize.tracing.answers import Answers
from memsize.tracing.feed import Call
from memsize.tracing.quiet import undisturbed


def torchinfo_reading(twin: nn.Module, call: Call) -> Reading | None:
    """What `torchinfo.summary` says of a `meta` twin (it is run, hooked and left to the caller); None if it fails.

    torchinfo walks anything that PyTorch runs, so it runs here as everything does: on `meta`, answered by shape rules.
    """
    import torchinfo

    args, kwargs = call
    mode = "train" if twin.training else "eval"
    try:
        with undisturbed(), Answers():
            summary = torchinfo.summary(
                twin, input_data=args or None, verbose=0, device="meta", mode=mode, cache_forward_pass=False, **kwargs
            )
    except Exception:  # torchinfo wraps whatever a model raises; that it has no answer is the answer
        return None
    return Reading(f"torchinfo {version('torchinfo')}", summary.total_params, summary.total_param_bytes)
