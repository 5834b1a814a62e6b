"""Whatever is wrong with the user's own code, names or numbers: one line that says what, and status 2."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memsize
from memsize import Report
from memsize.cli import run
from memsize.errors import InputError, MemsizeError, first_line, in_one_line
from memsize.render import render
from tests.conftest import Python
from tests.gpus import replay

ROOT = Path(__file__).resolve().parent.parent

MODELS = """
from torch import nn

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x)

class Train(Base):
    def train(self, mode=True):
        raise RuntimeError("no train")

class Parameters(Base):
    def parameters(self, recurse=True):
        raise RuntimeError("no parameters")

class NamedModules(Base):
    def named_modules(self, *args, **kwargs):
        raise RuntimeError("no modules")

class Attribute(Base):
    def __getattr__(self, name):
        raise KeyError(name)

class Unhashable(Base):
    __hash__ = None

class Inside(Base):
    def __init__(self):
        super().__init__()
        self.fc._modules["back"] = self

class SilentError(Exception):
    def __str__(self):
        raise ValueError("nothing to say")

class Raises(Base):
    def forward(self, x):
        raise SilentError

class Refuses(Base):
    def __init__(self):
        raise SilentError

class Described(nn.Linear):
    def extra_repr(self):
        raise RuntimeError("no words")

class Undescribed(Base):
    def __init__(self):
        super().__init__()
        self.fc = Described(4, 4)

    def forward(self, x):
        return self.fc(x[:, :2])
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command says where it refuses something: one line that is no bug, and no traceback."""
    assert run(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and len(said) < 500, said
    assert "bug in memsize" not in said
    return said


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("Train", "your own code failed at bad.py:14 (train): RuntimeError: no train"),
        ("Parameters", "(parameters): RuntimeError: no parameters"),
        ("NamedModules", "(named_modules): RuntimeError: no modules"),
        ("Attribute", "KeyError"),
        ("Unhashable", "cannot be hashed"),
        ("Inside", "fc.back is the model itself again"),
        ("Refuses", "building bad.py:Refuses failed at bad.py:46: SilentError"),
        ("Raises", "the forward failed in Raises: the report says why"),
        ("Undescribed", "the forward failed in fc (Described): the report says why"),
    ],
)
def test_models_that_misbehave(models: None, capsys: pytest.CaptureFixture[str], name: str, part: str) -> None:
    options = ("--scenario", "fp32", "--train", "adamw")
    assert part in refused(capsys, "report", f"bad.py:{name}", "--input", "4", *options)


class Listed(nn.Module):
    """A list of layers, which is never called itself, and a head that does not fit them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(5, 1)
        self.after = nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.after(self.head(x))


def test_a_list_whose_layers_ran_was_reached() -> None:
    with pytest.raises(memsize.ForwardError) as stopped:
        memsize.report(Listed(), (4,), batch_size=2)
    trace = stopped.value.trace
    assert trace is not None
    rows = render(Report(trace.model, trace, failure=trace.failure), "text", depth=1).split("Below")[1].splitlines()
    names = [row.partition("  ")[0] for row in rows]
    assert names[names.index("layers") :][:3] == ["layers", "head", "1 not reached"]


def test_an_exception_that_says_nothing_is_named() -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert first_line(SilentError()) == in_one_line(SilentError()) == "SilentError"


