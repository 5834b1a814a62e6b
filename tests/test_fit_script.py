"""`memsize.fit_script`: the largest value of a script's own argument, by running the script."""

from __future__ import annotations

from pathlib import Path

import pytest

import memsize
from memsize.cli import run as command
from memsize.errors import ForwardError, InputError
from tests.fits import VariedScript
from tests.gpus import card, cuda_context

MiB = 2**20


@pytest.mark.parametrize(
    ("arguments", "name", "valued"),
    [
        (["--lr", "1", "--batch-size", "8"], "batch-size", ("--lr", "1", "--batch-size", "9")),
        (["--batch_size=8", "--lr=1"], "--batch-size", ("--batch_size=9", "--lr=1")),
        (["-b", "8"], "b", ("-b", "9")),
        (["train.batch_size=8", "+x=1"], "train.batch_size", ("train.batch_size=9", "+x=1")),
        (["config.yaml", "+n=8"], "n", ("config.yaml", "+n=9")),
    ],
)
def test_the_argument_is_found_however_it_is_written(arguments: list[str], name: str, valued: tuple[str, ...]) -> None:
    script = VariedScript.of("train.py", arguments, name)
    assert script.value == 8 and script.valued(9) == valued
    assert script.command() == f"train.py {' '.join(arguments)}"


@pytest.mark.parametrize(
    ("arguments", "name", "text"),
    [
        (["--batch-size", "8"], "batch", "did you mean --batch-size?"),
        ([], "batch", "no argument 'batch': add it with a value after train.py"),
        (["--batch-size", "auto"], "batch-size", "--batch-size is 'auto'"),
        (["--batch-size"], "batch-size", "--batch-size is empty"),
        (["n=0"], "n", "n is '0'"),
        (["n=1.5"], "n", "n is '1.5'"),
    ],
)
def test_what_cannot_vary_is_said(arguments: list[str], name: str, text: str) -> None:
    with pytest.raises(InputError) as raised:
        VariedScript.of("train.py", arguments, name)
    assert text in str(raised.value)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(
        "import sys, torch\n"
        "n, grows = int(sys.argv[2]), sys.argv[3:] != ['--fixed']\n"
        "assert n != 3, 'three is refused'\n"
        "print('never seen')\n"
        "x = torch.empty((n if grows else 1) * 2**20, dtype=torch.uint8, device='cuda')\n",
        encoding="utf-8",
    )
    return path


def test_the_share_of_the_card_that_the_script_takes_is_all_there_is(script: Path) -> None:
    """A share of 300 MiB, which the script works out from the size of the card that it sees."""
    share = "torch.cuda.set_per_process_memory_fraction(300 * 2**20 / torch.cuda.mem_get_info()[1])\n"
    script.write_text(script.read_text().replace("assert", f"{share}assert", 1))
    found = memsize.fit_script(script, ["--size", "20"], vary="size", gpu="t4")
    row = found.fit_rows[0]
    assert (row.size, row.next_size, found.budgets[0].allocator) == (300, 301, 300 * MiB)


def test_the_largest_value_fits_and_the_next_does_not(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A tensor of 100 MiB is one segment of as much, one of 101 takes 102."""
    budget = cuda_context(card("t4")).high + 100 * MiB
    found = memsize.fit_script(script, ["--size", "20"], vary="size", gpu="t4", budget=budget)
    row = found.fit_rows[0]
    assert (row.status, row.size, row.peak, row.next_size) == ("found", 100, 100 * MiB, 101)
    assert row.per_step == MiB and found.runs <= 8 and found.vary == "--size"
    assert "never seen" not in capfd.readouterr().out


def test_each_card_is_the_one_that_the_script_sees(script: Path) -> None:
    """The script takes as many MiB a step of the argument as the card has GiB: 14 of a T4, 39 of an A100."""
    text = script.read_text().replace("2**20", "2**20 * (torch.cuda.mem_get_info()[1] // 2**30)")
    script.write_text(text)
    found = memsize.fit_script(script, ["--size", "20"], vary="size", gpu=["t4", "a100", "a100-80gb"])
    t4, a100, larger = found.fit_rows
    assert (t4.gpu, t4.per_step, a100.gpu, a100.per_step) == ("Tesla T4", 14 * MiB, "A100 40GB", 39 * MiB)
    assert larger.per_step == 79 * MiB  # with the kernels of the other A100
    for row in found.fit_rows:
        assert row.size is not None and row.peak is not None and row.per_step is not None
        assert row.status == "found" and row.peak <= row.budget < row.peak + row.per_step + 2 * MiB
        trace = found.trace_of(row)
        assert trace is not None and max(each.bytes for each in trace.storages) == row.size * row.per_step
    assert len({run.gpu for run in found.traces}) == 3 and found.runs == len(found.traces)


@pytest.mark.parametrize("inside", [False, True])
def test_the_allocator_has_the_settings_that_the_script_runs_with(
    inside: bool, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two steps from 64 to 128 MiB, 97 MiB take a block of 128, and 100 MiB are there."""
    setting = "roundup_power2_divisions:2"
    if inside:
        text = script.read_text()
        script.write_text(f"import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = '{setting}'\n{text}")
    else:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    budget = cuda_context(card("t4")).high + 100 * MiB
    row = memsize.fit_script(script, ["--size", "20"], vary="size", gpu="t4", budget=budget).fit_rows[0]
    assert (row.size, row.peak, row.next_size) == (96, 96 * MiB, 97)


def test_a_value_without_effect_and_a_failing_script_are_said(script: Path) -> None:
    with pytest.raises(InputError, match="--size 20 and 40 take the same memory of the GPU"):
        memsize.fit_script(script, ["--size", "20", "--fixed"], vary="size", gpu="t4")
    with pytest.raises(ForwardError, match="three is refused"):
        memsize.fit_script(script, ["--size", "3"], vary="size", gpu="t4")
    with pytest.raises(InputError, match="no such script"):
        memsize.fit_script("none.py", ["--size", "3"], vary="size", gpu="t4")


def test_a_script_that_is_not_there_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert command(["fit-script", "--vary-argument", "b", "gone.py", "-b", "3"]) == 2
    assert capfd.readouterr().err.strip() == "error: no such script: gone.py"


def test_the_command_names_the_option_that_is_missing(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["fit-script", str(script)]) == 2
    assert capsys.readouterr().err == (
        "error: --vary-argument is missing (the argument of the script to vary: batch-size for --batch-size 8 or "
        "batch_size=8)\n"
    )


@pytest.mark.thorough
def test_the_command_takes_the_scripts_arguments(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpu", "t4", "--budget", "750MiB", "--vary-argument", "size"]
    assert command(["fit-script", *options, str(script), "--size", "20"]) == 0
    answer = capsys.readouterr()
    assert "largest --size that fits" in answer.out
    assert command(["fit-script", *options, str(script), "--", "--size", "20"]) == 0
    assert capsys.readouterr() == answer
    assert command(["fit-script", *options, "--train", "adamw", str(script), "--size", "20"]) == 2
    assert "no such option" in capsys.readouterr().err
    assert command(["fit", "model.py", "--gpu", "t4", "--", "--size", "20"]) == 2
    capsys.readouterr()
