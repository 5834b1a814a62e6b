"""The user's model and the process are the same after a question as before, also after one that failed anywhere."""

from __future__ import annotations

import copy
import gc
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memsize
from tests import models
from tests.conftest import Python, Write
from tests.misbehaving import MODELS, fuse, globals_of_modules
from tests.process import changes, process_state, settings_kept

Question = Callable[[nn.Module, Any], object]
QUESTIONS: dict[str, Question] = {
    "report": lambda model, size: memsize.report(model, size, batch_size=2),
    "all": lambda model, size: memsize.report(model, size, batch_size=2, scenarios="all"),
    "train": lambda model, size: memsize.report(model, size, batch_size=2, scenarios="fp32,amp-fp16", train="adamw"),
    "trace": lambda model, size: memsize.trace(model, size, batch_size=2, optimizer="sgd:momentum=0.9"),
    "fit": lambda model, size: memsize.fit(model, size, batch_size=2, scenarios="fp32", gpu="t4"),
    "layout": lambda model, size: memsize.layout(model, size, batch_size=2),
    "compare": lambda model, size: memsize.diff(model, model, size, batch_size=2),
    "stored": lambda model, size: memsize.diff(model, model),
    "execute": lambda model, size: memsize.report(model, size, batch_size=2, scenarios="fp32", execute=True),
}


class BoomError(Exception):
    pass


ERRORS = (
    None,
    BoomError("boom"),
    RuntimeError("boom"),
    MemoryError(),
    SystemExit(0),
    GeneratorExit(),
    KeyboardInterrupt(),
)


