"""Training steps: the same events as a real run on the CPU, phases, roles, and the laws that every trace obeys."""

from __future__ import annotations

import copy
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import memsize
from memsize import Trace, Training
from memsize.records.trace import Event, Storage
from memsize.tracing.run import Run, Setup
from tests import models
from tests.conftest import Python
from tests.gpus import estimate_gpu, replay
from tests.models import OPTIMIZERS as NAMED, SCENARIOS, inputs_from_data, meta_copy, parse_optimizer
from tests.records import alive, live_bytes, peak
from tests.workloads import Inference, OwnLoop, Runner, TrainingSteps, Workload


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.second = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        x = checkpoint(self.second, x, use_reentrant=False)
        return self.head(x)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 * x


class Custom(nn.Module):
    """A function with a backward of its own, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 32)
        self.b = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Squared.apply(self.a(x)))


class TwoHeads(nn.Module):
    """Two outputs, so two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.left = nn.Linear(16, 3)
        self.right = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(x))
        return self.left(x), self.right(x)


class Experts(nn.Module):
    """A dense mixture: every expert sees every token, weighted by a softmax gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.gate(x), -1)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return (outputs * weights.unsqueeze(-2)).sum(-1)


class Block(nn.Module):
    """A pre-norm transformer block in plain ops."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = torch.softmax(q @ k.transpose(-1, -2) / 8, -1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


def unet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.SiLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(16, 4, 3, padding=1),
    )


ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(8, 3), lambda: torch.randn(4, 8)),
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        lambda: torch.randn(4, 64),
    ),
    "deep": (lambda: nn.Sequential(*[nn.Linear(32, 32) for _ in range(12)]), lambda: torch.randn(4, 32)),
    "no bias": (lambda: nn.Sequential(nn.Linear(32, 8, bias=False), nn.Sigmoid()), lambda: torch.randn(4, 32)),
    "tanh": (lambda: nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4)), lambda: torch.randn(4, 32)),
    "silu": (lambda: nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 4)), lambda: torch.randn(4, 32)),
    "in place": (lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(True), nn.Linear(64, 4)), lambda: torch.randn(4, 32)),
    "leaky": (
        lambda: nn.Sequential(nn.Linear(9, 9), nn.LeakyReLU(0.1), nn.ELU(), nn.Softplus()),
        lambda: torch.randn(4, 9),
    ),
    "dropout-free mlp with norm": (
        lambda: nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4)),
        lambda: torch.randn(4, 32),
    ),
    "batch norm 1d": (
        lambda: nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)),
        lambda: torch.randn(4, 32),
    ),
    "conv": (models.Reused, lambda: torch.randn(2, 16, 8, 8)),
    "conv norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        lambda: torch.randn(2, 3, 9, 9),
    ),
    "strided": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 1)), lambda: torch.randn(2, 3, 9, 9)),
    "grouped": (
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1)),
        lambda: torch.randn(2, 8, 9, 9),
    ),
    "transposed": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 3, 3)),
        lambda: torch.randn(2, 3, 9, 9),
    ),
    "conv 1d": (lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.AvgPool1d(2)), lambda: torch.randn(2, 4, 16)),
    "conv 3d": (lambda: nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU()), lambda: torch.randn(1, 2, 6, 6, 6)),
    "pooled": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.AvgPool2d(2)),
        lambda: torch.randn(2, 3, 14, 14),
    ),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)), lambda: torch.randn(2, 3, 9, 9)),
    "instance norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True)),
        lambda: torch.randn(2, 3, 9, 9),
    ),
    "unet": (unet, lambda: torch.randn(2, 3, 8, 8)),
    "padded": (lambda: nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(3, 4, 3)), lambda: torch.randn(2, 3, 8, 8)),
    "residual": (models.Residual, lambda: torch.randn(2, 4, 8, 8)),
    "tied": (models.Tied, lambda: torch.randint(0, 1065, (2, 16))),
    "embedding": (lambda: nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 4)), lambda: torch.randint(0, 50, (2, 7))),
    "unused": (models.Unused, lambda: torch.randn(3, 100)),
    "direct": (models.Direct, lambda: torch.randn(1, 197, 768)),
    "detached": (models.Detached, lambda: torch.randn(2, 10)),
    "frozen": (
        lambda: _frozen(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))),
        lambda: torch.randn(2, 16),
    ),
    "checkpointed": (Checkpointed, lambda: torch.randn(4, 32)),
    "custom function": (Custom, lambda: torch.randn(4, 16)),
    "two heads": (TwoHeads, lambda: torch.randn(4, 16)),
    "experts": (Experts, lambda: torch.randn(4, 16)),
    "block": (Block, lambda: torch.randn(2, 6, 32)),
    "two blocks": (lambda: nn.Sequential(Block(), Block()), lambda: torch.randn(2, 6, 32)),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True),
        lambda: torch.randn(2, 6, 32),
    ),
    "attention": (models.Attention, lambda: torch.randn(2, 7, 64)),
    "cell": (lambda: _Unrolled(), lambda: torch.randn(2, 5, 16)),
    "looking": (models.Looking, lambda: torch.randn(2, 10)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 8)), lambda: torch.randn(2, 16)),
}


