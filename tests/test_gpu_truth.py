"""Predictions are held to what a GPU measured: every file in tests/truth, replayed against today's predictions.

The arithmetic of the promises is tested on measurements made by hand, one set that keeps them all and one for each that
breaks it; so that a file which passes says something.

`MEMSIZE_GOLDEN=write pytest tests/test_gpu_truth.py` writes the accuracy table into docs/accuracy.md.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
from torch import nn

from benchmarks import gpu_truth
from benchmarks.gpu_truth import Options, collect
from benchmarks.nets.adapted import Adapted
from benchmarks.nets.convolutional import VGG16, ConvNeXtTiny, EfficientNetB0, Toy, UNet
from benchmarks.nets.language import GPT2, Bert, T5Small, llama_tied, llama_untied
from benchmarks.nets.residual import ResNet18, ResNet50
from benchmarks.nets.visual import SwinTiny, ViTBase
from benchmarks.truth import explain
from benchmarks.truth.figures import Figure, Replayed, figures, replayed
from benchmarks.truth.lanes import LaneError, Lanes
from benchmarks.truth.outcomes import FOLDER, Outcome, Truth, outcome_of, path_of, paths, read, write
from benchmarks.truth.suite import NETS, SUITE
from benchmarks.truth.table import NOT_YET, table
from memsize.errors import InputError
from tests.conftest import ROOT
from tests.measurements import (
    AllocationLog,
    DeviceUse,
    MeasuredWorkload,
    Measurement,
    Peaks,
    SoftwareStack,
    Weightless,
    predict,
)
from tests.records import Interval, Prediction, VerifiedRun
from tests.standin import STACK

MIB = 2**20
H100 = replace(STACK, gpu="NVIDIA H100 80GB HBM3", capability=(9, 0), torch="2.11.0+cu130")
STAND_IN = "tests.standin:StandIn"

# -- the suite --------------------------------------------------------------------------------------------------------

PARAMETERS: list[tuple[Callable[[], nn.Module], int]] = [
    (Toy, 9_223_901),
    (ResNet18, 11_689_512),
    (ResNet50, 25_557_032),
    (VGG16, 138_357_544),
    (EfficientNetB0, 5_288_548),
    (ConvNeXtTiny, 28_589_128),
    (UNet, 31_037_698),
    (ViTBase, 86_567_656),
    (SwinTiny, 28_288_354),
    (Bert, 109_482_240 + 2 * 768 + 2),
    (GPT2, 124_439_808),
    (partial(GPT2, 1280, 36, 20), 774_030_080),
    (T5Small, 60_506_624),
    (llama_tied, 1_235_814_400),
    (llama_untied, 1_100_048_384),
]
"""The published counts: torchvision's and timm's tables, transformers' checkpoints."""


@pytest.mark.parametrize(("build", "count"), PARAMETERS)
def test_the_networks_are_the_known_ones(build: Callable[[], nn.Module], count: int) -> None:
    with Weightless():
        model = build()
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_adapters_alone_are_trained() -> None:
    model = SUITE["gpt2-adapted/train/amp-bf16/adamw/b8/s512"].case.model
    # rank 16 on 768 → 2304 and on 768 → 768, in each of 12 blocks
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained == 12 * 16 * ((768 + 2304) + (768 + 768))
    assert sum(isinstance(module, Adapted) for module in model.modules()) == 24


def test_the_suite_has_what_it_promises() -> None:
    entries = SUITE.values()
    assert len(SUITE) >= 60
    assert {entry.net for entry in entries} == set(NETS)
    for net in NETS:
        kinds = {entry.training is not None for entry in entries if entry.net.startswith(net.partition("-check")[0])}
        assert kinds == {True, False} or net.endswith("adapted"), net
    for kind, wanted in (
        (True, {"fp32", "bf16", "amp-fp16", "amp-bf16", "apex-O2"}),
        (False, {"fp32", "fp16", "bf16", "int8-weight"}),
    ):
        assert {entry.scenario for entry in entries if (entry.training is not None) is kind} == wanted
    trainings = [entry.training for entry in entries if entry.training]
    assert {training.optimizer for training in trainings} == {"sgd", "sgd-momentum", "adamw", "adamw:fused"}
    assert {training.gradient_accumulation_steps for training in trainings} == {1, 4}
    batches: dict[tuple[str, str], set[int]] = {}
    for entry in entries:
        batches.setdefault((entry.net, entry.scenario), set()).add(entry.batch)
    assert sum(len(sizes) > 1 for sizes in batches.values()) >= 5


