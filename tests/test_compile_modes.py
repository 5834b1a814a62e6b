"""The modes of torch.compile: the pool of CUDA graphs and what measuring kernels takes, by arithmetic."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import memsize
from memsize.cli import memsize as command_line
from memsize.records.trace import PRIVATE_POOL, Trace
from memsize.units import format_bytes
from tests.records import live_bytes

MIB = 2**20
BLAS = 8_519_680
"""cuBLAS's workspace on an A100."""
OF_CUBLASLT = ("addmm", 2**20)
"""A workspace of its own, which it has up to PyTorch 2.11."""


def ran(tmp_path: Path, code: str) -> Any:
    script = tmp_path / "script.py"
    script.write_text(f"import torch\nfrom torch import nn\n{code}")
    return memsize.run(script, gpu="a100")


KEPT = """
def function(x):
    return x.sin() + 1

function = torch.compile(function{mode})
x = torch.randn(4 * 2**20, device="cuda")
results = [function(x) for _ in range(4)]
"""


def test_a_new_iteration_overwrites_the_results_of_graphs(tmp_path: Path) -> None:
    """x and each of four results have 16 MiB. With CUDA graphs the pool has room for a copy of x and one result: each
    iteration overwrites that of the one before, although the list still refers to it."""
    assert ran(tmp_path, KEPT.format(mode="")).peak.reserved == (1 + 4) * 16 * MIB
    run = ran(tmp_path, KEPT.format(mode=', mode="reduce-overhead"'))
    assert run.peak.reserved == (1 + 2) * 16 * MIB
    assert [s.op for s in run.trace.storages if s.stream == PRIVATE_POOL and s.bytes == 16 * MIB] == [
        "add",  # the first call warms up and reads x where it is
        *("copy_", "add") * 3,  # the second is recorded, and the others replayed
    ]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_iterations_may_be_marked(tmp_path: Path) -> None:
    """Between two marks nothing is overwritten: x and four results, all of which the first iteration warms up."""
    marked = "torch.compiler.cudagraph_mark_step_begin()\nresults"
    run = ran(tmp_path, KEPT.replace("results", marked).format(mode=', mode="reduce-overhead"'))
    assert run.peak.reserved == (1 + 4) * 16 * MIB
    assert [s.op for s in run.trace.storages if s.stream == PRIVATE_POOL and s.bytes == 16 * MIB] == ["add"] * 4


def test_what_other_code_frees_is_not_for_graphs(tmp_path: Path) -> None:
    """24 MiB that were freed serve a result of 16, but not where that is of the pool; a recording empties the cache."""
    code = """
        x = torch.randn(2, device="cuda")
        torch.empty(24 * 2**20, dtype=torch.uint8, device="cuda")
        function = torch.compile(lambda x: x.new_ones(4 * 2**20) * x[0]{mode})
        for _ in range(3):
            function(x)
        assert torch.cuda.memory_reserved() == {reserved} * 2**20
    """.replace("\n        ", "\n")
    # A small segment for x, and the freed one of 24. The latter goes when the pool is made, in which there are 16 MiB
    # for the result, and a small segment for a copy of x.
    ran(tmp_path, code.format(mode="", reserved=2 + 24))
    assert len(ran(tmp_path, code.format(mode=", mode='reduce-overhead'", reserved=2 + 16 + 2)).trace.emptied) == 2


