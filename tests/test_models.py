"""Models as people have them: routed, detecting, recurrent, wrapped, quantized, and written for one device only."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import memsize
from memsize import Trace
from memsize.tracing.run import Setup
from tests.known_values import ALL_SELECTED, BALANCED, MIXED_DEVICES
from tests.models import inputs_from_data, meta_copy
from tests.records import totals, visible
from tests.workloads import Forward

Compute = Callable[..., Any]


class Model(nn.Module):
    """Modules by name and a forward that is given them."""

    def __init__(self, forward: Compute, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


class Wanting(nn.Module):
    """Cannot be made without its argument."""

    def __new__(cls, size: int) -> Wanting:
        return super().__new__(cls)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.body = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Fixed(nn.Linear):
    """Refuses to change its mode, as what `torch.export` gives does."""

    def __init__(self) -> None:
        super().__init__(16, 8)

    def train(self, mode: bool = True) -> Fixed:
        raise NotImplementedError


def trace_of(model: nn.Module, *inputs: Tensor, device: str = "meta") -> Trace:
    """The trace of a plain forward, on `meta` or really computed."""
    if device == "cpu":
        return Forward().run(Setup("m", "as-given", copy.deepcopy(model), (inputs, {}), model.training, device="cpu"))
    call = inputs_from_data(inputs).call()
    return Forward().run(Setup("m", "as-given", meta_copy(model), call, model.training))


def outputs(trace: Trace, path: str) -> list[str]:
    return [str(output.spec) for layer in trace.layers if layer.path == path for output in layer.outputs]


# -- routing ----------------------------------------------------------------------------------------------------------


def experts(size: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(size, size) for _ in range(4))


def by_one_hot(self: Any, x: Tensor) -> Tensor:
    weights, chosen = self.router(x).softmax(-1).topk(2)
    mask, out = F.one_hot(chosen, 4).permute(2, 1, 0), torch.zeros_like(x)
    for expert, layer in enumerate(self.experts):
        place, token = torch.where(mask[expert])
        out.index_add_(0, token, layer(x[token]) * weights[token, place, None])
    return out


def by_counting(self: Any, x: Tensor) -> Tensor:
    chosen = self.router(x).topk(2).indices.flatten()
    order = chosen.argsort()
    counts = torch.bincount(chosen, minlength=4).cpu().tolist()
    parts = [layer(part) for layer, part in zip(self.experts, x[order // 2].split(counts), strict=True)]
    joined = torch.cat(parts)
    return torch.empty_like(joined).index_copy_(0, order, joined).view(-1, 2, 16).sum(1)


def by_comparing(self: Any, x: Tensor) -> Tensor:
    chosen, out = self.router(x).argmax(-1), torch.zeros_like(x)
    for expert, layer in enumerate(self.experts):
        mine = chosen == expert
        if mine.any():
            out[mine] = layer(x[mine])
    return out


# 64 tokens to 4 experts: 64·2/4 = 32 each for two choices a token, 16 for one
ROUTED = {"one hot": (by_one_hot, 32), "counting": (by_counting, 32), "comparing": (by_comparing, 16)}


@pytest.mark.parametrize("name", ROUTED)
def test_a_router_sends_every_expert_the_same_share(name: str) -> None:
    forward, share = ROUTED[name]
    model = Model(forward, router=nn.Linear(16, 4), experts=experts(16))
    value = torch.randn(64, 16)
    trace = trace_of(model, value)
    assert [outputs(trace, f"experts.{expert}") for expert in range(4)] == [[f"float32[{share},16]"]] * 4
    assert trace.assumptions == (BALANCED,)
    # However the tokens fall, there are as many of them.
    assert totals(trace).saved_bytes == totals(trace_of(model, value, device="cpu")).saved_bytes


def test_a_threshold_lets_everything_through() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.body(x)
        return self.head(y[y.mean(-1) > 0.5])

    trace = trace_of(Model(forward, body=nn.Linear(16, 16), head=nn.Linear(16, 4)), torch.randn(100, 16))
    assert outputs(trace, "head") == ["float32[100,4]"]
    assert trace.assumptions == (ALL_SELECTED,)


# -- every kind -------------------------------------------------------------------------------------------------------


def lengths_on_the_cpu(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(self.body(packed)[0], batch_first=True)[0]


def lengths_as_given(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, lengths, batch_first=True)
    return pad_packed_sequence(self.body(packed)[0], batch_first=True)[0]


def states_on_the_cpu(self: Any, x: Tensor) -> Tensor:
    state = torch.zeros(1, x.shape[0], 8)
    return self.body(x, (state, state.clone()))[0]


def made_for_cuda(self: Any, x: Tensor) -> Tensor:
    y = self.body(x.cuda()) + torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    return y + torch.arange(8, device=torch.device("cuda", 0)) + torch.tensor([1.0]).to("cuda:0")


def regions(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = self.body(x)
    with torch.autocast("cuda", enabled=False):
        y = self.head(y.float())
    with torch.no_grad():
        return y + self.head(self.body(x)).detach()


def validated(self: Any, x: Tensor) -> Tensor:
    padding = torch.nn.functional.interpolate(torch.ones(2, 1, 64, 64, device=x.device), size=(4, 4)).bool()
    assert padding.all()
    assert torch.isfinite(x).all()
    assert 3 in torch.arange(8, device=x.device)[[0, 3]]
    return self.body(x)


def in_two_steps(self: Any, x: Tensor) -> Tensor:
    return self.head(self.body(x))


def there_and_back(self: Any, x: Tensor) -> Tensor:
    window = torch.hann_window(4, device=x.device)
    return torch.istft(torch.stft(self.body(x), 4, window=window, return_complex=True), 4, window=window)


def summed(self: Any, x: Tensor) -> Tensor:
    return sum(x @ weight for weight in self.held)


SMALL: dict[str, Any] = {"input_size": (16,), "batch_size": 2}
STEPS: dict[str, Any] = {"input_size": (5, 16), "batch_size": 2}
PADDED: dict[str, Any] = {"input_data": (torch.randn(3, 7, 16), torch.tensor([7, 5, 2]))}


def body(forward: Compute, **more: nn.Module) -> nn.Module:
    return Model(forward, body=nn.Linear(16, 8), **more)


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "data parallel": (lambda: nn.DataParallel(nn.Sequential(nn.Linear(16, 8), nn.ReLU())), SMALL),
    "compiled": (lambda: torch.compile(nn.Linear(16, 8)), SMALL),
    "a compiled part": (lambda: body(in_two_steps, head=torch.compile(nn.Linear(8, 8))), SMALL),
    "a compiled function": (lambda: body(torch.compile(lambda self, x: self.body(x) * 2)), SMALL),
    "scripted": (lambda: torch.jit.script(nn.Sequential(nn.Linear(16, 8), nn.ReLU())), SMALL),
    "traced": (lambda: torch.jit.trace(nn.Linear(16, 8), torch.randn(2, 16)), SMALL),
    "graph": (lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(16, 8), nn.ReLU())), SMALL),
    "made with arguments": (lambda: Wanting(16), SMALL),
    "without a training mode": (Fixed, SMALL),
    "a sample at a time": (lambda: body(lambda self, x: torch.func.vmap(lambda row: self.body(row))(x)), SMALL),
    "checkpointed": (lambda: body(lambda self, x: checkpoint(self.body, x, use_reentrant=False)), SMALL),
    "checkpointed, reentrant": (lambda: body(lambda self, x: checkpoint(self.body, x, use_reentrant=True)), SMALL),
    "complex": (lambda: body(lambda self, x: torch.fft.ifft(torch.fft.fft(self.body(x).float())).abs()), SMALL),
    "autocast inside": (lambda: body(regions, head=nn.Linear(8, 8)), SMALL),
    "validated": (lambda: body(validated), SMALL),
    "for cuda only": (lambda: body(made_for_cuda), SMALL),
    "packed": (lambda: nn.LSTM(16, 8, bidirectional=True), {"input_data": (pack_sequence([torch.randn(4, 16)] * 2),)}),
    "lengths on the cpu": (lambda: Model(lengths_on_the_cpu, body=nn.GRU(16, 8, batch_first=True)), PADDED),
    "lengths as given": (lambda: Model(lengths_as_given, body=nn.GRU(16, 8, batch_first=True)), PADDED),
    "states on the cpu": (lambda: Model(states_on_the_cpu, body=nn.LSTM(16, 8, batch_first=True)), STEPS),
    "spectrum": (lambda: body(there_and_back), SMALL),
    "weight norm": (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 8))), SMALL),
    "pieces in lists": (lambda: Model(summed, held=nn.ParameterList(list(torch.randn(3, 16, 8)))), SMALL),
}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*is not supported in Python 3.14")
@pytest.mark.parametrize("name", MODELS)
def test_runs_counts_and_leaves_alone(name: str) -> None:
    build, given = MODELS[name]
    model = build()
    before = [(path, id(tensor), tensor._version) for path, tensor in model.state_dict(keep_vars=True).items()]
    report = memsize.report(model, scenarios="fp32,amp-bf16", **given)
    assert [result.status for result in report.scenario_results] == ["run", "run"]
    found = totals(report.trace)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.output_bytes > 0
    for depth in (0, 1, None):
        rows = visible(report.trace, depth)
        assert sum(row.saved_bytes for row in rows) == found.saved_bytes
        assert sum(row.output_bytes for row in rows) == found.output_bytes
    assert [(path, id(t), t._version) for path, t in model.state_dict(keep_vars=True).items()] == before


@pytest.mark.parametrize("name", ["states on the cpu"])
def test_tensors_of_two_devices_are_noted(name: str) -> None:
    build, given = MODELS[name]
    report = memsize.report(build(), scenarios="fp32", **given)
    [note] = report.trace.notes
    assert re.fullmatch(re.escape(f"{MIXED_DEVICES}: test_models.py:") + "[0-9]+", note)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_cell_learns_from_a_state_that_was_made_on_the_cpu(cell: Callable[[int, int], nn.Module]) -> None:
    """The same gradients as from a state that was made where the input is, and the line that made it otherwise."""

    def forward(self: Any, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], 4, device=None if self.there else x.device)
        step = self.cell(x, (state, state) if cell is nn.LSTMCell else state)
        return step[0] if cell is nn.LSTMCell else step

    def traced(there: bool) -> tuple[int, tuple[str, ...]]:
        model = type("Net", (nn.Module,), {"forward": forward, "there": there})()
        model.cell = cell(3, 4)
        trace = memsize.trace(model, (3,)).trace
        return sum(each.bytes for each in trace.storages if each.role == "gradient"), trace.notes

    (gradients, notes), (expected, none) = traced(True), traced(False)
    assert gradients == expected > 0
    assert any(note.startswith(f"{MIXED_DEVICES}: test_models.py:") for note in notes)
    assert not any(note.startswith(MIXED_DEVICES) for note in none)


def test_a_random_decision_is_the_same_each_time() -> None:
    import random

    def forward(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) < 0.1 or random.random() < 0.5:
                continue
            x = layer(x)
        return x

    model = Model(forward, layers=experts(16))
    first, second = (memsize.report(model, (16,), scenarios="fp32").trace for _ in range(2))
    assert first.layers == second.layers


# -- quantized models as they are given -------------------------------------------------------------------------------


class Quantizable(nn.Module):
    """Convolution, batch norm, ReLU, pooling, linear, between the stubs of torch.ao."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out_of = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm(self.conv(self.into(x))))
        return self.out_of(self.head(self.pool(y).flatten(1)))