def test_a_recursion_limit_that_is_too_low(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nested = nn.Linear(2, 2)
    for _ in range(400):
        nested = nn.Sequential(nested)  # type: ignore[assignment]
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(300)
        with pytest.raises(MemsizeError, match="recursion limit of 300"):
            memsize.report(nested, (2,))
    finally:
        sys.setrecursionlimit(limit)


HUGE = 10**30


@pytest.mark.parametrize("batch", [2**62, 2**63, HUGE])
@pytest.mark.parametrize("command", ["report", "timeline", "fit", "layout"])
def test_batches_beyond_any_tensor(models: None, capsys: pytest.CaptureFixture[str], command: str, batch: int) -> None:
    said = refused(capsys, command, "bad.py:Base", "--input", "4", "--batch-size", str(batch))
    assert "than a tensor can" in said


@pytest.mark.parametrize("size", [str(2**62), str(2**63), str(HUGE)])
def test_sizes_beyond_any_tensor(models: None, capsys: pytest.CaptureFixture[str], size: str) -> None:
    refused(capsys, "report", "bad.py:Base", "--input", size)
    refused(capsys, "report", "bad.py:Base", "--input", f"{size}:int64")


def test_texts_beyond_memory(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    tiny = "hf:llama?num_hidden_layers=1&hidden_size=16&intermediate_size=16&num_attention_heads=2&vocab_size=32"
    assert "of memory left" in refused(capsys, "report", tiny, "--seq-len", str(10**13))
    assert "sequence length of 1e+30" in refused(capsys, "report", tiny, "--seq-len", str(HUGE))


def test_integers_of_one_value_take_no_memory_whatever_their_number() -> None:
    """A trillion ids of 8 bytes."""
    table = nn.Embedding(10, 1)
    trace = memsize.report(table, "():int64", batch_size=10**12, scenarios="fp32").trace
    assert trace.inputs[0].bytes == 8 * 10**12
    assert trace.layers[0].output_bytes == 4 * 10**12


def test_a_run_beyond_what_a_gpu_can_address_is_refused() -> None:
    """2^44 blocks of 512 B; up to there a replay is exact."""
    assert replay([(0, 2**52)]).allocated.bytes == 2**52
    with pytest.raises(InputError, match="more than 8 PiB"):
        replay([(0, 2**52), (1, 2**52)])


def test_computing_for_real_beyond_memory(models: None, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "report", "bad.py:Base", "--input", "4", "--batch-size", str(10**13), "--execute")
    assert "needs more than 149,011.61 GiB of memory" in said  # 4 numbers of 4 bytes each


LONG = "x" * 5000


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", LONG),
        ("report", f"{LONG}.py:Net"),
        ("report", f"hf:{LONG}"),
        ("report", f"bad.py:{LONG}", "--input", "4"),
        ("report", "bad.py:Base", "--input", "4", "--scenario", LONG),
        ("report", "bad.py:Base", "--input", "4", "--inputs", f"{LONG}.py:make"),
        ("report", "bad.py:Base", "--input", "4", "--arg", f"{LONG}=1"),
        ("checkpoint", LONG),
        ("report", "~nosuch/model.py:Net"),
        ("checkpoint", "~nosuch/last.pt"),
    ],
)
def test_names_too_long_and_homes_of_nobody(
    models: None, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    refused(capsys, *arguments)


def test_a_config_in_the_home_of_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert "no such folder or file: ~nosuch/config.json" in refused(capsys, "report", "hf:~nosuch/config.json")


@pytest.mark.thorough
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("redirected", "status", "said"),
    [
        (">&-", 2, "error: cannot write to stdout, which is closed: name a file with -o\n"),
        (">/dev/full", 2, "error: cannot write to stdout: No space left on device\n"),
        (">/dev/null 2>&-", 0, ""),
        (">/dev/full 2>/dev/full", 2, ""),
    ],
)
def test_output_that_nobody_takes(tmp_path: Path, redirected: str, status: int, said: str) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "last.pt")
    command = f"{sys.executable} -m memsize checkpoint last.pt {redirected}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, said)


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("last.pt", "last.pt is not a Python file: memsize checkpoint last.pt shows what it holds"),
        ("notes.txt", "notes.txt is not a Python file\n"),
    ],
)
def test_files_that_are_not_python(models: None, capsys: pytest.CaptureFixture[str], file: str, part: str) -> None:
    path = Path(file)
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    target = str(path.parent if path.parent.name else path)
    assert part in refused(capsys, "report", target, "--input", "4")


@pytest.mark.parametrize("command", [["sweep", ""], ["checkpoint", ""], ["report", "timm:resnet18", "--save", ""]])
def test_an_empty_name_is_no_folder(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command) == 2
    assert re.search("invalid value for .*: the name is empty", capsys.readouterr().err)


