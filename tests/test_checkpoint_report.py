"""What is said of a checkpoint: its parts, its modules, findings, how it fits a model, and how all that is drawn."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import memsize
from memsize import CheckpointReport
from memsize.cli import run
from memsize.errors import CheckpointError, MemsizeError
from memsize.records.trace import TensorSpec
from memsize.render import FORMATS, render
from memsize.units import Bytes
from tests.checkpoints import (
    USES,
    Breakdown,
    Claims,
    Contents,
    Expected,
    FileRecord,
    Mark,
    Match,
    Piece,
    Storage,
    Tensor,
    View,
    compared,
    expected_from,
    gguf_bytes,
    halved,
    read,
    share_out,
)
from tests.pages import check_golden as check, table_of
from tests.records import strided_extent


def tensor(name: str, shape: tuple[int, ...] = (4,), dtype: str = "float32", **facts: Any) -> Tensor:
    """A tensor of a made-up file; dots in `name` part its keys, a slash is a dot within one."""
    keys = tuple(key.replace("/", ".") for key in name.split("."))
    elements = torch.Size(shape).numel()
    size = elements * getattr(torch, dtype).itemsize
    given = {"storage": 0, "bytes": size} | facts
    return Tensor(".".join(keys), keys, TensorSpec(dtype, shape), elements, **given)


def contents(*tensors: Tensor, **facts: Any) -> Contents:
    """A made-up file of `tensors`, each in a storage of its own."""
    tensors = tuple(replace(tensor, storage=index) for index, tensor in enumerate(tensors))
    storages = tuple(Storage(t.name, 0, 0, t.bytes + t.unneeded, t.bytes + t.unneeded) for t in tensors)
    data = sum(storage.bytes for storage in storages)
    uses = tuple(data if use == "tensors" else 0 for use in USES)
    file = FileRecord("x.pt", "PyTorch zip", data, uses, len(tensors))
    return Contents("x.pt", "PyTorch zip", (file,), storages, tensors, **facts)


def kinds(*names: str, **facts: Any) -> list[str]:
    return [part.kind for part in Breakdown(contents(*map(tensor, names), **facts)).tensor_parts]


def codes(report: CheckpointReport) -> list[str]:
    return [finding.code for finding in report.findings]


# Parts


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.w", "ema.w", "optimizer.x", "lr_scheduler.x"], ["model", "EMA", "optimizer", "scheduler"]),
        (["state_dict.w", "state_dict_ema.w", "best_acc"], ["model", "EMA", "other"]),
        (["model_state_dict.w", "optimizer_state_dict.x"], ["model", "optimizer"]),
        (["net.w", "ema_model.w", "scaler.scale", "rng_state.0"], ["model", "EMA", "other", "other"]),
        (["params.w", "params_ema.w"], ["model", "EMA"]),
        (["netG.w", "netD.w", "opt_g.x"], ["model", "model", "optimizer"]),
        (["generator.w", "discriminator.w"], ["model", "model"]),
        (["checkpoint.model.w", "checkpoint.optimizer.x"], ["model", "optimizer"]),
        (["anything.w", "something.w"], ["model", "model"]),
        (["model.w", "queue.w"], ["model", "other"]),
        (["conv/weight", "conv/bias"], ["model", "model"]),
        (["model_ema/w", "diffusion/w"], ["EMA", "model"]),
        (["schema.w", "template.w"], ["model", "model"]),
        (["optimizer_embedding/weight", "scheduler/weight"], ["model", "model"]),
    ],
)
def test_parts_by_their_keys(names: list[str], expected: list[str]) -> None:
    assert kinds(*names) == expected


def test_parts_by_what_they_hold() -> None:
    marks = (Mark(("states", "0"), "optimizer"),)
    assert kinds("states.0.state.1.exp_avg", "weights.w", marks=marks) == ["optimizer", "model"]
    assert kinds("state.1.exp_avg", marks=(Mark((), "optimizer"),)) == ["optimizer"]


def test_a_part_is_named_by_its_keys() -> None:
    parts = Breakdown(contents(tensor("generator.w"), tensor("critic.w"), tensor("opt_g.x"))).parts
    assert [(part.kind, part.name, part.bytes) for part in parts] == [
        ("model", "generator, critic", 32),
        ("optimizer", "opt_g", 16),
    ]


def test_shared_tensors_count_once() -> None:
    shared = tensor("model.b", bytes=0, shared_with="model.a")
    part = Breakdown(contents(tensor("model.a"), shared)).parts[0]
    assert (part.tensors, part.elements, part.bytes) == (2, 4, 16)


class Children(nn.Module):
    """A module of one float32 weight, 4 bytes, and children by name."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = child(x)
        return x * self.weight


