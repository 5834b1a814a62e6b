"""The trace of a forward: what is new memory, what is kept, and that PyTorch's own run says the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

import memsize
from memsize import Trace
from memsize.errors import ForwardError
from memsize.tracing.run import Setup
from tests import models
from tests.kernels import registry
from tests.models import Ledger, inputs_from_data, meta_copy, saving
from tests.records import live_bytes, split_phase, totals, visible
from tests.workloads import Forward

ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "small": (models.Small, lambda: torch.randn(2, 3, 32, 32)),
    "tied": (models.Tied, lambda: torch.randint(0, 1065, (2, 16))),
    "unused": (models.Unused, lambda: torch.randn(3, 100)),
    "reused": (models.Reused, lambda: torch.randn(1, 16, 8, 8)),
    "attention": (models.Attention, lambda: torch.randn(2, 7, 64)),
    "direct": (models.Direct, lambda: torch.randn(1, 197, 768)),
    "listed": (models.Listed, lambda: torch.randn(2, 100)),
    "nested": (models.Nested, lambda: torch.randn(2, 10)),
    "recurrent": (models.Recurrent, lambda: torch.randn(2, 5, 16)),
    "detached": (models.Detached, lambda: torch.randn(2, 10)),
    "looking": (models.Looking, lambda: torch.randn(2, 10)),
    "residual": (models.Residual, lambda: torch.randn(2, 4, 8, 8)),
    "encoder": (lambda: nn.TransformerEncoderLayer(32, 4, batch_first=True), lambda: torch.randn(2, 6, 32)),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.GELU(), nn.AdaptiveAvgPool2d(1)),
        lambda: torch.randn(2, 3, 9, 9),
    ),
}


@pytest.fixture(autouse=True)
def without_onednn() -> Iterator[None]:
    """oneDNN's fused LSTM is the CPU's own affair: no other device has it."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(enabled)


class Functions(nn.Module):
    """Makes a tensor at each of three lines, and keeps the first two at the line that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        value = nn.functional.relu(value)
        made = self.fc(value)
        return nn.functional.gelu(made)


def test_lines_that_make_and_keep() -> None:
    """The innermost line outside of PyTorch, also for what an `nn.Linear` makes; nobody's line for parameters.

    The input needs no gradient, so that `fc` keeps the result of `relu`, not `relu` itself.
    """
    trace = forward(Functions(), torch.randn(4, 8))
    first = Functions.forward.__code__.co_firstlineno
    at = [f"test_tracing.py:{first + place}" for place in (1, 2, 3)]
    relu, linear, gelu = (next(s for s in trace.storages if s.op == op) for op in ("relu", "addmm", "gelu"))
    assert [trace.lines[s.line] for s in (relu, linear, gelu)] == at
    assert [trace.lines[s.saved_at] for s in (relu, linear)] == at[1:]
    assert (gelu.saved_at, gelu.saved_by) == (-1, -1)
    assert {s.line for s in trace.storages if s.role == "parameter"} == {-1}


def forward(model: nn.Module, value: object, device: str = "meta", training: bool = True) -> Trace:
    """The trace of one plain forward without CUDA's semantics, on `meta` or really computed on the CPU."""
    if device == "meta":
        twin, call = meta_copy(model), inputs_from_data(value).call()
    else:
        twin, call = copy.deepcopy(model), ((value,), {})
    return Forward().run(Setup(type(model).__name__, "as-given", twin, call, training, device=device))


def kept_by_pytorch(model: nn.Module, value: Tensor) -> int:
    """Bytes that autograd keeps in a real run on the CPU: unique storages of saved tensors, parameters apart."""
    kept: dict[int, int] = {}
    held = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in held:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(value)
    del result
    return sum(kept.values())


@pytest.mark.parametrize("name", ZOO)
def test_keeps_what_autograd_keeps_on_the_cpu(name: str) -> None:
    build, make = ZOO[name]
    model, value = build(), make()
    assert totals(forward(model, value)).saved_bytes == kept_by_pytorch(copy.deepcopy(model), value)