QUICK = ("perceptron", "wide", "toy", "lstm", "gru", "resnet18/infer", "vgg16/infer")
WORKLOADS = [name if name.startswith(QUICK) else pytest.param(name, marks=pytest.mark.slow) for name in SUITE]


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_is_predicted(name: str) -> None:
    said = SUITE[name].case.predict(H100)
    assert 0 < said.least.requested <= said.least.allocated <= said.least.reserved <= said.device.low
    assert Peaks.most([said.most, said.least]) == said.most
    # it fits the smallest of the GPUs that it is meant for, with room for what is not foreseen
    assert said.device.high < 60 * 2**30
    assert said.log.entries
    work = SUITE[name].case.workload()
    assert (work.optimizer is None) == ("/infer/" in name) and work.training is ("/train/" in name)


# -- the promises, on measurements made by hand ------------------------------------------------------------------------

EXACT = Peaks(1000 * MIB, 1010 * MIB, 1100 * MIB)
WIDER = Peaks(1040 * MIB, 1060 * MIB, 1160 * MIB)
"""What a convolutional net may take with the largest workspaces: 50 MiB of 1,010 allocated ones is 5 %."""


def row(
    number: int,
    convolutional: bool = False,
    measured: Peaks | None = None,
    device: int = 1600 * MIB,
    most: Peaks = WIDER,
    tracked: int | None = 1000 * MIB,
    benchmark: bool = False,
) -> Replayed:
    most = most if convolutional else EXACT
    said = Prediction(
        EXACT,
        most,
        Interval(EXACT.reserved + 300 * MIB, most.reserved + 650 * MIB),
        0,
        AllocationLog((), ()),
        convolutional,
    )
    work = MeasuredWorkload(f"net-{number}", (), 8, "fp32", benchmark=benchmark)
    seen = Measurement(work, STACK, measured or EXACT, None, DeviceUse(device, "NVML, this process"), tracked=tracked)
    return Replayed(f"net-{number}", VerifiedRun(seen, said))


def rows(**changes: Callable[[int], Replayed]) -> list[Replayed]:
    """20 perceptrons and 20 convolutional nets that keep every promise, but for what `changes` makes of either kind."""
    plain, nets = changes.get("plain", row), changes.get("nets", partial(row, convolutional=True))
    return [*map(plain, range(20)), *map(nets, range(20))]


def off(figure: str, share: float) -> Peaks:
    """A measurement whose figure is above what is predicted by that share of itself."""
    return replace(EXACT, **{figure: round(getattr(EXACT, figure) / (1 - share))})


def missed(found: list[Replayed]) -> list[str]:
    return [figure.what for figure in figures(found) if not figure.reached]


def test_measurements_that_keep_every_promise() -> None:
    found = figures(rows())
    assert [figure.what for figure in found if not figure.reached] == []
    assert {figure.count for figure in found} == {20, 40}
    exact, widest = found[0], found[6]
    assert (exact.value, exact.tracked) == (1.0, 1.0)
    assert widest.value == pytest.approx(50 / 1010)
    inside = rows(nets=lambda n: row(n, True, Peaks(1020 * MIB, 1050 * MIB, 1150 * MIB)))
    assert missed(inside) == []


