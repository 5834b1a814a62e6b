"""A convolution as cuDNN is asked about it: one of three operations, and the tensors involved."""

from __future__ import annotations

from math import prod
from typing import Final, Literal, NamedTuple, get_args

from memsize.errors import InputError

Operation = Literal["forward", "data", "filter"]
"""The forward, the gradient of its input, and that of its weights. A transposed convolution's forward is ``"data"``."""

WIDTHS: Final = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of a number, for the dtypes that PyTorch gives to cuDNN's convolutions."""

_FORMATS: Final = ("row-major", "channels-last")


class Convolution(NamedTuple):
    """`x`, `w` and `y` are the shapes of input, weight and output of the forward, whichever of them is computed.

    All of them are of one dtype and one format. `deterministic` and `tf32` are PyTorch's settings
    (`torch.backends.cudnn`), which rule some of cuDNN's plans out.
    """

    operation: Operation
    dtype: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    channels_last: bool = False
    deterministic: bool = False
    tf32: bool = True

    @property
    def operands(self) -> int:
        """The bytes of the three tensors together."""
        return WIDTHS[self.dtype] * (prod(self.x) + prod(self.w) + prod(self.y))

    @property
    def groups(self) -> int:
        """Into how many groups the channels are divided."""
        return self.x[1] // self.w[1]

    def __str__(self) -> str:
        shapes = (self.x, self.w, self.y, self.padding, self.stride, self.dilation)
        flags = [name for name in ("deterministic", "tf32") if getattr(self, name)]
        words = (self.operation, self.dtype, _FORMATS[self.channels_last], *map(_joined, shapes), *flags)
        return " ".join(words)

    @classmethod
    def parse(cls, text: str) -> Convolution:
        """The convolution that `str` wrote; raises `InputError` for anything else."""
        words = text.split()
        try:
            operation, dtype, layout, *rest = words
            x, w, y, padding, stride, dilation = (tuple(map(int, word.split(","))) for word in rest[:6])
            last = bool(_FORMATS.index(layout))
        except ValueError as error:
            raise InputError(f"not a convolution: {text!r}") from error
        flags = frozenset(rest[6:])
        if operation not in get_args(Operation) or dtype not in WIDTHS or not flags <= {"deterministic", "tf32"}:
            raise InputError(f"not a convolution: {text!r}")
        return cls(
            operation,  # type: ignore[arg-type]
            dtype,
            x,
            w,
            y,
            padding,
            stride,
            dilation,
            last,
            "deterministic" in flags,
            "tf32" in flags,
        )


def _joined(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))