@pytest.mark.parametrize("command", [["sweep", "a\0b"], ["report", "timm:resnet18", "-o", "a\0b"]])
def test_a_null_byte_is_in_no_name(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command) == 2
    assert "the name has a null byte" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_second_gpu_is_refused_in_cudas_words(models: None, capsys: pytest.CaptureFixture[str]) -> None:
    Path("asks.py").write_text("import torch\ntorch.cuda.set_device(3)\n")
    assert "asks.py:2: AcceleratorError: CUDA error: invalid device ordinal" in refused(capsys, "report", "asks.py:net")


# -- training ---------------------------------------------------------------------------------------------------------


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


class Caught(nn.Module):
    """Tries one layer, and fails behind another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with suppress(RuntimeError):
            self.first(x)
        return self.second(x).foo()


class Unlearned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no way back")


class Back(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Unlearned.apply(super().forward(x)))


def _step(fails: Callable[[nn.Module, torch.Tensor], Any]) -> Callable[[nn.Module], Callable[[torch.Tensor], Any]]:
    return lambda model: lambda x: fails(model, x)


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (nn.Linear(4, 4).requires_grad_(False), {}, "no parameter of the model requires a gradient"),
        (nn.ReLU(), {"optimizer": "sgd"}, "no parameter of the model requires a gradient"),
        (Sparse(), {}, "the optimizer failed: Adam does not support sparse gradients"),
        (nn.Linear(4, 4), {"optimizer": lambda _: 3}, "what was returned, 3, is not an optimizer"),
        (nn.Linear(4, 4), {"loss": lambda output: output.foo}, "the loss failed: AttributeError"),
        (nn.Linear(4, 4), {"loss": lambda output: output}, r"the loss is float32\[1,4\]"),
        (nn.Linear(4, 4), {"loss": "own"}, "the model returns no loss of its own"),
        (nn.Linear(4, 4), {"step": lambda _: None}, r"step\(model\) returned None"),
        (nn.Linear(4, 4), {"step": lambda model: model.foo}, "the training step cannot be set up: AttributeError"),
        (nn.Linear(4, 4), {"step": _step(lambda _, x: {}[x.dim()])}, "the training step failed: KeyError: 2\n"),
        (nn.Linear(4, 4), {"step": _step(lambda model, x: model(x[:, :2]))}, "the forward failed in Linear, given "),
        (Back(4, 4), {}, "the backward failed in or after that of Back.*no way back"),
        (Caught(), {}, r"the forward failed in Caught, given \S+: AttributeError"),
    ],
)
def test_what_failed_in_training_is_named(model: nn.Module, options: dict[str, Any], said: str) -> None:
    size = "3:int64" if isinstance(model, Sparse) else (4,)
    with pytest.raises(MemsizeError, match=said):
        memsize.trace(model, size, **options)


def test_users_of_python_are_told_of_python() -> None:
    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum().to(torch.int64).item() else -x

    with pytest.raises(MemsizeError, match=r"\(execute=True\)"):
        memsize.report(Looks(), (4,))


FORWARD_MODE = """
import torch, memsize
from torch.func import jvp

class Net(torch.nn.Linear):
    def forward(self, x):
        return jvp(super().forward, (x,), (torch.ones_like(x),))[1]

try:
    memsize.report(Net(4, 4), (4,), scenarios="fp32")
except memsize.ForwardError as error:
    print("import torch._decomp.decompositions_for_jvp at the top" in str(error))
import torch._decomp.decompositions_for_jvp
print(memsize.report(Net(4, 4), (4,), scenarios="fp32").totals.output_bytes)
"""


@pytest.mark.thorough
def test_forward_mode_gradients_say_what_to_import(warm_python: Python) -> None:
    done = warm_python("-W", "ignore", "-c", FORWARD_MODE)
    assert done.stdout.splitlines() == ["True", "16"], done.stderr
