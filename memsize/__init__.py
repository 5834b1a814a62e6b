"""memsize: what each byte of a PyTorch model is for, why it did or didn't shrink, and what a GPU will see.

    report = memsize.report("model.py:Test", input_size=(3, 64, 64))
    report.layers, report.scenarios, report.tensors      # pandas DataFrames
    report.why()                                         # findings, most important first
    memsize.compare(before, after)                       # two models: what changed, what did not, why
    step = memsize.trace(model, (3, 64, 64), optimizer="adamw")
    step.peak                                            # what a GPU would show at the peak of a training step
    memsize.fit(model, (3, 64, 64), train="adamw", gpu="t4")    # the largest batch, and what binds it
    memsize.check()                                      # the limits and baselines in pyproject.toml
    memsize.generate("hf:config.json", prompt=8192, new=512)    # prefill, decode and the KV cache of a language model
    memsize.serve("hf:config.json", gpu="h100")          # the blocks and tokens of a paged server's cache
    memsize.sweep("sweep.toml", results="sweep.jsonl")   # a grid of models, batches, scenarios and GPUs as one table
    memsize.run("train.py", ["--epochs", "1"], gpu="t4")        # a script of yours, on a GPU that isn't there
    memsize.fit_script("train.py", ["-b", "8"], vary="b")       # the largest value of an argument of its own
    memsize.audit_layout(model, (3, 224, 224))           # what channels last does to it
    report.save("run.memsize"); memsize.load("run.memsize")     # the same answer later, without the model
    memsize.verify(model, (3, 64, 64), train="adamw")    # on a machine with a GPU: compare the prediction with it
    memsize.explain("snapshot.pickle")                   # what was alive on that GPU, from a memory snapshot

Importing memsize does not import torch; the first report does.
"""

from __future__ import annotations

from memsize.version import VERSION

# `typing` and `importlib` would be the longest part of what the command does before it can be interrupted in silence.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from memsize.analysis.step import Guard, StepTrace
    from memsize.api import (
        audit_layout,
        check,
        compare,
        explain,
        fit,
        fit_script,
        generate,
        guard,
        load,
        read_checkpoint,
        report,
        run,
        serve,
        shape_rule,
        sweep,
        trace,
        verify,
        virtual_gpu,
    )
    from memsize.errors import (
        BudgetError,
        CheckpointError,
        ForwardError,
        InputError,
        MemsizeError,
        OutputError,
        ScenarioError,
        TargetError,
        UnknownValueError,
    )
    from memsize.interrupt import Interrupted
    from memsize.records.check import Check
    from memsize.records.comparison import Comparison
    from memsize.records.explanation import Explanation
    from memsize.records.fit import Fit
    from memsize.records.generation import GenerationReport
    from memsize.records.layout import LayoutReport
    from memsize.records.program import ProgramRun
    from memsize.records.ranks import RankRuns
    from memsize.records.report import Report
    from memsize.records.serving import ServingReport
    from memsize.records.sweep import Sweep
    from memsize.records.verification import Verification
    from memsize.records.world import World
    from memsize.spec.stack import Stack
    from memsize.spec.training import Training

__version__ = VERSION

__all__ = [
    "BudgetError",
    "Check",
    "CheckpointError",
    "Comparison",
    "Explanation",
    "Fit",
    "ForwardError",
    "GenerationReport",
    "Guard",
    "InputError",
    "Interrupted",
    "LayoutReport",
    "MemsizeError",
    "OutputError",
    "ProgramRun",
    "RankRuns",
    "Report",
    "ScenarioError",
    "ServingReport",
    "Stack",
    "StepTrace",
    "Sweep",
    "TargetError",
    "Training",
    "UnknownValueError",
    "Verification",
    "World",
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

_HOMES = {
    "memsize.api": (
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
    ),
    "memsize.interrupt": ("Interrupted",),
    "memsize.records.check": ("Check",),
    "memsize.records.comparison": ("Comparison",),
    "memsize.records.explanation": ("Explanation",),
    "memsize.records.program": ("ProgramRun",),
    "memsize.records.ranks": ("RankRuns",),
    "memsize.records.report": ("Report",),
    "memsize.errors": (
        "BudgetError",
        "CheckpointError",
        "ForwardError",
        "InputError",
        "MemsizeError",
        "OutputError",
        "ScenarioError",
        "TargetError",
        "UnknownValueError",
    ),
    "memsize.records.fit": ("Fit",),
    "memsize.records.generation": ("GenerationReport",),
    "memsize.records.layout": ("LayoutReport",),
    "memsize.records.serving": ("ServingReport",),
    "memsize.records.sweep": ("Sweep",),
    "memsize.analysis.step": ("Guard", "StepTrace"),
    "memsize.spec.stack": ("Stack",),
    "memsize.records.world": ("World",),
    "memsize.spec.training": ("Training",),
    "memsize.records.verification": ("Verification",),
    "memsize.cli.magic": ("load_ipython_extension",),
}
"""Where each name lives. It is imported when it is first used: a command pays for what it needs, a tenth of a second
less for one that only reads a file's header.
"""


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'memsize' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
