"""FlexAttention: shapes and layouts as PyTorch's own fake kernels give them, and what a step keeps and takes."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.utils.checkpoint import checkpoint

import memsize
from tests.conftest import Python
from tests.kernels import UNCOMPILED_FLEX, flex_gradients, flex_outputs

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*is not supported in Python 3.14")
"""What torch.compile's parts say as they are imported."""


def meta(*shape: int, order: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
    """A tensor whose dimensions lie in memory in this order, the outermost first."""
    made = torch.empty([shape[dim] for dim in order], dtype=torch.bfloat16, device="meta")
    return made.permute([order.index(dim) for dim in range(4)])


def described(tensors: Any) -> list[tuple[Any, ...]]:
    return [(tuple(t.shape), t.stride(), t.dtype) for t in tensors]


BY_LENGTH = (0, 2, 1, 3)
CASES = {
    "by heads": (meta(2, 4, 128, 16), meta(2, 4, 96, 16), meta(2, 4, 96, 16)),
    "by length": tuple(meta(2, 4, length, 16, order=BY_LENGTH) for length in (128, 96, 96)),
    "grouped": (meta(2, 8, 128, 16, order=BY_LENGTH), meta(2, 2, 96, 16), meta(2, 2, 96, 32)),
    "features outside": (meta(2, 4, 128, 16, order=(3, 0, 1, 2)), meta(2, 4, 96, 16), meta(2, 4, 96, 16)),
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_pytorchs_fake_kernels(name: str) -> None:
    theirs = import_module("torch._higher_order_ops.flex_attention")  # an attribute of that name is the operator
    query, key, value = CASES[name]
    output = flex_outputs(query, key, value)
    rest = (None, (), 1.0, {})
    assert described(output) == described(theirs.flex_attention_fake_impl(query, key, value, *rest))
    grads = flex_gradients(output[0], query, key, value, *output[:2])
    backward = theirs.flex_attention_backward_fake_tensor_mode
    expected = backward(query, key, value, *output[:2], output[0], None, None, *rest)
    assert described(grads) == described(expected[:3])


class Attending(nn.Module):
    def __init__(self, bias: bool = False, masked: bool = False, compiled: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192, bias=False), nn.Linear(64, 64, bias=False)
        self.slopes = nn.Parameter(torch.ones(4)) if bias else None
        self.masked = masked
        self.attend = torch.compile(flex.flex_attention) if compiled else flex.flex_attention

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, 4, 16).permute(2, 0, 3, 1, 4)
        slopes, options = self.slopes, {}
        if slopes is not None:
            options["score_mod"] = lambda score, b, h, i, j: score + slopes[h] * (i - j)
        if self.masked:
            options["block_mask"] = flex.create_block_mask(
                lambda b, h, i, j: i >= j, None, None, length, length, device=x.device
            )
        return self.out(self.attend(query, key, value, **options).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_holds_nothing_of_the_size_of_the_scores(compiled: bool) -> None:
    trace = memsize.trace(Attending(compiled=compiled), (128, 64), batch_size=2, optimizer="sgd", steps=1).trace
    whole, rows = 2 * 4 * 128 * 16 * 4, 2 * 4 * 128 * 4
    made = [each for each in trace.storages if each.op == "flex_attention"]
    # the output, the sums and the greatest scores, of which the first two are kept
    assert [(each.bytes, each.role) for each in made] == [
        (whole, "activation"), (rows, "activation"), (rows, "temporary"),
    ]  # fmt: skip
    back = sorted(each.bytes for each in trace.storages if each.op == "flex_attention_backward")
    assert back == sorted([whole, whole, whole, rows])
    tensors = [each.bytes for each in trace.storages if each.role != "workspace"]
    assert max(tensors) < 2 * 4 * 128 * 128 * 4
    assert UNCOMPILED_FLEX in trace.notes


class Checkpointed(Attending):
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(super().forward, x, use_reentrant=False))


@pytest.mark.parametrize("kind", [Attending, Checkpointed])
def test_inside_compiled_code_it_takes_what_its_kernels_take(kind: type[Attending]) -> None:
    """Those that it takes in eager code: Inductor would make the same kernels with Triton."""
    options: dict[str, Any] = {"batch_size": 2, "optimizer": "sgd", "steps": 1}
    eager, compiled = (
        memsize.trace(kind(bias=True), (128, 64), scenario=name, **options).trace for name in ("fp32", "fp32+compile")
    )
    assert not [note for note in compiled.notes if "could not be" in note]
    for op in ("flex_attention", "flex_attention_backward"):
        sizes = [sorted(each.bytes for each in trace.storages if each.op == op) for trace in (eager, compiled)]
        assert sizes[0] == sizes[1] != []


def test_what_is_kept_for_backward() -> None:
    report = memsize.report(Attending(), (128, 64), batch_size=2, scenarios="fp32,amp-bf16")
    x = 2 * 128 * 64
    # the input, three projections, the output and the sums; four numbers and four indices of the empty mask's blocks
    kept = report.totals.saved_bytes
    assert 0 <= kept - (4 * x + 4 * 3 * x + 4 * x + 4 * 2 * 4 * 128) <= 64
    lower = report.scenarios.loc["amp-bf16", "saved_bytes"]
    weight = 2 * 64 * 64  # of `out`: the input needs no gradient, and so not the weights that it meets
    assert 0 <= lower - (2 * x + 2 * 3 * x + 2 * x + 4 * 2 * 4 * 128 + weight) <= 64


def test_masks_and_what_scores_read() -> None:
    trace = memsize.trace(Attending(bias=True, masked=True), (256, 64), optimizer="sgd", steps=1).trace
    slopes = next(each for each in trace.tensors if each.name == "slopes")
    assert slopes.used and slopes.differentiable
    assert any(each.role == "activation" and each.dtype == "int32" for each in trace.storages)  # the mask's blocks


def test_pytorchs_module_is_left_as_it_was() -> None:
    before = dict(vars(flex))
    memsize.report(Attending(), (16, 64), scenarios="fp32")
    assert all(vars(flex)[name] is value for name, value in before.items())


@pytest.mark.parametrize("compiled", ["", "called", "told"])
def test_a_mask_is_held_whole_unless_it_is_compiled(compiled: str) -> None:
    """A mask of 1024 x 1024 numbers has 8 x 8 blocks."""
    whole, blocks = 1024 * 1024, 8 * 8
    warned = pytest.warns(DeprecationWarning, match="_compile") if compiled == "told" else nullcontext()
    with memsize.virtual_gpu("a100") as gpu, warned:
        create = torch.compile(flex.create_block_mask) if compiled == "called" else flex.create_block_mask
        told = {"_compile": True} if compiled == "told" else {}
        mask = create(lambda b, h, i, j: i >= j, None, None, 1024, 1024, "cuda", **told)
        held = torch.cuda.memory_allocated()
    assert mask.kv_indices.shape == (1, 1, 8, 8) and mask.shape == (1, 1, 1024, 1024)
    # 8 counts or 64 indices of int32, of queries and of keys, in blocks whose values decide and in whole ones
    assert held == 8 * 512
    sizes = {each.bytes for each in gpu.trace.storages}
    assert sizes == {4 * 8, 4 * blocks} if compiled else max(sizes) >= whole


IN_A_PROGRAM = """
import sys

import memsize

assert "torch.nn.attention.flex_attention" not in sys.modules
with memsize.virtual_gpu("a100") as gpu:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    query, key, value = (torch.ones(1, 2, 256, 16, device="cuda", requires_grad=True) for _ in range(3))
    with torch.autocast("cuda", torch.bfloat16):
        flex_attention(query, key, value).sum().backward()
scores = 2 * 256 * 256
assert not any(storage.bytes >= scores for storage in gpu.trace.storages)
assert sum("flex_attention is counted as" in note for note in gpu.trace.notes) == 1
"""


@pytest.mark.thorough
def test_a_program_may_import_it_while_it_runs(warm_python: Python) -> None:
    done = warm_python("-W", "ignore", "-c", IN_A_PROGRAM)
    assert done.returncode == 0, done.stderr
