"""memsize: what each byte of a PyTorch model is for, why it did or didn't shrink, and what a GPU will see.

    report = memsize.report("model.py:Test", input_size=(3, 64, 64))
    report.layers, report.scenarios, report.tensors      # pandas DataFrames
    report.why()                                         # findings, most important first
    memsize.diff(before, after)                          # two models: what changed, what did not, why
    step = memsize.trace(model, (3, 64, 64), optimizer="adamw")
    step.peak                                            # what a GPU would show at the peak of a training step
    memsize.fit(model, (3, 64, 64), train="adamw", gpu="t4")    # the largest batch, and what binds it
    memsize.check()                                      # the limits and baselines in pyproject.toml
    memsize.generate("hf:config.json", prompt=8192)      # prefill, decode and the KV cache of a language model
    memsize.serve("hf:config.json", gpu="h100")          # the blocks and tokens of a paged server's cache
    memsize.sweep("sweep.toml", results="sweep.jsonl")   # a grid of models, batches, scenarios and GPUs as one table
    memsize.run("train.py", ["--epochs", "1"], gpu="t4")        # a script of yours, on a GPU that isn't there
    memsize.fit_script("train.py", ["-b", "8"], vary="b")       # the largest value of an argument of its own
    memsize.layout(model, (3, 224, 224))           # what channels last does to it
    report.save("run.memsize"); memsize.load("run.memsize")     # the same answer later, without the model
    memsize.verify(model, (3, 64, 64), train="adamw")    # on a machine with a GPU: compare the prediction with it
    memsize.explain("snapshot.pickle")                   # what was alive on that GPU, from a memory snapshot
    memsize.explain("train.log")                         # what it held, from an out-of-memory error alone

Importing memsize does not import torch; the first report does.
"""

from __future__ import annotations

from memsize.version import VERSION

__version__ = VERSION

_BESIDE_ANSWERS = {
    "memsize.api": "fit_script guard init load shape_rule virtual_gpu",
    "memsize.analysis.program": "VirtualGpu",
    "memsize.analysis.step": "Guard",
    "memsize.device.allocator_config": "AllocatorConfig",
    "memsize.errors": (
        "BudgetError CheckpointError ForwardError InputError MemsizeError OutputError "
        "ScenarioError TargetError TorchMissingError UnknownValueError"
    ),
    "memsize.interrupt": "Interrupted",
    "memsize.records.finding": "Finding",
    "memsize.records.trace": "Trace",
    "memsize.records.world": "World",
    "memsize.spec.generation": "Generation Serving",
    "memsize.spec.inputs": "InputSpec",
    "memsize.spec.model_request": "ModelRequest",
    "memsize.spec.parallel": "Parallel",
    "memsize.spec.scenario": "Scenario",
    "memsize.spec.stack": "Gpu Stack",
    "memsize.spec.training": "Training",
}
"""The public names that are neither an answer nor the function that returns one, by the module that each lives in."""


def _homes() -> dict[str, str]:
    """The module of each public name. It is imported when the name is first used: a command pays for what it needs, a
    tenth of a second less for one that only reads a file's header.
    """
    from memsize.records.kinds import KINDS

    homes = {name: home for home, names in _BESIDE_ANSWERS.items() for name in names.split()}
    for kind in KINDS.values():
        if kind.function:
            module, _, record = kind.record.partition(":")
            homes |= {kind.function: "memsize.api", record: f"memsize.{module}"}
    return homes


def __getattr__(name: str) -> object:
    # No constant: listing the answers imports what a command need not wait for.
    if name == "__all__":
        return sorted(_homes())
    # IPython looks for the extension; it is no name that people call.
    home = "memsize.cli.magic" if name == "load_ipython_extension" else _homes().get(name)
    if home is None:
        raise AttributeError(f"module 'memsize' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_homes()})
