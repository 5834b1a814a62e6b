"""Targets → models: what can be named, that no weight is made, that nothing is left behind, and what goes wrong."""

from __future__ import annotations

import builtins
import io
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from memsize.errors import DataDependentError, TargetError
from tests.measurements import SMALLEST, Weightless
from tests.models import LoadedModel, Target, load, parse_target

Python = Callable[..., subprocess.CompletedProcess[str]]
Write = Callable[[str, str], Path]

NET = """
import torch
from torch import nn
from layers import WIDTH

class Net(nn.Module):
    def __init__(self, width, depth=2, *, kind="plain"):
        super().__init__()
        self.fc = nn.Linear(width, WIDTH)

    def forward(self, x):
        import late
        return self.fc(x) * late.SCALE

class Scaled:
    def __init__(self):
        self.net = Net(8)

    @staticmethod
    def build():
        return Net(8)

def build():
    return Net(8)

def answer():
    return 42

instance = build()
number = 3
"""


@pytest.fixture
def net(write: Write) -> Path:
    write("layers.py", "WIDTH = 3\n")
    write("late.py", "SCALE = 1.0\n")
    return write("model.py", NET)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def refused(target: str | Path, **arguments: object) -> str:
    with pytest.raises(TargetError) as caught:
        load(str(target), arguments)
    return str(caught.value)


# What a target can name


def test_the_toy_model(toy_target: str) -> None:
    loaded = load(toy_target)
    assert loaded.name == "model.py:Test"
    assert loaded.notes == ()
    # 300·(3·9+1) + 500·(300·9+1) + 1000·(500·9+1) + 3,364,000+1 = 8,400 + 1,350,500 + 4,501,000 + 3,364,001
    assert sum(p.numel() for p in loaded.module.parameters()) == 9_223_901


@pytest.mark.parametrize(
    ("name", "arguments", "width"),
    [
        ("Net", {"width": 7}, 7),
        ("Net", {"width": 7, "depth": 1, "kind": "other"}, 7),
        ("build", {}, 8),
        ("Scaled.build", {}, 8),
        ("instance", {}, 8),
        ("nn.Linear", {"in_features": 5, "out_features": 3, "bias": True}, 5),
    ],
)
def test_a_class_a_function_an_instance(net: Path, name: str, arguments: dict[str, object], width: int) -> None:
    loaded = load(f"{net}:{name}", arguments)
    assert loaded.name == f"model.py:{name}"
    assert {(3, width), (3,)} == set(shapes(loaded.module).values())


def test_the_only_class_needs_no_name(net: Path) -> None:
    assert load(str(net), {"width": 4}).name == "model.py:Net"


def test_a_dotted_name_from_what_is_installed() -> None:
    loaded = load("torch.nn:Linear", {"in_features": 3, "out_features": 4})
    assert (loaded.name, type(loaded.module)) == ("torch.nn:Linear", nn.Linear)


