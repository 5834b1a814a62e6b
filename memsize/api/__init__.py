"""The composition: from a model, a program or a file to an answer. The command line and notebooks call these."""

from memsize.api.checking import check
from memsize.api.comparing import compare
from memsize.api.file_readers import explain, load, read_checkpoint
from memsize.api.fitting import fit
from memsize.api.generating import generate, serve
from memsize.api.guarding import guard
from memsize.api.models import audit_layout, report, shape_rule, trace, verify
from memsize.api.programs import fit_script, run, virtual_gpu
from memsize.api.sweeping import sweep

__all__ = [
    "audit_layout",
    "check",
    "compare",
    "explain",
    "fit",
    "fit_script",
    "generate",
    "guard",
    "load",
    "read_checkpoint",
    "report",
    "run",
    "serve",
    "shape_rule",
    "sweep",
    "trace",
    "verify",
    "virtual_gpu",
]
