"""Type checkers and editors see the keywords of the public functions, and the types of their values."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import memsize
from tests.stub import STUB, stub

NOT_OURS = (
    "AbstractContextManager Any Callable Iterable Literal Mapping None Path PathLike Sequence bool float int object "
    "str nn Module optim Optimizer os"
)
CALLS = """\
import torch
from torch import nn

import memsize

net = nn.Linear(8, 2)
memsize.report(net, (8,), train="adamw", gpu=memsize.Gpu(name="t4"), mode="eval").why()
memsize.report(net, "8", parallel=memsize.Parallel("fsdp", shards=8), train=memsize.Training("sgd"))
memsize.fit(net, [(8,)], gpu=["t4", "a100"], budget="1GiB", found=lambda part: print(part.code)).fit_rows
memsize.guard(net, torch.optim.SGD(net.parameters()), torch.zeros(1, 8), on_excess="raise").fits
memsize.sweep({"target": "net.py:Net"}, backend="dask")
with memsize.virtual_gpu("t4", world=memsize.World(8, rank=3)) as gpu:
    print(gpu.run.failure)
memsize.report(net, (8,), traning="adamw")  # wrong: call-arg
memsize.report(net, (8,), gpu=3)  # wrong: arg-type
memsize.report(net, (8,), mode="evaluate")  # wrong: arg-type
memsize.report()  # wrong: call-arg
memsize.timeline(net, (8,)).scenarios  # wrong: attr-defined
memsize.serve("hf:gpt2", block_size="16")  # wrong: arg-type
memsize.serve("hf:gpt2", batch_size=7)  # wrong: call-arg
memsize.guard(net, "adamw", torch.zeros(1, 8))  # wrong: arg-type
memsize.check(8)  # wrong: arg-type
"""


def test_the_stub_is_that_of_the_signatures() -> None:
    assert STUB.read_text(encoding="utf-8") == stub(), "python -m tests.stub writes it"
    assert STUB.with_name("py.typed").exists()


def test_types_of_signatures_are_public() -> None:
    for name in memsize.__all__:
        if inspect.isfunction(function := getattr(memsize, name)):
            parameters = inspect.signature(function).parameters.values()
            types = " ".join(re.sub('".*?"', "", str(parameter.annotation)) for parameter in parameters)
            assert set(re.findall(r"\w+", types)) <= {*memsize.__all__, *NOT_OURS.split()}, name


@pytest.mark.thorough
def test_mypy_finds_the_wrong_calls(tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(CALLS)
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nfollow_imports = silent\n[mypy-pandas.*,plotly.*]\nfollow_imports = skip\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), "calls.py"],
        cwd=tmp_path,
        env={"MYPYPATH": str(STUB.parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.findall(r"^calls.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    wrong = [
        (str(n), line.partition("# wrong: ")[2]) for n, line in enumerate(CALLS.splitlines(), 1) if "# wrong" in line
    ]
    assert found == wrong, done.stdout + done.stderr
