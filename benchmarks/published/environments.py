"""Folders with the exact releases that a measurement was made with, beside this machine's own PyTorch.

Each is filled once, by pip, under a cache folder, and put in front of the installed packages of the process that
predicts with it. Only what decides the figures is pinned; PyTorch itself is the one that memsize runs on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final


class UnbuiltError(Exception):
    """An environment cannot be built; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Requirements for pip, and a commit of a repository of which some folders are unpacked beside them."""

    name: str
    requirements: tuple[str, ...] = ()
    repository: str | None = None
    commit: str | None = None
    folders: tuple[str, ...] = ()
    dependencies: bool = True

    @property
    def path(self) -> Path:
        """The folder that Python imports from."""
        return cache() / self.name


CLONES: Final = {
    "https://github.com/Lightning-AI/litgpt": "MEMSIZE_LITGPT",
    "https://github.com/huggingface/peft": "MEMSIZE_PEFT",
    "https://github.com/rasbt/LLMs-from-scratch": "MEMSIZE_BOOK",
    "https://github.com/pytorch/ao": "MEMSIZE_TORCHAO",
    "https://github.com/openai/parameter-golf": "MEMSIZE_PARAMETER_GOLF",
    "https://github.com/pytorch/torchtune": "MEMSIZE_TORCHTUNE",
    "https://github.com/apple/ml-cross-entropy": "MEMSIZE_CCE",
}
"""Repositories, and the variables that name a clone at hand instead."""
LITGPT, PEFT, BOOK, TORCHAO, PARAMETER_GOLF, TORCHTUNE, CCE = CLONES
_LIGHTNING: Final = (
    "lightning==2.5.5",
    "pytorch-lightning==2.5.5",
    "lightning-utilities==0.15.2",
    "torchmetrics==1.8.2",
)
"""What the package imports; the recipe does what Fabric 2.1 did to its outputs."""


def _transformers(version: str) -> Environment:
    return Environment(f"transformers-{version}", (f"transformers=={version}",))


def _litgpt(commit: str) -> Environment:
    return Environment(f"litgpt-{commit[:8]}", _LIGHTNING, LITGPT, commit, ("lit_gpt",), dependencies=False)


_DIFFUSERS: Final = (
    "diffusers==0.38.0",
    "transformers==5.10.2",
    "huggingface-hub<2",
    "tokenizers<0.23.1",
    "accelerate",
    *"httpx httpcore h11 anyio sniffio hf-xet requests Pillow importlib_metadata zipp certifi idna urllib3".split(),
)
"""Without what comes with memsize's own packages, PyTorch among them."""
_RECORDS: Final = (
    "2026-03-17_NaiveBaseline",
    "2026-03-18_LongContextSeq2048",
    "2026-03-19_10L_MixedPrecision",
    "2026-03-19_Seq2048_FP16Emb_TunedLR",
    "2026-03-19_TrainingOptSeq4096",
)
"""Of parameter-golf, those whose text and settings are known and that need no kernels of their own."""
_PEFT_FOLDERS: Final = ("src/peft", "method_comparison/image-gen/experiments")


