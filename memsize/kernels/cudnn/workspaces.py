"""The workspace of each convolution of a run: cuDNN's own answer, a recorded one, or an estimate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Final

from memsize.kernels.cudnn.backend import CudnnError
from memsize.kernels.cudnn.library import Convolution, Library

_FEW_CHANNELS: Final = 4
"""Up to this many input channels, plans read an image in the format that it has."""


class Plans:
    """The workspaces that cuDNN takes on a GPU of compute capability `capability`, one for each convolution met.

    `library` loads the library to ask when the first convolution comes, since loading it takes memory. `recorded` holds
    answers that cuDNN `release` gave earlier, which take precedence. `greedy` answers with the most that PyTorch's
    benchmark may allocate: the largest workspace of all plans that it tries.
    """

    def __init__(
        self,
        capability: tuple[int, int],
        library: Callable[[], Library | None] = lambda: None,
        *,
        recorded: Mapping[Convolution, int] | None = None,
        release: str | None = None,
        greedy: bool = False,
    ) -> None:
        self.capability = capability
        self.greedy = greedy
        self.answers: dict[Convolution, int] = dict(recorded or {})
        """Bytes of workspace, by convolution."""
        self.estimated: set[Convolution] = set()
        """The convolutions whose answer is an estimate."""
        self._library = library
        self._release = release if recorded else None

    def workspace(self, convolution: Convolution) -> int:
        """The bytes that the convolution takes beside its tensors while it runs."""
        size = self.answers.get(convolution)
        if size is None:
            size = self.answers[convolution] = self._ask(convolution)
        return size

    def source(self, convolutions: Collection[Convolution]) -> str | None:
        """Return the cuDNN release that answered for `convolutions`; None if there are none, or one is an estimate."""
        return self._release if convolutions and self.estimated.isdisjoint(convolutions) else None

    def _ask(self, convolution: Convolution) -> int:
        library = self._library()
        if library is not None:
            with suppress(CudnnError):  # a GPU newer than the library, say
                size = self._answer(library, convolution)
                self._release = self._release or str(library)
                return size
        self.estimated.add(convolution)
        return estimate(convolution, self.capability) * (_GREED if self.greedy else 1)

    def _answer(self, library: Library, convolution: Convolution) -> int:
        if self.greedy:
            return max((plan.workspace for plan in library.plans(convolution, self.capability)), default=0)
        plan = library.plan(convolution, self.capability)
        return plan.workspace if plan else 0


_GREED: Final = 3
"""The largest workspace, as a multiple of the first plan's, where cuDNN cannot be asked: an assumption."""


def estimate(convolution: Convolution, capability: tuple[int, int]) -> int:
    """Roughly what cuDNN takes where it cannot be asked: room for all three tensors in the format of its kernels.

    Kernels for tensor cores work on channels last, and convert row-major tensors to it and back. Kernels without tensor
    cores, depthwise ones and those for an image's few channels work on the tensors as they are. `python -m
    benchmarks.workspaces` says how often that is so.
    """
    if convolution.operation != "filter" and convolution.x[1] <= _FEW_CHANNELS:
        return 0
    if 1 < convolution.groups == convolution.x[1]:
        return 0
    return convolution.operands if _is_rearranged(convolution, capability) else 0


def _is_rearranged(convolution: Convolution, capability: tuple[int, int]) -> bool:
    narrow = convolution.dtype in ("float16", "bfloat16")
    if convolution.dtype == "float64" or capability < (7, 5):
        return False
    if narrow:
        return not convolution.channels_last
    if capability < (8, 0) or not convolution.tf32:
        return False
    return not convolution.channels_last or capability[0] in (8, 12)