TELLING = "head encoder net model module optimizer loss_net lr stats state param_groups 0".split()
"""Names that would tell a part of a training checkpoint: as children of a module they tell nothing."""


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("names", [["stem", "head"], TELLING])
def test_the_names_of_children_do_not_part_a_module(tmp_path: Path, names: list[str], nested: bool) -> None:
    model, path = Children(**{name: Children() for name in names}), tmp_path / "a.pt"
    if nested:
        model = Children(stem=model)
    # Each module has a weight of 4 bytes.
    size = 4 * len(list(model.modules()))
    for saved, root in ((model, ""), ({"model": model}, "model"), ({"anything": model, "epoch": 3}, "anything")):
        torch.save(saved, path)
        part = CheckpointReport(read(path)).breakdown.parts
        assert [(group.kind, group.name, group.bytes) for group in part] == [("model", root, size)]
    torch.jit.save(torch.jit.trace(model, torch.zeros(1)), path)
    assert [(group.kind, group.bytes) for group in Breakdown(read(path)).parts] == [("model", size)]


def test_a_whole_module_is_compared_by_the_names_of_its_state_dict(tmp_path: Path) -> None:
    model = nn.ModuleDict({"stem": Children(), "head": Children()})
    for saved, key in ((model, ""), ({"model": model}, "model")):
        torch.save(saved, tmp_path / "a.pt")
        match = compared(Breakdown(read(tmp_path / "a.pt")), expected_from(model), "ModuleDict")
        assert (match.matching, match.differences, match.key) == (2, (), key)


def test_modules_beside_each_other_are_models(tmp_path: Path) -> None:
    # Every part is a state dict, or a module, of 4 bytes but for the queue, of 8: only that is no module's.
    queue = {"queue": [torch.zeros(2)]}
    for part in (Children(), Children().state_dict()):
        torch.save({"projector": part, "head": part, "ema": Children().state_dict()} | queue, tmp_path / "a.pt")
        kinds = [(group.kind, group.name) for group in Breakdown(read(tmp_path / "a.pt")).parts]
        assert kinds == [("model", "projector, head"), ("EMA", "ema"), ("other", "queue")]


def test_a_traced_module_has_the_names_of_its_state_dict(tmp_path: Path) -> None:
    torch.save(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))), tmp_path / "a.pt")
    assert [tensor.name for tensor in read(tmp_path / "a.pt").tensors] == ["0.weight", "0.bias"]


# Modules


def layered(count: int) -> Breakdown:
    names = [f"model.layers/{n}/{part}/weight" for n in range(count) for part in ("attn", "mlp")]
    return Breakdown(contents(*map(tensor, names), tensor("model.head/weight")))


def test_modules_down_to_a_depth() -> None:
    breakdown = layered(2)
    assert [g.name for g in breakdown.modules(View(1))] == ["model.layers", "model.head"]
    assert [g.name for g in breakdown.modules(View(2))] == ["model.layers.0", "model.layers.1", "model.head.weight"]
    assert len(list(breakdown.modules(View(None)))) == 5
    assert [g.bytes for g in breakdown.modules(View(0))] == [5 * 16]