def test_each_size_of_a_dynamic_graph_is_recorded(tmp_path: Path) -> None:
    """The second size is compiled for any. Each warms up where x is, and has a copy of it from its second call on."""
    code = """
def function(x):
    return x.sin() + 1

function = torch.compile(function, mode="reduce-overhead")
for size in (4, 8, 8, 8, 12, 12):
    function(torch.randn(size * 1024, device="cuda"))
"""
    pooled = [s for s in ran(tmp_path, code).trace.storages if s.stream == PRIVATE_POOL]
    of_size = {4: ["add"], 8: ["add", "copy_", "add", "copy_", "add"], 12: ["add", "copy_", "add"]}
    assert [(s.bytes // 4096, s.op) for s in pooled] == [(size, op) for size, ops in of_size.items() for op in ops]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


def trained(mode: str, **options: Any) -> Trace:
    options = {"input_size": (512, 256), "batch_size": 8, "optimizer": "sgd", "gpu": "a100", "steps": 3} | options
    return memsize.trace(Net(), scenario=f"fp32+compile:{mode}", **options).trace


def of_phase(trace: Trace, phase: str) -> list[tuple[str, int, int]]:
    """What a phase allocates: op, bytes and stream."""
    number = trace.phases.index(phase)
    events = [(trace.storages[e.storage], e.delta) for e in trace.events if e.phase == number and e.delta > 0]
    return [(storage.op, delta, storage.stream) for storage, delta in events if delta > 4096]


def test_a_training_step_is_warmed_up_and_then_recorded() -> None:
    trace = trained("reduce-overhead")
    hidden, out, weights = 4096 * 1024 * 4, 4096 * 256 * 4, 1024 * 256 * 4
    forward = [("addmm", hidden), ("addmm", BLAS), ("mul", hidden), ("addmm", out)]
    backward = [("mm", hidden), ("mm", BLAS), ("mm", weights), ("sum", 256 * 32 * 4), ("mm", weights)]
    for step, copies in enumerate(([], [("copy_", out)], [("copy_", out)]), 1):  # x, and the loss's gradient
        for phase, ops in (("forward", forward), ("backward", backward)):
            events = [(op, size) for op, size, stream in of_phase(trace, f"{phase} {step}") if stream == PRIVATE_POOL]
            pooled = [event for event in events if event != OF_CUBLASLT]
            assert pooled[: len(copies + ops)] == [*copies, *ops]
    # Parameters, the input and the loss are outside; the workspace is gone when a graph has ended.
    assert {s.stream for s in trace.storages if s.role in ("parameter", "input")} == {0}
    live = dict.fromkeys(range(len(trace.storages)), 0)
    for event in trace.events:
        live[event.storage] += event.delta
    assert not [s for s, size in live.items() if size and trace.storages[s].role == "workspace"]
    assert len(trace.emptied) == 3  # for the pool, for the forward, for the backward


def test_the_usual_mode_has_no_pool() -> None:
    assert not trained("default").streams


def test_a_graph_that_changes_its_input_is_not_captured(tmp_path: Path) -> None:
    run = ran(
        tmp_path,
        """
def function(x):
    x.add_(1)
    return x.sin()

function = torch.compile(function, mode="reduce-overhead")
x = torch.randn(4096, device="cuda")
for _ in range(3):
    function(x)
""",
    )
    assert not run.trace.streams


def test_measuring_kernels_widens_the_peak_to_an_interval() -> None:
    """A product of x, 16 rows, with 256 MiB of weights: measuring it copies both, makes a result, and flushes 40 MiB of
    cache, on top of the model and its input."""
    model = nn.Linear(8192, 8192, bias=False)
    trace = memsize.trace(
        model,
        input_size=(8192,),
        batch_size=16,
        scenario="fp32+compile:max-autotune-no-cudagraphs",
        optimizer=None,
        gpu="a100",
    ).trace
    row = 16 * 8192 * 4
    weights, copied = 8192 * 8192 * 4, 8192 * 8192 * 4 + 2 * row + 40 * MIB
    (note,) = [note for note in trace.notes if "measure kernels" in note]
    least, most = re.findall(r"[\d.,]+ [KMG]iB", note)[:2]
    assert least == format_bytes(max(live_bytes(trace.events)))
    assert most == format_bytes(weights + row + copied)


@pytest.mark.parametrize(
    ("stack", "cache"),
    [
        (None, 40 * MIB),
        ("torch=2.7", 40 * MIB),
        pytest.param("torch=2.6", 256 * MIB, marks=pytest.mark.thorough),
        ("torch=2.5", 256_000_000),
    ],
)
def test_measuring_padding_widens_the_peak_to_an_interval(stack: str | None, cache: int) -> None:
    """Of a product of 1,024 rows and 4,001 columns, which are padded to 4,008: random operands, the second of which is
    padded in a copy, the result of the padded product, and a buffer that flushes the cache: of the size of an A100's,
    or that of Triton 3.2, or 3.1."""
    model = nn.Linear(512, 4001, bias=False)
    options: dict[str, Any] = {"input_size": (1024, 512), "batch_size": 1, "optimizer": None, "gpu": "a100"}
    trace = memsize.trace(model, scenario="bf16+compile", stack=stack, **options).trace
    operands, result = 1024 * 512 + 512 * 4001, 1024 * 4008
    inside = 2 * operands  # the input and the weight, while the graph is compiled
    (note,) = [note for note in trace.notes if "whether padding pays" in note]
    least, most = re.findall(r"[\d.,]+ [KMG]iB", note)[:2]
    assert least == format_bytes(max(live_bytes(trace.events)))
    assert most == format_bytes(inside + 2 * (operands + 512 * 4008 + result) + cache)
    assert not [n for n in trace.notes if "max-autotune" in n]


def test_a_gpu_with_few_multiprocessors_measures_nothing() -> None:
    trace = memsize.trace(
        Net(), input_size=(256,), batch_size=8, scenario="fp32+compile:max-autotune-no-cudagraphs", gpu="t4"
    ).trace
    assert not [note for note in trace.notes if "max-autotune" in note]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--compile"], "fp32+compile"),
        (["--compile", "reduce-overhead"], "fp32+compile:reduce-overhead"),
        (["--compile=max-autotune"], "fp32+compile:max-autotune"),
    ],
)
def test_the_mode_may_follow_the_flag(tmp_path: Path, words: list[str], name: str) -> None:
    """What else follows it is an argument of its own."""
    (tmp_path / "net.py").write_text("import torch\nNet = torch.nn.Tanh\n")
    command = ["report", "--scenario", "fp32", *words, f"{tmp_path / 'net.py'}:Net", "--input", "8", "-f", "json"]
    result = CliRunner().invoke(command_line, command, catch_exceptions=False)
    assert result.exit_code == 0 and f'"{name}"' in result.output


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(memsize.MemsizeError, match="compile"):
        memsize.report(Net(), input_size=(256,), compile="fastest")


