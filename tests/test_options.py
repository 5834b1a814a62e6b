"""Options are declared once: the command line, Python and TOML files take the same ones, and refuse what they don't."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from torch import nn

import memsize
from memsize import cli
from memsize.errors import InputError, MemsizeError
from tests.fits import requests
from tests.models import MODEL_KEYS, Option, file_requests, keywords_of, options_of, request_of

REQUESTS = {
    name: value
    for module in (requests, file_requests)
    for name, value in vars(module).items()
    if name.endswith("Request") and name != "ModelRequest"
}
NET = nn.Linear(8, 2)
PAGES = Path(__file__).resolve().parent.parent / "docs"


def options() -> list[tuple[str, Option]]:
    return [(name, choice) for name, request in REQUESTS.items() for choice in options_of(request).values()]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: memsize.report(NET, (8,), scenario="fp32"), "unknown keyword `scenario`: did you mean scenarios"),
        (lambda: memsize.report(NET, (8,), gpu=["t4", "a100"]), "gpu is .*: it should be a Gpu, a text or None"),
        (lambda: memsize.report(NET, (8,), train="adamw", allocator="nonsense:1"), "no allocator setting"),
        (lambda: memsize.report(NET, (8,), loss="mse"), "loss is for training steps: name an optimizer with train"),
        (lambda: memsize.report(NET, (8,), arguments={"width": 3}), "arguments are for a target"),
        (lambda: memsize.report(NET, input_data=torch.zeros(4, 8), batch_size=2), "real inputs already have a batch"),
        (lambda: memsize.trace(NET, (8,), train="adamw"), r"unknown keyword `train`: did you mean optimizer\?$"),
        (lambda: memsize.fit(NET, (8,), optimizer="adamw"), r"did you mean train\?$"),
        (lambda: memsize.fit(NET, (8,), load_in_4bit=True), r'did you mean base="nf4"\?$'),
        (lambda: memsize.fit(NET, (8,), gradient_checkpointing=True), r"did you mean remedies\?$"),
        (lambda: memsize.report(NET, input_shape=(8,)), r"did you mean input_size\?$"),
        (lambda: memsize.generate("hf:gpt2", height=64), r'did you mean arguments=\{"height": 1024\}\?$'),
        (lambda: memsize.trace(NET, (8,), step=lambda model: model, loss="mse"), "step is a loop of your own"),
        (lambda: memsize.serve("hf:gpt2", batch_size=7), "unknown keyword `batch_size`: did you mean max_num_seqs"),
        (lambda: memsize.serve("hf:gpt2", block_size="16"), "block_size is '16': it should be a whole number"),
        (lambda: memsize.generate("hf:gpt2", mode="train"), "unknown keyword `mode`"),
        (lambda: memsize.generate("hf:gpt2", num_beams=0), "num_beams is 0: it must be at least 1"),
        (
            lambda: memsize.report(NET, (8,), train=memsize.Training("sgd"), loss="mse"),
            "loss is given twice: the Training already holds it",
        ),
        (
            lambda: memsize.report(NET, (8,), training=memsize.Training("sgd")),
            r"unknown keyword `training`: did you mean train\?$",
        ),
        (lambda: memsize.report(memsize.ModelRequest.of(NET, (8,)), batch_size=2), "batch_size is given twice"),
        (lambda: memsize.report(NET, input_data=torch.zeros(4, 8), seq_len=2), "these have their own sizes"),
        (lambda: memsize.report(NET, gpu="t4"), "gpu is about a run of the model, which needs an input"),
        (lambda: memsize.report(NET, mode="eval"), "mode is about a run of the model, which needs an input"),
        (lambda: memsize.report(nn.ReLU), r"the class ReLU: give an instance, ReLU\(…\), or a target, 'file.py:ReLU'"),
        (lambda: memsize.guard(nn.ReLU, torch.optim.SGD(NET.parameters()), torch.zeros(1, 8)), "the class ReLU"),
        (lambda: memsize.init(NET, (8,)), "names its models: give a target, such as model.py:Net, and no module"),
        (lambda: memsize.guard(NET, "adamw", torch.zeros(1, 8)), "optimizer is 'adamw': give the one of your loop"),
        (lambda: memsize.fit(NET, (8,), gpus="t4"), "cannot read the number of GPUs 't4'.*; gpu names the kind of GPU"),
        (lambda: memsize.fit(NET, (8,), gpus=2), r"gpus goes with parallel.*\(parallel fsdp\)"),
        (lambda: memsize.fit("hf:gpt2", prompt=8, mode="train"), "mode is for training steps"),
        (lambda: memsize.diff(*[memsize.report(NET)] * 2, scenarios="fp16"), "scenarios is for models that are run"),
        (
            lambda: memsize.diff(*[memsize.ModelRequest.of(NET, (8,))] * 2, batch_size=2),
            "an input is for models without",
        ),
        (lambda: memsize.diff(NET, NET, gpu="t4"), "gpu is about a run of the model, which needs an input"),
        (lambda: memsize.diff(NET, NET, scenarios="fp16"), "its forward takes input"),
        (lambda: memsize.run("train.py", "--epochs 1"), "arguments is '--epochs 1': it should be a list"),
        (lambda: memsize.sweep({"target": "torch.nn:ReLU"}, fresh=True), "retry and fresh need a file"),
        (lambda: memsize.checkpoint("a.pt", arguments={"width": 1}), "name it with against"),
        (lambda: memsize.verify(NET, (8,), against="a.memsize", device=1), "device is a GPU of this machine"),
        (lambda: memsize.generate("hf:gpt2", num_beams=2, prompt_lookup_num_tokens=2), "leave out num_beams"),
        (lambda: memsize.explain(), "snapshot is missing"),
        (lambda: memsize.report(), "model is missing"),
        (lambda: memsize.explain("a", "b"), "explain takes snapshot, and the rest by keywords"),
        (lambda: memsize.explain("a", snapshot="b"), "snapshot is given twice"),
    ],
)
def test_no_argument_is_ignored(call: Callable[[], object], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        call()


class Odd:
    """What no keyword takes."""


FUNCTIONS = [
    name
    for name in memsize.__all__
    if inspect.isfunction(getattr(memsize, name)) and name not in ("load", "shape_rule")
]
KEYWORDS = [
    (name, parameter.name)
    for name in FUNCTIONS
    for parameter in inspect.signature(getattr(memsize, name)).parameters.values()
    if not re.search(r"Any$|Module|Optimizer", parameter.annotation)  # what a model's forward takes, and models
]
REST: dict[str, dict[str, Any]] = {
    "check": {},
    "checkpoint": {"path": "a.pt"},
    "diff": {"before": NET, "after": NET},
    "explain": {"snapshot": "a.pickle"},
    "fit_script": {"script": "a.py", "arguments": ["-b", "1"], "vary": "b"},
    "generate": {"model": "hf:a.json"},
    "guard": {"model": NET, "optimizer": None, "batch": torch.zeros(1, 8)},
    "run": {"script": "a.py"},
    "serve": {"model": "hf:a.json"},
    "sweep": {"grid": {"target": "torch.nn:ReLU"}},
    "virtual_gpu": {},
}
"""What else a call needs; of the other functions a model and its input."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_keyword(name: str) -> None:
    rest = REST.get(name, {"model": NET, "input_size": (8,)})
    for key in (key for function, key in KEYWORDS if function == name):
        annotation = inspect.signature(getattr(memsize, name)).parameters[key].annotation
        with pytest.raises(MemsizeError) as caught:
            getattr(memsize, name)(**rest | {key: Odd()})
        text = str(caught.value)
        assert not re.search(r"(^|\s)--\w", text), key
        if "Literal" in annotation:
            assert text.startswith(f"no {key.replace('_', ' ')} ")
        else:
            assert re.match(rf"{key} is '.*Odd object.*': it should be ", text), key


