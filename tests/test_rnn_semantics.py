"""Recurrent layers as cuDNN runs them: what is returned, kept and made on the way, in bytes by hand."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.kernels import Batch, Net, autocast_region, cuda_semantics, reserve_bytes, weight_elements
from tests.models import MetaDispatchMode

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
MODES = {"relu": 0, "tanh": 1, "lstm": 2, "gru": 3}
T, B, N, H = 10, 8, 32, 64
"""Steps, sequences, input and hidden size of most of the tests."""

# What cuDNN 9.24 answers for one LSTM layer of these sizes, and for variations on it: mode, layers, bidirectional,
# projection, element size, dropout, steps of packed sequences, and the bytes of the reserve space.
ANSWERED: list[tuple[str, int, bool, int, int, float, int, int]] = [
    ("lstm", 1, False, 0, 4, 0.0, 80, 102_656),
    ("lstm", 2, False, 0, 4, 0.0, 80, 225_536),
    ("lstm", 3, False, 0, 4, 0.0, 80, 348_416),
    ("lstm", 1, True, 0, 4, 0.0, 80, 205_056),
    ("lstm", 2, True, 0, 4, 0.0, 80, 450_816),
    ("lstm", 3, True, 0, 4, 0.0, 80, 696_576),
    ("lstm", 1, False, 0, 2, 0.0, 80, 51_456),
    ("lstm", 1, False, 0, 8, 0.0, 80, 205_056),
    ("lstm", 1, False, 16, 4, 0.0, 80, 128_256),
    ("lstm", 2, False, 16, 4, 0.0, 80, 276_736),
    ("lstm", 2, False, 0, 4, 0.5, 80, 226_176),
    ("lstm", 3, False, 0, 4, 0.5, 80, 349_696),
    ("lstm", 2, True, 0, 4, 0.5, 80, 453_376),
    ("lstm", 1, False, 0, 4, 0.0, 52, 66_816),
    ("gru", 1, False, 0, 4, 0.0, 80, 123_136),
    ("gru", 2, False, 0, 4, 0.0, 80, 266_496),
    ("gru", 2, False, 0, 4, 0.5, 80, 267_136),
    ("tanh", 1, False, 0, 4, 0.0, 80, 20_736),
    ("relu", 1, False, 0, 4, 0.0, 80, 20_736),
    ("tanh", 2, False, 0, 4, 0.0, 80, 61_696),
    ("tanh", 2, True, 0, 4, 0.0, 80, 123_136),
]


class Log(MetaDispatchMode):
    """Answers every op by shape and writes down which ones were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def run_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.ops.append(func._overloadpacket.__name__)
        return super().run_op(func, args, kwargs)


class Run:
    """One forward of `model` on `meta`, and what it showed."""

    def __init__(self, model: nn.Module, *inputs: Any, amp: torch.dtype | None = None, **options: Any) -> None:
        self.log, self.kept = Log(), dict[int, torch.UntypedStorage]()
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        self.copies: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                self.kept[storage._cdata] = storage
            return tensor

        def copied(_: Tensor, copy: Tensor) -> None:
            self.copies[copy.untyped_storage()._cdata] = copy.untyped_storage().nbytes()

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        with self.log, cuda_semantics(autocast_observer=copied, **options), hooks, contextlib.ExitStack() as stack:
            if amp:
                stack.enter_context(autocast_region(amp))
            self.result = model(*inputs)
        self.kept_bytes = sum(storage.nbytes() for storage in self.kept.values())

    def backward(self) -> None:
        """The gradient of the sum of the first output."""
        output = self.result[0] if isinstance(self.result, tuple) else self.result
        with self.log:
            (output.data if hasattr(output, "batch_sizes") else output).float().sum().backward()


