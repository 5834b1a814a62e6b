"""`memsize layout`: which layers keep channels last, which operations lose it, and what gets copied."""

from __future__ import annotations

import click

from memsize.cli.options import depth_option, output_options, scenario_option
from memsize.cli.output import Destination
from memsize.cli.saved import is_saved
from memsize.cli.subject import subject_options
from memsize.cli.working import working
from memsize.spec.model_request import ModelRequest
from memsize.spec.scenario import scenario_named


@click.command(
    short_help="Show which layers keep channels last, and what gets copied.",
    epilog="""\b
    Examples:
      memsize layout model.py:Net --input 3,224,224
      memsize layout timm:convnext_tiny --batch-size 32 --scenario amp-bf16
      memsize layout torchvision:r3d_18 -o layout.html
    """,
)
@subject_options
@scenario_option
@depth_option
@output_options
def layout(subject: ModelRequest, scenario: str, depth: int | None, output: Destination) -> None:
    """Show which operations of TARGET lose channels last, and what is copied only to rearrange it.

    TARGET is path.py:Name, package.module:name or a library's model, as for memsize report. It is run twice: as it is,
    and with the weights and inputs that are images (4-D) or volumes (5-D) in channels last.
    """
    asked = scenario_named(scenario)

    # What the user's model prints goes to stderr: stdout holds the report and nothing else.
    with working() as progress:
        from memsize import api
        from memsize.analysis.saved_runs import load_kind

        found = (
            load_kind(str(subject.model), "layout")
            if is_saved(subject.model)
            else api.audit_layout(
                subject,
                scenario=asked.name,
                progress=progress,
            )
        )
        output.keep(found)
        text = output.drawn(found, depth=depth)
    output.write(text)
