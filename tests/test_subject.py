"""What a question is about: one value, however it is said, and the same for every function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memsize
from memsize import InputSpec, ModelRequest
from memsize.errors import InputError
from tests.models import call_of, options_of

ROW = torch.zeros(4, 8)
ROWS = InputSpec(None, (3, 64, 64))
IDS = InputSpec("ids", (512,), "int64")


class Weighted(nn.Module):
    """Takes one argument by position and one by keyword only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x: Tensor, *, weights: Tensor | None = None, double: bool = False) -> Tensor:
        out = self.layer(x)
        out = out if weights is None else out * weights
        return torch.cat((out, out)) if double else out


@pytest.mark.parametrize(
    ("size", "specs"),
    [
        ((3, 64, 64), (ROWS,)),
        ([3, 64, 64], (ROWS,)),
        (torch.Size((3, 64, 64)), (ROWS,)),
        ("3,64,64", (ROWS,)),
        (ROWS, (ROWS,)),
        ([ROWS, IDS], (ROWS, IDS)),
        (((3, 64, 64), "ids=512:int64"), (ROWS, IDS)),
        (["3,64,64", IDS], (ROWS, IDS)),
    ],
)
def test_a_size_in_any_form(size: Any, specs: tuple[InputSpec, ...]) -> None:
    subject = ModelRequest.of("model.py:Net", size)
    assert (subject.specs, subject.call, subject.source) == (specs, None, None)
    assert subject.has_input


def make() -> Tensor:
    return ROW


@pytest.mark.parametrize("data", [ROW, (ROW, ROW), [ROW], {"x": ROW}, torch.nn.utils.rnn.pack_sequence([ROW])])
def test_real_inputs_are_no_size(data: Any) -> None:
    for subject in (ModelRequest.of("m:f", data), ModelRequest.of("m:f", input_data=data)):
        assert (subject.specs, subject.call, subject.source) == ((), call_of(data), None)


def test_keywords_beside_data() -> None:
    mask = torch.ones(2)
    assert ModelRequest.of("m:f", ROW, kwargs={"mask": mask}).call == ((ROW,), {"mask": mask})
    assert ModelRequest.of("m:f", input_data=(ROW,), kwargs={"mask": mask}).call == ((ROW,), {"mask": mask})
    assert ModelRequest.of("m:f", {"x": ROW}, kwargs={"mask": mask}).call == ((), {"x": ROW, "mask": mask})
    with pytest.raises(InputError, match="'mask' is given twice"):
        ModelRequest.of("m:f", {"mask": ROW}, kwargs={"mask": mask})


def test_functions_that_make_inputs() -> None:
    assert ModelRequest.of("m:f", make).source is make
    assert ModelRequest.of("m:f", input_data="inputs.py:make").source == "inputs.py:make"
    assert not ModelRequest.of("m:f").has_input


@pytest.mark.parametrize(
    "given",
    [
        {"input_size": (8,), "input_data": ROW},
        {"input_size": (8,), "args": (ROW,)},
        {"input_size": ROW, "input_data": ROW},
        {"input_size": (8,), "kwargs": {"weights": ROW}},
        {"input_data": "inputs.py:make", "kwargs": {"weights": ROW}},
        {"input_data": "inputs.py:make", "args": (ROW,)},
    ],
)
def test_an_input_that_is_given_twice(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="give the input once"):
        ModelRequest.of("m:f", **given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"batch_size": 0}, "batch size 0: it must be at least 1"),
        ({"mode": "test"}, "no mode 'test'"),
        ({"input_size": (8,), "seq_len": 4}, "a sequence length is for inputs that memsize makes"),
        ({"input_size": (8, 0)}, "a size of 0"),
    ],
)
def test_what_cannot_be(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        ModelRequest.of("m:f", **given)


def test_a_subject_is_taken_as_it_is() -> None:
    subject = ModelRequest(nn.Linear(8, 2), (InputSpec(None, (8,)),), batch_size=4)
    assert ModelRequest.of(subject) is subject
    assert memsize.trace(subject, optimizer=None).trace.inputs[0].bytes == 4 * 8 * 4


def test_args_and_kwargs_together() -> None:
    weights = torch.ones(4, 2)
    for given in ({"args": (ROW,), "kwargs": {"weights": weights, "double": True}}, {"args": [ROW], "kwargs": {}}):
        trace = memsize.trace(Weighted(), optimizer=None, **given).trace  # type: ignore[arg-type]
        named = {tensor.name: tensor.bytes for tensor in trace.inputs}
        # float32[4,8] by position, float32[4,2] by keyword; twice as many rows come out where they are asked for
        assert named == ({"0": 128, "weights": 32} if given["kwargs"] else {"0": 128})
        assert trace.layers[0].outputs[0].spec.shape == ((8, 2) if given["kwargs"] else (4, 2))
    alone = memsize.report(Weighted(), kwargs={"x": ROW}, scenarios="fp32")
    assert alone.trace.inputs[0].name == "x" and alone.trace.batch_size == 4


@pytest.mark.parametrize("name", ["report", "trace", "fit", "verify", "layout"])
def test_every_question_takes_the_same(name: str) -> None:
    function: Callable[..., Any] = getattr(memsize, name)
    shown = list(inspect.signature(function).parameters)
    shared = list(inspect.signature(ModelRequest.of).parameters)[2:-1] + list(options_of(ModelRequest))[3:]
    if name in ("verify", "layout"):  # they always run every layer, of the model as it is
        of_training = ("lora", "adapter", "base", "freeze", "imbalance", "capacity_factor")
        shared = [key for key in shared if key not in ("whole", *of_training)]
    assert shown[:2] == ["model", "input_size"] and shown[2 : 2 + len(shared)] == shared
    with pytest.raises(TypeError, match="unknown keyword `batch`: did you mean batch_size"):
        function(nn.Linear(8, 2), (8,), batch=4)
