"""Modules that other tools stumble over: what they store, what a training step makes of it, and that they stay as they
are. The expected figures are counted from the user's own module, by storage, and from arithmetic.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import pack_sequence

import memsize
from memsize.errors import MemsizeError
from tests.gpus import Buckets
from tests.models import plain_tensors
from tests.records import alive, totals

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit", "ignore:.*is not supported in Python 3.14", "ignore:.*weight_norm", "ignore:.*deprecated"
)


class Autocasting(nn.Module):
    """Its first half runs under autocast, inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            y = self.first(x).relu()
        return self.second(y.float())


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Adapted(nn.Module):
    """A frozen base layer beside two small trained factors."""

    def __init__(self, base: nn.Module, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.01)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


class Listed(nn.Module):
    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        values = self.held.values() if isinstance(self.held, nn.ParameterDict) else self.held
        return sum(x @ weight for weight in values)  # type: ignore[return-value]


class Codes(nn.Module):
    """Eight 4-bit codes to an int32, scales and zero points for groups of 32, as GPTQ and AWQ files hold them."""

    def __init__(self, size: int, out: int, group: int = 32) -> None:
        super().__init__()
        self.group = group
        self.register_buffer("qweight", torch.zeros(size, out // 8, dtype=torch.int32))
        self.register_buffer("qzeros", torch.zeros(size // group, out // 8, dtype=torch.int32))
        self.register_buffer("scales", torch.ones(size // group, out, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        shifts = torch.arange(0, 32, 4, device=x.device)
        weight = (self.qweight[:, :, None] >> shifts).flatten(1) & 15
        zeros = (self.qzeros[:, :, None] >> shifts).flatten(1).repeat_interleave(self.group, 0) & 15
        dequantized = (weight - zeros) * self.scales.repeat_interleave(self.group, 0)
        return (x.half() @ dequantized.half()).to(x.dtype)


class Scan(nn.Module):
    """A selective state space, step by step: 16 channels with 8 states each."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.mix, self.out = nn.Linear(16, 32), nn.Linear(16, 17), nn.Linear(16, 16)
        self.spread, self.decay = nn.Linear(1, 16), nn.Parameter(torch.zeros(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        values, gate = self.into(x).chunk(2, -1)
        step, enter, leave = self.mix(values).split([1, 8, 8], -1)
        step, state, outputs = F.softplus(self.spread(step)), x.new_zeros(len(x), 16, 8), []
        for t in range(x.shape[1]):
            state = torch.exp(-step[:, t, :, None] * self.decay.exp()) * state
            state = state + step[:, t, :, None] * enter[:, t, None] * values[:, t, :, None]
            outputs.append((state * leave[:, t, None]).sum(-1))
        return self.out(torch.stack(outputs, 1) * F.silu(gate))


class TimeMix(nn.Module):
    """The running weighted mean of RWKV, with its largest exponent so far."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value, self.gate = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.decay, self.bonus = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        key, value, outputs = self.key(x), self.value(x), []
        above = below = torch.zeros_like(key[:, 0])
        largest = torch.full_like(above, -1e38)
        for t in range(x.shape[1]):
            now = torch.maximum(largest, key[:, t] + self.bonus)
            old, new = torch.exp(largest - now), torch.exp(key[:, t] + self.bonus - now)
            outputs.append((old * above + new * value[:, t]) / (old * below + new))
            largest = torch.maximum(largest - self.decay.exp(), key[:, t])
            above, below = above + new * value[:, t], below + new
        return torch.sigmoid(self.gate(x)) * torch.stack(outputs, 1)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            out[token] += weights[token, place, None] * expert(x[token])
        return out


class Detector(nn.Module):
    """Images of several sizes in a list; losses in training, boxes that are sure enough in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.kinds, self.boxes = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        high, wide = (max(image.shape[axis] for image in images) for axis in (1, 2))
        batch = images[0].new_zeros(len(images), 3, high, wide)
        for index, image in enumerate(images):
            batch[index, :, : image.shape[1], : image.shape[2]].copy_(image)
        features = self.body(batch)
        kinds, boxes = self.kinds(features).flatten(2), self.boxes(features).flatten(2)
        if targets is not None:
            pairs = list(enumerate(targets))
            return {
                "kind": sum(F.cross_entropy(kinds[n].t()[: len(t["labels"])], t["labels"]) for n, t in pairs),
                "box": sum(F.l1_loss(boxes[n].t()[: len(t["boxes"])], t["boxes"]) for n, t in pairs),
            }
        sure = [kinds[n].softmax(0).amax(0) > 0.5 for n in range(len(images))]
        return [{"boxes": boxes[n].t()[kept]} for n, kept in enumerate(sure)]


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.body = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> dict[str, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(decoder_input_ids.shape[1], device=input_ids.device)
        hidden = self.body(self.embed(input_ids), self.embed(decoder_input_ids), tgt_mask=mask, tgt_is_causal=True)
        return {"logits": self.head(hidden)}


def linear() -> nn.Linear:
    return nn.Linear(16, 8)


def parametrized() -> nn.Module:
    layer = nn.Linear(16, 16)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer)


def pruned(removed: bool) -> nn.Module:
    layer = linear()
    prune.l1_unstructured(layer, "weight", 0.5)
    if removed:
        prune.remove(layer, "weight")
    return nn.Sequential(layer)


def compiled_in_place() -> nn.Module:
    model = nn.Sequential(linear(), nn.ReLU())
    model.compile()
    return model


def adapted_int8() -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return nn.Sequential(*(Adapted(layer) for layer in model))


def tensors(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape) for shape in shapes)


ROW, STEPS = tensors((2, 16)), tensors((2, 12, 16))
IMAGES = [torch.rand(3, 32, 40), torch.rand(3, 24, 48)]
OBJECTS = [{"boxes": torch.rand(count, 4), "labels": torch.zeros(count, dtype=torch.int64)} for count in (3, 1)]
PACKED = pack_sequence([torch.randn(length, 16) for length in (5, 3, 2)])
PAIR = {"input_ids": torch.randint(50, (2, 6)), "decoder_input_ids": torch.randint(50, (2, 4))}

KINDS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "data parallel, autocast inside": (lambda: nn.DataParallel(Autocasting()), ROW),
    "data parallel inside": (lambda: nn.Sequential(nn.DataParallel(linear()), nn.ReLU()), ROW),
    "data parallel of a compiled model": (lambda: nn.DataParallel(torch.compile(linear())), ROW),
    "compiled": (lambda: torch.compile(nn.Sequential(linear(), nn.ReLU())), ROW),
    "compiled in place": (compiled_in_place, ROW),
    "scripted": (lambda: torch.jit.script(nn.Sequential(linear(), nn.BatchNorm1d(8), nn.ReLU())), ROW),
    "traced": (lambda: torch.jit.trace(nn.Sequential(linear(), nn.ReLU()), ROW[0]), ROW),
    "scripted inside": (lambda: nn.Sequential(torch.jit.script(linear()), nn.Linear(8, 4)), ROW),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(linear())), ROW),
    "old weight norm": (lambda: nn.Sequential(nn.utils.weight_norm(linear())), ROW),
    "spectral norm": (lambda: nn.Sequential(parametrizations.spectral_norm(linear())), ROW),
    "old spectral norm": (lambda: nn.Sequential(nn.utils.spectral_norm(linear())), ROW),
    "orthogonal": (lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(16, 16))), ROW),
    "parametrized": (parametrized, ROW),
    "pruned": (lambda: pruned(False), ROW),
    "pruned for good": (lambda: pruned(True), ROW),
    "parameter list": (lambda: Listed(nn.ParameterList(torch.randn(16, 8) for _ in range(3))), ROW),
    "parameter dictionary": (lambda: Listed(nn.ParameterDict({"a": torch.randn(16, 8), "b": torch.randn(16, 8)})), ROW),
    "adapters": (lambda: nn.Sequential(Adapted(nn.Linear(16, 32)), nn.ReLU(), Adapted(nn.Linear(32, 8))), ROW),
    "adapters on int8": (adapted_int8, ROW),
    "packed 4-bit codes": (lambda: nn.Sequential(nn.Linear(16, 64), Codes(64, 64)), ROW),
    "experts": (Experts, tensors((64, 16))),
    "packed sequence": (lambda: nn.LSTM(16, 8, 2, bidirectional=True), (PACKED,)),
    "detector": (Detector, (IMAGES, OBJECTS)),
    "encoder and decoder": (EncoderDecoder, PAIR),
    "selective scan": (Scan, STEPS),
    "time mix": (TimeMix, STEPS),
    "synchronized norms": (
        lambda: nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(linear(), nn.BatchNorm1d(8))),
        ROW,
    ),
    "averaged": (lambda: torch.optim.swa_utils.AveragedModel(linear()), ROW),
}


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that `tensor` is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from pieces(getattr(tensor, name))
    else:
        yield tensor


def stored(held: Iterator[Tensor]) -> int:
    """The bytes of all storages in `held`, each once."""
    storages = {s.data_ptr(): s.nbytes() for t in held for piece in pieces(t) for s in [piece.untyped_storage()]}
    return sum(storages.values())


def looks(model: nn.Module) -> list[object]:
    """Everything of a model that a report could touch."""
    seen: list[object] = []
    for path, module in model.named_modules():
        hooks = [name for name, table in vars(module).items() if name.endswith("_hooks") and table]
        seen.append((path, type(module), id(module), module.training, hooks))
    held = [(name, t) for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)]
    return [*seen, *((name, id(t), t._version, t.requires_grad, t.grad) for name, t in held)]


@pytest.mark.thorough
@pytest.mark.parametrize("name", KINDS)
def test_what_is_stored_and_what_a_step_makes_of_it(name: str) -> None:
    torch.manual_seed(0)
    build, data = KINDS[name]
    model = build()
    before = looks(model)
    report = memsize.report(model, input_data=data, scenarios="as-given")
    assert not report.stopped
    assert report.totals.parameters == sum(p.numel() for p in model.parameters())
    assert report.totals.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert report.totals.parameter_bytes == stored(model.parameters())
    assert report.totals.buffer_bytes == stored(model.buffers())

    trace = memsize.trace(model, input_data=data, scenario="as-given", optimizer="adamw", steps=2).trace
    made = {role: [s.bytes for s in trace.storages if s.role == role] for role in ("gradient", "optimizer state")}
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    # one gradient in each of 2 steps, two moments in the first
    assert sum(made["gradient"]) == 2 * trained
    assert sum(made["optimizer state"]) == 2 * trained
    assert looks(model) == before


def test_a_frozen_base_keeps_no_gradient_and_no_state() -> None:
    build, data = KINDS["adapters"]
    step = memsize.trace(build(), input_data=data, optimizer="adamw")
    # (4·16 + 32·4 + 4·32 + 8·4)·4 bytes are trained, of 16·32 + 32 + 32·8 + 8 frozen ones beside them
    assert step.peak.roles["gradient"] == 352 * 4
    assert step.peak.roles["optimizer state"] == 2 * 352 * 4
    assert step.peak.roles["parameter"] == (352 + 808) * 4


def test_pruning_stores_a_mask_and_a_computed_weight() -> None:
    report = memsize.report(pruned(False), input_data=ROW, scenarios="fp32")
    assert (report.totals.parameter_bytes, report.totals.buffer_bytes, report.totals.attribute_bytes) == (544, 512, 512)
    gone = memsize.report(pruned(True), input_data=ROW, scenarios="fp32")
    assert (gone.totals.parameter_bytes, gone.totals.buffer_bytes, gone.totals.attribute_bytes) == (544, 0, 0)


def test_packed_codes_are_counted_as_they_are() -> None:
    report = memsize.report(Codes(64, 64), (64,), scenarios="as-given")
    # 64·64/2 bytes of codes, 2·64/2 of zero points, 2·64 float16 scales
    assert (report.totals.parameters, report.totals.buffer_bytes) == (0, 2048 + 64 + 256)


# TorchScript


def test_layers_inside_a_scripted_module_are_said_to_be_unseen() -> None:
    model = nn.Sequential(torch.jit.script(nn.Sequential(linear(), nn.ReLU())), nn.Linear(8, 4))
    report = memsize.report(model, input_data=ROW, scenarios="fp32")
    assert [layer.path for layer in report.trace.layers if layer.outputs] == ["", "0", "1"]
    assert report.remarks == (
        "TorchScript hides calls of its layers: their outputs and saved tensors are in the row of 0",
    )


def test_weights_of_a_frozen_script_are_its_constants() -> None:
    frozen = torch.jit.freeze(torch.jit.script(nn.Sequential(linear(), nn.ReLU()).eval()))
    assert not list(frozen.parameters())
    report = memsize.report(frozen, input_data=ROW, scenarios="as-given", mode="eval")
    # 16·8 + 8
    assert (report.totals.parameters, report.totals.parameter_bytes) == (136, 544)
    assert [tensor.name for tensor in report.trace.tensors] == ["0.bias", "0.weight"]


def test_scripted_layers_stay_as_they_are_where_others_are_quantized() -> None:
    report = memsize.report(nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 8)), (8,))
    # 8·8 + 8 numbers; of the other 8·8 bytes, a float32 scale and an int8 zero point for each row, and 8 biases
    assert report.scenarios.loc["int8-weight", "parameter_bytes"] == 4 * 72 + 64 + (4 + 1) * 8 + 4 * 8


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.shift = nn.Linear(8, 8), torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + 2 * self.shift


def test_what_a_trace_captures_is_no_weight() -> None:
    report = memsize.report(torch.jit.trace(Shifted(), torch.ones(2, 8)), (8,))
    assert (report.totals.parameters, report.totals.attribute_bytes) == (72, 32)
    [captured] = [tensor for tensor in report.trace.tensors if tensor.kind == "attribute"]
    assert (captured.wrapper, captured.bytes) == ("TorchScript constant", 32)
    assert "converts Linear; this model has none" in report.scenarios.loc["int8-weight", "reason"]


def test_weights_of_frozen_script_cannot_be_quantized() -> None:
    frozen = torch.jit.freeze(torch.jit.script(linear().eval()))
    report = memsize.report(frozen, input_data=ROW, scenarios="as-given,int8-weight", mode="eval")
    assert "frozen TorchScript: bias is a constant" in report.scenarios.loc["int8-weight", "reason"]


# Modules that change


class Late(nn.Module):
    """Makes its head once it has seen an input."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.body, self.again = linear(), again

    def forward(self, x: Tensor) -> Tensor:
        if self.again or not hasattr(self, "head"):
            self.head = nn.Linear(8, 8, dtype=x.dtype, device=x.device)
        return self.head(self.body(x))


class Caching(nn.Module):
    """Keeps its last features in a buffer that is None at first, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = linear(), 0
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        self.last, self.calls = y.detach().clone(), self.calls + 1
        return y


@pytest.mark.parametrize("again", [False, True])
def test_late_modules_are_counted_as_after_a_forward(again: bool) -> None:
    model = Late(again)
    report = memsize.report(model, input_data=ROW, scenarios="fp32,fp16,amp-bf16")
    assert not hasattr(model, "head")
    assert [result.status for result in report.scenario_results] == ["run"] * 3
    # (16·8 + 8) + (8·8 + 8), as the model has once it was run
    copy.deepcopy(model)(*ROW)
    assert report.totals.parameters == 136 + 72
    assert "the forward registers head.weight and head.bias" in report.remarks[0]


def test_late_modules_are_trained() -> None:
    step = memsize.trace(Late(), input_data=ROW, optimizer="adamw")
    assert step.peak.roles["parameter"] == step.peak.roles["gradient"] == 208 * 4


def test_late_buffers_are_counted() -> None:
    model = Caching()
    report = memsize.report(model, input_data=ROW, scenarios="fp32")
    assert (model.last, model.calls) == (None, 0)
    assert report.totals.buffer_bytes == 2 * 8 * 4


def test_lazy_modules_are_initialised_in_the_twin_only() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(4))
    report = memsize.report(model, input_data=tensors((2, 3, 8, 8)), scenarios="fp32,fp16,int8-weight")
    # 4·3·9 + 4, 4 + 4, 4·6·6·4 + 4
    assert report.totals.parameters == 112 + 8 + 580
    assert all(nn.parameter.is_lazy(parameter) for parameter in model.parameters())
    assert [type(module) for module in model] == [nn.LazyConv2d, nn.LazyBatchNorm2d, nn.Flatten, nn.LazyLinear]


# Several GPUs


def test_data_parallel_says_what_each_gpu_has() -> None:
    report = memsize.report(nn.DataParallel(Autocasting()), input_data=ROW, scenarios="fp32")
    found = next(finding for finding in report.why() if finding.code == "data-parallel-replicas")
    # (16·32 + 32 + 32·8 + 8)·4 bytes on every further GPU
    assert found.bytes == 808 * 4


@pytest.fixture
def process_group() -> Iterator[None]:
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("torch.distributed is not in this PyTorch")
    with tempfile.TemporaryDirectory() as folder:
        store = distributed.FileStore(os.path.join(folder, "store"), 1)
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield
        distributed.destroy_process_group()


def peak_gradients(model: nn.Module) -> int:
    return memsize.trace(model, (512,), optimizer="sgd").peak.roles["gradient"]


def test_distributed_training_stores_gradients_twice(process_group: None) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))

    one = 4 * (512 * 512 + 512) * 4
    assert peak_gradients(build()) == one
    model = nn.parallel.DistributedDataParallel(build())
    assert peak_gradients(model) == 2 * one
    finding = next(f for f in memsize.report(model, (512,), scenarios="fp32").why() if f.code == "gradient-buckets")
    assert finding.bytes == one
    for _ in range(3):  # it makes its lasting buckets after a first step, and tells of them later
        model(torch.randn(1, 512)).sum().backward()
    sizes = [int(size) for size in model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")]
    trace = memsize.trace(model, (512,), optimizer="sgd").trace
    # the last layer fills the first bucket of 1 MiB, and the other three share one of up to 25
    assert [s.bytes for s in trace.storages if s.role == "gradient"][:2] == sizes == [one // 4, 3 * one // 4]
    assert peak_gradients(nn.parallel.DistributedDataParallel(build(), gradient_as_bucket_view=True)) == one


def test_a_bucket_is_closed_at_its_limit_and_the_first_one_at_1_mib() -> None:
    mib = 2**20

    def sizes(*mebibytes: float, limit: int | None = None) -> list[float]:
        parameters = [torch.empty(int(size * mib) // 4, device="meta") for size in reversed(mebibytes)]
        buckets = Buckets() if limit is None else Buckets(limit)
        return [count * dtype.itemsize / mib for dtype, count in buckets.sizes(parameters)]

    # Parameters are taken from the last one on, here in the order given
    assert sizes(1, 24, 1, 3) == [1, 25, 3]
    assert sizes(0.5, 0.25, 0.5, 24, 0.5, 0.5) == [1.25, 25]
    assert sizes(30, 30) == [30, 30]
    assert sizes(1, 24, 0.75, 0.25) == [1, 25]
    assert sizes(0.5, 0.25, 0.25, limit=mib // 2) == [0.5, 0.5]
    assert sizes(1, 2, 3, 1, limit=3 * mib) == [1, 5, 1]


def test_each_dtype_has_buckets_of_its_own() -> None:
    halves = [torch.empty(2**19, dtype=torch.float16, device="meta") for _ in range(2)]
    single = torch.empty(2**18, device="meta")
    # 1 MiB of each closes the first bucket of its dtype, the last parameter's first; what is left is open
    assert Buckets().sizes([halves[0], single, halves[1]]) == [
        (torch.float16, 2**19),
        (torch.float32, 2**18),
        (torch.float16, 2**19),
    ]


def test_gradients_that_are_views_of_buckets_stay_when_they_are_zeroed(process_group: None) -> None:
    def at_the_end_of_each_forward(**options: bool) -> list[int]:
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(512, 512)), **options)
        trace = memsize.trace(model, (512,), optimizer="sgd", steps=2).trace
        last = {trace.phases[event.phase]: index for index, event in enumerate(trace.events)}
        ends = [last[f"forward {step}"] for step in (1, 2)]
        return [
            sum(size for s, size in alive(trace, end).items() if trace.storages[s].role == "gradient") for end in ends
        ]

    one = (512 * 512 + 512) * 4
    # Buckets beside the gradients, which zero_grad drops; views of buckets, which it only fills with zeros
    assert at_the_end_of_each_forward() == [one, one]
    assert at_the_end_of_each_forward(gradient_as_bucket_view=True) == [one, one]
    trace = memsize.trace(
        nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(512, 512)), gradient_as_bucket_view=True),
        (512,),
        optimizer="sgd",
        steps=2,
    ).trace
    gradients = [index for index, storage in enumerate(trace.storages) if storage.role == "gradient"]
    assert [event.delta > 0 for event in trace.events if event.storage in gradients] == [True, True]


def test_sharded_models_are_refused(process_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1,))
    divided = parallelize_module(nn.Sequential(linear()), mesh, {"0": ColwiseParallel()})
    for model in (fully_shard(nn.Sequential(linear()), mesh=mesh), divided):
        with pytest.raises(MemsizeError, match="before it is sharded"):
            memsize.report(model, (16,))
        with pytest.raises(MemsizeError, match="before it is sharded"):
            memsize.trace(model, (16,), gpu="t4")


# Routing


def test_routing_is_assumed_to_be_even_and_said_so() -> None:
    build, data = KINDS["experts"]
    report = memsize.report(build(), input_data=data, scenarios="fp32")
    # 64 tokens to 2 of 4 experts each
    experts = [layer for layer in report.trace.layers if layer.path in {f"experts.{index}" for index in range(4)}]
    assert [str(layer.outputs[0].spec) for layer in experts] == ["float32[32,16]"] * 4
    assert "a router sends every expert the same share" in report.assumptions[0]
    assert totals(report.trace).parameters == 16 * 4 + 4 * (16 * 32 + 32 + 32 * 16 + 16)


class Conditional(nn.Module):
    """A branch that its batch decides, or its input."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.by_data = by_data
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        decides = x.sum() > 0 if self.by_data else torch.tensor(len(x) < 4)
        return torch.cond(decides, lambda x: self.first(x).exp().sum(-1), lambda x: self.second(x).exp().sum(-1), (x,))


def test_a_conditional_keeps_operands_and_computes_its_branch_again() -> None:
    trace = memsize.trace(Conditional(by_data=False), input_size=(64,), batch_size=8, optimizer="sgd").trace
    assert totals(trace).saved_bytes == 8 * 64 * 4  # the input; the condition is on the CPU
    products = [storage for storage in trace.storages if storage.op == "mm" and storage.shape == (8, 32)]
    assert len(products) == 2 * 3  # of the second branch, in forward and backward of three steps
    check_first_branch("fp32")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_compiled_conditional_takes_its_first_branch() -> None:
    check_first_branch("fp32+compile")


def check_first_branch(scenario: str) -> None:
    options: dict[str, Any] = {"input_size": (64,), "batch_size": 8, "optimizer": "sgd", "scenario": scenario}
    trace = memsize.trace(Conditional(by_data=True), **options).trace
    assert totals(trace).saved_bytes == 8 * 64 * 4 + 1 and not any(one.shape == (8, 32) for one in trace.storages)
    assert "torch.cond is assumed to take its first branch where that depends on data" in trace.notes


class Loop(nn.Module):
    """A loop that counts, or ends by its input."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.by_data = by_data
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        def goes_on(count: Tensor, x: Tensor) -> Tensor:
            return x.sum() < 0 if self.by_data else count < 5

        count = torch.zeros((), dtype=torch.int64, device=x.device)
        return while_loop(goes_on, lambda count, x: (count + 1, self.linear(x).sin()), (count, x))[1]


@pytest.mark.parametrize(("by_data", "iterations"), [(False, 5), (True, 2)])
def test_a_loop_runs_as_often_as_it_counts(by_data: bool, iterations: int) -> None:
    trace = memsize.trace(Loop(by_data), input_size=(64,), batch_size=8, optimizer="sgd").trace
    products = [storage for storage in trace.storages if storage.op == "addmm" and storage.shape == (8, 64)]
    assert len(products) == 2 * 3 * iterations  # in forward and backward of three steps
    note = "while_loop is assumed to run twice where that depends on data"
    assert (note in trace.notes) is by_data


def test_code_that_is_compiled_inside_a_forward_runs_as_it_is_written() -> None:
    class Compiling(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return torch.compile(lambda x: super(Compiling, self).forward(x).sin())(x)

    layers = nn.Linear(64, 32), nn.ReLU()
    trace = memsize.trace(Compiling(*layers), input_size=(64,), batch_size=8).trace
    assert [storage.shape for storage in trace.storages if storage.op == "sin"] == [(8, 32)] * 3


def graph_bytes(result: Tensor, model: nn.Module) -> int:
    """The bytes of the storages that the graph of a real `result` saved, without those of `model`."""
    stored = {p.untyped_storage().data_ptr() for t in model.parameters() for p in plain_tensors(t)}
    nodes, seen, sizes = [result.grad_fn], set(), {}
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        named = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        for tensor in (*named, *getattr(node, "saved_tensors", ())):
            for part in plain_tensors(tensor) if isinstance(tensor, Tensor) else ():
                sizes[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        nodes += [later for later, _ in node.next_functions]
    return sum(size for address, size in sizes.items() if address not in stored)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("quantization", "Int8WeightOnlyConfig"),  # copies of the second and third weight in the input's dtype
        ("quantization", "Int8DynamicActivationInt8WeightConfig"),  # the rounded input passes no gradient on
        ("prototype.quantized_training", "int8_weight_only_quantized_training"),
        ("prototype.quantized_training", "int8_mixed_precision_training"),
    ],
)
@pytest.mark.parametrize("adapted", [False, True])
def test_what_int8_models_that_are_trained_save_is_what_they_save_on_a_cpu(
    module: str, name: str, adapted: bool
) -> None:
    config = getattr(pytest.importorskip(f"torchao.{module}"), name)()
    quantize_ = pytest.importorskip("torchao.quantization").quantize_
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 10))
    quantize_(model, config)
    if adapted:
        model = nn.Sequential(*(Adapted(m) if isinstance(m, nn.Linear) else m for m in model.children()))
    x = torch.randn(4, 64)
    predicted = memsize.report(model, x, scenarios="as-given").scenario_results[0].totals
    assert predicted is not None and predicted.saved_bytes == graph_bytes(model(x), model)