BROKEN: dict[str, list[Replayed]] = {
    # 11 of 20 are off by one byte in 10^9: nothing but exactness is lost
    "requested exact, not convolutional": rows(
        plain=lambda n: row(n, measured=replace(EXACT, requested=EXACT.requested + (n < 11)))
    ),
    # 11 of 20 by 0.15 %: above the median that is allowed; fewer than half exact
    "requested, not convolutional: median error": rows(
        plain=lambda n: row(n, measured=off("requested", 0.0015 if n < 11 else 0))
    ),
    # 2 of 20 by 1.5 %: 90 % are within 1 %
    "requested, not convolutional: within 1 %": rows(
        plain=lambda n: row(n, measured=off("requested", 0.015 if n < 2 else 0))
    ),
    "allocated, not convolutional: median error": rows(
        plain=lambda n: row(n, measured=off("allocated", 0.004 if n < 11 else 0))
    ),
    # too much predicted: 2 of 20 measure 3 % less
    "allocated, not convolutional: within 2 %": rows(
        plain=lambda n: row(n, measured=off("allocated", -0.03 if n < 2 else 0))
    ),
    # 2 of 20 measure 1 % less than the least: outside, and no underestimate
    "allocated, convolutional: inside the interval": rows(
        nets=lambda n: row(n, True, off("allocated", -0.01 if n < 2 else 0))
    ),
    # one interval of 102 MiB beside 1,010: 10.1 %
    "allocated, convolutional: widest interval": rows(
        nets=lambda n: row(n, True, most=replace(WIDER, allocated=(1010 + (102 if n == 7 else 50)) * MIB))
    ),
    # 21 of 40 by 1.5 %, all of them too high
    "reserved: median error": [
        *(row(n, measured=off("reserved", -0.015)) for n in range(20)),
        *(row(n, True, off("reserved", -0.015 if n < 1 else 0)) for n in range(20)),
    ],
    # 3 of 40 less than the context's least
    "device: inside the interval": rows(plain=lambda n: row(n, device=(1300 if n < 3 else 1600) * MIB)),
    # one device 3 % above the most: 1,750 / 0.97
    "underestimated by more than 2 %, any figure": rows(
        plain=lambda n: row(n, device=round(1750 * MIB / 0.97) if n == 3 else 1600 * MIB)
    ),
}
TOO = {"requested, not convolutional: median error": ["requested exact, not convolutional"]}
"""What cannot be broken alone."""


@pytest.mark.parametrize("what", BROKEN)
def test_measurements_that_break_one(what: str) -> None:
    assert missed(BROKEN[what]) == [*TOO.get(what, []), what]


def test_every_promise_is_broken_by_one() -> None:
    assert list(BROKEN) == [figure.what for figure in figures(rows())]


def test_each_figure_counts_for_underestimates() -> None:
    for figure in ("requested", "allocated", "reserved"):
        found = figures([row(0, measured=off(figure, 0.025)), row(1)])
        assert found[-1].value == 1, figure
        assert figures([row(0, measured=off(figure, 0.019)), row(1)])[-1].value == 0
    # what an interval covers is none
    assert figures([row(0, True, Peaks(1039 * MIB, 1059 * MIB, 1159 * MIB))])[-1].value == 0


def test_memtracker_is_held_to_the_same() -> None:
    found = figures(rows(plain=lambda n: row(n, tracked=900 * MIB if n < 10 else None)))
    exact, median_, *_ = found
    assert exact.tracked == 0.0 and median_.tracked == pytest.approx(0.1)
    assert figures(rows(plain=lambda n: row(n, tracked=None)))[0].tracked is None
    assert [figure.tracked for figure in found[5:]] == [None] * 5


def test_runs_with_the_benchmark_are_none_of_the_promises() -> None:
    bad = row(50, True, off("allocated", 0.5), benchmark=True)
    assert missed([*rows(), bad]) == [] and figures([*rows(), bad])[7].count == 40


def test_nothing_measured_reaches_nothing() -> None:
    assert [figure.reached for figure in figures([])] == [False] * len(BROKEN)
    assert {figure.value for figure in figures([])} == {None}