def model_state(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that a run could touch."""
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            state[path] = module.training
        else:
            held = {name: described(value) for name, value in vars(module).items() if name != "_modules"}
            state[path] = (id(module), type(module), list(module._modules), held)
    return state


def described(value: Any, depth: int = 0) -> Any:
    if isinstance(value, torch.Tensor):
        return tensor_state(value)
    if isinstance(value, dict) and depth < 3:
        return [(key, described(each, depth + 1)) for key, each in value.items()]
    if isinstance(value, (list, tuple)) and depth < 3:
        return [described(each, depth + 1) for each in value]
    return value if isinstance(value, (int, float, str, type(None))) else id(value)


def tensor_state(tensor: torch.Tensor) -> tuple[Any, ...]:
    kind = (id(tensor), type(tensor), tensor.dtype, tensor.device, tensor.requires_grad, tensor._version)
    if nn.parameter.is_lazy(tensor):
        return kind
    values = (tensor.int_repr() if tensor.is_quantized else tensor.detach()).tolist()
    hooks = len(tensor._backward_hooks or ())
    gradient = tensor.grad if tensor.is_leaf else None
    return *kind, tensor.stride(), values, hooks, None if gradient is None else (id(gradient), gradient.tolist())


def everything(model: nn.Module) -> dict[str, Any]:
    return {"model": model_state(model), "globals": globals_of_modules(), **process_state()}


def ask(name: str, question: str, error: BaseException | None = None, at: int = 0) -> dict[str, Any]:
    """What is different after the question, which may fail in the model's forward."""
    build, size = MODELS[name]
    model = build()
    before = everything(model)
    fuse.set(error, at)
    expected = (memsize.MemsizeError, *([KeyboardInterrupt] if isinstance(error, KeyboardInterrupt) else []))
    with suppress(*expected):
        QUESTIONS[question](model, size)
    fuse.set(None, 0)
    return changes(before, everything(model))


def some(seed: int) -> Iterator[tuple[str, BaseException | None, int]]:
    """Questions, errors and places where they happen, at random."""
    chosen = random.Random(seed)
    while True:
        yield chosen.choice(list(QUESTIONS)), chosen.choice(ERRORS), chosen.choice((1, 2, 3, 5, 8, 13, 20, 30, 50))


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Modules that are imported on first use stay imported: here, all of them."""
    for question in QUESTIONS.values():
        question(nn.Conv2d(1, 1, 1), (1, 8, 8))
    for name in ("checkpointed", "quantized"):
        memsize.report(MODELS[name][0](), (8,))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_a_report_changes_nothing(name: str) -> None:
    assert not ask(name, "report")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_nor_does_a_question_that_fails_anywhere(name: str) -> None:
    question, error, at = next(some(list(MODELS).index(name)))
    assert not ask(name, question, error, at), (question, error, at)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_nor_do_many(name: str) -> None:
    for _, (question, error, at) in zip(range(30), some(len(name)), strict=False):
        assert not ask(name, question, error, at), (question, error, at)


@pytest.mark.parametrize("name", ["settings", "global"])
def test_what_one_run_changes_does_not_reach_the_next(name: str) -> None:
    model = MODELS[name][0]()
    both = memsize.report(model, (8,), batch_size=2, scenarios="fp32,fp16")
    (alone,) = memsize.report(model, (8,), batch_size=2, scenarios="fp16").scenario_results
    assert both.scenario_results[1] == alone


TARGET = """
import os, torch, warnings
from torch import nn
torch.set_default_dtype(torch.float64)
os.environ["MEMSIZE_TEST_TARGET"] = "set"
warnings.simplefilter("error")
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
    def forward(self, x):
        assert os.environ["MEMSIZE_TEST_TARGET"] == "set"
        return self.body(x.double()) + torch.zeros(8)
"""


def test_what_a_target_sets_while_it_is_imported_holds_for_its_runs_only(write: Write) -> None:
    target = f"{write('model.py', TARGET)}:Net"
    before = process_state()
    report = memsize.report(target, "8:float64", scenarios="as-given")
    assert {tensor.spec.dtype for tensor in report.trace.tensors} == {"float64"}
    assert report.layers["output_bytes"].sum() == 8 * 8 + 8 * 8  # of the linear layer, and of the sum
    assert changes(before, process_state()).keys() <= {"imports"}  # of what loading and the table need


def test_what_a_run_sets_for_the_compiler_is_put_back() -> None:
    """Settings with values of their own, and those that a run imports."""
    with warnings.catch_warnings(action="ignore"):
        from torch._functorch import config as functorch
        from torch._inductor import config as inductor
    before = functorch.activation_memory_budget, inductor.triton.cudagraphs, inductor.max_autotune
    with inductor.patch(max_autotune=True):
        with settings_kept():
            functorch.activation_memory_budget = 0.5
            inductor.triton.cudagraphs, inductor.max_autotune = True, False
        after = functorch.activation_memory_budget, inductor.triton.cudagraphs, inductor.max_autotune
    assert after == (*before[:2], True)


def test_settings_that_cannot_be_read_are_left_alone() -> None:
    """PyTorch refuses to tell a precision that was set by two of its interfaces."""
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        with settings_kept():
            torch.set_float32_matmul_precision("medium")
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_gradient_mode_changes_no_figure(mode: Callable[[], AbstractContextManager[object]]) -> None:
    model = models.Small()
    expected = memsize.report(model, (3, 32, 32), batch_size=2)
    step = memsize.trace(model, (3, 32, 32), batch_size=2)
    with mode():
        built, images = models.Small(), torch.randn(2, 3, 32, 32)
        before = process_state()
        for each in (model, built):
            found = memsize.report(each, (3, 32, 32), batch_size=2)
            assert found.trace == expected.trace
            assert found.totals.saved_bytes > 0
        assert memsize.trace(built, images).peak == step.peak
        assert not changes(before, process_state())


class Everyday(nn.Module):
    """Convolutions, norms, a recurrent layer, attention, a logged statistic: ops that save what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).relu().flatten(2).transpose(1, 2)
        self.largest = x.softmax(-1).norm().item()
        x = self.lstm(x)[0].exp()
        attended: torch.Tensor = self.attention(x, x, x)[0]
        return attended.sigmoid()


