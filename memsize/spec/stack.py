"""The GPU to simulate: its name, its PyTorch and CUDA, and the settings of its caching allocator."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, get_args

from memsize.errors import InputError
from memsize.spec.options import check_fields, option

Release = tuple[int, int]
"""Major and minor: (2, 6)."""
Loading = Literal["lazy", "eager"]
"""When CUDA loads the kernels of a library: those that run, or all of them at its first call."""
Switch = Literal["on", "off"]

OLDEST: Final[Release] = (2, 0)
NEWEST: Final[Release] = (2, 14)
"""The first and the last release of PyTorch whose rules are known."""
_CUDA: Final = (11, 13)
"""The first and the last major release of CUDA that those were built with."""

_CUDNN: Final = {
    **dict.fromkeys([(2, 1), (2, 2), (2, 3)], "8.9.2"),
    **dict.fromkeys([(2, 4), (2, 5), (2, 6)], "9.1.0"),
    **dict.fromkeys([(2, 8), (2, 9), (2, 10)], "9.10.2"),
    **dict.fromkeys([(2, 12), (2, 13)], "9.20.0"),
    **{(2, 0): "8.5.0", (2, 7): "9.5.1", (2, 11): "9.19.0", (2, 14): "9.24.0"},
}
"""The cuDNN that the wheels on PyPI require (``Requires-Dist``). Builds for another CUDA may have another one."""

_NOTE: Final = (
    "cuBLAS's workspaces, cuDNN's release, the layout of flash attention's result, autocast's policy, the caching "
    "allocator's settings and the CUDA context are those of {}; the other kernels and the optimizers are those of the "
    "PyTorch {} that is installed here"
)


@dataclass(frozen=True, slots=True)
class Stack:
    """Releases as people write them: ``Stack("2.6", "12.4")``. None, for either, is what is installed.

    `cudnn` is the release of cuDNN; None: the one that PyTorch's wheels require. `loading` is what
    `CUDA_MODULE_LOADING` says, ``"lazy"`` or ``"eager"``; None: what CUDA and PyTorch do by themselves. `benchmark` is
    `torch.backends.cudnn.benchmark`, ``"on"`` or ``"off"``; None: what the program sets. Raises `InputError` for a
    release whose rules are not known.
    """

    torch: str | None = None
    cuda: str | None = None
    loading: Loading | None = None
    cudnn: str | None = None
    benchmark: Switch | None = None

    def __post_init__(self) -> None:
        if self.torch is not None and not ("." in self.torch and OLDEST <= (release(self.torch) or (0, 0)) <= NEWEST):
            simulated = " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))
            raise InputError(f"PyTorch {self.torch} is not known: its memory is simulated for {simulated}")
        if self.cuda is not None and not _CUDA[0] <= (release(self.cuda) or (0, 0))[0] <= _CUDA[1]:
            raise InputError(f"CUDA {self.cuda} is not known: PyTorch's stacks have {_CUDA[0]}.0 to {_CUDA[1]}.x")
        if self.cudnn is not None and not ("." in self.cudnn and release(self.cudnn)):
            raise InputError(f"cuDNN {self.cudnn} cannot be read: write it like 9.10")
        if self.loading is not None and self.loading not in get_args(Loading):
            raise InputError(f"CUDA loads its modules lazy or eager, not {self.loading}")
        if self.benchmark is not None and self.benchmark not in get_args(Switch):
            raise InputError(f"cuDNN's benchmark is on or off, not {self.benchmark}")

    @classmethod
    def parse(cls, text: str) -> Stack:
        """The stack that a text such as ``"torch=2.6,cuda=12.4,loading=eager"`` names; any part may be left out."""
        releases: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, version = map(str.strip, part.partition("="))
            if name not in {field.name for field in fields(cls)} or not version or name in releases:
                raise InputError(f"cannot read {part!r} in a stack: write it like torch=2.6,cuda=12.4")
            releases[name] = version
        return cls(**releases)

    @classmethod
    def of(cls, stack: Stack | str | None) -> Stack:
        """Return a stack that is a value or a text; None is the installed one."""
        return stack if isinstance(stack, Stack) else cls.parse(stack or "")

    def __str__(self) -> str:
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return ",".join(f"{name}={part}" for name, part in parts.items() if part)

    def note(self, installed: str) -> str | None:
        """Say what follows it, and what stays that of the `installed` PyTorch; None for the installed one itself."""
        return _NOTE.format(self, installed) if self.torch or self.cuda or self.cudnn else None

    def in_environment(self, module_loading: str | None) -> Stack:
        """Return the stack of a process whose `CUDA_MODULE_LOADING` that is; CUDA ignores what it does not know."""
        loading = next((name for name in get_args(Loading) if name == (module_loading or "").lower()), None)
        return self if self.loading else replace(self, loading=loading)

    @property
    def release(self) -> Release | None:
        """Major and minor of its PyTorch; None where that is the installed one."""
        return None if self.torch is None else release(self.torch)

    @property
    def cudnn_release(self) -> str | None:
        """The release of its cuDNN; None is any that is installed."""
        return self.cudnn or (_CUDNN[self.release] if self.release else None)


INSTALLED: Final = Stack()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The GPU to simulate: its `name` (None: the usual one), its PyTorch and CUDA, and its allocator's settings.

    `allocator` is an `AllocatorConfig`, or a text as `PYTORCH_CUDA_ALLOC_CONF` holds it; None is PyTorch's defaults,
    for a program those of its environment. Raises `InputError` for a `stack` whose rules are not known.
    """

    name: str | None = option(None, "GPU to simulate: a100, t4, h100 …", key="gpu", shown="a100", metavar="NAME")
    stack: Stack | str | None = option(
        None,
        "PyTorch and CUDA on the GPU: torch=2.6,cuda=12.4; cudnn=9.10; benchmark=on: cuDNN's; loading=eager: all of "
        "CUDA's kernels.",
        shown="those installed",
        metavar="RELEASES",
    )
    allocator: Any = option(
        None,
        "Settings of the caching allocator, as in PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True …",
        annotation="AllocatorConfig | str | None",
        metavar="SETTINGS",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.name is not None and not any(name.strip() for name in str(self.name).split(",")):
            raise InputError(f"gpu is {self.name!r}: name one, such as t4")
        object.__setattr__(self, "stack", Stack.of(self.stack))

    @property
    def releases(self) -> Stack:
        """Its PyTorch and CUDA."""
        return Stack.of(self.stack)


def release(version: str) -> Release | None:
    """Major and minor of a version such as ``"2.13.0+cpu"`` or ``"12"``; None where it cannot be read."""
    match = re.match(r"(\d+)(?:\.(\d+))?(?![\d])", version)
    return (int(match[1]), int(match[2] or 0)) if match else None
