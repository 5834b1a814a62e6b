"""`memsize verify`: compare a predicted step with the same step run on this machine's GPU."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace

from memsize.cli.command import answer, command
from memsize.cli.output import Destination
from memsize.spec.requests import VerifyRequest
from memsize.version import VERSION


@command(
    VerifyRequest,
    short_help="Compare predictions with a real GPU.",
    epilog="""\b
    Examples:
      memsize verify model.py:Net --input 3,224,224 --train adamw
      memsize verify model.py:Net --input 3,224,224 --train adamw --scenario amp-bf16 --save h100.memsize
      memsize verify model.py:Net --input 3,224,224 --train adamw --scenario amp-bf16 --against h100.memsize
    """,
)
def verify(request: VerifyRequest, output: Destination) -> None:
    """Predict a step of TARGET, run it on this machine's GPU, and compare the two.

    TARGET is path.py:Name, package.module:name or a library's model, as for memsize report. With --train, training
    steps are run; without, one inference. If prediction and measurement differ, the first operations whose allocations
    differ are listed. Convolutional networks are run a second time with cudnn.benchmark.
    """
    made_by = {"command": shlex.join(["memsize", *sys.argv[1:]]), "version": VERSION}
    answer(
        output,
        "verification",
        request.model.model,
        lambda api, progress: replace(api.verify(request, progress=progress), **made_by),
    )
