"""What a program needs a real GPU for: the one line that names it, and what to do instead."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from memsize.cli import run as command
from tests.programs import run_script
from tests.records import NeedsGpu

TRITON = """
class Kernel:
    def __init__(self, fn):
        self.fn = fn

    def __getitem__(self, grid):
        return self.run

    def run(self, *args):
        raise AssertionError("libcuda.so cannot found!")
"""


def said(tmp_path: Path, text: str) -> tuple[NeedsGpu | None, str]:
    """What the script needs, and the first sentence of its report."""
    found, error = run_script(tmp_path, text)
    assert error is not None
    failed, cause, *_ = found.findings
    assert failed.code == "run-failed"
    return found.needs_gpu, cause.text()


@pytest.mark.parametrize("size", [3, 2**30], ids=["small", "too large for the CPU"])
def test_an_op_without_a_shape_rule_is_named(tmp_path: Path, size: int) -> None:
    needed, sentence = said(
        tmp_path,
        f"""
        import torch
        lib = torch.library.Library("ofrule{size}", "DEF")
        lib.define("scan(Tensor x) -> Tensor")
        torch.ops.ofrule{size}.scan(torch.empty({size}, device="cuda"))
        """,
    )
    assert needed == NeedsGpu("op", f"ofrule{size}::scan", "train.py:5")
    assert sentence.startswith(f"ofrule{size}::scan at train.py:5 has no shape rule: write one with memsize.")


def test_a_custom_op_without_a_fake_is_named(tmp_path: Path) -> None:
    needed, _ = said(
        tmp_path,
        """
        import torch
        @torch.library.custom_op("offake::scan", mutates_args=(), device_types="cpu")
        def scan(x: torch.Tensor) -> torch.Tensor:
            return x.cumsum(0)
        def main():
            scan(torch.ones(3, device="cuda"))
        main()
        """,
    )
    assert needed == NeedsGpu("op", "offake::scan", "train.py:7")


def test_a_triton_kernel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = ModuleType("triton")
    exec(TRITON, vars(triton))
    monkeypatch.setitem(sys.modules, "triton", triton)
    needed, sentence = said(
        tmp_path,
        """
        import torch, triton
        @triton.Kernel
        def add(x): ...
        x = torch.ones(3, device="cuda")
        add[1,](x)
        """,
    )
    assert needed == NeedsGpu("triton", "add", "train.py:6")
    assert sentence.startswith("The Triton kernel add that train.py:6 launches needs a real GPU: wrap it in ")


def test_triton_kernels_write_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autotuned or not; what was known of the values that they write is not known any more."""
    runtime = tmp_path / "triton" / "runtime"
    runtime.mkdir(parents=True)
    (tmp_path / "triton" / "__init__.py").write_text("from triton.runtime import *\n")
    (runtime / "__init__.py").write_text("from .autotuner import Autotuner\nfrom .jit import JITFunction\n")
    (runtime / "jit.py").write_text(TRITON.replace("Kernel", "JITFunction"))
    (runtime / "autotuner.py").write_text(
        "from . import jit\nclass Autotuner(jit.JITFunction):\n    configs = ['first', 'second']\n"
        "    def run(self): ...\n"
    )
    for name in ("triton", "triton.runtime", "triton.runtime.jit", "triton.runtime.autotuner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    launched: list[Any] = []
    monkeypatch.setattr(sys, "launched", launched, raising=False)
    found, error = run_script(
        tmp_path,
        "import sys, torch, triton\n"
        "x, y = torch.zeros(4, device='cuda'), torch.zeros(4, device='cuda')\n"
        "triton.JITFunction(None)[1,](x, out=[y])\n"
        "tuned = triton.Autotuner(None)\n"
        "tuned[1,](x)\n"
        "assert tuned.best_config == 'first'\n"
        "sys.launched.append(triton.JITFunction); print(x.tolist(), torch.zeros(1, device='cuda').item())\n",
    )
    assert error is None and any("Triton kernels are not run" in note for note in found.trace.notes)
    assert found.needs_gpu is None and [each.lines for each in found.assumed] == [("train.py:7",)]
    assert "left_out" not in launched[0].run.__qualname__ and "triton" not in sys.modules


DRIVER = """
import torch
class GPUDriver:
    def __init__(self): self.get_device_capability = torch.cuda.get_device_capability
class CudaDriver(GPUDriver):
    def __init__(self): raise AssertionError("libcuda.so cannot found!")
    def get_current_target(self): return self.get_device_capability(0)
class Backend: driver = CudaDriver
backends = {"nvidia": Backend}
"""


def test_tritons_driver_is_that_of_the_simulated_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4: a block can have 64 KiB of shared memory (CUDA's programming guide, compute capability 7.5)."""
    files = {
        "__init__": "from .runtime import autotuner",
        "backends": DRIVER,
        "runtime/__init__": "from .driver import driver",
        "runtime/driver": "class Config: _active = None\ndriver = Config()",
        "runtime/jit": TRITON.replace("Kernel", "JITFunction"),
        "runtime/autotuner": "from .. import backends\nfrom . import jit\nclass Autotuner(jit.JITFunction): ...",
    }
    for name, text in files.items():
        (tmp_path / f"triton/{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"triton/{name}.py").write_text(text)
    seen: list[Any] = []
    monkeypatch.setattr(sys, "seen", seen, raising=False)
    for name in list(sys.modules):
        if name.partition(".")[0] == "triton":
            monkeypatch.delitem(sys.modules, name)
    script = """
        import sys, torch, triton
        driver = triton.runtime.driver._active
        sys.seen += [triton.runtime.driver, driver.get_current_target(), driver.utils.get_device_properties(0)]
        driver.launcher_cls(None, {})
        """
    _, error = run_script(tmp_path, script)
    config, capability, properties = seen
    assert (capability, properties["max_shared_mem"], properties["multiprocessor_count"]) == ((7, 5), 64 * 1024, 40)
    assert config._active is None and str(error) == "a compiled Triton kernel can be launched only on a real GPU"


def test_an_extension_that_wants_tensors_of_cuda(tmp_path: Path) -> None:
    needed, sentence = said(tmp_path, 'raise RuntimeError("input must be a CUDA tensor")')
    assert needed == NeedsGpu("extension", None, "train.py:1")
    assert sentence.startswith("The CUDA extension that train.py:1 calls needs a real GPU: ")


@pytest.mark.parametrize("name", ["flash_attn", "vllm", "apex", "xformers", "mamba_ssm"])
def test_packages_of_cuda_kernels_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    needed, sentence = said(tmp_path, f"import torch\nfrom {name} import anything\n")
    assert needed is not None and (needed.what, needed.name, needed.line) == ("package", name, "train.py:2")
    assert sentence == f"train.py:2 needs {name}, which is made for a real GPU: {needed.instead}."


@pytest.mark.parametrize("name", ["bitsandbytes", "deepspeed", "fla", "liger_kernel", "some_tracker", "triton"])
def test_packages_that_only_have_to_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    class Missing:
        """Keeps the package from being found, also where it is installed."""

        def find_spec(self, fullname: str, *_: object) -> None:
            if fullname == name:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, name, raising=False)
    needed, sentence = said(tmp_path, f"import torch\nimport {name}\n")
    assert needed is None
    assert sentence == (f"{name} is not installed in memsize's environment: install both in the same one.")


def test_a_package_that_a_library_asks_for(tmp_path: Path) -> None:
    """As transformers says it."""
    message = "FlashAttention2 cannot be used: the package flash_attn seems to be not installed."
    for wrapped in ("", "RuntimeError('Failed to import the model') from "):
        needed, _ = said(tmp_path, f"raise {wrapped}ImportError({message!r})")
        assert needed is not None and needed.name == "flash_attn"
        for same in ("torch.nn.functional.scaled_dot_product_attention", 'attn_implementation="sdpa"'):
            assert same in (needed.instead or "")


@pytest.mark.parametrize(
    "error",
    [
        None,
        KeyError("apex"),
        ModuleNotFoundError("No module named 'yaml'", name="yaml"),
        torch.OutOfMemoryError("CUDA out of memory"),
        NotImplementedError("Cannot copy out of meta tensor; no data!"),
    ],
)
def test_other_errors_are_the_programs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    monkeypatch.setattr("builtins.error", error, raising=False)
    found, raised = run_script(tmp_path, "if error:\n    raise error\n")
    assert found.needs_gpu is None and raised is error


def test_the_traceback_comes_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text('import torch\nraise ImportError("apex is not built", name="apex")\n', encoding="utf-8")
    assert command(["run", str(script)]) == 1
    written = capfd.readouterr()
    assert "ImportError: apex is not built" in written.err and "memsize/" not in written.err
    assert "train.py:2 needs apex, which is made for a real GPU" in " ".join(written.out.split())