def meta(*shape: int, dtype: torch.dtype = FP32, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def recurrent(kind: str = "LSTM", **options: Any) -> nn.RNNBase:
    layer: nn.RNNBase = getattr(nn, kind)(N, H, device="meta", **options)
    return layer


# -- sizes of cuDNN's own -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ANSWERED, ids=str)
def test_reserve_space_is_what_cudnn_asks_for(case: tuple[str, int, bool, int, int, float, int, int]) -> None:
    mode, layers, both, projected, size, dropout, steps, answer = case
    net = Net(MODES[mode], N, H, projected, layers, both)
    assert reserve_bytes(net, Batch(B, T, steps), size, dropout) == answer


def test_reserve_space_by_hand() -> None:
    # Rounded up by parts: gates 4 x 3 x 5 x 11 x 4 = 2,640 to 2,656; cell 660 to 672; and 256 on top.
    assert reserve_bytes(Net(2, 7, 11, 0, 1, False), Batch(5, 3, 15), 4, 0.0) == 2_656 + 672 + 256 == 3_584
    # Two layers: gates 5,280, cells 1,320 to 1,344, the output between them 660 to 672.
    assert reserve_bytes(Net(2, 7, 11, 0, 2, False), Batch(5, 3, 15), 4, 0.0) == 5_280 + 1_344 + 672 + 256 == 7_552


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("both", [False, True])
def test_flat_weights_have_room_for_every_parameter(kind: str, layers: int, both: bool) -> None:
    mode = {"LSTM": 2, "GRU": 3, "RNN": 1}[kind]
    layer = recurrent(kind, num_layers=layers, bidirectional=both)
    net = Net(mode, N, H, 0, layers, both)
    assert weight_elements(net) == sum(p.numel() for p in layer.parameters())
    bare = recurrent(kind, num_layers=layers, bidirectional=both, bias=False)
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    biases = 2 * gates * H * layers * (1 + both)
    assert weight_elements(net) == sum(p.numel() for p in bare.parameters()) + biases


def test_flat_weights_with_projections() -> None:
    layer = recurrent(proj_size=16, num_layers=2, bidirectional=True)
    assert weight_elements(Net(2, N, H, 16, 2, True)) == sum(p.numel() for p in layer.parameters())


# -- what a layer returns and keeps -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # the real run's
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "bidirectional": True},
        {"batch_first": True, "bias": False},
        {"num_layers": 3, "dropout": 0.5},
        {"proj_size": 16, "num_layers": 2},
        {"nonlinearity": "relu"},
    ],
    ids=str,
)
def test_shapes_are_those_of_a_real_run(kind: str, options: dict[str, Any]) -> None:
    if ("proj_size" in options and kind != "LSTM") or ("nonlinearity" in options and kind != "RNN"):
        pytest.skip("not an option of this layer")
    shape = (B, T, N) if options.get("batch_first") else (T, B, N)
    layer = recurrent(kind, **options)
    run = Run(layer, meta(*shape, grad=True))
    assert "_cudnn_rnn" in run.log.ops
    real, state = getattr(nn, kind)(N, H, **options)(torch.zeros(shape))
    ours, our_state = run.result
    assert ours.shape == real.shape
    assert (ours.transpose(0, 1) if options.get("batch_first") else ours).is_contiguous()  # time-major in memory
    states, our_states = ((s,) if isinstance(s, Tensor) else s for s in (state, our_state))
    assert [s.shape for s in our_states] == [s.shape for s in states]
    run.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in layer.parameters())
    assert run.log.ops.count("_cudnn_rnn_backward") == 1


def test_what_a_layer_keeps() -> None:
    run = Run(recurrent(), meta(T, B, N, grad=True))
    # Input, both initial states, output, reserve space. The flat weights are the parameters themselves.
    x, state, out = 4 * T * B * N, 4 * B * H, 4 * T * B * H
    assert run.kept_bytes == x + 2 * state + out + 102_656
    assert run.log.ops.count("_cudnn_rnn") == 1


def test_evaluation_has_no_reserve_space() -> None:
    layer = recurrent().eval()
    run = Run(layer, meta(T, B, N))
    sizes = [storage.nbytes() for storage in run.kept.values()]
    assert 102_656 not in sizes
    assert 0 in sizes
    with pytest.raises(RuntimeError, match="training mode"):
        run.backward()


