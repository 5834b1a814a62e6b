"""The composition: from a model, a program or a file to an answer. The command line and notebooks call these."""

from memsize.api.checking import check, init
from memsize.api.comparing import checkpoint, diff, explain, load
from memsize.api.fitting import fit
from memsize.api.generating import generate, serve
from memsize.api.guarding import guard
from memsize.api.keywords import renamed_to
from memsize.api.models import layout, report, shape_rule, step_trace, timeline, trace, verify
from memsize.api.programs import fit_script, run, run_program, virtual_gpu
from memsize.api.sweeping import sweep

audit_layout = renamed_to(layout, "audit_layout")
compare = renamed_to(diff, "compare")
read_checkpoint = renamed_to(checkpoint, "read_checkpoint")

__all__ = [
    "audit_layout",
    "check",
    "checkpoint",
    "compare",
    "diff",
    "explain",
    "fit",
    "fit_script",
    "generate",
    "guard",
    "init",
    "layout",
    "load",
    "read_checkpoint",
    "report",
    "run",
    "run_program",
    "serve",
    "shape_rule",
    "step_trace",
    "sweep",
    "timeline",
    "trace",
    "verify",
    "virtual_gpu",
]