def live_objects(model: nn.Module, rounds: int) -> int:
    """What the garbage collector knows of after some reports and training steps."""
    for _ in range(rounds):
        memsize.report(model, (3, 8, 8))
        memsize.trace(model, (3, 8, 8), steps=2)
    gc.collect()
    return len(gc.get_objects())


def test_nothing_stays_behind() -> None:
    model = Everyday()
    before = live_objects(model, 3)
    # One round leaks about 2,400 objects where autograd's graphs are not freed. Caches may still learn a few dozen.
    assert live_objects(model, 3) - before < 100


RESIDENT = """
import re
from pathlib import Path
from tests.test_undisturbed import Everyday, live_objects

def resident() -> int:
    return int(re.search(r"VmRSS:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

model = Everyday()
objects, kibibytes = live_objects(model, 5), resident()
print(live_objects(model, 245) - objects, resident() - kibibytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own figures")
def test_memory_stays_where_it_was_over_500_runs(python: Python) -> None:
    """A report and a trace a round, in a process of its own."""
    done = python("-c", RESIDENT)
    assert done.returncode == 0, done.stderr
    objects, kibibytes = map(int, done.stdout.split())
    assert objects < 100
    assert kibibytes < 4096


def test_a_model_still_trains_after_its_report() -> None:
    model = models.Small()
    twin = copy.deepcopy(model)
    memsize.report(model, (3, 32, 32), batch_size=2)
    data = torch.randn(2, 3, 32, 32)
    results = []
    for each in (model, twin):
        torch.manual_seed(0)
        each(data).sum().backward()
        results.append(each.head.weight.grad)
    assert torch.equal(results[0], results[1])


def test_random_numbers_go_on_where_they_were() -> None:
    drawn, model = [], MODELS["seeding"][0]()
    for ask_between in (False, True):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        if ask_between:
            memsize.report(model, (8,), scenarios="all")
        drawn.append((torch.rand(3).tolist(), random.random(), np.random.rand()))
    assert drawn[0] == drawn[1]


def test_a_trace_computes_on_one_thread_and_leaves_the_number_as_it_was() -> None:
    numbers = []

    class Asking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            numbers.append(torch.get_num_threads())
            return x + 1

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        memsize.report(Asking(), (2,))
        assert set(numbers) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: memsize.fit(model, (64,), scenarios="fp32,bf16", budget="2GiB", train="adamw"),
        lambda model: memsize.report(model, (8, 64), scenarios="fp32,fp16,bf16,amp-fp16", train="adamw"),
    ],
    ids=["fit", "report"],
)
def test_copies_in_circles_do_not_pile_up(ask: Callable[[nn.Module], Any]) -> None:
    """Python's collector is paused during runs, and a model that holds itself dies by it alone."""
    alive: WeakSet[nn.Module] = WeakSet()
    together: list[int] = []

    class Circular(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)
            self.__dict__["itself"] = self

        def forward(self, x: Tensor) -> Tensor:
            assert self.__dict__["itself"] is self
            alive.add(self)
            together.append(len(alive))
            return self.layer(x)

    ask(Circular())
    assert len(together) > 8
    assert max(together) <= 3


def test_an_ordinary_model_leaves_nothing_to_the_collector() -> None:
    """A collection scans all that a process has made: reference counts alone free the copies that ran."""
    alive: WeakSet[nn.Module] = WeakSet()
    collected: list[int] = []

    class Ordinary(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            alive.add(self)
            return super().forward(input)

    def note(_: str, found: dict[str, int]) -> None:
        collected.append(found["collected"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        for optimizer in (None, "adamw"):
            memsize.trace(Ordinary(8, 8), (8,), optimizer=optimizer)
    finally:
        gc.callbacks.remove(note)
    assert not any(collected) and not alive