def test_gradients_of_the_weights_share_one_buffer() -> None:
    layer = recurrent(num_layers=2)
    Run(layer, meta(T, B, N)).backward()
    storages = {p.grad.untyped_storage()._cdata: p.grad.untyped_storage().nbytes() for p in layer.parameters()}
    assert list(storages.values()) == [4 * sum(p.numel() for p in layer.parameters())]
    bare = recurrent(bias=False)
    Run(bare, meta(T, B, N)).backward()
    assert [p.grad.untyped_storage().nbytes() for p in bare.parameters()] == [4 * p.numel() for p in bare.parameters()]


def test_packed_sequences() -> None:
    lengths = torch.tensor([10, 9, 8, 7, 6, 5, 4, 3])  # 52 steps in all

    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = recurrent(bidirectional=True)

        def forward(self, x: Tensor) -> Any:
            return self.layer(pack_padded_sequence(x, lengths))

    run = Run(Packs(), meta(T, B, N, grad=True))
    packed, (h, c) = run.result
    assert packed.data.shape == (52, 2 * H)
    assert h.shape == c.shape == (2, B, H)
    assert 2 * 5 * 52 * H * 4 + 256 in [storage.nbytes() for storage in run.kept.values()]
    run.backward()


# -- flat weights -----------------------------------------------------------------------------------------------------


def kept_sizes(run: Run) -> list[int]:
    return [storage.nbytes() for storage in run.kept.values()]


def test_weights_that_lie_apart_are_copied_at_every_call() -> None:
    layer = recurrent()
    flat = sum(p.numel() for p in layer.parameters())
    assert 4 * flat not in kept_sizes(Run(layer, meta(T, B, N)))
    assert 2 * flat not in kept_sizes(Run(recurrent().half(), meta(T, B, N, dtype=FP16)))
    # flatten_parameters passes bfloat16 over, though cuDNN takes it.
    run = Run(recurrent().bfloat16(), meta(T, B, N, dtype=BF16))
    assert "_cudnn_rnn" in run.log.ops
    assert 2 * flat in kept_sizes(run)


def test_what_cudnn_does_not_take() -> None:
    layer, x = recurrent(), meta(2, 3, N)
    for options in ({"cudnn": 91200}, {"capability": (7, 5)}):
        assert "_cudnn_rnn" not in Run(recurrent().bfloat16(), x.bfloat16(), **options).log.ops
        assert "_cudnn_rnn" in Run(layer, x, **options).log.ops
    with torch.backends.cudnn.flags(enabled=False):
        assert "_cudnn_rnn" not in Run(layer, x).log.ops
    with pytest.raises((RuntimeError, ValueError), match=r"dtype|type"):
        Run(layer, x.half())


# -- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amp", [FP16, BF16], ids=str)
def test_autocast_copies_the_weights_into_one_float16_buffer(amp: torch.dtype) -> None:
    layer = recurrent(num_layers=2)
    flat = sum(p.numel() for p in layer.parameters())
    run = Run(layer, meta(T, B, N), amp=amp)
    assert run.result[0].dtype is FP16  # whatever the region's dtype: AutocastRNN.cpp names kHalf
    assert list(run.copies.values()) == [2 * flat]
    assert 2 * flat in kept_sizes(run)
    run.backward()
    assert all(p.grad is not None and p.grad.dtype is FP32 and p.grad.shape == p.shape for p in layer.parameters())


def test_autocast_leaves_half_and_double_weights_alone() -> None:
    assert not Run(recurrent().half(), meta(T, B, N), amp=BF16).copies
    run = Run(recurrent().double(), meta(T, B, N, dtype=FP64), amp=FP16)
    assert (run.result[0].dtype, run.copies) == (FP64, {})


def test_autocast_without_biases() -> None:
    layer = recurrent(bias=False)
    run = Run(layer, meta(T, B, N), amp=FP16)
    assert list(run.copies.values()) == [2 * (sum(p.numel() for p in layer.parameters()) + 8 * H)]
    run.backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.skipif(torch.version.cuda is None, reason="a CPU build has no autocast wrapper around _cudnn_rnn")
