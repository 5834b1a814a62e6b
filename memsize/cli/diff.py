"""`memsize diff`: what changed from one model, revision, saved run or checkpoint to another."""

from __future__ import annotations

from memsize.cli.command import answer, command, jobs_option, refuse_options
from memsize.cli.output import Destination
from memsize.loading.revision import parse_revision
from memsize.loading.target import is_checkpoint, parse_target
from memsize.records.run_file import is_run_file
from memsize.spec.requests import DiffRequest


@command(
    DiffRequest,
    also=(jobs_option,),
    shows_saved=False,
    short_help="Show what changed from one version of a model to another.",
    epilog="""\b
    Examples:
      memsize diff HEAD~1:model.py:Net model.py:Net --input 3,224,224
      memsize diff main:model.py:Net model.py:Net --input 3,224,224 --train adamw --gpu t4 -o comment.md
      memsize diff old.py:Net new.py:Net --input 3,224,224 --scenario fp32,amp-bf16
      memsize diff before.memsize after.memsize
      memsize diff epoch1.ckpt epoch2.ckpt
    """,
)
def diff(request: DiffRequest, output: Destination, jobs: int | None) -> None:
    """Show what changed from BEFORE to AFTER: layers, bytes by role and scenario, the peak and the findings.

    Each is a target of memsize report, such as model.py:Net, a target at a git revision, such as HEAD~1:model.py:Net, a
    saved run, or a checkpoint. A revision is checked out beside your files, which stay as they are. The options are
    those of memsize report and apply to both.
    """
    if not any([_is_run(request.before), _is_run(request.after)]):
        refuse_options(f"{request.before} and {request.after} are files")
    answer(
        output,
        "comparison",
        None,
        lambda api, progress: api.diff(request, progress=progress),
        jobs=1 if request.execute else jobs,
    )


def _is_run(side: str) -> bool:
    """Whether a side is a model that has to be run; raises `TargetError` for a text that is no target."""
    if is_run_file(side) or is_checkpoint(side):
        return False
    if parse_revision(side) is None:
        parse_target(side)
    return True