def test_a_dotted_name_from_the_working_folder(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("pack_a/__init__.py", "")
    write("pack_a/nets.py", "from torch import nn\nfrom .size import N\nnet = nn.Linear(N, N)\n")
    write("pack_a/size.py", "N = 4\n")
    monkeypatch.chdir(tmp_path)
    assert shapes(load("pack_a.nets:net").module)["weight"] == (4, 4)


def test_a_file_of_a_package_may_import_relatively_and_beside_itself(write: Write) -> None:
    write("pack/__init__.py", "")
    write("pack/sub/__init__.py", "")
    write("pack/sub/size.py", "N = 4\n")
    imports = "from torch import nn\nfrom .size import N\nfrom ..sub import size\nimport size as beside\n"
    file = write("pack/sub/nets.py", f"{imports}net = nn.Linear(N, N)\n")
    assert shapes(load(f"{file}:net").module)["weight"] == (4, 4)
    assert not [name for name in sys.modules if name.partition(".")[0] in ("pack", "size")]


def test_reads_a_target() -> None:
    assert parse_target(f"{__file__}:Net") == Target(Path(__file__), None, "Net")
    assert parse_target(__file__) == Target(Path(__file__), None, None)
    assert parse_target("package.module:Net.build") == Target(None, "package.module", "Net.build")


# Nothing is left behind


def test_two_files_of_one_name_do_not_meet(write: Write) -> None:
    for folder, width in (("a", 3), ("b", 5)):
        write(f"{folder}/layers.py", f"WIDTH = {width}\n")
        write(f"{folder}/late.py", f"SCALE = {width}.0\n")
    files = [write(f"{folder}/model.py", NET) for folder in "ab"]
    first, second = (load(f"{file}:Net", {"width": 2}) for file in files)
    for loaded, width in ((first, 3), (second, 5), (first, 3)):
        with loaded.importable(), loaded.importable():
            nn.init.zeros_(loaded.module.fc.weight)
            nn.init.ones_(loaded.module.fc.bias)
            assert loaded.module(torch.ones(1, 2)).tolist() == [[float(width)] * width]
    assert not {"model", "layers", "late"} & set(sys.modules)


def test_the_users_own_import_stays_the_users(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(net.parent))
    import model  # the test's own file, as a notebook would have it

    loaded = load(f"{net}:Net", {"width": 2})
    assert sys.modules["model"] is model
    assert type(loaded.module) is not model.Net
    for name in ("model", "layers"):
        del sys.modules[name]


def test_a_changed_file_is_read_again(net: Path) -> None:
    assert shapes(load(f"{net}:build").module)["fc.weight"] == (3, 8)
    net.write_text(NET.replace("Net(8)", "Net(9)"))
    assert shapes(load(f"{net}:build").module)["fc.weight"] == (3, 9)


def test_a_file_named_like_a_library_does_not_replace_it(write: Write) -> None:
    import types

    file = write("types.py", "from torch import nn\nclass Net(nn.Linear):\n    pass\n")
    load(f"{file}:Net", {"in_features": 2, "out_features": 2})
    assert sys.modules["types"] is types


@pytest.mark.parametrize("failing", [False, True])
def test_the_process_is_as_it_was(write: Write, failing: bool) -> None:
    text = """
import random, sys
import numpy, torch
sys.path.insert(0, "/somewhere/else")
random.random(), numpy.random.rand(), torch.rand(3)
assert sys.argv == [__file__]
class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        numpy.random.rand()
"""
    file = write("model.py", text + ("        raise ValueError('no')\n" if failing else ""))
    python, numpy, state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    before = list(sys.path), sys.argv, set(sys.modules)
    if failing:
        refused(f"{file}:Net")
    else:
        load(f"{file}:Net")
    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == numpy
    assert torch.equal(torch.get_rng_state(), state)
    assert (list(sys.path), sys.argv) == before[:2]
    assert "model" not in sys.modules


# No weight is made


def test_large_parameters_are_on_meta_and_small_ones_real() -> None:
    with Weightless():
        model = nn.Linear(SMALLEST, 3)
    assert [type(p) for p in model.parameters()] == [nn.Parameter, nn.Parameter]
    assert model.weight.is_meta
    assert model.weight.requires_grad
    assert not model.bias.is_meta


class Positions(nn.Module):
    """What constructors do beside making layers: tables, masks, rates, ties, moves, copies, casts."""

    def __init__(self) -> None:
        super().__init__()
        table, places = torch.zeros(2000, 512), torch.arange(0, 2000, dtype=torch.float).unsqueeze(1)
        angles = places * torch.exp(torch.arange(0, 512, 2).float() * -0.1)
        table[:, 0::2], table[:, 1::2] = torch.sin(angles), torch.cos(angles)
        self.register_buffer("table", table[None])
        self.register_buffer("mask", torch.tril(torch.ones(2000, 2000)).bool())
        self.register_buffer("index", torch.arange(5000))
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.words = nn.Embedding(5000, 64, padding_idx=0)
        self.head = nn.Linear(64, 5000, bias=False)
        self.head.weight = self.words.weight
        self.first = nn.Parameter(torch.zeros(8))
        self.first.data.copy_(table[0, :8])
        self.legacy = nn.Parameter(torch.Tensor(100, 100).uniform_(-1, 1))
        self.again = nn.Linear(100, 100)
        self.again.load_state_dict({"weight": torch.ones(100).expand(100, 100), "bias": torch.ones(100)})
        nn.init.orthogonal_(self.again.weight)
        nn.init.trunc_normal_(self.again.weight)
        nn.init.eye_(self.again.weight)
        nn.init.kaiming_normal_(self.again.weight, generator=torch.Generator().manual_seed(1))
        self.to("cpu").half().float()


def test_a_constructor_that_does_all_sorts() -> None:
    with pytest.warns(UserWarning, match="non-meta"), Weightless():
        model = Positions()
    plain = Positions()
    assert shapes(model) == shapes(plain)
    real = {name for name, held in (*model.named_parameters(), *model.named_buffers()) if not held.is_meta}
    assert real == {"index", "first", "again.bias"}
    assert model.head.weight is model.words.weight
    assert model.rates == plain.rates
    assert model.index.tolist() == list(range(5000))
    assert (model.table.shape, model.table.dtype) == (plain.table.shape, plain.table.dtype)
    assert (model.mask.shape, model.mask.dtype) == (plain.mask.shape, plain.mask.dtype)
    assert torch.equal(model.again.bias, torch.ones(100))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(128, 128, 2, bidirectional=True),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, batch_first=True), 2),
        lambda: nn.MultiheadAttention(128, 4),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(100, 100)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(64, 64, 3)),
        lambda: nn.Sequential(nn.LazyLinear(10), nn.LazyConv2d(4, 3)),
        lambda: nn.Linear(100, 100, dtype=torch.complex64),
        lambda: nn.BatchNorm2d(5000),
    ],
)
def test_the_same_model_as_by_plain_construction(make: Callable[[], nn.Module]) -> None:
    with Weightless():
        model = make()
    plain = make()
    assert {k: (type(v), v.dtype) for k, v in model.named_parameters()} == {
        k: (type(v), v.dtype) for k, v in plain.named_parameters()
    }
    lazy = nn.parameter.UninitializedParameter
    for (_, held), (_, expected) in zip(model.state_dict().items(), plain.state_dict().items(), strict=True):
        if not isinstance(held, lazy):
            assert (held.shape, held.dtype, held.stride()) == (expected.shape, expected.dtype, expected.stride())
    assert all(p.is_meta for p in model.parameters() if not isinstance(p, lazy) and p.numel() >= SMALLEST)