class _Unrolled(nn.Module):
    """An LSTM cell over five steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], 8)
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
        return h


def _frozen(model: nn.Module) -> nn.Module:
    model[0].requires_grad_(False)  # type: ignore[index,operator]
    return model


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, foreach=True),
}


@pytest.fixture(autouse=True)
def without_onednn() -> Iterator[None]:
    """oneDNN's kernels and the CPU's own flash attention are the CPU's affair."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch._C._set_mkldnn_enabled(enabled)


def stepped(model: nn.Module, value: Tensor, optimizer: Any, device: str) -> Trace:
    """Two training steps without CUDA's semantics, on `meta` or really computed."""
    if device == "meta":
        twin, call = meta_copy(model), inputs_from_data(value).call()
    else:
        twin, call = copy.deepcopy(model), ((value,), {})
    setup = Setup(type(model).__name__, "as-given", twin, call, True, device=device)
    return TrainingSteps(Training(optimizer, loss="mean", steps=2)).run(setup)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ZOO)
def test_planned_and_real_steps_write_the_same_events(name: str, optimizer: str) -> None:
    build, make = ZOO[name]
    torch.manual_seed(0)
    model, value = build(), make()
    planned = stepped(model, value, OPTIMIZERS[optimizer], "meta")
    real = stepped(model, value, OPTIMIZERS[optimizer], "cpu")
    assert lifetimes(planned) == lifetimes(real)


# A CPU has fused encoder and attention paths of its own in evaluation, and keeps no statistics in a batch norm where
# CUDA does.
DIFFERENT_ON_A_CPU = {"encoder", "attention", "batch norm 1d", "conv norm"}


@pytest.mark.parametrize("name", [name for name in ZOO if name not in DIFFERENT_ON_A_CPU])
def test_planned_and_real_inferences_write_the_same_events(name: str) -> None:
    build, make = ZOO[name]
    torch.manual_seed(0)
    model, value = build(), make()
    planned = Setup("m", "as-given", meta_copy(model), inputs_from_data(value).call(), False)
    real = Setup("m", "as-given", copy.deepcopy(model), ((value,), {}), False, device="cpu")
    assert lifetimes(Inference().run(planned)) == lifetimes(Inference().run(real))


@pytest.mark.thorough
def test_the_first_checkpoint_of_a_process_keeps_nothing_alive(warm_python: Python) -> None:
    """It imports PyTorch's compiler, which leaves a cycle with every frame below it, the forward's among them."""
    source = """
        import torch, memsize
        from torch import nn
        from torch.utils.checkpoint import checkpoint

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

            def forward(self, x):
                x = checkpoint(self.body, x, use_reentrant=False)
                return self.head(x)

        trace = memsize.trace(Net(), (8,), optimizer=None, mode="eval").trace
        ended = [event for event in trace.events if event.delta < 0]
        # before PyTorch 2.12 cuBLASLt takes a workspace for each product
        tensors = [event for event in ended if trace.storages[event.storage].role != "workspace"]
        print([trace.phases[event.phase] for event in tensors])
    """
    done = warm_python("-c", textwrap.dedent(source))
    assert done.stdout.strip() == "['forward']", done.stdout + done.stderr


