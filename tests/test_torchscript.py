"""TorchScript in programs on a virtual GPU: graphs that are recorded there, modules that move, and their files."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

import memsize
from memsize import ProgramRun

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::torch.jit.TracerWarning")
BEGINNING = """
    import io, os, torch
    from torch import nn
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    images = torch.ones(2, 3, 8, 8, device="cuda")
    def kinds(graph):
        return [node.kind() for node in graph.nodes() if node.kind().startswith("aten")]
"""


def ran(tmp_path: Path, text: str, **options: Any) -> ProgramRun:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(BEGINNING) + textwrap.dedent(text), encoding="utf-8")
    run = memsize.run(script, gpu="t4", **options)
    assert run.failure is None, run.failure
    return run


def test_a_traced_model_trains(tmp_path: Path) -> None:
    """The memory of its layers is counted: a second forward of the same ops needs what the first did."""
    run = ran(
        tmp_path,
        """
        model = torch.jit.trace(net.cuda(), images)
        assert kinds(model.inlined_graph)[0] == "aten::_convolution", kinds(model.inlined_graph)
        str(model.graph)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(images).sum().backward()
            assert all(p.grad is not None and p.grad.is_cuda for p in model.parameters())
            optimizer.step()
        """,
    )
    assert run.steps == 2
    made = {storage.op for storage in run.trace.storages if storage.role == "activation"}
    assert {"convolution", "relu"} <= made


def test_a_run_of_a_traced_model_can_be_saved(tmp_path: Path) -> None:
    """While a graph is recorded, shapes hold tensors: records have numbers all the same."""
    run = ran(tmp_path, "torch.jit.trace(net.cuda(), images)")
    run.save(tmp_path / "run.memsize")
    assert memsize.load(tmp_path / "run.memsize").trace == run.trace
    (convolution,) = (layer for layer in run.trace.layers if layer.type == "Conv2d")
    assert [output.spec.shape for output in convolution.outputs] == [(2, 4, 6, 6)]


def test_the_graph_of_a_model_on_the_cpu_is_pytorchs_own(tmp_path: Path) -> None:
    ran(
        tmp_path,
        """
        image = images.cpu()
        model = torch.jit.trace(net.eval(), image)
        wanted = "_convolution batch_norm relu flatten linear".split()
        assert kinds(model.inlined_graph) == [f"aten::{name}" for name in wanted], kinds(model.inlined_graph)
        assert torch.equal(model(image), net(image))
        """,
    )


def test_sizes_are_part_of_a_graph(tmp_path: Path) -> None:
    """What a function computes from a shape follows the shape of other inputs, as PyTorch records it."""
    ran(
        tmp_path,
        """
        def halves(x):
            positions = torch.arange(x.shape[0] // 2, device=x.device)
            return x[: x.shape[0] // 2] + torch.zeros(x.size(1), device="cuda") + positions[:, None]
        traced = torch.jit.trace(halves, torch.ones(4, 6, device="cuda"))
        assert traced(torch.ones(8, 6, device="cuda")).shape == (4, 6)
        """,
    )


def test_only_the_programs_own_decisions_are_warned_of(tmp_path: Path) -> None:
    ran(
        tmp_path,
        """
        import warnings
        class Deciding(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = net
            def forward(self, x):
                return self.net(x) if x.shape[0] > 1 else x
        model = Deciding().cuda()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", torch.jit.TracerWarning)
            torch.jit.trace(model, images)
        assert {os.path.basename(w.filename) for w in caught} - {"functional.py"} == {"train.py"}, caught
        """,
    )


def test_recurrent_and_attention_layers_are_traced(tmp_path: Path) -> None:
    ran(
        tmp_path,
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.rnn = nn.LSTM(8, 8, batch_first=True)
            def forward(self, x):
                x, _ = self.rnn(x)
                q = x.view(x.size(0), x.size(1), 2, 4).transpose(1, 2)
                return nn.functional.scaled_dot_product_attention(q, q, q)
        x = torch.ones(2, 5, 8, device="cuda")
        traced = torch.jit.trace_module(Net().cuda(), {"forward": x})
        assert traced(x).shape == (2, 2, 5, 4)
        """,
    )


def test_a_traced_model_may_hold_modules_that_it_never_calls(tmp_path: Path) -> None:
    """The fast path of attention takes the weights of its output layer without calling it."""
    ran(
        tmp_path,
        """
        x = torch.ones(2, 5, 16, device="cuda")
        traced = torch.jit.trace(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).cuda(), x)
        traced(x).sum().backward()
        """,
    )


def test_a_scripted_module_moves_to_the_gpu(tmp_path: Path) -> None:
    """3·4·9 + 4 values of the convolution, 4·4 and a counter of the batch norm, 144·5 + 5 of the last layer."""
    run = ran(
        tmp_path,
        """
        model = torch.jit.script(net).cuda()
        assert all(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
        model(images)
        """,
    )
    stored = [s for s in run.trace.storages if s.role in ("parameter", "buffer")]
    assert sum(s.bytes for s in stored) == 4 * (112 + 16 + 725) + 8


def test_weights_of_a_scripted_module_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its 3,420 B stand in the report; the module can be loaded again, to the GPU or the CPU, from a buffer too."""
    monkeypatch.chdir(tmp_path)
    run = ran(
        tmp_path,
        """
        model = torch.jit.script(net.cuda())
        model.save("model.pt")
        traced = torch.jit.trace(net, images)
        torch.jit.save(traced, "traced.pt")
        before = torch.cuda.memory_allocated()
        torch.jit.script(nn.Linear(1024, 1024).cuda()).save("large.pt")
        assert torch.cuda.memory_allocated() == before
        torch.jit.load("large.pt")
        os.remove("large.pt")
        assert os.path.getsize("model.pt") == os.path.getsize("traced.pt") == 0
        assert next(torch.jit.load("model.pt").parameters()).is_cuda
        assert next(torch.jit.load("traced.pt", map_location="cpu").parameters()).device.type == "cpu"
        buffer = io.BytesIO()
        torch.jit.save(model, buffer)
        buffer.seek(0)
        assert torch.jit.load(buffer, map_location="cuda")(images).shape == (2, 5)
        net.cpu()
        torch.jit.script(nn.Linear(2, 2)).save("small.pt")
        assert os.path.getsize("small.pt")
        assert torch.jit.load("small.pt", map_location="cuda")(torch.ones(1, 2, device="cuda")).is_cuda
        """,
    )
    assert not (tmp_path / "model.pt").exists() and (tmp_path / "small.pt").exists()
    assert len(run.unwritten) == 4, run.unwritten


def test_a_file_that_was_there_is_not_overwritten_by_torchscript(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_text("old")
    ran(
        tmp_path,
        f"""
        try:
            torch.jit.script(nn.Linear(2, 2)).save("{tmp_path}/old.pt")
        except PermissionError:
            pass
        """,
    )
    assert (tmp_path / "old.pt").read_text() == "old"