class Windows(nn.Module):
    """What timm's window attention does: the table that says which position is which is made where a weight is."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(100, 100)
        self.register_buffer("index", torch.empty(4, 4, dtype=torch.long))
        places = torch.arange(4, device=self.proj.weight.device)
        self.index.copy_(places[:, None] - places[None, :] + 3)
        self.register_buffer("angles", torch.linspace(0, 1, 3).to(self.proj.weight.device))
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3, device=self.proj.weight.device)]


def test_what_is_made_where_a_weight_is_has_values() -> None:
    with Weightless():
        model = Windows()
    assert model.proj.weight.is_meta
    assert model.index.tolist() == [[3, 2, 1, 0], [4, 3, 2, 1], [5, 4, 3, 2], [6, 5, 4, 3]]
    assert model.angles.tolist() == model.rates == [0, 0.5, 1]


def test_a_call_that_names_no_device_makes_no_weights() -> None:
    with Weightless():
        large = torch.ops.aten.zeros.default([100, 100])
        stacked = torch.cat([large, torch.ones(1, 100)])
    assert large.is_meta and stacked.is_meta and stacked.shape == (101, 100)


def test_what_the_constructor_itself_makes_on_meta_stays_there() -> None:
    with Weightless():
        with torch.device("meta"):
            model = nn.Linear(4, 4)
        large = nn.Linear(100, 100)
    assert model.weight.is_meta and model.bias.is_meta
    assert large.weight.is_meta and not large.bias.is_meta


def test_integers_are_not_made_up() -> None:
    with Weightless():
        counts = torch.zeros(4, dtype=torch.int64)
        with pytest.raises(DataDependentError, match="int64"):
            counts.copy_(torch.rand(100, 100).sum(1)[:4])


def test_a_constructor_that_reads_its_weights_gets_them(write: Write) -> None:
    text = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(100, 100)
        self.scale = self.fc.weight.abs().max().item()
"""
    loaded = load(f"{write('model.py', text)}:Net")
    assert not any(p.is_meta for p in loaded.module.parameters())
    assert loaded.module.scale == loaded.module.fc.weight.abs().max().item()
    assert len(loaded.notes) == 1
    assert "model.py:7" in loaded.notes[0]


