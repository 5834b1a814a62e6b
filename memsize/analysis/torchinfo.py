"""A second opinion: what a summary that users already trust says of a model."""

from __future__ import annotations

from importlib.metadata import version

from torch import nn

from memsize.errors import exits_caught
from memsize.records.trace import ToolReport
from memsize.spec.model_request import Call
from memsize.torch_internals.isolation import undisturbed
from memsize.tracing.dispatch import MetaDispatchMode
from memsize.tracing.module_calls import ModuleCallRecorder


def torchinfo_reading(model: nn.Module, call: Call) -> ToolReport | None:
    """The totals of `torchinfo.summary` for a meta copy, which it runs and hooks; None if it fails.

    torchinfo walks anything that PyTorch runs, so it runs here as everything does: on `meta`, answered by shape rules.
    Without arguments it does not run it, and adds up what is registered.
    """
    import torchinfo

    args, kwargs = call
    mode = "train" if model.training else "eval"
    try:
        with exits_caught(), undisturbed(), MetaDispatchMode():
            summary = torchinfo.summary(
                model, input_data=args or None, verbose=0, device="meta", mode=mode, cache_forward_pass=False, **kwargs
            )
    except Exception:  # torchinfo wraps whatever a model raises; that it has no answer is the answer
        return None
    return ToolReport(f"torchinfo {version('torchinfo')}", summary.total_params, summary.total_param_bytes)


def counts_without_running(calls: ModuleCallRecorder) -> bool:
    """Whether torchinfo counts the same for a model without running it as it does when it runs it.

    It does where each module is registered once and is first called by the module that holds it, during that one's own
    first call: torchinfo then meets the same modules, each inside the same one. A model for which its hooks may fail
    (they want tensors with dimensions) is not one of these.
    """
    seen = calls.seen
    index = {layer.path: position for position, layer in enumerate(seen)}
    holders = [index[layer.path.rpartition(".")[0]] if layer.path else -1 for layer in seen]
    times = [0] * len(seen)
    for caller, called in calls.entered:
        if not times[called] and (caller != holders[called] or (caller >= 0 and times[caller] != 1)):
            return False
        times[called] += 1
    is_ordinary = all(layer.plain and all(output.spec.shape for output in layer.outputs) for layer in seen)
    registered = sum(1 for layer in seen for module in layer.module._modules.values() if module is not None)
    return registered == len(seen) - 1 and all(times) and is_ordinary