ENVIRONMENTS: Final[Mapping[str, Environment]] = {
    package.name: package
    for package in (
        _transformers("4.43.4"),
        _transformers("4.46.3"),
        _transformers("4.50.3"),
        _litgpt("0cc02afa1dca7434418cf612690da13d38d294fd"),
        _litgpt("e894d307aa4de0a0285adc2c7b8394c0d53f3e0b"),
        # Those of PyTorch 2.4 and 2.7, which are asked for the workspaces of convolutions, and what they load.
        Environment("cudnn-9.1", ("nvidia-cudnn-cu12==9.1.0.70", "nvidia-cublas-cu12==12.1.3.1"), dependencies=False),
        Environment("cudnn-9.5", ("nvidia-cudnn-cu12==9.5.1.17", "nvidia-cublas-cu12==12.8.4.1"), dependencies=False),
        Environment(
            "diffusers-0.33.1",
            (
                *("diffusers==0.33.1", "transformers==4.50.3", "huggingface-hub<1", "tokenizers<0.22"),
                *"importlib_metadata zipp requests urllib3 certifi idna charset-normalizer".split(),
            ),
            dependencies=False,
        ),
        Environment(
            "diffusers-0.34.0",
            (
                *("diffusers==0.34.0", "transformers==4.51.3", "huggingface-hub==0.31.4", "tokenizers==0.21.1"),
                *("accelerate==1.7.0", "torchao==0.11.0", "optimum-quanto==0.2.7", "gguf==0.19.0"),
                *"ninja importlib_metadata zipp requests urllib3 certifi idna charset-normalizer".split(),
            ),
            dependencies=False,
        ),
        Environment("book-218221ab", (), BOOK, "218221ab62f0f502ca0bbf1620fe1c53ee1aba03", ("pkg", "ch04"), False),
        Environment(
            "torchao-9acc9a4d",
            (),
            TORCHAO,
            "9acc9a4de61879d3dd6129611e722ef827d0e9a6",
            ("torchao/_models/llama", "torchao/prototype/low_bit_optim"),
            False,
        ),
        Environment(
            "torchao-training-9acc9a4d",
            (),
            TORCHAO,
            "9acc9a4de61879d3dd6129611e722ef827d0e9a6",
            ("torchao/_models/llama", "benchmarks/quantized_training/pretrain_llama2.py"),
            False,
        ),
        Environment(
            "torchao-36027d82",
            (),
            TORCHAO,
            "36027d82d1ad9949597ea16002ff4940374b1b94",
            ("benchmarks/benchmark_low_bit_adam.py",),
            False,
        ),
        Environment(
            "book-28c65cdf",
            (),
            BOOK,
            "28c65cdfbc3338e2e040016eea4b7fdf556e4d57",
            ("ch05/10_llm-training-speed",),
            False,
        ),
        Environment(
            "parameter-golf-4908dc46",
            (),
            PARAMETER_GOLF,
            "4908dc46f21ed3fdd08d2fdca285deb2194b9599",
            tuple(f"records/track_10min_16mb/{record}" for record in _RECORDS),
            False,
        ),
        Environment(
            "torchtune-1814feb1",
            (
                *("torchao==0.7.0", "torchdata==0.11.0", "omegaconf==2.4.0", "antlr4-python3-runtime==4.9.3"),
                *("tiktoken==0.14.0", "blobfile==3.3.0", "sentencepiece==0.2.3", "kagglehub==1.0.3"),
                *"datasets==5.2.0 pyarrow dill multiprocess xxhash fsspec lxml pycryptodomex".split(),
                *"requests urllib3 certifi idna charset-normalizer".split(),
            ),
            TORCHTUNE,
            "1814feb17",
            ("torchtune", "recipes"),
            False,
        ),
        Environment(
            "cce-d42911f9",
            ("triton==3.7.0",),
            CCE,
            "d42911f9b1a1f98289bb601c35c8151562603d74",
            ("cut_cross_entropy",),
            False,
        ),
        *(
            Environment(f"peft-{commit[:8]}", _DIFFUSERS, PEFT, commit, _PEFT_FOLDERS, dependencies=False)
            for commit in ("638b395f92528ebde2b507bbe11b9c4cb40a8f8b", "a5526d27a9d47d1e8264d5e1b1f96c0fdc79464e")
        ),
    )
}


def cache() -> Path:
    """Where the folders are: `MEMSIZE_CACHE`, or memsize's part of the user's cache folder."""
    cache = os.environ.get("MEMSIZE_CACHE")
    return Path(cache) if cache else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "memsize"


def ready(environment: Environment) -> Path:
    """The folder of `environment`, filled if it isn't yet. Raises `UnbuiltError`."""
    path = environment.path
    if (path / ".complete").exists():
        return path
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        _install(environment, path)
        _unpack(environment, path)
    except (OSError, subprocess.CalledProcessError) as error:
        shutil.rmtree(path, ignore_errors=True)
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise UnbuiltError(f"{environment.name} cannot be built: {' '.join(said)}") from error
    (path / ".complete").touch()
    return path


def _install(environment: Environment, path: Path) -> None:
    if not environment.requirements:
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(path), *environment.requirements]
    _run([*command, *([] if environment.dependencies else ["--no-deps"])])


def _unpack(environment: Environment, path: Path) -> None:
    """The files of a commit: from a clone at hand, or from one made for this."""
    if environment.repository is None or environment.commit is None:
        return
    clone = os.environ.get(CLONES[environment.repository])
    if clone is None:
        clone = str(path / ".clone")
        _run(["git", "clone", "--quiet", "--bare", environment.repository, clone])
    archive = path / ".files.tar"
    _run(["git", "-C", clone, "archive", "--output", str(archive), environment.commit, *environment.folders])
    shutil.unpack_archive(archive, path, filter="data")
    archive.unlink()


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