def test_modules_are_put_together_where_they_are_many() -> None:
    # Depth 3 is a row for each tensor here; 40 layers make 81 of them, and 3 when numbers are left out.
    assert layered(2).fitting_view == View(3)
    assert layered(40).fitting_view == View(3, folded=True)
    names = [group.name for group in layered(40).modules(layered(40).fitting_view)]
    assert names == ["model.layers.*.attn", "model.layers.*.mlp", "model.head.weight"]


def test_optimizer_state_is_gathered_by_what_it_is() -> None:
    names = [f"optimizer.state.{n}.{kind}" for n in range(3) for kind in ("exp_avg", "exp_avg_sq")]
    groups = Breakdown(contents(*map(tensor, names))).modules(View(1))
    assert [(group.name, group.tensors) for group in groups] == [
        ("optimizer.state.*.exp_avg", 3),
        ("optimizer.state.*.exp_avg_sq", 3),
    ]


@given(st.lists(st.lists(st.sampled_from("abc01"), min_size=1, max_size=5), max_size=30), st.none() | st.integers(0, 6))
def test_rows_add_up_at_every_depth(paths: list[list[str]], depth: int | None) -> None:
    breakdown = Breakdown(contents(*(tensor(f"model.{'/'.join(path)}") for path in paths)))
    for view in (View(depth), View(depth, folded=True), breakdown.fitting_view):
        groups = list(breakdown.modules(view))
        assert sum(group.bytes for group in groups) == 16 * len(paths)
        assert sum(group.tensors for group in groups) == len(paths)


# Bytes


@given(st.lists(st.tuples(st.integers(0, 120), st.integers(-3, 60), st.sampled_from(USES)), max_size=12))
def test_claims_add_up_to_the_file(drawn: list[tuple[int, int, Any]]) -> None:
    claims = Claims(100)
    for start, length, use in drawn:
        claims.claim(start, length, use)
    assert sum(claims.sums()) == 100
    covered = {byte for start, length, use in drawn for byte in range(start, start + length) if byte < 100}
    named = {byte for start, length, use in drawn if use == "unclaimed" for byte in range(start, start + length)}
    assert claims.sums()[USES.index("unclaimed")] >= 100 - len(covered)
    assert claims.sums()[USES.index("unclaimed")] <= 100 - len(covered) + len(named)


def test_padding_between_claims() -> None:
    claims = Claims(50)
    claims.claim(0, 20, "pickle")
    claims.claim(30, 10, "tensors")
    claims.pad_gaps(20, 45)
    assert dict(zip(USES, claims.sums(), strict=True)) == dict.fromkeys(USES, 0) | {
        "pickle": 20,
        "tensors": 10,
        "padding": 15,
        "unclaimed": 5,
    }


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8))
def test_views_cover_a_storage_once(drawn: list[tuple[int, int]]) -> None:
    pieces = [
        Piece((str(n),), TensorSpec("uint8", (size,)), size, 0, start, size, size)
        for n, (start, size) in enumerate(drawn)
    ]
    tensors, storages = share_out(pieces, [Storage("s", 0, 0, 80, 80)])
    union = {byte for start, size in drawn for byte in range(start, start + size)}
    assert sum(tensor.bytes for tensor in tensors) == len(union)
    assert storages[0].unneeded == 80 - len(union)
    for tensor, (_, size) in zip(tensors, drawn, strict=True):
        assert tensor.bytes <= size
        assert (tensor.shared_with is not None) == (size > 0 and tensor.bytes == 0)


@given(st.lists(st.integers(0, 5), max_size=4), st.permutations(range(4)), st.sampled_from([8, 16, 32, 64]))
def test_what_a_strided_tensor_spans(shape: list[int], order: list[int], bits: int) -> None:
    base = torch.empty(shape, device="meta").permute([axis for axis in order if axis < len(shape)])
    span, needed = strided_extent(base.shape, base.stride(), bits)
    assert span == needed == base.numel() * bits // 8