def test_names_that_were_never_released_are_unknown() -> None:
    for name in ("audit_layout", "compare", "read_checkpoint"):
        assert not hasattr(memsize, name)
    with pytest.raises(TypeError, match="`accumulate`"):
        memsize.trace(NET, (8,), accumulate=2)


def test_an_unknown_keyword_is_a_type_error_too() -> None:
    with pytest.raises(TypeError):
        memsize.layout(NET, (8,), scenarios="fp32")


def test_a_value_takes_the_place_of_its_options() -> None:
    gpu = memsize.Gpu(name="t4", allocator="expandable_segments:True")
    by_value = memsize.report(NET, (8,), scenarios="fp32", train=memsize.Training("sgd", loss="sum"), gpu=gpu)
    by_words = memsize.report(
        NET, (8,), scenarios="fp32", train="sgd", loss="sum", gpu="t4", allocator="expandable_segments:True"
    )
    assert by_value == by_words


def request_named(command: str) -> type:
    return REQUESTS["".join(map(str.capitalize, command.split("-"))) + "Request"]


LISTS = ("gpus", "models", "scenarios")


@pytest.mark.parametrize("name", [n for n in cli.memsize.list_commands(click.Context(cli.memsize)) if n not in LISTS])
def test_help_shows_the_commands_own_defaults(name: str) -> None:
    """Two commands may have other defaults for the same option: as they are declared, so they are shown."""
    context = click.Context(cli.memsize)
    command = cli.memsize.get_command(context, name)
    assert command is not None
    request = request_named(name)
    for parameter in command.params:
        declared: Any = getattr(parameter, "declared", None)
        if declared is not None:
            assert declared == options_of(request)[declared.key]
            text = " ".join(str(parameter.get_help_record(click.Context(command))).split())
            assert declared.shown is None or f"[default: {declared.shown}" in text.replace("- ", "-")


