"""`memsize layout`: which layers keep channels last, which operations lose it, and what gets copied."""

from __future__ import annotations

from memsize.cli.command import answer, command, depth_option
from memsize.cli.output import Destination
from memsize.spec.requests import LayoutRequest


@command(
    LayoutRequest,
    also=(depth_option,),
    short_help="Show which layers keep channels last, and what gets copied.",
    epilog="""\b
    Examples:
      memsize layout model.py:Net --input 3,224,224
      memsize layout timm:convnext_tiny --batch-size 32 --scenario amp-bf16
      memsize layout torchvision:r3d_18 -o layout.html
    """,
)
def layout(request: LayoutRequest, output: Destination, depth: int | None) -> None:
    """Show which operations of TARGET lose channels last, and what is copied only to rearrange it.

    TARGET is path.py:Name, package.module:name or a library's model, as for memsize report. It is run twice: as it is,
    and with the weights and inputs that are images (4-D) or volumes (5-D) in channels last.
    """
    answer(
        output, "layout", request.model.model, lambda api, progress: api.layout(request, progress=progress), depth=depth
    )