NET = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1024, 8192), nn.Linear(8192, 1024)

    def forward(self, x):
        return x + self.down(self.up(x).exp().sin().cos())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""
TRAINED = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
{model}
optimizer = torch.optim.SGD(model.parameters())
x, labels = torch.randn(512, 1024, device="cuda"), torch.zeros(512, dtype=torch.int64, device="cuda")
for _ in range(2):
    output = model(x)
    torch.nn.functional.cross_entropy(output, labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    del output
"""
DDP = "model = torch.compile(nn.parallel.DistributedDataParallel(Net().cuda()))"
FSDP = """
model = Net().cuda()
for block in model.blocks:
    block.compile()
    fully_shard(block)
fully_shard(model)
"""


@pytest.mark.parametrize(("parallel", "model"), [("ddp=2", DDP), ("fsdp=2", FSDP)])
def test_several_gpus_compile_as_a_script_does(parallel: str, model: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    options: dict[str, Any] = {"input_size": (1024,), "batch_size": 512, "gpu": "a100", "parallel": parallel}
    eager, compiled = (
        memsize.timeline(f"{tmp_path / 'net.py'}:Net", train="sgd", scenario=scenario, **options).peak.bytes
        for scenario in ("fp32", "fp32+compile")
    )
    (tmp_path / "train.py").write_text(f"{NET}{TRAINED.format(model=model)}")
    run = memsize.run(tmp_path / "train.py", gpu="a100", gpus=2)
    assert isinstance(run, memsize.ProgramRun)
    assert eager > compiled == run.peak.requested


def test_compiled_stages_of_a_pipeline_need_less(tmp_path: Path) -> None:
    """The last of two stages has one block and one microbatch under way at a time. It keeps the results of the first
    product and of cos, and not those of exp and sin: 512 x 8192 floats less, and a microbatch's result of 2 MiB more.
    """
    (tmp_path / "net.py").write_text(NET)
    options: dict[str, Any] = {"input_size": (1024,), "batch_size": 512, "gpu": "a100", "parallel": "pp=2,rank=1"}
    eager, compiled = (
        memsize.timeline(f"{tmp_path / 'net.py'}:Net", train="sgd", scenario=scenario, **options).peak.bytes
        for scenario in ("fp32", "fp32+compile")
    )
    assert eager > compiled


@pytest.mark.thorough
def test_layers_that_are_divided_are_compiled() -> None:
    """By the library's plan: its tensors go to the device of their mesh, by name, in the code that is traced."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=100
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    options: dict[str, Any] = {"input_size": "input_ids=64:int64", "batch_size": 8, "parallel": "tp=2", "gpu": "a100"}
    eager, compiled = (memsize.trace(model, optimizer="sgd", scenario=s, **options) for s in ("bf16", "bf16+compile"))
    assert compiled.peak.requested < eager.peak.requested
    assert not [note for note in compiled.trace.notes if "could not be" in note]


PADDED = """
net = nn.Linear(2048, {columns}, bias=False, device="cuda")
x = torch.randn({rows}, 2048, device="cuda")
with torch.no_grad():
    for _ in range(2):
        torch.compile(net)(x)
"""


def test_the_first_run_of_a_script_measures_whether_padding_pays(tmp_path: Path) -> None:
    """Beside x and the weights: random ones of both, weights padded to 8004 columns, as a graph's input in each call,
    their product, and the 40 MiB of an A100's L2 cache. Without padding, product by product, 8001 columns each time.
    The first product makes cuBLAS's handle.
    """
    run = ran(tmp_path, PADDED.format(rows=1024, columns=8001))
    x, weights, padded, buffer = 1024 * 2048 * 4, 2048 * 8001 * 4, 2048 * 8004 * 4, 40 * MIB
    plain, product = 1024 * 8001 * 4, 1024 * 8004 * 4
    measured = [s.bytes for s in run.trace.storages if s.op == "pad_mm"]
    assert measured == [x, weights, BLAS, plain, buffer, plain, padded, product, buffer, padded, product]
    assert run.peak.requested == 2 * (x + weights) + BLAS + padded + product + buffer
    steady = x + weights + padded + product + BLAS
    (note,) = (note for note in run.trace.notes if "padding pays" in note)
    assert note.startswith(f"at the peak tensors hold {format_bytes(steady)} to {format_bytes(run.peak.requested)}:")


def test_a_product_that_reads_more_than_it_computes_is_measured_and_not_padded(tmp_path: Path) -> None:
    """Three rows, which padding makes four: PyTorch takes the GPU for a thousand times slower than it is, so that it
    measures these as well, with random weights beside the model's. The model's own product has three.
    """
    run = ran(tmp_path, PADDED.format(rows=3, columns=8192))
    x, weights, padded, buffer = 3 * 2048 * 4, 2048 * 8192 * 4, 4 * 2048 * 4, 40 * MIB
    plain, product = 3 * 8192 * 4, 4 * 8192 * 4
    measured = [s.bytes for s in run.trace.storages if s.op == "pad_mm"]
    assert measured == [x, weights, BLAS, plain, buffer, plain, padded, product, buffer, padded, product]
    assert {s.bytes for s in run.trace.storages if s.op == "mm"} == {plain}


def test_a_script_may_run_out_of_memory_while_padding_is_measured(tmp_path: Path) -> None:
    """The weights have 7.6 of a T4's 14.6 GiB, and so would random ones."""
    script = PADDED.format(rows=1024, columns=1_000_001)
    (tmp_path / "script.py").write_text(f"import torch\nfrom torch import nn\n{script}")
    run = memsize.run(tmp_path / "script.py", gpu="t4")
    assert isinstance(run, memsize.ProgramRun)
    assert run.ran_out and "pad_mm needs 7.63 GiB" in str(run)