# A CPU computes all of an LSTM's input gates ahead of its steps; no other device does.
@pytest.mark.parametrize("name", [name for name in ZOO if name != "recurrent"])
def test_meta_and_real_runs_write_the_same_events(name: str) -> None:
    build, make = ZOO[name]
    model, value = build(), make()
    planned, real = forward(model, value), forward(model, value, "cpu")
    assert planned.layers == real.layers
    assert _sizes(planned) == _sizes(real)


def _sizes(trace: Trace) -> list[tuple[int, int, int]]:
    """Every event as bytes, layer and phase, apart from storages of a few bytes."""
    return [(event.delta, event.layer, event.phase) for event in trace.events]


class Monitored(nn.Module):
    """Logs its result's norm, in a graph that is dropped before it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.fc(x)
        self.norm = h.norm().item()
        return h


def test_what_a_dropped_graph_had_saved_is_not_kept() -> None:
    trace = forward(Monitored(), torch.randn(256, 256))
    # The layer keeps its input, 256·256·4; its result, which the norm had saved, is only returned.
    assert totals(trace).saved_bytes == 262_144
    assert [(s.role, s.saved_by) for s in trace.storages if s.op == "addmm"] == [("output", -1)]


def test_dropped_graphs_leave_nothing_for_the_next_step() -> None:
    model = nn.Sequential(*(Monitored() for _ in range(6)))
    steps = memsize.trace(model, (256,), batch_size=64, steps=4).trace
    peaks: dict[int, int] = {}
    for event, level in zip(steps.events, live_bytes(steps.events), strict=True):
        step = split_phase(steps.phases[event.phase])[1]
        peaks[step] = max(peaks.get(step, 0), level)
    assert peaks[2] == peaks[3] == peaks[4]


def test_what_is_saved_again_belongs_to_the_layer_whose_graph_lasts() -> None:
    trace = forward(nn.Sequential(Monitored(), nn.Linear(256, 8)), torch.randn(256, 256))
    assert {layer.path: layer.saved_bytes for layer in trace.layers} == {"": 0, "0": 0, "0.fc": 262_144, "1": 262_144}


def test_a_saved_tensor_is_held_without_its_graph() -> None:
    weight = torch.randn(8, requires_grad=True)
    result = weight.exp()
    ledger = Ledger("cpu")
    held = ledger.saved(result).tensor
    assert held.grad_fn is None and held.data_ptr() == result.data_ptr()
    # A leaf has no graph. Data that it is given later is what backward reads, as sharded training expects.
    assert ledger.saved(weight).tensor is weight


def test_a_selective_checkpoint_sees_no_hooks_of_a_user() -> None:
    find = getattr(checkpoint, "_current_user_saved_tensors_hooks", None)
    if find is None:
        pytest.skip("this PyTorch looks for no hooks: 2.14 does")
    with saving(Ledger().saved):
        assert find() is None
        with torch.autograd.graph.save_on_cpu():
            assert find() is not None
    assert find() is None


def test_in_place_results_and_views_bring_no_memory() -> None:
    trace = forward(models.Small(), torch.randn(2, 3, 32, 32))
    memory = {layer.path: [(output.memory, output.bytes) for output in layer.outputs] for layer in trace.layers}
    assert memory["conv"] == [("new", 2 * 8 * 30 * 30 * 4)]
    assert memory["relu"] == [("in place", 0)]
    assert memory["flat"] == [("view", 0)]
    assert memory[""] == [("passed", 0)]
    # conv and norm 57,600 each, pool 2·8·15·15·4 = 14,400, dropout the same, head 2·10·4 = 80
    assert totals(trace).output_bytes == 57_600 + 57_600 + 14_400 + 14_400 + 80


def test_every_output_of_a_nested_result_is_listed() -> None:
    trace = forward(models.Nested(), torch.randn(2, 10))
    outputs = trace.layers[0].outputs
    assert [str(output.spec) for output in outputs] == ["float32[2,10]", "float32[2,10]", "float32[2,3]"]
    # The body's 80 bytes are the body's; the sigmoid's 80 are new here; the slice is a view.
    assert [(output.memory, output.bytes) for output in outputs] == [("passed", 0), ("new", 80), ("view", 0)]


def test_a_tensor_saved_in_a_transform_keeps_its_outer_graph() -> None:
    weight, outer = torch.randn(3, requires_grad=True), []

    def inner(x: Tensor) -> Tensor:
        result = x * weight
        held = Ledger("cpu").saved(result).tensor
        outer.append((held.grad_fn, torch._C._functorch.get_unwrapped(held).requires_grad))
        return result.sum()

    torch.func.grad(inner)(torch.randn(3))
    assert outer == [(None, True)]


def test_a_tensor_that_is_returned_again_is_listed_again() -> None:
    class Repeating(nn.Module):
        def forward(self, x: Tensor) -> dict[str, object]:
            h = x + 1
            return {"first": h, "all": [h, h], "input": x}

    outputs = forward(Repeating(), torch.randn(2, 10)).layers[0].outputs
    assert [(each.memory, each.bytes) for each in outputs] == [("new", 80), ("new", 0), ("new", 0), ("passed", 0)]


def test_a_module_under_several_names_says_so() -> None:
    model = nn.Module()
    model.first = nn.Sequential(nn.Linear(10, 10), nn.ReLU())
    model.again, model.head = model.first, nn.ModuleList([model.first[0]])
    model.forward = lambda x: model.again(x)  # type: ignore[method-assign]
    trace = forward(model, torch.randn(2, 10))
    aliases = {layer.path: layer.aliases for layer in trace.layers if layer.aliases}
    assert aliases == {"first": ("again",), "first.0": ("head.0",)}
    # A container without a figure has a row all the same, which is the only one to say so.
    assert {row.path: row.marks for row in visible(trace) if row.aliases} == {
        "first": ("also again",),
        "first.0": ("also head.0",),
    }


def test_a_module_called_three_times_has_one_row() -> None:
    trace = forward(models.Reused(), torch.randn(1, 16, 8, 8))
    conv = trace.layers[1]
    assert (conv.calls, conv.parameters, len(conv.outputs)) == (3, 2_320, 3)
    assert conv.output_bytes == 3 * 16 * 8 * 8 * 4


def test_tied_weights_are_stored_once_and_the_tie_is_named() -> None:
    trace = forward(models.Tied(), torch.randint(0, 1065, (1, 16)))
    assert (totals(trace).parameters, totals(trace).parameter_bytes) == (68_160, 272_640)
    assert {tensor.name: tensor.tied_to for tensor in trace.tensors} == {
        "embed.weight": None,
        "head.weight": "embed.weight",
    }


def test_unused_parameters_and_cut_gradients_are_marked() -> None:
    unused = {t.name: t.used for t in forward(models.Unused(), torch.randn(1, 100)).tensors}
    assert unused == {
        "first.weight": True,
        "first.bias": True,
        "idle.weight": False,
        "idle.bias": False,
        "second.weight": True,
        "second.bias": True,
    }
    detached = {t.name: (t.used, t.differentiable) for t in forward(models.Detached(), torch.randn(1, 10)).tensors}
    assert detached["first.weight"] == (True, False)
    assert detached["first.bias"] == detached["second.weight"] == (True, True)


def test_lazy_parameters_are_counted_once_they_have_a_shape() -> None:
    model = models.Lazy()
    trace = forward(model, torch.randn(2, 20))
    assert (totals(trace).parameters, totals(trace).parameter_bytes) == (210, 840)
    assert nn.parameter.is_lazy(model.body.weight)


def test_an_encoder_in_eval_mode_takes_the_path_that_hooks_would_close() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, batch_first=True)
    trace = forward(layer, torch.randn(2, 6, 32), training=False)
    assert all(layer.calls for layer in trace.layers if layer.path in ("", "self_attn", "linear1"))


def test_values_that_follow_from_shapes_are_known() -> None:
    trace = forward(models.Looking(), torch.randn(2, 10))
    assert str(trace.layers[0].outputs[0].spec) == "float32[2,4]"
    assert trace.assumptions == ("every value is finite (isnan and isinf are False)",)


def test_a_decision_that_only_data_can_make_names_the_layer() -> None:
    with pytest.raises(ForwardError, match="reads a data-dependent value") as caught:
        forward(models.Deciding(), torch.randn(2, 10))
    trace = caught.value.trace
    assert trace is not None
    assert trace.failure is not None
    # What ran before is still there.
    assert [layer.calls for layer in trace.layers] == [0, 1]


def test_a_decision_can_be_taken_by_computing() -> None:
    report = memsize.report(models.Deciding(), (10,), execute=True, scenarios="fp32,amp-bf16", train="sgd")
    assert [result.status for result in report.scenario_results] == ["run", "run"]
    assert any("with real values" in note for note in report.remarks)
    built = memsize.report(models.Toy().to("meta"), (3, 64, 64), execute=True, scenarios="fp32")
    planned = memsize.report(models.Toy().to("meta"), (3, 64, 64), scenarios="fp32")
    assert built.totals == planned.totals


def test_a_shape_rule_answers_for_a_custom_op() -> None:
    library = torch.library.Library("memsize_test", "FRAGMENT")
    library.define("scan(Tensor x, int width) -> Tensor")

    def native(x: Tensor, width: int) -> Tensor:
        raise RuntimeError("x must be a CUDA tensor")

    library.impl("scan", native, "CUDA")

    class Scanning(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.memsize_test.scan(x, 3) + 1

    with pytest.raises(ForwardError):
        forward(Scanning(), torch.zeros(2, 5))

    @memsize.shape_rule("memsize_test::scan")
    def scan(x: Tensor, width: int) -> Tensor:
        return torch.empty((*x.shape, width), device="meta")

    try:
        trace = forward(Scanning(), torch.zeros(2, 5))
    finally:
        del registry.TABLE["memsize_test::scan"]
    assert str(trace.layers[0].outputs[0].spec) == "float32[2,5,3]"


def test_a_failure_says_what_the_layer_wanted_and_got() -> None:
    with pytest.raises(ForwardError) as caught:
        forward(models.Small(), torch.randn(2, 3, 16, 16))
    message = str(caught.value)
    # 16 → conv 14 → pool 7: 8·7·7 = 392 features where the head wants 8·15·15 = 1800.
    assert "head (Linear)" in message
    assert "float32[2,392]" in message
    assert "in_features=1800" in message


def test_an_undefined_attribute_names_the_users_line() -> None:
    with pytest.raises(ForwardError, match=r"no attribute 'haed'[\s\S]*models\.py:\d+"):
        forward(models.Forgetful(), torch.randn(2, 10))


def test_batch_norm_that_refuses_one_value_offers_a_way_out() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 8), nn.BatchNorm2d(4))
    with pytest.raises(ForwardError, match=r"--batch-size 2, or --mode eval"):
        forward(model, torch.randn(1, 3, 8, 8))


def test_mixed_dtypes_fail_as_they_do_for_real() -> None:
    model = nn.Sequential(nn.Linear(8, 8).half(), nn.Linear(8, 8))
    with pytest.raises(ForwardError, match="dtype"):
        forward(model, torch.randn(1, 8).half())


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
def test_an_op_without_a_meta_kernel_runs_on_the_cpu_and_says_so() -> None:
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 4)), {nn.Linear})
    trace = forward(model, torch.randn(2, 8))
    assert str(trace.layers[0].outputs[0].spec) == "float32[2,4]"
    assert any("run on the CPU" in note for note in trace.notes)
