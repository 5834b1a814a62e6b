"""Processes that a script starts under `memsize run`: they have the same GPU, and leave the user's files alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import memsize
from memsize.render import render
from memsize.units import MiB

linux = pytest.mark.skipif(sys.platform != "linux", reason="Landlock is Linux's")


def run(folder: Path, text: str, **options: object) -> memsize.ProgramRun:
    (folder / "train.py").write_text("import os, subprocess, sys\n" + text, encoding="utf-8")
    answer = memsize.run(folder / "train.py", **{"gpu": "t4", **options})  # type: ignore[arg-type]
    assert isinstance(answer, memsize.ProgramRun)
    return answer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("old.txt").write_text("mine", encoding="utf-8")
    return tmp_path


CHILD = "import torch\nx = torch.ones(64, 1024, 1024, device='cuda')\n"


@pytest.mark.thorough
def test_a_process_that_runs_python_has_the_gpu_and_says_what_it_took(folder: Path) -> None:
    """64 × 1024 × 1024 × 4 B = 256 MiB, which the allocator has in one segment; the script itself has 4 MiB."""
    (folder / "child.py").write_text(
        CHILD + "with open('log.txt', 'a') as log:\n    log.write('more')\n"
        "import os\ntry:\n    os.open('old.txt', os.O_WRONLY)\n"
        "except PermissionError:\n    print(torch.cuda.memory_allocated())\n",
        encoding="utf-8",
    )
    answer = run(
        folder,
        "import torch\n"
        "x = torch.ones(1024, 1024, device='cuda')\n"
        "import pathlib\n"
        "pathlib.Path('log.txt').write_text('begun ')\n"
        "out = subprocess.check_output([sys.executable, 'child.py'], text=True)\n"
        "assert out == f'{2**28}\\n', out\n"
        "with open('log.txt', 'a') as log:\n    log.write(' done')\n",
    )
    (child,) = answer.children
    assert (child.rank, child.steps, child.reserved, child.ran_out) == (None, 0, 256 * MiB, False)
    assert child.command.endswith("child.py")
    assert child.low == answer.peak.device.low + (256 - 20) * MiB  # that of the script has a segment of 20 MiB
    assert "run-children" in {finding.code for finding in answer.findings}
    assert json.loads(render(answer, "json"))["children"] == [child._asdict()]
    assert re.search(r"\| [^|]*child.py +\| +\| +0 \| +256.00 \|", render(answer, "markdown"))
    assert Path("old.txt").read_text(encoding="utf-8") == "mine"
    assert Path("log.txt").read_text(encoding="utf-8") == "begun more done"


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        (CHILD + "x.view(7)", r"RuntimeError: shape '\[7\]' is invalid for input of size \d+"),
        pytest.param(CHILD + "raise SystemExit(3)", "exit status 3", marks=pytest.mark.thorough),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL"),
        pytest.param(
            "import nothing_of_the_kind",
            "ModuleNotFoundError: No module named 'nothing_of_the_kind'",
            marks=pytest.mark.thorough,
        ),
        pytest.param("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", None, marks=pytest.mark.thorough),
        pytest.param("raise ValueError('so ' * 999)", f"ValueError: {'so ' * 62}…", marks=pytest.mark.thorough),
        pytest.param("raise SystemExit", None, marks=pytest.mark.thorough),
    ],
)
def test_the_failure_of_a_process_is_reported(folder: Path, code: str, failure: str | None) -> None:
    (folder / "child.py").write_text(code, encoding="utf-8")
    answer = run(folder, "subprocess.run([sys.executable, 'child.py'], capture_output=True)\n")
    failed = [finding.text() for finding in answer.findings if finding.code == "run-child-failed"]
    assert len(failed) == (failure is not None)
    if failure is not None:
        (child,) = answer.children
        assert re.fullmatch(failure, child.failure or "") and bool(child.high) == ("torch" in code)
        assert re.fullmatch(rf"A process that the script started failed with {failure}: .*child\.py\.", failed[0])
    assert ("run-nothing-on-gpu" in {finding.code for finding in answer.findings}) != ("torch" in code)


def test_a_script_that_replaces_itself_is_followed(folder: Path) -> None:
    """As `axolotl train` does, by `accelerate launch`: 64 × 1024 × 1024 × 4 B are 256 MiB. Then nothing more runs."""
    (folder / "child.py").write_text(CHILD, encoding="utf-8")
    answer = run(
        folder,
        "os.execvpe(sys.executable, [sys.executable, 'child.py'], os.environ)\nopen('more.txt', 'w').close()\n",
    )
    (child,) = answer.children
    assert child.reserved == 256 * MiB and answer.failure is None
    assert not Path("more.txt").exists()


TORCHVISION = """
import torch
torch.ops.load_library("torchvision/_C.so")
print(torch.ops.torchvision.nms)
"""


@pytest.mark.thorough
def test_a_process_imports_a_torchvision_that_does_not_fit(folder: Path) -> None:
    """As the script itself does: its library of operators cannot be loaded."""
    (folder / "child.py").write_text(TORCHVISION, encoding="utf-8")
    run(folder, "subprocess.check_call([sys.executable, 'child.py'])")


SPAWN = """
import multiprocessing

