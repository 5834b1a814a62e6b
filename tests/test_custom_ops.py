"""Custom ops in programs on a virtual GPU: what their bodies allocate counts, and their results have defined values.

1024 · 1024 · 64 values of 4 B are 256 MiB of scratch memory, which is free again once the op returns.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import memsize
from memsize import ProgramRun

MiB = 2**20
SCRATCH = 'torch.empty(1024, 1024, 64, device="cuda")'
BEGINNING = f"""
import torch
from torch.library import custom_op, triton_op
def scaled(x):
    return x + {SCRATCH}.sum()
"""


def ran(tmp_path: Path, text: str, **options: Any) -> ProgramRun:
    script = tmp_path / "train.py"
    script.write_text(BEGINNING + textwrap.dedent(text), encoding="utf-8")
    run = memsize.run(script, gpu="t4", **options)
    assert isinstance(run, ProgramRun) and run.failure is None, run
    return run


def most_temporaries(run: ProgramRun) -> int:
    return max(storage.bytes for storage in run.trace.storages)


DEFINITIONS = {
    "custom_op": """
        @custom_op("t_custom::scale", mutates_args={})
        def op(x: torch.Tensor) -> torch.Tensor:
            return scaled(x)
        """,
    "custom_op with a fake": """
        @custom_op("t_faked::scale", mutates_args={})
        def op(x: torch.Tensor) -> torch.Tensor:
            return scaled(x)
        op.register_fake(torch.empty_like)
        """,
    "custom_op with a kernel for CUDA": """
        @custom_op("t_cuda::scale", mutates_args={}, device_types="cpu")
        def op(x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("on a GPU, this is not called")
        op.register_kernel("cuda")(scaled)
        """,
    "triton_op": """
        @triton_op("t_triton::scale", mutates_args={})
        def op(x: torch.Tensor) -> torch.Tensor:
            return scaled(x)
        """,
    "Library": """
        library = torch.library.Library("t_library", "DEF")
        library.define("scale(Tensor x) -> Tensor")
        library.impl("scale", scaled, "CUDA")
        op = torch.ops.t_library.scale
        """,
}


@pytest.mark.parametrize("definition", DEFINITIONS.values(), ids=DEFINITIONS)
def test_memory_of_the_body_counts(tmp_path: Path, definition: str) -> None:
    run = ran(
        tmp_path,
        textwrap.dedent(definition)
        + textwrap.dedent(
            f"""
            y = op(torch.ones(4, device="cuda"))
            assert y.is_cuda and y.shape == (4,)
            assert torch.cuda.max_memory_allocated() >= 256 * {MiB} > torch.cuda.memory_allocated()
            assert y.tolist() == [1.0] * 4
            """
        ),
    )
    assert run.peak.requested >= 256 * MiB and most_temporaries(run) == 256 * MiB
    (largest, *_) = run.tensors
    assert largest.line == "train.py:5"


def test_gradients_pass_a_custom_op(tmp_path: Path) -> None:
    ran(
        tmp_path,
        """
        @custom_op("t_grad::scale", mutates_args={})
        def op(x: torch.Tensor) -> torch.Tensor:
            assert x.is_cuda and not (x * 2).requires_grad
            return x * 2
        op.register_autograd(lambda context, grad: grad * 2)
        model = torch.nn.Linear(4, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            op(model(torch.ones(2, 4, device="cuda"))).sum().backward()
            assert model.weight.grad.shape == (4, 4)
            optimizer.step()
        """,
    )


def test_an_op_that_writes_into_its_arguments(tmp_path: Path) -> None:
    ran(
        tmp_path,
        """
        @custom_op("t_writes::fill", mutates_args={"x"})
        def op(x: torch.Tensor, value: float) -> None:
            x.fill_(value)
        x = torch.zeros(4, device="cuda")
        op(x, 3.0)
        assert x.tolist() == [3.0] * 4
        """,
    )


def test_a_custom_op_on_the_cpu_is_computed(tmp_path: Path) -> None:
    """What it makes on the GPU counts all the same."""
    run = ran(
        tmp_path,
        """
        @custom_op("t_cpu::scale", mutates_args={})
        def op(x: torch.Tensor) -> torch.Tensor:
            torch.empty(1024, 1024, device="cuda")
            return x * 2
        assert op(torch.tensor([1.0, 2.0])).tolist() == [2.0, 4.0]
        """,
    )
    assert run.peak.requested == 4 * MiB


def test_a_thread_of_the_program_calls_a_custom_op(tmp_path: Path) -> None:
    run = ran(
        tmp_path,
        """
        import threading
        @custom_op("t_thread::scale", mutates_args={})
        def op(x: torch.Tensor) -> torch.Tensor:
            return scaled(x)
        x, results = torch.ones(4, device="cuda"), []
        thread = threading.Thread(target=lambda: results.append(op(x)))
        thread.start()
        thread.join()
        assert results[0].is_cuda
        """,
    )
    assert most_temporaries(run) == 256 * MiB


def test_a_body_that_needs_the_gpu_is_replaced_by_its_fake(tmp_path: Path) -> None:
    run = ran(
        tmp_path,
        """
        @custom_op("t_native::scale", mutates_args={})
        def op(x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("x must be a CUDA tensor")
        op.register_fake(torch.empty_like)
        op(torch.ones(2**20, device="cuda"))
        """,
    )
    assert run.peak.requested == 8 * MiB
    (note,) = (note for note in run.trace.notes if "t_native::scale" in note)
    assert "x must be a CUDA tensor" in note


def test_an_error_of_the_body_is_the_programs_own(tmp_path: Path) -> None:
    ran(
        tmp_path,
        """
        @custom_op("t_error::scale", mutates_args={})
        def op(x: torch.Tensor) -> torch.Tensor:
            raise ValueError("wrong shape")
        op.register_fake(torch.empty_like)
        try:
            op(torch.ones(4, device="cuda"))
        except ValueError as error:
            assert str(error) == "wrong shape"
        else:
            raise AssertionError
        """,
    )


def test_out_of_memory_in_a_body_is_pytorchs_error(tmp_path: Path) -> None:
    """4 Gi values of 4 B are more than the 15 GiB of a T4."""
    run = ran(
        tmp_path,
        """
        @custom_op("t_memory::scale", mutates_args={})
        def op(x: torch.Tensor) -> torch.Tensor:
            return x + torch.empty(2**32, device="cuda").sum()
        op.register_fake(torch.empty_like)
        try:
            op(torch.ones(4, device="cuda"))
        except torch.OutOfMemoryError:
            print("caught")
        """,
    )
    assert [refused.bytes for refused in run.refused] == [16 * 2**30]


def test_the_note_on_triton_names_kernels_and_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "triton" / "runtime"
    package.mkdir(parents=True)
    (tmp_path / "triton" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "jit.py").write_text(
        "class JITFunction:\n"
        "    def __init__(self, fn): self.fn, self.__name__ = fn, fn.__name__\n"
        "    def __getitem__(self, grid): return self.run\n"
    )
    (package / "autotuner.py").write_text(
        "from triton.runtime import jit\nclass Autotuner:\n"
        "    def __init__(self, fn): self.fn = fn\n"
        "    def __getitem__(self, grid): return self.run\n"
    )
    names = ("triton", "triton.runtime", "triton.runtime.jit", "triton.runtime.autotuner")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    run = ran(
        tmp_path,
        """
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.jit import JITFunction
        @JITFunction
        def add(x, y): ...
        @Autotuner
        @JITFunction
        def norm(x): ...
        @custom_op("t_kernels::add", mutates_args={})
        def op(x: torch.Tensor) -> torch.Tensor:
            y = torch.empty_like(x)
            add[(1,)](x, y)
            return y
        x = torch.zeros(4, device="cuda")
        op(x)
        norm[(1,)](x)
        """,
    )
    (note,) = (note for note in run.trace.notes if "Triton" in note)
    assert note.startswith("Triton kernels are not run (add in t_kernels::add and norm): ")
    for name in names:
        sys.modules.pop(name, None)


def test_kernels_compiled_by_nvrtc_write_what_is_there(tmp_path: Path) -> None:
    run = ran(
        tmp_path,
        """
        kernel = torch.cuda._compile_kernel('extern "C" __global__ void fill(float* x) {}', "fill")
        kernel.set_shared_memory_config(64 * 1024)
        x = torch.zeros(4, device="cuda")
        kernel(grid=(1, 1, 1), block=(4, 1, 1), args=[x])
        x.tolist()
        """,
    )
    assert "NVRTC kernels are not run (fill): they write to existing tensors and allocate no memory" in run.trace.notes
    assert [assumption.lines for assumption in run.assumed] == [("train.py:11",)]


def test_the_body_counts_in_a_traced_model_too() -> None:
    """64 Mi values of 4 B, beside a model of 16 values; a body that fails without a GPU leaves its results to the
    fake, and says so.
    """

    @torch.library.custom_op("t_traced::scale", mutates_args=())
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * torch.empty(64 * 2**20, device=x.device).sum()

    scale.register_fake(torch.empty_like)
    scale.register_autograd(lambda context, grad: grad * 2)

    @torch.library.custom_op("t_traced::native", mutates_args=())
    def native(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("x must be a CUDA tensor")

    native.register_fake(torch.empty_like)
    native.register_autograd(lambda context, grad: grad * 2)

    class Net(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return native(scale(super().forward(x)))

    step = memsize.trace(Net(4, 4, bias=False), (4,), optimizer="sgd", gpu="t4")
    assert max(storage.bytes for storage in step.trace.storages) == 256 * MiB
    (note,) = (note for note in step.trace.notes if "t_traced::" in note)
    assert note.startswith("the body of t_traced::native needs a real GPU (RuntimeError: x must be a CUDA tensor)")
