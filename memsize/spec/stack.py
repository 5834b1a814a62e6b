"""The releases of PyTorch and CUDA that a GPU is simulated with, where they are not the installed ones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from memsize.errors import InputError

Release = tuple[int, int]
"""Major and minor: (2, 6)."""

OLDEST: Final[Release] = (2, 0)
NEWEST: Final[Release] = (2, 14)
"""The first and the last release of PyTorch whose rules are known."""
_CUDA: Final = (11, 13)
"""The first and the last major release of CUDA that those were built with."""

_NOTE: Final = (
    "cuBLAS's workspaces, the layout of flash attention's result, the caching allocator's settings and the CUDA "
    "context are those of {}; the other kernels, autocast's policy, the optimizers and cuDNN are those of the "
    "PyTorch {} that is installed here"
)


@dataclass(frozen=True, slots=True)
class Stack:
    """Releases as people write them: ``Stack("2.6", "12.4")``. None, for either, is what is installed.

    Raises `InputError` for a release whose rules are not known.
    """

    torch: str | None = None
    cuda: str | None = None

    def __post_init__(self) -> None:
        if self.torch is not None and not ("." in self.torch and OLDEST <= (release(self.torch) or (0, 0)) <= NEWEST):
            known = f"{_dotted(OLDEST)} to {_dotted(NEWEST)}"
            raise InputError(f"PyTorch {self.torch} is not known: its memory is simulated for {known}")
        if self.cuda is not None and not _CUDA[0] <= (release(self.cuda) or (0, 0))[0] <= _CUDA[1]:
            raise InputError(f"CUDA {self.cuda} is not known: PyTorch's stacks have {_CUDA[0]}.0 to {_CUDA[1]}.x")

    @classmethod
    def parse(cls, text: str) -> Stack:
        """The stack that a text such as ``"torch=2.6,cuda=12.4"`` names; either may be left out."""
        given: dict[str, str] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, version = (each.strip() for each in part.partition("="))
            if name not in ("torch", "cuda") or not version or name in given:
                raise InputError(f"cannot read {part!r} in a stack: write it like torch=2.6,cuda=12.4")
            given[name] = version
        return cls(**given)

    @classmethod
    def of(cls, given: Stack | str | None) -> Stack:
        """The stack that is given as a value or as a text; None is the installed one."""
        return given if isinstance(given, Stack) else cls.parse(given or "")

    def __str__(self) -> str:
        versions = {"torch": self.torch, "cuda": self.cuda}
        return ",".join(f"{name}={version}" for name, version in versions.items() if version)

    def note(self, installed: str) -> str | None:
        """What follows it, and what stays that of the `installed` PyTorch; None for the installed one itself."""
        return _NOTE.format(self, installed) if str(self) else None

    @property
    def release(self) -> Release | None:
        """Major and minor of its PyTorch; None where that is the installed one."""
        return None if self.torch is None else release(self.torch)


INSTALLED: Final = Stack()


def release(version: str) -> Release | None:
    """Major and minor of a version such as ``"2.13.0+cpu"`` or ``"12"``; None where it cannot be read."""
    found = re.match(r"(\d+)(?:\.(\d+))?(?![\d])", version)
    return (int(found[1]), int(found[2] or 0)) if found else None


def _dotted(version: Release) -> str:
    return ".".join(map(str, version))