def fail():
    raise SystemExit(5)

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        process = multiprocessing.get_context(method).Process(target=fail)
        process.start()
        process.join()
"""


@linux
@pytest.mark.thorough
def test_the_failures_of_multiprocessing_are_reported(folder: Path) -> None:
    answer = run(folder, SPAWN)
    assert [(child.failure, child.high) for child in answer.children] == [("exit status 5", 0)] * 2
    (text,) = [finding.text() for finding in answer.findings if finding.code == "run-child-failed"]
    assert text == "2 processes that the script started failed, the first with exit status 5: ForkProcess-1."


LEFT_RUNNING = """
import concurrent.futures, multiprocessing, time

def work(name):
    open(name, "w").close()
    time.sleep(0.5)
    raise SystemExit(5)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    pool = concurrent.futures.ProcessPoolExecutor(1, context)  # its worker waits for work
    assert pool.submit(abs, -1).result() == 1
    context.Process(target=work, args=("joined",)).start()
    context.Process(target=time.sleep, args=(60,), daemon=True).start()
"""


@linux
def test_processes_that_are_left_running_are_waited_for(folder: Path) -> None:
    """Python waits for them before it ends, but not for daemons and workers."""
    begun, progress = time.monotonic(), list[str]()
    answer = run(folder, LEFT_RUNNING, progress=progress.append)
    assert [child.failure for child in answer.children] == ["exit status 5"]
    assert Path("joined").exists() and time.monotonic() - begun < 50
    assert re.search(r"waiting for ForkProcess-\d+, which the script started", "\n".join(progress))


SPAWNED = """
import multiprocessing, torch

def work():
    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    while True:
        model(torch.ones(8, 1024, device="cuda")).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=work).start()