@pytest.mark.parametrize("amp", [FP16, BF16], ids=str)
def test_autocast_casts_states_and_inputs_as_in_pytorch(amp: torch.dtype) -> None:
    """Of half weights, because for others the real wrapper asks the device for the buffer's size."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", amp)
        try:
            x, h = torch.empty(T, B, N, device="cuda"), torch.empty(1, B, H, device="cuda")
            weights = [w.half() for w in (torch.empty(4 * H, N, device="cuda"), torch.empty(4 * H, H, device="cuda"))]
            theirs = torch._cudnn_rnn(x, weights, 2, None, h, h, 2, H, 0, 1, False, 0.0, True, False, [], None)
        finally:
            torch.set_autocast_enabled("cuda", False)
    ours, (hy, cy) = Run(recurrent(bias=False).half(), meta(T, B, N), amp=amp).result
    assert [t.dtype for t in (ours, hy, cy)] == [t.dtype for t in theirs[:3]]
    assert [t.shape for t in (ours, hy, cy)] == [t.shape for t in theirs[:3]]


# -- cells ------------------------------------------------------------------------------------------------------------


def test_lstm_cell_is_fused() -> None:
    cell = nn.LSTMCell(N, H, device="meta")
    run = Run(cell, meta(B, N, grad=True))
    assert run.log.ops.count("_thnn_fused_lstm_cell") == 1
    # The input; the products of input and state with the weights, and the functions of their sum; the first state,
    # zeros that stand for both of its parts, and the new cell.
    x, gates, state = 4 * B * N, 4 * B * 4 * H, 4 * B * H
    assert run.kept_bytes == x + 3 * gates + 2 * state
    run.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in cell.parameters())


def test_gru_cell_is_fused() -> None:
    cell = nn.GRUCell(N, H, device="meta")
    run = Run(cell, meta(B, N, grad=True))
    assert run.log.ops.count("_thnn_fused_gru_cell") == 1
    x, state, gates, workspace = 4 * B * N, 4 * B * H, 4 * B * 3 * H, 4 * B * 5 * H
    assert run.kept_bytes == x + state + 2 * gates + workspace
    run.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in cell.parameters())


def test_cells_under_autocast_and_outside_of_a_trace() -> None:
    for kind in (nn.LSTMCell, nn.GRUCell):
        run = Run(kind(N, H, device="meta"), meta(B, N), amp=BF16)
        first = run.result[0] if isinstance(run.result, tuple) else run.result
        assert first.dtype is BF16
        with cuda_semantics():
            assert kind(N, H, device="meta")(meta(B, N)) is not None


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_cpu_tensors_run_as_ever(kind: str) -> None:
    layer, x = getattr(nn, kind)(N, H), torch.ones(T, B, N)
    expected = layer(x)[0]
    with cuda_semantics(stands_for={"cpu"}):
        assert torch.equal(layer(x)[0], expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("packed", [False, True])
def test_autocast_decides_about_the_steps_that_cudnn_does_not_take(kind: type[nn.RNNBase], packed: bool) -> None:
    """A T4's cuDNN takes no bfloat16, which is what a linear layer before hands on: weights and input meet in it."""
    layer, before = kind(8, 16, num_layers=2, bidirectional=True), nn.Linear(8, 8)
    layer, before = layer.to("meta"), before.to("meta")
    x = torch.empty(5, 4, 8, device="meta", requires_grad=True)
    with MetaDispatchMode(), cuda_semantics(capability=(7, 5)), autocast_region(BF16):
        given: Any = before(x)
        if packed:
            given = pack_padded_sequence(given, torch.tensor([5, 4, 2, 1]))
        result, _ = layer(given)
        out = result.data if packed else result
        assert out.dtype is BF16 and out.shape[-1] == 32
        out.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype is FP32 for parameter in layer.parameters())
