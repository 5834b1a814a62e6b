"""`memsize timeline`: live memory over a training step, drawn or as a snapshot for PyTorch's memory viewer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memsize.cli.command import WITH_SNAPSHOT, command, is_given, is_saved
from memsize.cli.output import Destination
from memsize.cli.working import working
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.cards import card
from memsize.files import Content
from memsize.spec.requests import TimelineRequest

if TYPE_CHECKING:
    from memsize.analysis.step import StepTrace


@command(
    TimelineRequest,
    formats=WITH_SNAPSHOT,
    epilog="""\b
    Examples:
      memsize timeline model.py:Net --input 3,224,224 --train adamw
      memsize timeline model.py:Net --input 3,224,224 --train adamw --scenario amp-bf16 -o step.html
      memsize timeline hf:config.json --seq-len 2048 --train adamw --parallel fsdp=8 --gpu h100
      memsize timeline model.py:Net --input 3,224,224 --train sgd -o step.pickle

    \b
    A .pickle is a PyTorch memory snapshot, which https://pytorch.org/memory_viz displays.
    """,
)
def timeline(request: TimelineRequest, output: Destination) -> None:
    """Show the live memory of TARGET over its training steps, by role; without --train, over one inference.

    TARGET is path.py:Name, package.module:name or a library's model, as for memsize report.
    """
    # What the user's model prints goes to stderr: stdout holds the timeline and nothing else.
    with working() as progress:
        from memsize import api

        if is_saved(request.model.model, "scenario", "allocator"):
            step = _saved(request)
        else:
            step = api.step_trace(request, progress=progress)
        output.keep(step)
        progress("writing the timeline")
        content = _content(step, output)
    output.write(content)


def _saved(request: TimelineRequest) -> StepTrace:
    from memsize.analysis.step import load_step

    step = load_step(str(request.model.model), request.scenario if is_given("scenario") else None)
    allocator = request.gpu.allocator
    return replace(step, config=AllocatorConfig.of(allocator)) if allocator else step


def _content(step: StepTrace, output: Destination) -> Content:
    if output.format == "snapshot":
        from memsize.analysis.timeline import pickled

        return pickled(step.trace, step.config)
    from memsize.analysis.timeline import timeline

    return output.drawn(timeline(step.trace, step.config, card(step.gpu)))