def test_a_figure_that_is_missing_is_not_counted() -> None:
    without = row(0)
    seen = replace(without.checked.measurement, device=None, peaks=None)
    found = figures([replace(without, checked=replace(without.checked, measurement=seen)), *rows()])
    assert (found[0].count, found[8].count) == (20, 40)


# -- the file ---------------------------------------------------------------------------------------------------------

CHEAP = ("perceptron/train/fp32/sgd/b64", "lstm/infer/fp32/b64/s35", "resnet18/infer/fp16/b16", "toy/infer/fp32/b1")


@cache
def measured_as_predicted() -> Truth:
    """Four workloads of the suite, as if a GPU had shown exactly what is said of it."""
    outcomes = []
    for name in CHEAP:
        case = SUITE[name].case
        said = case.predict(H100)
        seen = Measurement(
            case.workload(),
            H100,
            said.least,
            said.least,
            DeviceUse(said.device.low, "NVML, this process"),
            tracked=said.least.requested,
            log=said.log,
        )
        outcomes.append(outcome_of(name, VerifiedRun(seen, said)))
    return Truth(H100, "2026-11-21", "python -m benchmarks.gpu_truth", "0.1.0", tuple(outcomes))


def changed(truth: Truth, name: str, **peaks: int) -> Truth:
    found = next(each for each in truth.outcomes if each.name == name)
    assert found.measurement is not None and found.measurement.peaks is not None
    seen = replace(found.measurement, peaks=replace(found.measurement.peaks, **peaks))
    return truth.with_outcome(replace(found, measurement=seen))


def test_a_file_that_is_right_passes(tmp_path: Path) -> None:
    write(measured_as_predicted(), tmp_path / "truth.json")
    found = figures(replayed(read(tmp_path / "truth.json")))
    narrow = [figure for figure in found if "widest" not in figure.what]
    assert [figure.what for figure in narrow if not figure.reached] == []
    assert all(figure.count for figure in found)


def test_a_file_that_is_wrong_fails(tmp_path: Path) -> None:
    """The perceptron measured at 5 % more than is predicted: an underestimate, and no exact half any more."""
    truth = measured_as_predicted()
    outcome = next(each for each in truth.outcomes if each.name == CHEAP[0])
    assert outcome.said is not None
    more = {name: round(getattr(outcome.said.least, name) * 1.05) for name in ("requested", "allocated")}
    wrong = changed(truth, CHEAP[0], **more)
    write(wrong, tmp_path / "truth.json")
    names = missed(replayed(read(tmp_path / "truth.json")))
    assert "requested, not convolutional: within 1 %" in names
    assert "allocated, not convolutional: within 2 %" in names
    assert "underestimated by more than 2 %, any figure" in names


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    truth = measured_as_predicted().with_outcome(Outcome("gpt2/train/fp32/adamw/b4/s512", False, failure="it broke"))
    write(truth, tmp_path / "deep" / "truth.json")
    assert read(tmp_path / "deep" / "truth.json") == truth
    lines = (tmp_path / "deep" / "truth.json").read_text().splitlines()
    assert len(lines) == len(truth.outcomes) + 2  # one workload a line
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["truth.json"]
    # a workload that failed is to be measured again
    assert (CHEAP[0], False) in truth.done and ("gpt2/train/fp32/adamw/b4/s512", False) not in truth.done


def test_no_log_is_kept_but_what_it_says() -> None:
    outcome = measured_as_predicted().outcomes[0]
    assert outcome.measurement is not None and outcome.measurement.log is None
    compared = outcome.compared
    assert compared is not None and compared.predicted == compared.real == compared.matched > 0
    assert (compared.differing, compared.first) == (0, ())
    assert len(compared.digest) == 16


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "Expecting"),
        ("[]", "no attribute"),
        ('{"schema": "x"}', "found 'x'"),
        ('{"schema": "memsize.truth/1"}', "miss"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "truth.json").write_text(text)
    with pytest.raises(InputError, match=says):
        read(tmp_path / "truth.json")


