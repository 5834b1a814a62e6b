"""Nested tensors in programs on a virtual GPU: jagged ones are followed, strided ones refused in one sentence.

The batch is two sequences of 1,024 and 3,072 tokens with 256 numbers each: 4,096 · 256 float32 values are 4 MiB.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import memsize
from memsize import ProgramRun
from memsize.errors import ForwardError

MiB = 2**20
BEGINNING = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
def batch(**options):
    sequences = [torch.ones(1024, 256), torch.ones(3072, 256)]
    return torch.nested.nested_tensor(sequences, layout=torch.jagged, **options)
def heads(x):
    return x.unflatten(-1, [4, 64]).transpose(1, 2)
"""
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def ran(tmp_path: Path, text: str, **options: Any) -> ProgramRun:
    script = tmp_path / "train.py"
    script.write_text(BEGINNING + textwrap.dedent(text), encoding="utf-8")
    run = memsize.run(script, gpu="a100", **options)
    assert isinstance(run, ProgramRun) and run.failure is None, run
    return run


def large(run: ProgramRun, role: str) -> list[int]:
    return [storage.bytes for storage in run.trace.storages if storage.role == role and storage.bytes >= MiB]


@pytest.mark.parametrize("made", ['batch(device="cuda")', "batch().cuda()", 'batch().to("cuda")'])
def test_a_jagged_tensor_is_on_the_gpu(tmp_path: Path, made: str) -> None:
    run = ran(
        tmp_path,
        f"""
        x = {made}
        assert x.is_nested and x.is_cuda and x.device == torch.device("cuda", 0) and x.size(0) == 2
        assert x.offsets().tolist() == [0, 1024, 4096]
        assert [part.shape[0] for part in x.unbind()] == [1024, 3072]
        assert torch.cuda.memory_allocated() >= 4 * 2**20
        """,
    )
    assert run.peak.requested >= 4 * MiB


def test_a_linear_layer_over_a_jagged_tensor_trains(tmp_path: Path) -> None:
    """Each step keeps its input for the weight's gradient, and its output for that of the square: 4 MiB each."""
    run = ran(
        tmp_path,
        """
        model = nn.Linear(256, 256).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            x = batch(device="cuda", requires_grad=True)
            model(x).square().values().sum().backward()
            assert model.weight.grad.shape == (256, 256) and x.grad.is_cuda
            optimizer.step()
        """,
    )
    assert run.steps == 2 and large(run, "input") == large(run, "output") == [4 * MiB] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_over_a_jagged_tensor_has_no_scores(tmp_path: Path, dtype: str) -> None:
    """Scores of 4 heads would be 4 · (1,024² + 3,072²) values of 2 B at least, 80 MiB: CUDA's kernels make none."""
    run = ran(
        tmp_path,
        f"""
        x = batch(device="cuda", dtype=torch.{dtype}, requires_grad=True)
        y = scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True)
        y.transpose(1, 2).flatten(-2).values().sum().backward()
        assert x.grad.is_cuda
        """,
    )
    assert 8 * MiB <= run.peak.tensors < 60 * MiB
    assert not any("math" in storage.op or "softmax" in storage.op for storage in run.trace.storages)


def test_blocks_of_a_transformer_train_on_jagged_batches(tmp_path: Path) -> None:
    ran(
        tmp_path,
        """
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.qkv, self.out = nn.LayerNorm(256), nn.Linear(256, 768), nn.Linear(256, 256)
                self.mlp = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 256))
            def forward(self, x):
                q, k, v = map(heads, self.qkv(self.norm(x)).chunk(3, -1))
                x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
                return x + self.mlp(self.norm(x))
        model = nn.Sequential(Block(), Block()).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                y = model(batch(device="cuda"))
            y.float().values().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )


STRIDED = {
    "device": 'torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], device="cuda")',
    "cuda": "torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]).cuda()",
    "list": 'torch.nested.as_nested_tensor([torch.ones(2, 3, device="cuda"), torch.ones(4, 3, device="cuda")])',
    "masked attention": 'scaled_dot_product_attention(*[heads(batch(device="cuda", dtype=torch.float64))] * 3)',
}


@pytest.mark.parametrize("text", STRIDED.values(), ids=STRIDED)
def test_a_strided_one_is_refused_with_the_way_to_do_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        ForwardError, match=r"memsize cannot simulate nested tensors of strided layout .* layout=torch.jagged"
    ):
        ran(tmp_path, text)


def test_a_strided_one_on_the_cpu_is_pytorchs_own(tmp_path: Path) -> None:
    ran(
        tmp_path,
        """
        x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
        assert torch.nested.to_padded_tensor(x, 0.0).sum() == 18
        """,
    )


def test_wrappers_are_never_made_on_a_cuda_device(tmp_path: Path) -> None:
    """Autograd asks the driver about each tensor's device, in a constructor that may not raise."""
    ran(
        tmp_path,
        """
        class Wrapper(torch.Tensor):
            @classmethod
            def __torch_dispatch__(cls, *call):
                raise AssertionError(call)
        gpu = torch.device("cuda")
        sizes, strides, contiguous = (2,), (1,), torch.contiguous_format
        one = torch.Tensor._make_wrapper_subclass(
            Wrapper, sizes, strides, 0, contiguous, torch.float32, torch.strided, gpu, False, True
        )
        other = torch.Tensor._make_wrapper_subclass(Wrapper, sizes, device="cuda:0", requires_grad=True)
        kind = vars(torch._C.TensorBase)["device"]
        assert kind.__get__(one).type == kind.__get__(other).type == "meta"
        """,
    )


def test_nothing_is_left_behind() -> None:
    before = torch._C._nested.nested_tensor, torch.nested._internal.sdpa._select_sdp_backend  # type: ignore[attr-defined]
    with memsize.virtual_gpu("t4"):
        assert torch._C._nested.nested_tensor is not before[0]  # type: ignore[attr-defined]
    assert before == (torch._C._nested.nested_tensor, torch.nested._internal.sdpa._select_sdp_backend)  # type: ignore[attr-defined]


def test_compiled_attention_over_a_jagged_tensor_has_no_scores(tmp_path: Path) -> None:
    """Scores of 4 heads would take 4 · (1,024² + 3,072²) · 4 B, 160 MiB."""
    run = ran(
        tmp_path,
        """
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.inputs, self.output = nn.Linear(256, 768), nn.Linear(256, 256)
            def forward(self, x):
                query, key, value = (heads(part) for part in self.inputs(x).chunk(3, -1))
                attended = scaled_dot_product_attention(query, key, value, is_causal=True)
                return self.output(attended.transpose(1, 2).flatten(-2))
        model = Attention().cuda()
        optimizer, net = torch.optim.SGD(model.parameters()), torch.compile(model)
        for _ in range(2):
            net(batch(device="cuda")).values().sum().backward()
            assert model.inputs.weight.grad.shape == (768, 256)
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    assert run.steps == 2 and not any("as written" in note for note in run.trace.notes)
    # A bias's gradient of 768 values is summed by 64 blocks, each with 32 · 4 places for a value: 24 MiB for a moment.
    largest = max(storage.bytes for storage in run.trace.storages if storage.op != "sum")
    assert largest == 4096 * 768 * 4  # query, key and value, or their gradients