def test_a_constructor_that_fails_does_not_fail_with_its_weights_first(write: Write) -> None:
    text = """
import torch
made = []
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(100, 100)
        made.append(self.fc.weight.is_meta)
        self.heads = {"one": 1}["two"]
"""
    place = write("model.py", text.replace("made = []", "import builtins\nmade = builtins.made = []"))
    with pytest.raises(TargetError, match="KeyError: 'two'"):
        load(f"{place}:Net")
    made: list[bool] = vars(builtins).pop("made")
    assert made == [True]  # not once with weights that are really there


@pytest.mark.parametrize(
    ("line", "runs"),
    [
        ("input('Which size? ')", 1),  # stdin has ended, with and without a GPU
        ("import absent_library", 2),  # once without a GPU and once with one
        ("undefined", 2),
        ("self.fc.cuda()", 2),
        ("raise RuntimeError('PyTorch is not linked with support for cuda devices')", 2),  # after a virtual GPU
        ("raise ValueError('size')", 2),
        ("raise SystemExit(3)", 2),
        ("raise RuntimeError('size')", 3),  # and once with weights
    ],
)
def test_a_failing_constructor_runs_as_seldom_as_possible(
    write: Write, monkeypatch: pytest.MonkeyPatch, line: str, runs: int
) -> None:
    text = f"""
import builtins
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        builtins.runs.append(1)
        self.fc = nn.Linear(100, 100)
        {line}
"""
    counter: list[int] = []
    monkeypatch.setattr(builtins, "runs", counter, raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    refused(f"{write('model.py', text)}:Net")
    assert len(counter) == runs


def test_a_constructor_that_fails_before_it_makes_weights_is_not_given_them(write: Write) -> None:
    text = """
import builtins
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        builtins.runs.append(1)
        raise RuntimeError("no size")
"""
    place = write("model.py", text)
    builtins.runs = []  # type: ignore[attr-defined]
    refused(f"{place}:Net")
    assert vars(builtins).pop("runs") == [1, 1]  # once without a GPU and once with one


@pytest.mark.parametrize(
    "line",
    ["self.fc.weight.detach().numpy()", "self.fc.weight.tolist()", "float(self.fc.weight.sum())", "self.small()"],
)
def test_constructors_that_read_weights_in_other_ways_get_them(write: Write, line: str) -> None:
    text = f"""
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(100, 100)
        {line}
    def small(self):
        scale = torch.zeros(4)
        scale.copy_(self.fc.weight.detach().abs().sum(0)[:4])
        if not scale.all():
            raise ValueError("scales have to be positive")
"""
    loaded = load(f"{write('model.py', text)}:Net")
    assert not loaded.module.fc.weight.is_meta


@pytest.mark.filterwarnings("ignore:.*is deprecated|.*are deprecated")
def test_packed_weights_are_real(write: Write) -> None:
    text = """
import torch
def build():
    model = torch.nn.Sequential(torch.nn.Linear(100, 100))
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
"""
    weight, _ = load(f"{write('model.py', text)}:build").module[0]._packed_params._weight_bias()
    assert (weight.dtype, weight.device.type) == (torch.qint8, "cpu")


def test_seven_billion_parameters_need_no_memory(write: Write, python: Python) -> None:
    text = """
from torch import nn
def build():
    def layer():
        return nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)), *(nn.Linear(4096, 11008) for _ in range(3)))
    return nn.Sequential(nn.Embedding(32000, 4096), *(layer() for _ in range(32)), nn.Linear(4096, 32000))
"""
    write("model.py", text)
    code = """
import sys
from pathlib import Path
from memsize.loading import load
model = load("model.py:build").module
assert "torch._dynamo" not in sys.modules and "sympy" not in sys.modules
# Not ru_maxrss: that begins with what the process had which ran this one.
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(sum(p.numel() for p in model.parameters()), status["VmHWM"].split()[0])
"""
    done = python("-c", code)
    assert done.stderr == ""
    parameters, kibibytes = map(int, done.stdout.split())
    # 32 × (4 × (4096² + 4096) + 3 × (4096 × 11008 + 11008)) + 2 × 4096 × 32000 + 32000
    assert parameters == 6_739_762_432
    assert kibibytes < 2**20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_llama_of_seven_billion_from_its_configuration(write: Write) -> None:
    pytest.importorskip("transformers")
    text = """
from transformers import AutoModelForCausalLM, LlamaConfig
def build():
    return AutoModelForCausalLM.from_config(LlamaConfig())
"""
    model = load(f"{write('model.py', text)}:build").module
    assert sum(p.numel() for p in model.parameters()) == 6_738_415_616
    assert all(p.is_meta for p in model.parameters() if p.numel() >= SMALLEST)


# What goes wrong


@pytest.mark.parametrize(
    ("name", "arguments", "part"),
    [
        ("Nett", {}, "model.py has no 'Nett': did you mean Net"),
        ("number", {}, "model.py:number is an int"),
        ("torch", {}, "model.py:torch is a module"),
        ("Scaled", {}, "model.py:Scaled is the class Scaled"),
        ("answer", {}, "model.py:answer returned an int"),
        ("Net", {}, "model.py:Net needs the argument width: give --arg width=…"),
        ("Net", {"width": 2, "detph": 3}, "model.py:Net has no argument 'detph': did you mean depth"),
        ("build", {"width": 2}, "model.py:build has no argument 'width': it takes none"),
        ("instance", {"width": 2}, "model.py:instance is an instance already"),
        ("Net", {"width": "wide"}, "building model.py:Net failed at model.py:9: TypeError"),
    ],
)
def test_a_name_that_does_not_do(net: Path, name: str, arguments: dict[str, object], part: str) -> None:
    assert part in refused(f"{net}:{name}", **arguments)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("import torch\n\nx = 1 / 0\n", "importing model.py failed at model.py:3: ZeroDivisionError: division by zero"),
        ("import torch\nx = (\n", "importing model.py failed at model.py:2: SyntaxError: '(' was never closed"),
        ("import nothere_at_all\n", "at model.py:1: ModuleNotFoundError: No module named 'nothere_at_all'; install it"),
        ("import sys\nsys.exit(3)\n", "at model.py:2: SystemExit: 3; keep what runs the program below"),
        ("from torch import nn\nclass A(nn.Module): pass\nclass B(nn.Module): pass\n", "model.py holds A, B: name the"),
        ("x = 3\n", "model.py defines no torch.nn.Module class"),
        ("import broken\n", "importing model.py failed at broken.py:1: NameError: name 'undefined' is not defined"),
    ],
)
def test_a_file_that_does_not_do(write: Write, text: str, part: str) -> None:
    write("broken.py", "undefined\n")
    assert part in refused(write("model.py", text))


