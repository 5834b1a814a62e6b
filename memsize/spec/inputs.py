"""Inputs of a model as values: ``"3,64,64"`` or ``"input_ids=512:int64"`` → `InputSpec`, and back; and functions that
make inputs.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from memsize.errors import InputError, UnknownInputError, quoted
from memsize.records.dtypes import ALIASES, BITS

_USUAL = tuple(
    "float32 float16 bfloat16 float64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "complex32 complex64 complex128 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool".split()
)
DTYPES = tuple(name for name in BITS if not name.startswith(("q", "bc")))
"""The dtypes an input can have, by torch's own names; quantized ones need scales, which no shape gives."""

_ALIASES = {**ALIASES, "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Torch's second names, and the short ones that scenarios go by."""

_SCALAR = "()"
_DRAWN = re.compile(r"([a-z][a-z0-9_]+)(\[[^\[\]]*\])")
"""An input as answers draw it, ``float32[3,64,64]``: the dtype comes first."""
_BRACKETED = re.compile(r"[\[(]([^\[\]()]+?),?\s*[\])]")
_SEPARATOR = re.compile(r"\s*[,xX×]\s*")
_WHOLE = re.compile(r"[0-9]{1,20}")
_SPAN = re.compile(r"(-?[0-9]{1,20})\.\.(-?[0-9]{1,20})", re.ASCII)
_EXAMPLES = "write it like 3,64,64 or input_ids=512:int64"
MOST_ELEMENTS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input of a model. `shape` has no batch dimension; ``()`` is one number per sample.

    `name` is a keyword of the model's forward (None: given by position), `dtype` torch's own name (None: whatever the
    model computes in), `span` the least and the greatest value of an input of integers. Raises `InputError` for what
    cannot be. ``str(spec)`` is the text that `parse_input` reads.
    """

    name: str | None
    shape: tuple[int, ...]
    dtype: str | None = None
    span: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.name is not None and (not self.name.isidentifier() or keyword.iskeyword(self.name)):
            raise InputError(f"{self.name!r} cannot be the name of an input: forward takes keywords like input_ids")
        for size in self.shape:
            if isinstance(size, bool) or not isinstance(size, int):
                raise InputError(f"{size!r} is not a size: sizes are whole numbers above 0")
            if size < 1:
                raise InputError(f"a size of {size} leaves nothing to run on: sizes are whole numbers above 0")
            if size > MOST_ELEMENTS:
                raise InputError("a size is more than a tensor can hold (2^63 - 1)")
        if math.prod(self.shape) > MOST_ELEMENTS:
            raise InputError(f"input {format_shape(self.shape)} has more elements than a tensor can hold (2^63 - 1)")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UnknownInputError("dtype", self.dtype, _USUAL)
        if self.span is not None:
            low, high = self.span
            bits = re.fullmatch(r"(u?)int([0-9]+)", self.dtype or "")
            if not bits or int(bits[2]) < 8:
                raise InputError(f"a range is for integers, not for {self.dtype or 'the model’s floating dtype'}")
            most = 2 ** (int(bits[2]) - (not bits[1])) - 1
            if not (0 if bits[1] else -most - 1) <= low <= high <= most:
                raise InputError(f"no range {low}..{high} of {self.dtype}: it goes up, and its values fit the dtype")

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape))
        if self.name is None and self.dtype is None:
            shape = shape or _SCALAR
        name = "" if self.name is None else f"{self.name}="
        dtype = "" if self.dtype is None else f":{self.dtype}"
        return name + shape + dtype + ("" if self.span is None else ":{}..{}".format(*self.span))


def parse_input(text: str) -> InputSpec:
    """The input that ``[name=]sizes[:dtype[:least..greatest]]`` describes; raises `InputError` saying what is wrong.

    Sizes are separated by commas or ``x``, with or without brackets, and leave the batch dimension out.
    ``dtype[sizes]`` will do too. A name or a
    dtype alone (``"label=:int64"``), or ``()``, is one number per sample.
    """
    head, equals, rest = text.rpartition("=")
    if drawn := _DRAWN.fullmatch(rest.strip()):
        rest = f"{drawn[2]}:{drawn[1]}"
    sizes, colon, rest = (part.strip() for part in rest.partition(":"))
    dtype, ranged, span = (part.strip() for part in rest.partition(":"))
    if not sizes and not equals and not dtype:
        raise InputError(f"cannot read {text!r} as an input: {_EXAMPLES}")
    try:
        limits = _SPAN.fullmatch(span)
        if ranged and not limits:
            how = "write it like 0..999, from the least value to the greatest"
            raise InputError(f"{span!r} is not a range: {how}")
        bare = match[1] if (match := _BRACKETED.fullmatch(sizes)) else sizes
        parts = () if bare in ("", _SCALAR) else _SEPARATOR.split(bare.strip())
        for part in parts:
            if not _WHOLE.fullmatch(part):
                how = f"sizes are whole numbers above 0; {_EXAMPLES}"
                if part.endswith(".py"):
                    how = f"a function that returns the inputs goes with --inputs {text}"
                raise InputError(f"{quoted(part)} is not a size: {how}")
        if colon and not dtype:
            raise InputError("a dtype is missing after ':', such as int64")
        dtype = dtype.removeprefix("torch.")
        return InputSpec(
            head.strip() if equals else None,
            tuple(map(int, parts)),
            _ALIASES.get(dtype, dtype) if colon else None,
            span=(int(limits[1]), int(limits[2])) if limits else None,
        )
    except InputError as error:
        # The same error goes on, so that an unknown dtype stays one.
        error.args = (f"input {quoted(text)}: {error}",)
        raise


def parse_inputs(texts: Iterable[str]) -> tuple[InputSpec, ...]:
    """The inputs that `texts` describe, in their order; raises `InputError` when two have the same name."""
    specs = tuple(map(parse_input, texts))
    names = [spec.name for spec in specs if spec.name is not None]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"input {twice!r} is given twice")
    return specs


def format_shape(shape: tuple[int, ...]) -> str:
    """``"3,64,64"``; ``"()"`` for no dimension at all."""
    return ",".join(map(str, shape)) or _SCALAR


@dataclass(frozen=True, slots=True)
class InputRequest:
    """The sizes and the mode of inputs to make. A text that `goes_on` is a prompt, whose last token ends nothing."""

    batch_size: int = 1
    seq_len: int | None = None
    training: bool = True
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class InputMaker:
    """`make` gives the arguments of one call, with their batch dimension: a mapping of keywords, a tuple of positions,
    or the only one. Tensors may be `meta` where nobody reads their values.

    `resizable` says whether `make` heeds the batch size; `note` what a reader must know of these inputs, and `untyped`
    that their floating dtype is the model's, whatever `make` gives.
    """

    make: Callable[[InputRequest], Any]
    resizable: bool = True
    note: str | None = None
    untyped: bool = True
