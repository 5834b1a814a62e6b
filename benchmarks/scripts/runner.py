"""Runs one script under `memsize run`, in a folder of its own, and reads what came of it."""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT
from benchmarks.scripts.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one script; `failure` is empty where it ran."""

    name: str
    repository: str
    command: str
    failure: str = ""
    steps: int = 0
    reserved: int = 0
    """Bytes that the allocator held at most."""
    where: str = ""
    """The phase and layer of the peak, or the process that had it."""
    assumed: tuple[str, ...] = ()
    seconds: float = 0.0
    """Processor time of the whole process and of its workers."""
    torch: str = ""
    """The release of PyTorch."""

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Outcome:
        """The outcome that `asdict` took apart."""
        return cls(**{**data, "assumed": tuple(data["assumed"])})

    @property
    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def outcome(recipe: Recipe, sources: Path, scratch: Path, limit: float) -> Outcome:
    """Run `recipe` on a copy of its part of `sources`, the folder that holds the repositories by name.

    `scratch` takes the copy, the data and the program's output; `limit` is the most seconds that it may take.
    """
    about = {"name": recipe.name, "repository": recipe.repository, "command": recipe.command}
    about["torch"] = version("torch").partition("+")[0]
    if missing := [name for name in recipe.needs if find_spec(name) is None]:
        return Outcome(**about, failure=f"not installed: {', '.join(missing)}")
    source = sources / recipe.repository.partition("/")[2] / recipe.folder
    if not source.is_dir():
        return Outcome(**about, failure=f"no such folder: {recipe.repository}/{recipe.folder}")
    here = prepared(recipe, source, scratch)
    before = _processor()
    failure = _run(recipe, here, limit)
    return _read(about, here.parent / "run.json", failure, _processor() - before)


def prepared(recipe: Recipe, source: Path, scratch: Path) -> Path:
    """The folder to start it in: a copy of `source` with the data."""
    home = scratch.resolve() / recipe.name.replace("/", "-").replace(" ", "-")
    shutil.rmtree(home, ignore_errors=True)
    here = home / "program"
    if recipe.folder:
        shutil.copytree(source, here)
    else:
        here.mkdir(parents=True)
    for make in recipe.data:
        make(here)
    return here


def environment(recipe: Recipe, here: Path) -> dict[str, str]:
    """That of this process, with caches of its own, and hubs that are told not to try the network."""
    path = os.pathsep.join(filter(None, (str(ROOT), recipe.environment.get("PYTHONPATH"))))
    caches = {"HF_HOME": str(here.parent / "huggingface"), "TORCH_HOME": str(here.parent / "torch")}
    quiet = {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **caches, **quiet, **recipe.environment, "PYTHONPATH": path}


def _run(recipe: Recipe, here: Path, limit: float) -> str:
    """Why it failed; empty if it did not. Its output is kept in `output.txt`."""
    ours = [*shlex.split(recipe.options), "--format", "json", "-o", str(here.parent / "run.json")]
    command = [
        sys.executable,
        "-m",
        "memsize",
        "run",
        *ours,
        *shlex.split(recipe.command.format(bin=Path(sys.executable).parent)),
    ]
    output = here.parent / "output.txt"
    with output.open("w") as log:
        try:
            done = subprocess.run(
                command, cwd=here, env=environment(recipe, here), stdout=log, stderr=log, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return f"took more than {limit:g} s"
    return _last_error(output) if done.returncode else ""


def _last_error(output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    named = [line for line in lines if "Error" in line.partition(":")[0] and not line.startswith(" ")]
    said = [line for line in lines if line.strip() and not line.startswith("Wrote ")]
    return (named or said or ["the process failed without a word"])[-1][:300]


def _read(about: Mapping[str, str], file: Path, failure: str, seconds: float) -> Outcome:
    if not file.is_file():
        return Outcome(**about, failure=failure or "no report was written", seconds=round(seconds, 1))
    data = json.loads(file.read_text(encoding="utf-8"))
    peak, steps = data["peak"], data["steps"]
    reserved, where = peak["reserved"], " in ".join(filter(None, (peak["peak_phase"], peak["peak_layer"])))
    if not reserved and data["children"]:
        child = max(data["children"], key=lambda child: child["reserved"])
        reserved, where, steps = child["reserved"], child["command"], child["steps"]
    if not reserved:
        failure = failure or "nothing was put on the GPU"
    return Outcome(
        **about,
        failure=failure,
        steps=steps,
        reserved=reserved,
        where=where,
        assumed=tuple(assumption["text"] for assumption in data["assumed"]),
        seconds=round(seconds, 1),
    )


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