def test_a_place_that_is_not_there(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(net.parent)
    assert refused("modle.py:Net") == "no such file: modle.py (did you mean model.py, late.py, layers.py?)"
    assert "holds late.py, layers.py, model.py" in refused("./qqq.py:Net")
    assert "did you mean model.py?" in refused("./model:Net")
    assert "is a folder" in refused(f"{net.parent}:Net")
    assert "ends with a colon" in refused("model.py:")
    assert "is not a name" in refused("model.py:Net()")
    assert "cannot read ''" in refused("")
    assert "no module 'nothere'" in refused("nothere.nets:Net")
    assert "did you mean torch.nn:Linear?" in refused("torch.nn.Linear")


def test_an_error_keeps_its_cause(net: Path) -> None:
    with pytest.raises(TargetError) as caught:
        load(f"{net}:Net", {"width": "wide"})
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_checkout_beside_the_target_does_not_replace_memsize(write: Write) -> None:
    write("memsize/memsize/__init__.py", "raise RuntimeError('another memsize')")
    write("memsize/README.md", "")
    file = write(
        "model.py",
        "import torch\n\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(3, 4)\n",
    )
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "memsize"}
    with load(f"{file}:Net").scope.entered():
        assert sys.modules["memsize"] is before["memsize"]
    assert {name: sys.modules[name] for name in before} == before


def test_a_module_of_ones_own_has_no_scope() -> None:
    with pytest.raises(ValueError, match="was not loaded"):
        LoadedModel(nn.Linear(1, 1), "Linear").importable()