"""


@pytest.mark.thorough
def test_a_process_of_multiprocessing_goes_by_its_name(folder: Path) -> None:
    answer = run(folder, SPAWNED)
    (child,) = answer.children
    assert re.fullmatch(r"SpawnProcess-\d+", child.command) and child.steps == 3
    (text,) = [finding.text() for finding in answer.findings if finding.code == "run-children"]
    assert text.startswith(f"It fits on Tesla T4: {child.command}, which the script started, takes ")
    assert text.endswith(" For its breakdown, run a script that calls the function of this process directly.")


def test_a_process_without_torch_is_guarded_too(folder: Path) -> None:
    """It may write what the script has made, and the script what it has made."""
    run(
        folder,
        "os.mkdir('out')\n"
        "child = '''\n"
        "import pathlib, sys\n"
        'pathlib.Path("out/a.txt").write_text("a")\n'
        'pathlib.Path("new.txt").write_text("child")\n'
        'assert "torch" not in sys.modules\n'
        'pathlib.Path("old.txt").write_text("copied")\n'
        "'''\n"
        "assert subprocess.call([sys.executable, '-c', child], stderr=subprocess.DEVNULL) == 0\n"
        "with open('new.txt', 'a') as new:\n    new.write(' parent')\n",
    )
    assert Path("old.txt").read_text(encoding="utf-8") == "mine"
    assert Path("new.txt").read_text(encoding="utf-8") == "child parent"


@linux
@pytest.mark.parametrize(
    "line",
    [
        "subprocess.call(['rm', '-f', 'old.txt'])",
        "subprocess.call('echo lost > old.txt', shell=True)",
        "subprocess.Popen(['mv', 'old.txt', 'new.txt']).wait()",
        "os.system('truncate -s 0 old.txt')",
        "os.popen('echo lost >> old.txt').close()",
        "os.spawnlp(os.P_WAIT, 'rm', 'rm', '-f', 'old.txt')",
        "subprocess.call([sys.executable, '-S', '-c', 'open(\"old.txt\", \"w\")'])",
    ],
)
def test_other_programs_change_no_files_that_were_there(folder: Path, line: str) -> None:
    answer = run(folder, line)
    assert Path("old.txt").read_text(encoding="utf-8") == "mine"
    if "spawn" not in line:
        (remark,) = answer.unwritten
        assert "perhaps because" in remark and "--allow-writes" in remark


@linux
def test_other_programs_write_in_new_folders(folder: Path) -> None:
    run(
        folder,
        "os.mkdir('out')\n"
        "assert os.system('echo 1 > out/a.txt && mv out/a.txt out/b.txt') == 0\n"
        "assert os.system('exit 3') == 3 << 8\n"
        "assert subprocess.check_output('mktemp | xargs rm && cat old.txt', shell=True) == b'mine'\n"
        "try:\n    subprocess.run(['no-such-program'])\nexcept FileNotFoundError:\n    pass\n"
        "else:\n    raise SystemExit('it was started')\n",
    )
    assert Path("out/b.txt").read_text(encoding="utf-8") == "1\n"


def test_with_writes_allowed_they_are_started_as_they_are(folder: Path) -> None:
    answer = run(folder, "subprocess.call('echo other > old.txt', shell=True)", allow_writes=True)
    assert Path("old.txt").read_text(encoding="utf-8") == "other\n"
    assert answer.unwritten == ()


def test_nvidia_smi_answers_for_the_card(folder: Path) -> None:
    """14,909 MiB of the T4's 14,909.44; 20 MiB are reserved beside the context's 300."""
    run(
        folder,
        "import torch\n"
        "x = torch.ones(1024, 1024, device='cuda')\n"
        "def smi(*options):\n    return subprocess.check_output(['nvidia-smi', *options], text=True)\n"
        "total = torch.cuda.mem_get_info()[1] // 2**20\n"
        "used = total - torch.cuda.mem_get_info()[0] // 2**20\n"
        "line = smi('--query-gpu=name,memory.total', '--format=csv,noheader,nounits')\n"
        "assert line == f'Tesla T4, {total}\\n', line\n"
        "assert abs(int(smi('--query-gpu=memory.used', '--format=csv,noheader,nounits', '-i', '0')) - used) <= 1\n"
        "assert smi('-L').startswith('GPU 0: Tesla T4 (UUID: GPU-')\n"
        "assert 'Tesla T4' in smi()\n"
        "assert {len(line) for line in smi().splitlines()} == {79}\n"  # nvidia-smi draws a box of 79 columns
        "assert subprocess.call(['nvidia-smi', '--query-gpu=nonsense'], stderr=subprocess.DEVNULL) == 1\n",
    )


def test_the_environment_is_as_before_afterwards(folder: Path) -> None:
    before = dict(os.environ)
    run(folder, "assert os.environ['PYTHONPATH']")
    assert dict(os.environ) == before
    assert subprocess.Popen.__init__.__module__ == "subprocess"


def test_a_process_that_outlives_the_run_starts_as_usual(folder: Path) -> None:
    """The script's folder has gone by the time that Python has imported what lets the process have the GPU."""
    (folder / "train.py").write_text(
        "import os\n"
        "from pathlib import Path\n"
        "run = Path(os.environ['PYTHONPATH'].split(os.pathsep)[0])\n"
        "Path('start.py').write_text((run / 'sitecustomize.py').read_text())\n"
    )
    memsize.run(folder / "train.py", gpu="t4")
    done = subprocess.run([sys.executable, "start.py"], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.thorough
def test_ranks_that_a_launcher_starts_are_ranks(folder: Path) -> None:
    """One parameter of 1024 × 1024 × 4 B = 4 MiB; DDP's bucket of gradients has 4 MiB, and so have gradients."""
    (folder / "child.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "assert dist.get_world_size() == 2 and dist.get_rank() == int(os.environ['RANK'])\n"
        "torch.cuda.set_device(dist.get_rank())\n"
        "net = torch.nn.Linear(1024, 1024, bias=False).cuda()\n"
        "net = torch.nn.parallel.DistributedDataParallel(net, device_ids=[dist.get_rank()])\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for step in range(100):\n"
        "    net(torch.ones(1, 1024, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n",
        encoding="utf-8",
    )
    launch = "'-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', 'child.py'"
    answer = run(folder, f"subprocess.check_call([sys.executable, {launch}])")
    assert sorted((child.rank, child.steps) for child in answer.children) == [(0, 3), (1, 3)]
    (finding,) = [finding for finding in answer.findings if finding.code == "run-children"]
    assert "memsize run --gpus 2" in finding.text()


def test_nvml_by_ctypes_answers_for_the_card(folder: Path) -> None:
    """As pynvml calls it: 14,909.44 MiB of the T4."""
    run(
        folder,
        "import ctypes, torch\n"
        "x = torch.ones(1024, 1024, device='cuda')\n"
        "class Memory(ctypes.Structure):\n"
        "    _fields_ = [(name, ctypes.c_ulonglong) for name in ('total', 'free', 'used')]\n"
        "class Device(ctypes.Structure):\n    pass\n"
        "library = ctypes.CDLL('libnvidia-ml.so.1')\n"
        "assert library.nvmlInit_v2() == 0\n"
        "count, handle, memory = ctypes.c_uint(), ctypes.POINTER(Device)(), Memory()\n"
        "name = ctypes.create_string_buffer(96)\n"
        "assert library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 and count.value == 1\n"
        "assert library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(1), ctypes.byref(handle)) != 0\n"
        "assert library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(handle)) == 0 and handle\n"
        "assert library.nvmlDeviceGetName(handle, name, ctypes.c_uint(96)) == 0 and name.value == b'Tesla T4'\n"
        "assert library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0\n"
        "assert (memory.free, memory.total) == torch.cuda.mem_get_info()\n"
        "assert memory.used == memory.total - memory.free\n"
        "assert not hasattr(library, 'nvmlDeviceGetSomethingNew')\n"
        "assert isinstance(ctypes.CDLL(None), ctypes.CDLL)\n",
    )


OFFLINE = """
import os, socket, subprocess, urllib.request
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname()).close()
server.close()
for connect in (
    lambda: urllib.request.urlopen("http://192.0.2.1/", timeout=1),
    lambda: socket.create_connection(("example.com", 80), timeout=1),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"", ("192.0.2.1", 9)),
):
    try:
        connect()
        raise SystemExit("it was let through")
    except OSError as error:
        assert "--offline connects to no other machine" in str(error), error
assert os.environ["HF_HUB_OFFLINE"] == "1"
"""


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_without_a_network_other_machines_are_not_reached(folder: Path) -> None:
    """192.0.2.0/24 is set aside for documentation (RFC 5737)."""
    (folder / "child.py").write_text(OFFLINE, encoding="utf-8")
    run(folder, OFFLINE + "subprocess.check_call([sys.executable, 'child.py'])\n", offline=True)
    run(folder, "assert 'HF_HUB_OFFLINE' not in os.environ\n")


@linux
def test_programs_are_found_from_the_folder_that_they_are_started_in(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "remove.sh").write_text("#!/bin/sh\nrm -f ../old.txt\n", encoding="utf-8")
    (folder / "sub" / "remove.sh").chmod(0o755)
    run(folder, "assert subprocess.call(['./remove.sh'], cwd='sub') == 1\n")
    assert (folder / "old.txt").read_text(encoding="utf-8") == "mine"


@pytest.mark.thorough
def test_a_process_may_outlive_the_script(folder: Path) -> None:
    """It waits until the folder of the run is gone, and then ends without an error."""
    (folder / "child.py").write_text(
        "import os, sys, time, torch\n"
        "run = os.environ['PYTHONPATH'].split(os.pathsep)[0]\n"
        "print('started', flush=True)\n"
        "while os.path.isdir(run):\n    time.sleep(0.05)\n"
        "print('waited', flush=True)\n",
        encoding="utf-8",
    )
    run(
        folder,
        "import pathlib, time\n"
        "with open('out.txt', 'w') as out:\n"
        "    child = subprocess.Popen([sys.executable, 'child.py'], stdout=out, stderr=out, start_new_session=True)\n"
        "child.returncode = 0  # nobody waits for it\n"
        "while 'started' not in pathlib.Path('out.txt').read_text():\n    time.sleep(0.05)\n",
    )
    deadline = time.monotonic() + 20
    while "waited" not in (text := Path("out.txt").read_text("utf-8")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)
    assert "waited" in text and "Error" not in Path("out.txt").read_text("utf-8")