def lifetimes(trace: Trace) -> list[tuple[int, str, int]]:
    """Every event as bytes, phase and layer, in order, without the optimizer's step counters.

    They are host tensors of 4 bytes; only a run whose device is the CPU takes them for the device's.
    """
    counters = {
        event.storage
        for event in trace.events
        if trace.storages[event.storage].bytes == 4 and trace.phases[event.phase].startswith("optimizer")
    }
    return [
        (event.delta, trace.phases[event.phase], event.layer) for event in trace.events if event.storage not in counters
    ]


@pytest.mark.parametrize("name", ["perceptron", "conv norm", "block", "checkpointed"])
def test_laws(name: str) -> None:
    build, make = ZOO[name]
    trace = stepped(build(), make(), "adamw", "meta")
    live = live_bytes(trace.events)
    assert min(live) >= 0
    for index in range(0, len(live), 7):
        assert sum(alive(trace, index).values()) == live[index]
    found = peak(trace)
    assert sum(found.roles.values()) == found.bytes == max(live)
    shown = replay([(event.storage, event.delta) for event in trace.events])
    assert found.bytes == shown.requested.bytes <= shown.allocated.bytes <= shown.reserved.bytes
    again = stepped(build(), make(), "adamw", "meta")
    assert again.events == trace.events


def test_a_second_stream_has_segments_of_its_own() -> None:
    """1 MiB is freed before another is taken: one segment of 2 MiB serves both on one stream, each its own on two."""
    size = 2**20
    first = Storage(size, "temporary", -1, "op", "uint8", (size,), -1)
    events = tuple(Event(storage, delta, 0, -1, "op") for storage, delta in ((0, size), (0, -size), (1, size)))
    trace = Trace("m", "fp32", True, 1, "2.13.0", (), (), (), storages=(first, first), events=events)
    assert estimate_gpu(trace).reserved == 2 * size
    apart = estimate_gpu(replace(trace, storages=(first, first._replace(stream=7))))
    assert (apart.requested, apart.allocated, apart.reserved) == (size, size, 4 * size)


@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from(["linear", "perceptron", "block"]))
@settings(max_examples=15)
def test_the_peak_grows_with_the_batch(a: int, b: int, name: str) -> None:
    build, make = ZOO[name]
    model = build()
    small, large = sorted((a, b))
    shape = make().shape[1:]
    peaks = [memsize.trace(model, torch.zeros(batch, *shape), optimizer="sgd").peak for batch in (small, large)]
    assert peaks[0].requested <= peaks[1].requested
    assert peaks[0].allocated <= peaks[1].allocated


def test_phases_and_layers_of_a_step() -> None:
    trace = memsize.trace(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (8,), steps=2).trace
    phases = ("setup", "step 1", "zero_grad 1", "forward 1", "loss 1", "backward 1", "optimizer 1")
    assert trace.phases[:7] == phases
    gradients = [(s.layer, s.bytes) for s in trace.storages if s.role == "gradient"]
    # Layer 1 is "0" (8·16·4 = 512 and 16·4 = 64), layer 3 is "2" (16·4·4 = 256 and 16); both steps make them.
    assert sorted(gradients) == sorted([(1, 512), (1, 64), (3, 256), (3, 16)] * 2)


def test_optimizer_state_and_its_temporaries() -> None:
    model = nn.Sequential(nn.Linear(1000, 1000, bias=False))
    size = 4_000_000
    for optimizer, state, extra in [
        ("sgd", 0, 0),
        ("sgd-momentum", size, 0),
        ("adam", 2 * size, size),
        ("adamw", 2 * size, size),
        ("rmsprop", size, size),
        ("adagrad", size, 2 * size),
        # Without capturable, NAdam divides straight into the parameters: one temporary, as Adam.
        ("nadam", 2 * size, size),
    ]:
        step = memsize.trace(model, (1000,), optimizer=optimizer)
        trace = step.trace
        states = sum(s.bytes for s in trace.storages if s.role == "optimizer state" and s.bytes > 8)
        assert states == state, optimizer
        update = [index for index, event in enumerate(trace.events) if trace.phases[event.phase] == "optimizer 2"]
        high = max((_temporaries(trace, index) for index in update), default=0)
        assert high // size == extra // size, optimizer


def _temporaries(trace: Trace, index: int) -> int:
    held = alive(trace, index)
    return sum(size for storage, size in held.items() if trace.storages[storage].role == "temporary")


