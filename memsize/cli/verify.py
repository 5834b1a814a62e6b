"""`memsize verify`: compare a predicted step with the same step run on this machine's GPU."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import click

from memsize.cli.options import output_options, scenario_option
from memsize.cli.output import Destination
from memsize.cli.saved import is_saved
from memsize.cli.subject import subject_options, training_options
from memsize.cli.working import working
from memsize.spec.model_request import ModelRequest
from memsize.spec.scenario import scenario_named
from memsize.spec.training import Training


@click.command(
    short_help="Compare predictions with a real GPU.",
    epilog="""\b
    Examples:
      memsize verify model.py:Net --input 3,224,224 --train adamw
      memsize verify model.py:Net --input 3,224,224 --train adamw --scenario amp-bf16 --save h100.memsize
      memsize verify model.py:Net --input 3,224,224 --train adamw --scenario amp-bf16 --against h100.memsize
    """,
)
@subject_options
@training_options
@scenario_option
@click.option(
    "--device", default=0, show_default=True, type=click.IntRange(min=0), metavar="N", help="CUDA device to run on."
)
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Compare with a saved measurement of the same step instead, without a GPU.",
)
@output_options
def verify(
    subject: ModelRequest,
    training: Training | None,
    scenario: str,
    device: int,
    against: Path | None,
    output: Destination,
) -> None:
    """Predict a step of TARGET, run it on this machine's GPU, and compare the two.

    TARGET is path.py:Name, package.module:name or a library's model, as for memsize report. With --train, training
    steps are run; without, one inference. If prediction and measurement differ, the first operations whose allocations
    differ are listed. Convolutional networks are run a second time with cudnn.benchmark.
    """
    # Everything that can be wrong with the command itself shows before torch is loaded.
    asked = scenario_named(scenario)

    # What the user's model prints goes to stderr: stdout holds the comparison and nothing else.
    with working() as progress:
        from memsize import __version__, api
        from memsize.analysis.saved_runs import load_kind

        if is_saved(subject.model):
            found = load_kind(str(subject.model), "verification")
        else:
            found = api.verify(
                subject,
                scenario=asked.name,
                train=training,
                against=against,
                device=device,
                progress=progress,
            )
            found = replace(found, command=shlex.join(["memsize", *sys.argv[1:]]), version=__version__)
        output.keep(found)
        text = output.drawn(found)
    output.write(text)
