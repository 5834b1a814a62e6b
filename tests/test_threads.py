"""Several threads and processes that ask at once: the answers are those of one alone, and nothing stays behind."""

from __future__ import annotations

import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memsize
from tests.conftest import Write
from tests.process import changes, process_state

TARGET = """
import layers
from torch import nn

class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.body = layers.body(width)
    def forward(self, x):
        import late
        return late.twice(self.body(x))
"""
BESIDE = {
    "layers.py": "from torch import nn\ndef body(n):\n    return nn.Sequential(nn.Linear(8, n), nn.Dropout(0.5))\n",
    "late.py": "def twice(x):\n    return x + x\n",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(image))).mean((2, 3)))


NET = Net()


def report(_: str) -> str:
    return memsize.report(NET, (3, 8, 8), scenarios="fp32,amp-bf16").to_json()


def trace(_: str) -> object:
    return memsize.trace(NET, (3, 8, 8), batch_size=2, optimizer="adamw", steps=2).trace


def fit(_: str) -> object:
    return memsize.fit(NET, (3, 8, 8), scenarios="fp32", gpu="t4", batch_size=2).fit_rows


def target(name: str) -> str:
    return memsize.report(name, (8,), scenarios="fp32").to_json()


@pytest.fixture
def name(write: Write) -> str:
    for file, text in BESIDE.items():
        write(file, text)
    return f"{write('model.py', TARGET)}:Net"


def in_threads(count: int, calls: int, ask: Callable[[str], object], name: str) -> list[object]:
    """What `ask` returned or raised each time; the threads begin together."""
    ready = threading.Barrier(count)

    def work() -> list[object]:
        ready.wait()
        return [ask(name) for _ in range(calls)]

    with ThreadPoolExecutor(count) as pool:
        return [found for future in [pool.submit(work) for _ in range(count)] for found in future.result()]


@pytest.mark.parametrize("ask", [report, trace, fit, target])
def test_threads_get_the_figures_of_one_alone(ask: Callable[[str], object], name: str) -> None:
    alone, before = ask(name), process_state()
    assert in_threads(4, 3, ask, name) == [alone] * 12
    assert not changes(before, process_state())


@pytest.mark.slow
def test_four_threads_of_fifty_calls(name: str) -> None:
    asks = (report, trace, fit, target)
    alone, before = [ask(name) for ask in asks], process_state()
    found = in_threads(4, 50, lambda each: [ask(each) for ask in asks], name)
    assert found == [alone] * 200
    assert not changes(before, process_state())


def test_what_another_thread_does_is_not_recorded() -> None:
    """A thread that trains its own model meanwhile: its optimizer's steps are its own."""
    alone, stop, steps = trace(""), threading.Event(), [0]

    def train() -> None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        while not stop.is_set():
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            steps[0] += 1

    thread = threading.Thread(target=train)
    thread.start()
    try:
        while not steps[0]:
            stop.wait(0.001)
        while steps[0] < 10:
            assert trace("") == alone
    finally:
        stop.set()
        thread.join()


class Asking(nn.Module):
    """A model whose forward asks memsize about another one, in the same thread or in one of its own."""

    def __init__(self, ask: Callable[[], object]) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        self.ask()
        return self.body(x)


answers: list[Any] = []
"""Of the models below: theirs are functions without a state of their own, so that the copy that runs shares it."""


def ask_here() -> None:
    answers.append(memsize.trace(NET, (3, 8, 8), optimizer=None).peak)


def ask_in_a_thread() -> None:
    def ask() -> None:
        try:
            ask_here()
        except memsize.MemsizeError as error:
            answers.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()


def nothing() -> None:
    pass


def test_a_model_may_ask_about_another() -> None:
    answers.clear()
    ask_here()
    asked = memsize.trace(Asking(ask_here), (8,), optimizer=None).trace
    assert answers == [answers[0]] * len(answers) and len(answers) == 2
    assert asked == memsize.trace(Asking(nothing), (8,), optimizer=None).trace


def test_a_thread_that_the_model_starts_is_refused_instead_of_waiting_for_ever() -> None:
    answers.clear()
    memsize.trace(Asking(ask_in_a_thread), (8,), optimizer=None)
    assert answers == ["memsize was called in a thread that the model started while memsize was running it"]


gates: list[Callable[[], None]] = []


def paused() -> None:
    for gate in gates:
        gate()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_asks_while_another_thread_does() -> None:
    """The fork happens in the middle of a run of another thread, which does not exist in the child."""
    inside, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        go_on.wait(60)

    gates[:] = [wait]
    thread = threading.Thread(target=lambda: memsize.trace(Asking(paused), (8,), optimizer=None))
    thread.start()
    try:
        assert inside.wait(60)
        answers.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, about threads and forks
            child = multiprocessing.get_context("fork").Process(target=ask_here)
            child.start()
        child.join(60)
        assert child.exitcode == 0
    finally:
        go_on.set()
        thread.join()
