"""A torchvision or torchaudio that was built for another torch: what needs no compiled part of it runs all the same."""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from textwrap import dedent

import pytest

import memsize
from tests.conftest import Python, Write
from tests.models import matching_release

MISFIT = """
    import torch

    load = torch.ops.load_library

    def refuse(path):
        if "torchvision" in str(path):
            raise OSError("undefined symbol")
        load(path)

    torch.ops.load_library = refuse
    try:
        import torchvision
    except RuntimeError as error:
        print(error)
"""
"""Makes the installed torchvision one that does not fit, and meets it once, as a user does before memsize."""

LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
         "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}  # fmt: skip

OWN = """
    import torchvision
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torchvision.models.squeezenet1_1(weights=None)

        def forward(self, x):
            return self.body(x)
"""


@pytest.mark.parametrize(
    ("torch_version", "release"), [("2.11.0", "0.26.0"), ("2.12.1+cu130", "0.27.1"), ("2.13.0+cpu", "0.28.0")]
)
def test_the_release_that_belongs_to_a_torch(torch_version: str, release: str) -> None:
    """What the wheels of these releases require in their metadata."""
    assert matching_release(torch_version) == release


def test_the_installed_torchvision_requires_that_torch() -> None:
    try:
        needs = next(line for line in requires("torchvision") or () if re.match(r"torch\W", line))
    except PackageNotFoundError:
        pytest.skip("torchvision is not installed")
    pinned = re.search(r"==([\d.]+)", needs)
    if pinned is None:
        pytest.skip("newer releases require no single torch")
    assert matching_release(pinned[1]) == version("torchvision")


@pytest.mark.thorough
def test_library_models_run_beside_a_torchvision_that_does_not_fit(write: Write, warm_python: Python) -> None:
    pytest.importorskip("timm")
    pytest.importorskip("transformers")
    write("config.json", json.dumps(LLAMA))
    write("own.py", dedent(OWN))
    code = dedent(MISFIT) + dedent("""
        from memsize.cli import run

        def status(*arguments):
            return run(["report", *arguments, "--scenario", "as-given", "--format", "json", "-o", f"{len(done)}.json"])

        done = []
        done.append(status("timm:test_vit"))
        done.append(status("hf:config.json"))
        done.append(status("own.py:Net", "--input", "3,64,64"))
        assert torch.ops.load_library is refuse
        print(done)
    """)
    done = warm_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["operator torchvision::nms does not exist", "[0, 0, 0]"], done.stderr


OLD = """
    import torch
    from pathlib import Path

    try:
        torch.ops.load_library(str(Path(__file__).with_name("_C.so")))
    except OSError:
        pass

    @torch.library.register_fake("torchvision::roi_align")
    def roi_align(input, rois, scale, height, width, ratio, aligned):
        return input.new_empty(len(rois), input.shape[1], height, width)
"""
"""A torchvision whose compiled part held the gradients of its operators, as before 0.27."""

DETECTOR = """
    import torch, torchvision

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(4, 4)

        def forward(self, x):
            return torch.ops.torchvision.roi_align(self.head(x), torch.zeros(1, 5, device=x.device), 1.0, 2, 2, 0, True)
"""


def test_operators_whose_gradients_cannot_be_loaded_refuse(write: Write, warm_python: Python) -> None:
    write("torchvision/__init__.py", dedent(OLD))
    write("detector.py", dedent(DETECTOR))
    done = warm_python("-m", "memsize", "report", "detector.py:Net", "--input", "3,4,4")
    assert done.returncode == 2
    assert "needs the compiled part of torchvision" in done.stdout + done.stderr
    assert "pip install --force-reinstall --no-deps torchvision==0." in done.stdout + done.stderr


def test_a_script_imports_a_torchvision_that_does_not_fit(write: Write, warm_python: Python) -> None:
    write("torchvision/__init__.py", dedent(OLD))
    write("torchvision/_autograd_registrations.py", "")
    write(
        "train.py",
        """
import torch
import torchvision

x = torch.ones(1, 4, 8, 8, device="cuda")
print(tuple(torch.ops.torchvision.roi_align(x, torch.zeros(3, 5, device="cuda"), 1.0, 2, 2, 0, True).shape))
""",
    )
    done = warm_python("-m", "memsize", "run", "train.py")
    assert done.returncode == 0, done.stderr
    assert "(3, 4, 2, 2)\n" in done.stdout  # 3 regions of 4 channels, 2 × 2 each

    done = warm_python("-c", "import memsize\nwith memsize.virtual_gpu('t4'):\n    import train\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(3, 4, 2, 2)\n"


# torchaudio 2.11's way to its compiled part, and what it does without.
AUDIO = {
    "__init__.py": "from ._extension import IS_THERE\n",
    "_extension/__init__.py": "from .utils import _load_lib\nIS_THERE = _load_lib('_torchaudio')\n",
    "_extension/utils.py": """
import torch
def _load_lib(lib):
    torch.ops.load_library(f"absent/{lib}.so")
    return True
""",
}


def test_a_script_imports_a_torchaudio_that_does_not_fit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "torchaudio" / "_extension").mkdir(parents=True)
    for name, content in AUDIO.items():
        (tmp_path / "torchaudio" / name).write_text(content)
    script = tmp_path / "script.py"
    script.write_text("import torch, torchaudio\nprint('compiled:', torchaudio.IS_THERE)\ntorch.ones(1).cuda()\n")
    memsize.run(script)
    assert "compiled: False" in capfd.readouterr().out
