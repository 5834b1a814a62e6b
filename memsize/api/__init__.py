"""The composition: from a model, a program or a file to an answer. The command line and notebooks call these.

The module of a function is imported when it is first used: a command does not wait for those of the others.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memsize.api.checking import check as check, init as init
    from memsize.api.comparing import checkpoint as checkpoint, diff as diff, explain as explain, load as load
    from memsize.api.fitting import fit as fit
    from memsize.api.generating import generate as generate, serve as serve
    from memsize.api.models import (
        guard as guard,
        layout as layout,
        report as report,
        shape_rule as shape_rule,
        step_trace as step_trace,
        timeline as timeline,
        trace as trace,
        verify as verify,
    )
    from memsize.api.programs import (
        fit_script as fit_script,
        run as run,
        run_program as run_program,
        virtual_gpu as virtual_gpu,
    )
    from memsize.api.sweeping import sweep as sweep

_MODULES = {
    "checking": "check init",
    "comparing": "checkpoint diff explain load",
    "fitting": "fit",
    "generating": "generate serve",
    "models": "guard layout report shape_rule step_trace timeline trace verify",
    "programs": "fit_script run run_program virtual_gpu",
    "sweeping": "sweep",
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOMES[name]), name)
    return value