def test_the_name_of_a_file() -> None:
    assert path_of(H100).name == "nvidia-h100-80gb-hbm3-torch-2.11.json"
    assert path_of(replace(H100, gpu="Tesla T4", torch="2.13.0")).name == "tesla-t4-torch-2.13.json"


# -- what is committed ------------------------------------------------------------------------------------------------


@cache
def committed(path: Path) -> tuple[Truth, list[Replayed]]:
    truth = read(path)
    return truth, replayed(truth)


NONE = pytest.param(None, marks=pytest.mark.skip("no measurement yet"))


@pytest.mark.parametrize("path", paths() or [NONE], ids=lambda path: path.name if path else "none")
@pytest.mark.parametrize("what", BROKEN)
def test_what_was_measured_is_predicted(path: Path, what: str) -> None:
    """Each promise over each committed file."""
    found: dict[str, Figure] = {figure.what: figure for figure in figures(committed(path)[1])}
    assert found[what].reached, found[what]


@pytest.mark.parametrize("path", paths() or [NONE], ids=lambda path: path.name if path else "none")
def test_a_committed_file_is_small_and_tells_how_it_was_made(path: Path) -> None:
    truth, runs = committed(path)
    assert path == path_of(truth.stack) and path.stat().st_size < MIB
    assert truth.command.startswith("python -m benchmarks.gpu_truth")
    assert len({run.name for run in runs}) >= 60
    # the measured workload is the declared one
    for outcome in truth.outcomes:
        if outcome.measurement is not None:
            assert outcome.measurement.workload == SUITE[outcome.name].case.workload(outcome.benchmark)


MARKED = re.compile(r"(<!-- accuracy: .* -->\n)(.*?)(<!-- /accuracy -->)", re.DOTALL)


def test_the_page_shows_it() -> None:
    wanted = table([committed(path) for path in paths()])
    page = ROOT / "docs" / "accuracy.md"
    text = page.read_text(encoding="utf-8")
    if os.environ.get("MEMSIZE_GOLDEN") == "write":
        page.write_text(MARKED.sub(lambda found: f"{found[1]}\n{wanted}\n{found[3]}", text), encoding="utf-8")
        return
    shown = MARKED.search(text)
    assert shown is not None and shown[2].strip() == wanted.strip()
    assert f"{len(SUITE)} workloads" in text


def test_the_table_of_a_measurement() -> None:
    truth = measured_as_predicted()
    text = table([(truth, rows())])
    assert "NVIDIA H100 80GB HBM3, torch 2.11.0+cu130, CUDA 13.0" in text and "measured on 2026-11-21" in text
    assert "| requested exact, not convolutional | 20 | ≥ 50 % | 100 % | 100 % |" in text
    assert "| underestimated by more than 2 %, any figure | 40 | ≤ 0 | 0 | – |" in text
    bad = table([(truth, BROKEN["reserved: median error"])])
    assert "| reserved: median error | 40 | ≤ 1 % | 1.52 % (missed) | – |" in bad or "(missed)" in bad
    assert NOT_YET in table([]) and "100 %" not in table([])


# -- the run ----------------------------------------------------------------------------------------------------------


def options(folder: Path, *names: str, **changes: object) -> Options:
    usual = {"folder": folder / "truth", "memory": STAND_IN, "lanes": 1, "command": "python -m benchmarks.gpu_truth"}
    return Options(names, **(usual | changes))  # type: ignore[arg-type]