def test_halves() -> None:
    held = [tensor("a", (6,)), tensor("b", (6,), "float64"), tensor("c", (6,), "int64"), tensor("d", (6,), "bfloat16")]
    assert halved(held) == 12 + 12 + 48 + 12


# Findings


def test_a_training_checkpoint_that_says_why_it_is_large() -> None:
    report = CheckpointReport(
        contents(
            tensor("state_dict.module/w", (1000,)),
            tensor("ema.module/w", (1000,)),
            tensor("optimizer.state.0.exp_avg", (1000,)),
            tensor("optimizer.state.0.exp_avg_sq", (1000,)),
            tensor("queue", (10,), unneeded=4000),
            classes=("argparse.Namespace",),
            marks=(Mark(("optimizer",), "optimizer"),),
        )
    )
    assert codes(report) == [
        "optimizer-dominates",
        "duplicate-weights-ema",
        "view-keeps-whole-storage",
        "fp32-could-be-half",
        "module-prefix",
        "code-in-pickle",
    ]
    sizes = {finding.code: finding.bytes for finding in report.findings}
    assert sizes["optimizer-dominates"] == 8000
    assert sizes["duplicate-weights-ema"] == 4000
    assert sizes["view-keeps-whole-storage"] == 4000
    assert sizes["fp32-could-be-half"] == 2000
    texts = [finding.text("B") for finding in report.findings]
    assert "8,000 B, 40% of the file;" in texts[0] and "2.0 times" in texts[0]
    assert texts[2].endswith("queue is a view of a larger tensor: save tensor.clone() instead.")
    assert "'module.', the prefix of DataParallel" in texts[4]


@pytest.mark.parametrize(
    ("tensors", "facts", "code"),
    [
        ([tensor("w", (9,), "float64")], {}, "float64-tensors"),
        ([tensor("w"), tensor("v", dtype="float16")], {}, "mixed-dtypes"),
        ([tensor("a/w"), tensor("b/w", bytes=0, shared_with="a.w")], {}, "shared-storage"),
        ([tensor("_orig_mod/w")], {}, "module-prefix"),
        ([tensor("w")], {"module": "models.Net"}, "whole-model-pickled"),
        ([tensor("w")], {"missing": ("v",)}, "missing-tensors"),
        ([tensor("model.w", (99,)), tensor("optimizer.x")], {}, "optimizer-state"),
    ],
)
def test_single_findings(tensors: list[Tensor], facts: dict[str, Any], code: str) -> None:
    assert code in codes(CheckpointReport(contents(*tensors, **facts)))


def test_a_plain_half_model_has_nothing_to_explain() -> None:
    assert codes(CheckpointReport(contents(tensor("conv/w", dtype="float16"), tensor("fc/w", dtype="float16")))) == []


def test_bits_per_weight(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes([("a", (256, 4), 12, 0)], data=4 * 144))
    report = memsize.checkpoint(path)
    finding = next(finding for finding in report.findings if finding.code == "bits-per-weight")
    assert finding.values["bits"] == "4.50"  # Q4_K: 144 bytes for 256
    assert finding.bytes == 4 * 144


def test_bytes_that_belong_to_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.zeros(4)}, path, _use_new_zipfile_serialization=False)
    with path.open("ab") as file:
        file.write(bytes(1000))
    report = memsize.checkpoint(path)
    assert next(f.bytes for f in report.findings if f.code == "unclaimed-bytes") == 1000
    assert sum(row[5] for row in table_of(report, "parts").rows) == os.path.getsize(path)


# Against a model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 3, bias=False)


Change = Callable[[dict[str, Any]], Any]


def matched(tmp_path: Path, change: Change, model: nn.Module | None = None) -> Match:
    torch.save(change(Net().state_dict()), tmp_path / "a.pt")
    report = memsize.checkpoint(tmp_path / "a.pt", against=model or Net())
    assert report.match is not None
    return report.match