def option_rows() -> list[tuple[str, str]]:
    """The rows of options in the pages' tables, each with the command that its page is about."""
    pages = {"report": "peaks"} | {
        name: name for name in cli.memsize.list_commands(click.Context(cli.memsize)) if name not in LISTS
    }
    files = {name: PAGES / f"{page}.md" for name, page in pages.items() if (PAGES / f"{page}.md").exists()}
    lines = [(name, line) for name, file in files.items() for line in file.read_text("utf-8").splitlines()]
    return [(name, line) for name, line in lines if line.startswith("| `--")]


@pytest.mark.parametrize(("name", "row"), option_rows())
def test_the_tables_of_options_have_values_and_defaults_that_the_command_has(name: str, row: str) -> None:
    command = cli.memsize.get_command(click.Context(cli.memsize), name)
    assert command is not None
    request = request_named(name)
    targets = ["a.pt" for parameter in command.params if isinstance(parameter, click.Argument) and parameter.required]
    for example in re.findall("`(--[^`]+)`", row.split("|")[1]):
        words = example.split()
        option = next(
            parameter for parameter in command.params if words[0] in [*parameter.opts, *parameter.secondary_opts]
        )
        if isinstance(option.type, click.Choice):
            assert all(f"`{choice}`" in row or choice in words for choice in option.type.choices), example
        if default := re.search(r"`(\w+)` \(default\)", row):
            assert option.default == default[1]
        if words[-1].isupper():  # a placeholder
            assert not option.is_flag and len(words) == 2
            continue
        with command.make_context(name, [*targets, *words]) as context:
            request_of(request, {key: context.params[key] for key in options_of(request) if key in context.params})


def test_every_option_says_what_it_does() -> None:
    for name, choice in options():
        assert choice.positional or (choice.help[:1].isupper() and choice.help.endswith((".", "…", "own"))), (
            name,
            choice,
        )


def test_python_has_every_option_of_the_command_line() -> None:
    for name, request in REQUESTS.items():
        keywords = keywords_of(request)
        for key, choice in options_of(request).items():
            assert (choice.python or key) in keywords, (name, key)


def test_pythons_help_has_every_keyword_in_the_words_of_the_command_line() -> None:
    for name, request in REQUESTS.items():
        function = getattr(memsize, re.sub("(?<!^)(?=[A-Z])", "_", name.removesuffix("Request")).lower(), None)
        for key, choice in options_of(request).items():
            if function is not None and key in inspect.signature(function).parameters and choice.help:
                (line,) = re.findall(rf"^ *{key}: (.*)$", function.__doc__ or "", re.MULTILINE)
                assert line.startswith(choice.help[:30]) or "--" in choice.help


def test_every_key_of_a_section_is_an_option_of_report_or_timeline() -> None:
    options = options_of(requests.ReportRequest) | options_of(requests.TimelineRequest)
    assert set(MODEL_KEYS) <= {*options}