@pytest.mark.thorough
def test_a_run_on_a_stand_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Predictions, real runs, comparison, file, whole logs, and a second run that has nothing left to do."""
    names = ("perceptron/train/fp32/sgd/b64", "perceptron/infer/fp32/b64")
    asked = options(tmp_path, *names, logs=tmp_path / "logs.jsonl.gz")
    path = collect(asked)
    truth = read(path)
    assert path.name.startswith("stand-in-torch-")
    assert [outcome.name for outcome in truth.outcomes] == list(names)
    for outcome in truth.outcomes:
        assert outcome.failure is None and outcome.measurement is not None and outcome.said is not None
        assert outcome.compared is not None and outcome.compared.matched == outcome.compared.real
        assert outcome.measurement.tracked is not None
    out = capsys.readouterr().out
    assert "2 workloads to measure, children by forkserver" in out and "every workload is measured" in out

    with gzip.open(tmp_path / "logs.jsonl.gz", "rt") as lines:
        assert [json.loads(line)["name"] for line in lines] == list(names)
    explain.main([str(tmp_path / "logs.jsonl.gz"), "perceptron/infer/*"])
    out = capsys.readouterr().out
    assert "predicted only" in out and "addmm" in out and "train" not in out

    before = path.read_bytes()
    assert collect(replace(asked, resume=True)) == path
    assert path.read_bytes() == before
    assert "0 workloads to measure" in capsys.readouterr().out
    other = replace(truth, stack=replace(truth.stack, driver="1"))
    write(other, path)
    with pytest.raises(InputError, match="another stack"):
        collect(replace(asked, resume=True))


def test_what_fails_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A memory that cannot be read for the workload, and a limit that no workload keeps."""
    names = ("perceptron/train/fp32/sgd/b64", "perceptron/infer/fp32/b64")
    path = collect(options(tmp_path, *names, workload_seconds=0.01))
    failures = [outcome.failure for outcome in read(path).outcomes]
    assert failures == ["it took too long and was stopped"] * 2
    assert "2 workloads are left" in capsys.readouterr().out


def test_a_run_ends_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    collect(options(tmp_path, "perceptron/train/fp32/sgd/b64", seconds=9.5))
    assert "1 workloads are left: run the same with --resume" in capsys.readouterr().out


def _broken(out: Path) -> None:
    raise ValueError("no such thing\nat all")


def _silent(out: Path) -> None:
    os._exit(7)


@pytest.mark.thorough
def test_how_a_child_ends(tmp_path: Path) -> None:
    lanes = Lanes(tmp_path)
    with pytest.raises(LaneError, match=r"^ValueError: no such thing$"):
        lanes.run(_broken, (), 60)
    with pytest.raises(LaneError, match="it ended with status 7"):
        lanes.run(_silent, (), 60)
    with pytest.raises(LaneError, match="no attribute 'Nothing'"):
        Lanes(tmp_path, "tests.standin:Nothing", "spawn").stack(60)


def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert gpu_truth.main(["perceptron/infer/fp32/*"]) == 2
    err = capsys.readouterr().err
    assert err == "error: this machine has no GPU that PyTorch can use: verify runs the step for real on one\n"


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_truth.main(["--list", "lstm/*"]) == 0
    assert capsys.readouterr().out.splitlines() == [name for name in SUITE if name.startswith("lstm/")]
    assert gpu_truth.main(["nothing"]) == 2


def test_the_truth_is_the_projects() -> None:
    assert FOLDER == ROOT / "tests" / "truth"
    stack = SoftwareStack("g", (9, 0), 1, "2.11.0", "3.12")
    assert predict(SUITE[CHEAP[1]].case.trace(stack), stack).least.requested > 0


@pytest.mark.thorough
def test_measuring_needs_torch_and_little_else(python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """A machine with a GPU often has no more: nothing that only reports need is imported."""
    absent = ("torchinfo", "torchao", "transformers", "pandas", "tabulate", "click", "jinja2", "tqdm")
    code = f"import sys\nsys.modules.update(dict.fromkeys({absent!r}))\n" + (
        "from benchmarks import gpu_truth\n"
        "from benchmarks.truth.suite import SUITE\n"
        "from tests.standin import STACK, StandIn\n"
        "from memsize.analysis.verify.verification import verify_step\n"
        "with StandIn() as memory:\n"
        "    found = verify_step(SUITE['perceptron/train/fp32/sgd/b64'].case, memory, print)\n"
        "print(found.alignment.differences)\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "()"