@pytest.mark.parametrize(
    ("change", "key", "dropped", "added", "wrappers"),
    [
        (lambda s: s, "", "", "", ()),
        (lambda s: {"state_dict": s, "epoch": 1}, "state_dict", "", "", ()),
        (lambda s: {f"module.{k}": v for k, v in s.items()}, "", "module.", "", ()),
        (lambda s: {f"_orig_mod.{k}": v for k, v in s.items()}, "", "_orig_mod.", "", ()),
        (lambda s: {f"model.{k}": v for k, v in s.items()}, "", "model.", "", ()),
        (lambda s: {"model": {f"module.{k}": v for k, v in s.items()}}, "model", "module.", "", ()),
        (lambda s: {f"module._orig_mod.{k}": v for k, v in s.items()}, "", "module._orig_mod.", "", ()),
        (lambda s: {k.replace("body.", "body._orig_mod."): v for k, v in s.items()}, "", "", "", ("_orig_mod",)),
        (lambda s: {k: v for k, v in s.items() if k.startswith("body")}, "", "", "", ()),
        (lambda s: {k[5:]: v for k, v in s.items() if k.startswith("body.")}, "", "", "body.", ()),
    ],
)
def test_names_meet_after_a_change(
    tmp_path: Path, change: Change, key: str, dropped: str, added: str, wrappers: tuple[str, ...]
) -> None:
    match = matched(tmp_path, change)
    assert (match.key, match.dropped, match.added, match.wrappers) == (key, dropped, added, wrappers)
    assert match.matching in (7, 8)
    assert match.matching + match.count("missing") == 8
    assert match.count("unexpected") == 0


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    def spoil(state: dict[str, Any]) -> dict[str, Any]:
        del state["head.weight"]
        state["body.0.weight"] = torch.zeros(2, 4)
        state["body.0.bias"] = state["body.0.bias"].half()
        state["extra.weight"] = torch.zeros(5)
        return {"model": {f"module.{name}": value for name, value in state.items()}, "ema": {"other": torch.zeros(2)}}

    match = matched(tmp_path, spoil)
    assert match.matching == 5
    assert [(d.name, d.problem, str(d.file), str(d.model)) for d in match.differences] == [
        ("body.0.weight", "wrong shape", "float32[2,4]", "float32[3,4]"),
        ("body.0.bias", "wrong dtype", "float16[3]", "float32[3]"),
        ("head.weight", "missing", "None", "float32[3,3]"),
        ("extra.weight", "unexpected", "float32[5]", "None"),
    ]


def test_the_differences_are_those_of_load_state_dict(tmp_path: Path) -> None:
    state = Net().state_dict() | {"extra": torch.zeros(1)}
    del state["body.1.bias"]
    answer = Net().load_state_dict(state, strict=False)
    match = matched(tmp_path, lambda _: state)
    assert [d.name for d in match.differences if d.problem == "missing"] == answer.missing_keys
    assert [d.name for d in match.differences if d.problem == "unexpected"] == answer.unexpected_keys


def test_tied_tensors_may_be_left_out(tmp_path: Path) -> None:
    model = Net()
    model.again = model.head  # type: ignore[assignment]
    assert expected_from(model)["again.weight"] == Expected(TensorSpec("float32", (3, 3)), "head.weight")
    match = matched(tmp_path, lambda s: s, model)
    assert match.left_out == ("again.weight",)
    assert match.differences == ()