@pytest.mark.filterwarnings("ignore")
def test_a_statically_quantized_model_has_parameters_and_small_outputs() -> None:
    quantization = torch.ao.quantization
    engine = torch.backends.quantized.engine
    model = Quantizable().eval()
    model.qconfig = quantization.get_default_qconfig("x86" if engine == "none" else engine)
    model = quantization.fuse_modules(model, [["conv", "norm", "relu"]])
    quantization.prepare(model, inplace=True)
    model(torch.randn(2, 3, 16, 16))
    report = memsize.report(quantization.convert(model), (3, 16, 16), batch_size=2, scenarios="as-given", mode="eval")
    # conv 3·8·9 + 8 = 224, head 8·4 + 4 = 36
    assert totals(report.trace).parameters == 260
    assert outputs(report.trace, "conv") == ["quint8[2,8,14,14]"]
    conv = next(layer for layer in report.trace.layers if layer.path == "conv")
    assert conv.output_bytes == 2 * 8 * 14 * 14
    assert any("run on the CPU" in note for note in report.trace.notes)


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_graph_hands_numbers_to_its_ops() -> None:
    """torch.fx keeps scales as buffers, and quantized ops take numbers."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = torch.quantize_per_tensor(x, self.scale, self.zero, torch.quint8)
        return torch.ops.quantized.add_relu(y, y, self.scale, self.zero).dequantize()

    model = Model(forward, body=nn.Linear(1, 1))
    model.register_buffer("scale", torch.tensor(0.1))
    model.register_buffer("zero", torch.tensor(3))
    trace = memsize.report(model, (16,), batch_size=2, scenarios="as-given", mode="eval").trace
    assert outputs(trace, "") == ["float32[2,16]"]


def test_complex_parameters_stay_complex_in_every_precision() -> None:
    model = Model(lambda self, x: self.body(torch.fft.fft(x)).abs(), body=nn.Linear(16, 8, dtype=torch.complex64))
    report = memsize.report(model, (16,), batch_size=2, scenarios="fp32,amp-bf16")
    # (16·8 + 8)·8 bytes
    assert [result.totals.parameter_bytes for result in report.scenario_results if result.totals] == [1_088] * 2


# -- transformers -----------------------------------------------------------------------------------------------------

TINY: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
NAMED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "Bert": ("BertForMaskedLM", TINY | {"intermediate_size": 48}, ("input_ids=16:int64",)),
    "Llama": ("LlamaForCausalLM", TINY | {"intermediate_size": 48}, ("input_ids=16:int64",)),
    "Mixtral": (
        "MixtralForCausalLM",
        TINY | {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4},
        ("input_ids=16:int64",),
    ),
    "SwitchTransformers": (
        "SwitchTransformersForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 50, "num_experts": 4},
        ("input_ids=16:int64", "decoder_input_ids=8:int64"),
    ),
    "DebertaV2": ("DebertaV2Model", TINY | {"intermediate_size": 48}, ("input_ids=16:int64",)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMED)
def test_transformers_models_run_on_their_own_path(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind, config, inputs = NAMED[name]
    with torch.device("meta"):
        model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**config))
    report = memsize.report(model, inputs, batch_size=2, scenarios="fp32,amp-bf16")
    assert [result.status for result in report.scenario_results] == ["run", "run"]
    assert totals(report.trace).parameters == sum(p.numel() for p in model.parameters())
    assert not report.trace.notes
