"""Out of memory at any allocation: PyTorch's own exception, a verdict that says so, and the roles of that moment."""

from __future__ import annotations

import gc
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import memsize
from benchmarks.fuzz import out_of_memory
from benchmarks.fuzz.out_of_memory import PROGRAMS, Reference
from tests.gpus import card, cuda_context

MiB = 2**20


def run(folder: Path, text: str) -> Any:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(text), encoding="utf-8")
    return memsize.run(script, gpu="t4", steps=0)


@pytest.mark.thorough
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_sample_of_allocations_fails_as_on_a_gpu(name: str) -> None:
    """`make fuzz` lets each of them fail."""
    reference = Reference.of(PROGRAMS[name])
    trials = out_of_memory.trials(reference)
    assert sum(by_size for _, by_size, _ in trials) >= 4 and len(trials) > 60
    for trial in trials[5 :: len(trials) // 8]:
        assert not out_of_memory.faults(reference, *trial), trial


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_allocation_fails_as_on_a_gpu(name: str) -> None:
    reference = Reference.of(PROGRAMS[name])
    for trial in out_of_memory.trials(reference):
        assert not out_of_memory.faults(reference, *trial), trial


ADAM = """
    import torch
    parameters = [torch.nn.Parameter(torch.empty(2**26, device="cuda")) for _ in range(14)]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    try:
        torch.optim.Adam(parameters).step()
    except torch.OutOfMemoryError as error:
        print(error)
"""


def test_an_op_that_returns_a_list_runs_out_as_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """14 parameters of 256 MiB with gradients and two moments are 14,336 MiB. A T4 has 14,609.44 MiB beside the
    context: one of the square roots is still made, the second not, nor the other twelve.
    """
    answer = run(tmp_path, ADAM)
    (refused,) = answer.refused
    assert (refused.bytes, refused.op, refused.phase) == (256 * MiB, "_foreach_sqrt", "optimizer 1")
    assert capsys.readouterr().out.startswith(
        "CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capac"
    )
    assert answer.findings[0].code == "run-out-of-memory"
    third = 14 * 256 * MiB
    expected = {"parameter": third, "gradient": third, "optimizer state": 2 * third, "temporary": 256 * MiB}
    assert {role: size for role, size in answer.peak.roles.items() if size > MiB} == expected


@pytest.mark.parametrize(
    ("mebibytes", "segment"), [(1, "2.00 MiB"), (2, "20.00 MiB"), (9, "20.00 MiB"), (11, "12.00 MiB")]
)
def test_an_error_names_the_segment_that_pytorch_asks_the_driver_for(mebibytes: int, segment: str) -> None:
    """Small blocks come in segments of 2 MiB, those below 10 MiB in segments of 20, others in whole multiples of 2."""
    with memsize.virtual_gpu("t4"):
        free, total = torch.cuda.mem_get_info()
        whole = torch.empty(free // (2 * MiB) * 2 * MiB, dtype=torch.uint8, device="cuda")
        left = free - whole.nbytes
        with pytest.raises(torch.OutOfMemoryError) as error:
            torch.empty(mebibytes * MiB, dtype=torch.uint8, device="cuda")
    assert f"Tried to allocate {segment}. GPU 0" in str(error.value)
    assert f"this process has {(total - left) / 2**30:.2f} GiB memory in use. Of the" in str(error.value)
    assert f"{whole.nbytes / 2**30:.2f} GiB is allocated by PyTorch, and 0 bytes is reserved" in str(error.value)


@pytest.mark.parametrize("collects", [True, False])
def test_what_a_failed_op_has_made_is_gone(collects: bool, request: pytest.FixtureRequest) -> None:
    """Of four sums of 4 GiB beside as many tensors of which each is a view of one, three fit the card.

    Nothing waits for the collector, which is off in a command.
    """
    request.addfinalizer(gc.enable if gc.isenabled() else gc.disable)
    (gc.enable if collects else gc.disable)()
    with memsize.virtual_gpu("t4") as gpu:
        one = torch.empty(2**30, device="cuda")
        try:
            torch._foreach_add([one] * 4, 1.0)
        except torch.OutOfMemoryError:
            assert torch.cuda.memory_allocated() == one.nbytes  # inside of the handler too
        assert torch.empty(2 * 2**30, device="cuda").is_cuda
    assert len(gpu.run.refused) == 1


@pytest.mark.thorough
def test_a_backward_that_runs_out_leaves_no_graph_behind() -> None:
    """Autograd on a GPU drops the nodes that wait when one fails: a weight's gradient in half precision, say."""
    reference = Reference.of(out_of_memory.mixed_precision)
    trace = reference.run.answer.trace
    phases = [trace.phases[event.phase] for event in trace.events if event.delta > 0]
    for number in [number for number, phase in enumerate(phases) if phase == "backward 1"]:
        assert not out_of_memory.faults(reference, number, by_size=False, handled=True), number


@pytest.mark.parametrize(
    "backward",
    [
        "loss.backward()",
        "torch.autograd.grad(loss, list(model.parameters()))",
        "torch.autograd.grad(loss, list(model.parameters()), create_graph=True)",
    ],
)
def test_gradients_of_the_first_backward_are_gradients(backward: str, tmp_path: Path) -> None:
    """Beside 32 weights of 256 MiB, and 36 MiB of segments for small tensors and cuBLAS, a T4 has 6,605 MiB left for
    gradients: 25 are finished when the next one does not fit.
    """
    answer = run(
        tmp_path,
        f"""
        import torch
        from torch import nn
        with torch.device("cuda"):
            model = nn.Sequential(*[nn.Linear(8192, 8192, bias=False) for _ in range(32)])
            loss = model(torch.randn(4, 8192)).sum()
            {backward}
        """,
    )
    roles = answer.peak.roles
    assert answer.ran_out and roles["parameter"] == 32 * 256 * MiB
    assert roles["gradient"] == 25 * 256 * MiB and roles["temporary"] < MiB
    assert (answer.refused[0].bytes, answer.refused[0].layer) == (256 * MiB, str(32 - 25 - 1))


def test_what_a_script_assigns_as_gradients_is_known_without_an_optimizer(tmp_path: Path) -> None:
    """Beside 14 parameters of 512 MiB, 14 gradients of 512 MiB leave 273 MiB on a T4."""
    answer = run(
        tmp_path,
        """
        import torch
        parameters = [torch.nn.Parameter(torch.empty(2**27, device="cuda")) for _ in range(14)]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        torch.empty(2**27, device="cuda")
        """,
    )
    assert answer.ran_out and dict(answer.peak.roles) == {"parameter": 14 * 512 * MiB, "gradient": 14 * 512 * MiB}


def test_a_search_for_the_batch_that_fits_finds_it_where_the_optimizer_runs_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Accelerate's ``find_executable_batch_size``: by the words of the error, with a new model for each try.

    So many parameters of 128 MiB, their gradients, two moments and one list of square roots: 16 take 10,240 MiB.
    """
    answer = run(
        tmp_path,
        """
        import gc, torch
        count = 64
        while count:
            gc.collect()
            torch.cuda.empty_cache()
            try:
                parameters = [torch.nn.Parameter(torch.empty(2**25, device="cuda")) for _ in range(count)]
                for parameter in parameters:
                    parameter.grad = torch.empty_like(parameter)
                torch.optim.Adam(parameters).step()
                break
            except Exception as error:
                assert isinstance(error, RuntimeError) and len(error.args) == 1
                assert "CUDA out of memory." in error.args[0]
                parameters = parameter = None
                count //= 2
        print(count)
        """,
    )
    assert capsys.readouterr().out == "16\n"
    assert {refused.op for refused in answer.refused} <= {"empty", "empty_like", "zeros_like", "_foreach_sqrt"}
    assert answer.went_on is not None and answer.went_on.steps == 1


@pytest.mark.thorough
@pytest.mark.parametrize("caught", [False, True])
def test_a_script_whose_optimizer_needs_most_is_fitted(caught: bool, tmp_path: Path) -> None:
    """Adam holds four numbers for each parameter, and a fifth while it takes square roots: 40 tensors, in segments of
    whole 2 MiB.
    """
    t4 = card("t4")
    largest = (t4.bytes - cuda_context(t4).high) // (40 * 2 * MiB) * 2
    script = tmp_path / "train.py"
    step = "torch.optim.Adam(parameters).step()"
    handled = f"try:\n    {step}\nexcept torch.OutOfMemoryError:\n    raise SystemExit('too large')\n"
    script.write_text(
        "import sys, torch\n"
        "parameters = [torch.nn.Parameter(torch.empty(int(sys.argv[2]), 2**18, device='cuda')) for _ in range(8)]\n"
        "for parameter in parameters:\n"
        "    parameter.grad = torch.empty_like(parameter)\n" + (handled if caught else step),
        encoding="utf-8",
    )
    row = memsize.fit_script(script, ["--width", "8"], vary="width", gpu="t4").fit_rows[0]
    assert (row.status, row.size, row.next_size) == ("found", largest, largest + 1)
    for width, findings in ((largest, ["run-fits"]), (400, ["run-out-of-memory"])):
        answer = memsize.run(script, ["--width", str(width)], gpu="t4")
        assert [finding.code for finding in answer.findings][:1] == findings
        assert answer.ran_out == (width == 400)