def test_quantized_weights_are_of_another_dtype(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = Net()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    match = matched(tmp_path, lambda _: model.state_dict())
    assert {d.name: d.problem for d in match.differences} == {
        "body.0.weight": "wrong dtype",
        "head.weight": "wrong dtype",
    }


def test_nothing_in_common() -> None:
    match = compared(Breakdown(contents(tensor("a/b"))), {"c.d": Expected(TensorSpec("float32", (4,)))}, "Net")
    assert [(d.name, d.problem) for d in match.differences] == [("c.d", "missing"), ("a.b", "unexpected")]


# Drawing


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small training checkpoint in the working folder."""
    monkeypatch.chdir(tmp_path)
    model = Net()
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    big = torch.zeros(1000, 100)
    torch.save(
        {"epoch": 3, "state_dict": state, "queue": big[:2], "lr_scheduler": {"last_epoch": 1, "_step_count": 2}}, "a.pt"
    )
    return tmp_path / "a.pt"


def test_the_rows_of_the_parts_add_up_to_the_size_of_the_file(checkpoint: Path) -> None:
    report = memsize.checkpoint(checkpoint)
    table = table_of(report, "parts")
    assert table.total is not None
    assert sum(row[5] for row in table.rows) == table.total[5] == os.path.getsize(checkpoint)
    assert all(isinstance(row[5], Bytes) for row in table.rows)
    modules = table_of(report, "modules")
    assert modules.total is not None
    assert sum(row[5] for row in modules.rows) == modules.total[5]


def test_rows_beyond_what_is_read_are_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memsize.documents.checkpoint.MOST_MODULES", 2)
    report = CheckpointReport(contents(*(tensor(f"{name}/w", unneeded=3) for name in "abcde")))
    table = table_of(report, "modules")
    assert [str(row[0]) for row in table.rows] == ["a", "b", "3 more (JSON has them all)"]
    assert table.total is not None
    assert table.rows[-1][5:7] == (3 * 16, 3 * 3)
    for column in (2, 3, 5, 6):
        assert sum(row[column] for row in table.rows) == table.total[column]


@pytest.mark.parametrize("format", ["text", "markdown", "html", "json", "csv"])
def test_every_format(checkpoint: Path, format: str) -> None:
    text = render(memsize.checkpoint(checkpoint), format)
    assert text.endswith("\n")
    assert "queue" in text


def made_by_hand() -> CheckpointReport:
    """A training checkpoint: a model with a tensor that is a view, its EMA copy, two moments of an optimizer."""
    mebi = 2**18
    held = contents(
        *(tensor(f"model.{name}", (mebi,)) for name in ("stem.weight", "body.0.weight", "body.1.weight")),
        tensor("model.queue", (16,), unneeded=4 * mebi - 64),
        tensor("ema.stem.weight", (mebi,)),
        tensor("optimizer.state.0.exp_avg", (mebi,)),
        tensor("optimizer.state.0.step", (), "int64"),
        values=(("epoch", "3"), ("git", "x" * 120)),
        marks=(Mark(("optimizer",), "optimizer"),),
        classes=("numpy.ndarray",),
        notes=("a note",),
    )
    file = replace(held.files[0], name="x-00001.pt", size=held.size + 700, uses=(held.size, 0, 0, 500, 200, 0, 0))
    other = FileRecord("x-00002.pt", "PyTorch zip", 96, (0, 64, 0, 0, 0, 0, 32), 0)
    expected = {name: Expected(TensorSpec("float32", (mebi,))) for name in ("stem.weight", "body.0.weight", "fc.bias")}
    held = replace(held, files=(file, other))
    return CheckpointReport(held, compared(Breakdown(held), expected, "Net"))


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "markdown"])
def test_golden(format: str) -> None:
    check(f"checkpoint{FORMATS[format][0]}", render(made_by_hand(), format))


def test_golden_to_a_depth() -> None:
    check("checkpoint.80.txt", render(made_by_hand(), "text", width=80, depth=1))
    check("checkpoint.1.csv", render(made_by_hand(), "csv", depth=1))


@pytest.mark.parametrize("width", [80, 120, 200])
def test_text_fits_its_width(checkpoint: Path, width: int) -> None:
    text = render(memsize.checkpoint(checkpoint), "text", width=width)
    assert max(map(len, text.splitlines())) <= width


def test_json_holds_everything(checkpoint: Path) -> None:
    data = json.loads(render(memsize.checkpoint(checkpoint, against=Net()), "json", unit="B"))
    size = os.path.getsize(checkpoint)
    assert data["schema"] == "memsize.checkpoint/1"
    assert data["bytes"] == sum(data["uses"].values()) == size
    assert sum(t["bytes"] + t["unneeded"] for t in data["tensors"]) == data["uses"]["tensors"]
    assert data["behind_views"] == 998 * 100 * 4
    queue = next(t for t in data["tensors"] if t["name"] == "queue")
    assert (queue["part"], queue["shape"], queue["file"]) == ("other", [2, 100], "a.pt")
    assert data["against"]["dropped"] == "module."
    assert data["against"]["differences"] == []
    assert data["values"]["epoch"] == "3"
    assert data["values"]["lr_scheduler"].startswith("scheduler state")


def test_csv_has_a_row_for_each_tensor_or_module(checkpoint: Path) -> None:
    report = memsize.checkpoint(checkpoint)
    rows = list(csv.DictReader(io.StringIO(render(report, "csv"))))
    assert len(rows) == len(report.contents.tensors)
    assert sum(int(row["bytes"]) for row in rows) == sum(t.bytes for t in report.contents.tensors)
    assert len(list(csv.DictReader(io.StringIO(render(report, "csv", depth=1))))) == 2


def test_data_frames(checkpoint: Path) -> None:
    report = memsize.checkpoint(checkpoint)
    assert report.size == os.path.getsize(checkpoint)
    assert report.parts.set_index("part").loc["model", "where"] == "state_dict"
    assert report.tensors["bytes"].sum() == report.dtypes["bytes"].sum() == report.modules(2)["bytes"].sum()
    assert set(report.dtypes["dtype"]) == {"float32", "int64"}
    assert "view-keeps-whole-storage" in [finding.code for finding in report.why()]
    assert "<table>" in report._repr_html_()
    assert str(report).startswith("a.pt")
    assert json.loads(report.to_json(checkpoint.with_name("a.json"))) == json.loads(
        checkpoint.with_name("a.json").read_text()
    )


def test_an_empty_checkpoint(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "a.pt")
    report = memsize.checkpoint(tmp_path / "a.pt")
    for format in ("text", "markdown", "html", "json", "csv"):
        assert render(report, format)
    assert len(report.tensors) == 0


# The command line


def test_the_command(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "a.pt", "--units", "kib", "--depth", "1"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("a.pt   PyTorch zip   ")
    assert "KiB" in out and "Modules to depth 1" in out
    assert err == ""


def test_a_file_for_the_report(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "a.pt", "-o", "report.json"]) == 0
    assert json.loads(Path("report.json").read_text())["path"] == "a.pt"
    assert run(["checkpoint", "a.pt", "-o", "report.json"]) == 2
    assert "--force" in capsys.readouterr().err


def test_against_a_target(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("nets.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, width=3):\n"
        "        super().__init__()\n"
        "        print('building')\n"
        "        self.body = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width))\n"
        "        self.head = nn.Linear(width, width, bias=False)\n"
    )
    assert run(["checkpoint", "a.pt", "--against", "nets.py:Net"]) == 0
    out, err = capsys.readouterr()
    assert "The file has all 8 tensors of nets.py:Net" in out
    assert "building" not in out and err == "building\n"
    assert run(["checkpoint", "a.pt", "--against", "nets.py:Net", "--arg", "width=5"]) == 0
    out = capsys.readouterr().out
    assert "1 of the 8 tensors of nets.py:Net matches; 7 differ in shape." in out
    assert "float32[5,4]" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gone.pt"], "cannot read gone.pt"),
        (["a.pt", "--arg", "a=1"], "--against"),
        (["a.pt", "--against", "gone.py:Net"], "no such file"),
        (["a.pt", "--units", "MeB"], "did you mean"),
        (["a.pt", "-f", "jsn"], "did you mean json"),
    ],
)
def test_mistakes(checkpoint: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert run(["checkpoint", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def test_errors_are_memsizes(tmp_path: Path) -> None:
    assert issubclass(CheckpointError, MemsizeError)
    with pytest.raises(MemsizeError, match="cannot read"):
        read(tmp_path / "gone.pt")