@pytest.mark.parametrize("text", ["adamw:lr={{}}", "sgd:momentum=fast", "sgd:momentum=", "sgd:0.9"])
def test_optimizer_options_that_cannot_be_read(text: str) -> None:
    with pytest.raises(memsize.MemsizeError, match="cannot read the optimizer option"):
        parse_optimizer(text)


@pytest.mark.parametrize("name", [*NAMED, "adamw:fused", "adam:foreach=False"])
def test_an_optimizer_by_name_is_pytorchs_own(name: str) -> None:
    spec = parse_optimizer(name)
    own = lambda parameters: getattr(torch.optim, spec.cls)(parameters, **spec.options)  # noqa: E731
    by_name, made = (memsize.trace(models.Small(), (3, 32, 32), optimizer=kind, steps=2).trace for kind in (name, own))
    # State that an optimizer makes as it is made names the line above.
    storages = [[storage._replace(line=-1, saved_at=-1) for storage in trace.storages] for trace in (by_name, made)]
    assert (by_name.events, storages[0], by_name.phases) == (made.events, storages[1], made.phases)
    # Their class is as it was: a private one was stepped.
    assert getattr(torch.optim, spec.cls).add_param_group is torch.optim.Optimizer.add_param_group


def test_the_models_own_loss_may_be_all_that_it_returns() -> None:
    class Scalar(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x).mean()

    class First(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            logits = super().forward(x)
            return logits.mean(), logits

    plain = memsize.trace(nn.Linear(4, 4), (4,), optimizer="sgd", loss=lambda output: output.mean())
    for model, freed in ((Scalar(4, 4), 4 * 4), (First(4, 4), 0)):  # a loop holds what the model returned
        step = memsize.trace(model, (4,), optimizer="sgd", loss="own")
        assert "the loss is the model's own" in step.trace.notes
        assert step.peak.requested == plain.peak.requested - freed


def test_fused_adamw_needs_no_temporaries_and_counts_steps_on_the_gpu() -> None:
    model = nn.Sequential(nn.Linear(1000, 1000, bias=False))
    plain, fused = (memsize.trace(model, (1000,), optimizer=name).peak for name in ("adamw", "adamw:fused"))
    assert plain.requested - fused.requested > 3_900_000


class Branches(nn.Module):
    """Values with several uses: gradients meet that are shared, parts of others, expanded, or the engine's alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        first, second = x.chunk(2, 1)
        x = torch.cat([x, first * second], 1)[:, :8] + self.b(x) + x.expand(4, 8).relu()
        y = self.c(x)
        summed: Tensor = x + y * y.sum() + torch.cat([x, y], 1)[:, 4:12]
        return summed


def test_gradients_are_summed_in_place_where_the_engine_does_so() -> None:
    """The profiler shows what autograd does with real tensors while no dispatch mode looks on."""
    x = torch.randn(4, 8)
    with torch.profiler.profile(acc_events=True) as profile:
        Branches()(x).sum().backward()
    sums = [
        event.name
        for event in profile.events()
        if event.cpu_parent is None or event.cpu_parent.name.startswith("autograd::engine")
    ]
    assert sums.count("aten::add_") > 3  # or this would show nothing
    step = memsize.trace(Branches(), x, step=lambda model: lambda x: model(x).sum().backward(), steps=1)
    assert [storage.op for storage in step.trace.storages].count("add") == sums.count("aten::add")


_ROWS, _TARGET = torch.zeros(8, dtype=torch.int64), torch.zeros(64, 64)
FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda w: w[_ROWS],
    "index_select": lambda w: w.index_select(0, _ROWS),
    "gather": lambda w: w.gather(0, _ROWS[None]),
    "take": lambda w: w.take(_ROWS),
    "max": lambda w: w.max(1).values,
    "median": lambda w: w.median(1).values,
    "topk": lambda w: w.topk(4).values,
    "sort": lambda w: w.sort(1).values,
    "cummax": lambda w: w.cummax(1).values,
    "trace": lambda w: w.trace(),
    "logits": lambda w: binary_cross_entropy_with_logits(w, _TARGET),
    "weighted": lambda w: binary_cross_entropy_with_logits(w, _TARGET, _TARGET, pos_weight=_TARGET[0]),
    "not in place": lambda w: (w * w).sub(_TARGET).mul(w).sum(),
}


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
def test_formulas_of_autograd_write_into_results_of_their_own(formula: Callable[[Tensor], Tensor]) -> None:
    """A backward allocates as many matrices as a real one, in the order of the profiler."""
    size = 4 * 64 * 64
    output = formula(torch.zeros(64, 64, requires_grad=True))
    gradient = torch.ones_like(output)

    def step(model: nn.Module) -> Callable[[Tensor], None]:
        return lambda x: (output := model(x)).backward(torch.ones_like(output))

    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        output.backward(gradient)
    real = [event.self_cpu_memory_usage for event in profile.events() if event.self_cpu_memory_usage >= size]
    layer = nn.Linear(64, 64, bias=False)
    layer.forward = lambda _: formula(layer.weight)  # type: ignore[method-assign]
    trace = memsize.trace(layer, (64,), step=step, steps=1).trace
    backward = {number for number, phase in enumerate(trace.phases) if phase.startswith("backward")}
    taken = [event for event in trace.events if event.phase in backward and event.delta >= size]
    assert [event.delta for event in taken if event.op != "ones_like"] == real


def test_gradient_accumulation_keeps_the_peak_and_repeats_the_backward() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    once, twice = (memsize.trace(model, (64,), gradient_accumulation_steps=count, steps=1).trace for count in (1, 2))
    backwards = [sum(event.op == "mm" and event.delta > 0 for event in trace.events) for trace in (once, twice)]
    assert backwards[1] > backwards[0]
    layers = {place for place, layer in enumerate(twice.layers) if layer.path == "0"}
    forwards = [event for event in twice.events if event.op == "addmm" and event.layer in layers]
    assert {twice.phases[event.phase] for event in forwards if event.delta > 0} == {"forward 1"}


def test_ema_and_set_to_none() -> None:
    model = nn.Sequential(nn.Linear(512, 512, bias=False))
    size = 512 * 512 * 4
    plain = memsize.trace(model, (512,), optimizer="sgd").peak
    averaged = memsize.trace(model, (512,), optimizer="sgd", ema=True).peak
    assert averaged.roles["optimizer state"] - plain.roles.get("optimizer state", 0) == size
    zeroed = memsize.trace(model, (512,), optimizer="sgd", set_to_none=False)
    assert zeroed.peak.requested >= plain.requested


def test_apex_o2_keeps_masters_and_their_gradients() -> None:
    model = nn.Sequential(nn.Linear(1000, 1000, bias=False))
    peak = memsize.trace(model, (1000,), scenario="apex-O2", optimizer="adam").peak
    elements = 1_000_000
    # Per parameter: 2 stored, 4 master, 8 Adam, 2 gradient and 4 master gradient while stepping.
    assert peak.roles["parameter"] == 2 * elements
    assert peak.roles["master weight"] == 4 * elements
    assert peak.roles["optimizer state"] // elements == 8
    assert peak.roles["gradient"] == 6 * elements


def test_a_loop_of_ones_own() -> None:
    def loop(model: nn.Module) -> Callable[..., None]:
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda")

        def body(x: Tensor) -> None:
            optimizer.zero_grad()
            for half in x.chunk(2):
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = model(half).float().square().mean()
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

        return body

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    step = memsize.trace(model, torch.zeros(8, 64), step=loop, steps=2)
    assert {"forward 1", "backward 1", "optimizer 1", "optimizer 2"} <= set(step.trace.phases)
    roles = {storage.role for storage in step.trace.storages}
    assert {"cast copy", "gradient", "optimizer state", "activation"} <= roles
    assert step.peak.roles["optimizer state"] // 8 >= sum(p.numel() for p in model.parameters())


def _clip_in_two(parameters: list[Tensor], foreach: bool | None) -> None:
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=foreach)
    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm, foreach=foreach)


CLIPS: dict[str, tuple[Callable[..., Any], set[str], set[str]]] = {
    "by norm": (
        lambda parameters, foreach: torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=foreach),
        {"_foreach_norm", "_foreach_mul_"},
        {"mul_"},
    ),
    "by norm, in two calls": (_clip_in_two, {"_foreach_norm", "_foreach_mul_"}, {"mul_"}),
    "by value": (
        lambda parameters, foreach: torch.nn.utils.clip_grad_value_(parameters, 1.0, foreach=foreach),
        {"_foreach_clamp_min_", "_foreach_clamp_max_"},
        {"clamp_"},
    ),
}


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("foreach", [None, True, False])
def test_gradients_are_clipped_with_list_kernels(name: str, foreach: bool | None) -> None:
    """As on CUDA, unless the user wants it otherwise. The largest of the four tensors has 256·8,192 elements, which are
    32 chunks of 65,536: the norms of chunks are 4·32 numbers.
    """
    clip, lists, singles = CLIPS[name]
    ops: set[str] = set()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ops.add(func._overloadpacket.__name__)
            return func(*args, **kwargs or {})

    def loop(model: nn.Module) -> Callable[..., None]:
        def body(x: Tensor) -> None:
            model(x).square().sum().backward()
            with Seen():
                clip(list(model.parameters()), foreach)

        return body

    model = nn.Sequential(nn.Linear(8192, 256), nn.Linear(256, 8))
    trace = memsize.trace(model, torch.zeros(2, 8192), step=loop, steps=1).trace
    assert (lists if foreach is not False else singles) <= ops
    assert not (singles if foreach is not False else lists) & ops
    taken = [event.delta for event in trace.events if event.op == "_foreach_norm" and event.delta > 0]
    if "_foreach_norm" in lists and foreach is not False:
        assert taken == [4, 4, 4, 4, 4 * 4 * 32]


def test_averaged_weights_are_updated_with_list_kernels() -> None:
    def loop(model: nn.Module) -> Callable[..., None]:
        averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn())

        def body(x: Tensor) -> None:
            model(x).square().sum().backward()
            averaged.update_parameters(model)

        return body

    trace = memsize.trace(nn.Linear(64, 64), torch.zeros(2, 64), step=loop, steps=2).trace
    assert sum(event.delta > 0 for event in trace.events if "lerp" in event.op) == 0


def test_a_failing_backward_names_the_layer() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ValueError("no gradient today")

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Broken.apply(x)

    model = nn.Sequential(nn.Linear(4, 4), Inner())
    with pytest.raises(memsize.ForwardError, match="no gradient today"):
        memsize.trace(model, (4,))


def test_what_was_patched_is_as_before() -> None:
    from torch.optim import optimizer as module

    before = module._get_foreach_kernels_supported_devices, len(module._global_optimizer_pre_hooks)
    with pytest.raises(memsize.MemsizeError):
        memsize.trace(models.Forgetful(), (10,))
    memsize.trace(models.Reused(), (16, 8, 8))
    assert before == (module._get_foreach_kernels_supported_devices, len(module._global_optimizer_pre_hooks))


def test_storages_that_are_resized_in_place() -> None:
    class Gathered(nn.Module):
        """Frees its gathered weight between uses, as fully sharded training does."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.zeros(100, 100))

        def forward(self, x: Tensor) -> Tensor:
            storage = self.weight.untyped_storage()
            storage.resize_(0)
            x = x + 1
            storage.resize_(40_000)
            return x @ self.weight

    trace = memsize.trace(Gathered(), (100,), optimizer=None).trace
    resizes = [event.delta for event in trace.events if event.op == "resize_"]
    assert resizes == [-40_000, 40_000]
    assert not hasattr(torch.UntypedStorage.resize_, "__code__")  # the C method again


def test_own_step_without_an_optimizer_is_a_run_like_any_other() -> None:
    setup = Setup("m", "fp32", meta_copy(nn.Linear(4, 4)), inputs_from_data(torch.zeros(2, 4)).call(), True)

    def loop(model: nn.Module) -> Callable[..., None]:
        return lambda x: model(x).sum().backward()

    trace = OwnLoop(loop, 2).run(setup)
    assert [phase for phase in trace.phases if phase.startswith("backward")] == ["backward 1", "backward 2"]


@dataclass(frozen=True)
class Evaluations(Workload):
    """A workload that memsize does not have: several forwards without gradients, each result kept."""

    count: int

    def run(self, setup: Setup) -> Trace:
        run = Run(setup)
        args, kwargs = setup.call
        with run.recording(), torch.no_grad(), setup.precision.autocast():
            run.result = [setup.model(*args, **kwargs) for _ in range(self.count)]
        return run.trace()


def test_any_workload_runs() -> None:
    runner = Runner("m", nn.Linear(4, 8), inputs_from_data(torch.zeros(2, 4)), True)
    peaks = [peak(runner.run(Evaluations(count), SCENARIOS["fp16"])) for count in (1, 3)]
    # 4·8 + 8 weights and 2·4 inputs, then 2·8 results of each forward, all in 2 B.
    sizes = [found.bytes - found.roles["workspace"] for found in peaks]
    assert sizes == [2 * (40 + 8 + 16), 2 * (40 + 8 + 3 * 16)]
    assert peaks[0].bytes == peak(runner.run(Inference(), SCENARIOS["fp16"])).bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_is_traced_as_it_is(dtype: torch.dtype) -> None:
    model = nn.Linear(1000, 1000, bias=False).to(dtype)
    step = memsize.trace(model, (1000,), optimizer="sgd")
    assert step.trace.scenario == "as-given"
    # Weights and their gradients, and an input that takes the model's dtype.
    assert step.peak.roles["parameter"] == step.peak.roles["gradient"] == 10**6 * dtype.itemsize
    assert step.trace.inputs[0].bytes == 1000 * dtype.itemsize
    assert memsize.trace(model, (1000,), scenario="fp32", optimizer="sgd").peak.roles["parameter"] == 4 * 10**6


def test_inputs_are_cast_only_where_a_model_as_it_is_does_not_run_on_them() -> None:
    model = nn.Linear(8, 2).bfloat16()
    step = memsize.trace(model, torch.zeros(4, 8), optimizer=None)
    assert step.trace.inputs[0].spec.dtype == "bfloat16"
    assert any("floating-point inputs were cast to bfloat16" in note for note in step.trace.notes)
    given = memsize.trace(model, torch.zeros(4, 8, dtype=torch.bfloat16), optimizer=None)
    assert given.trace.inputs == step.trace.inputs and not any("cast to" in note for note in given.trace.notes)


class Guarded(nn.Module):
    """A forward that opens a region without gradients, as `generate` of transformers does, and decides by values."""

    def __init__(self, region: Callable[[], Any]) -> None:
        super().__init__()
        self.region = region
        self.body = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with self.region():
            for _ in range(int((torch.arange(3, device=x.device).max() + 1).item())):
                x = nn.functional.scaled_dot_product_attention(*(self.body(x)[None, None] for _ in range(3)))[0, 0]
        return x


def test_inference_mode_is_followed_like_no_grad() -> None:
    """Under it PyTorch hands composite ops over whole: a linear layer on three dimensions, and attention."""
    x = torch.randn(8, 16)
    found = [
        memsize.trace(Guarded(region), input_data=x, optimizer=None).trace.events
        for region in (torch.inference_mode, torch.no_grad)
    ]
    assert found[0] == found[1] and len(found[0]) > 20


def test_a_whole_step_in_inference_mode_is_followed_too() -> None:
    def make(region: Callable[[], Any]) -> Callable[[nn.Module], Callable[[Tensor], Tensor]]:
        def step(model: nn.Module) -> Callable[[Tensor], Tensor]:
            @region()
            def body(x: Tensor) -> Tensor:
                result: Tensor = model(x)
                return result

            return body

        return step

    model, x = models.Attention(), torch.randn(2, 7, 64)
    found = [
        memsize.trace(model, x, step=make(region)).trace.events for region in (torch.inference_mode, torch.no_grad)
    ]
    assert found[0] == found[1]
    assert not torch.is_inference_mode_enabled()


def python_calls(run: Callable[[], object]) -> int:
    """The calls of Python functions that `run` makes."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    run()  # what a process does once
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def test_the_work_of_a_step_grows_with_the_layers_and_no_faster() -> None:
    def step(layers: int) -> Callable[[], object]:
        net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        return lambda: memsize.trace(net, (8,), optimizer="sgd", steps=1, whole=True)

    few, more, most = (python_calls(step(layers)) for layers in (40, 80, 120))
    # The third 40 layers take as many calls as the second 40; if the work grew by the square, 5 for each 3 of those.
    assert most - more == pytest.approx(more - few, rel=0.05)
