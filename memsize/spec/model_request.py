"""What a question is about: a model, what it is built with, and what it is given. Parsed and checked once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from memsize.errors import InputError
from memsize.spec.inputs import MOST_ELEMENTS, InputSpec, parse_input

if TYPE_CHECKING:
    from torch import nn

Mode = Literal["train", "eval"]
InputSize = str | InputSpec | Sequence[int] | Sequence[Sequence[int] | str | InputSpec]
"""``(3, 64, 64)``, ``"ids=512:int64"``, or several of either, without the batch dimension."""
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of one call of a model."""


class InputOptions(TypedDict, total=False):
    """The keyword arguments that every question about a model takes; `ModelRequest.of` says what they mean."""

    input_data: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None
    batch_size: int | None
    seq_len: int | None
    arguments: Mapping[str, object] | None
    mode: Mode | None


@dataclass(frozen=True)
class ModelRequest:
    """A module, or a target built with `arguments`, and its input: one of `specs`, a `call` of real inputs, or the
    `source` that makes them, a function or its name. Where none is given, a library's model may know its own.

    `batch_size` is for inputs that are made, `seq_len` for texts that are. What is left None is for the question to
    choose.
    """

    model: nn.Module | str
    specs: tuple[InputSpec, ...] = ()
    call: Call | None = None
    source: Callable[..., Any] | str | None = None
    batch_size: int | None = None
    seq_len: int | None = None
    arguments: Mapping[str, object] = field(default_factory=dict)
    mode: Mode | None = None

    def __post_init__(self) -> None:
        if self.specs and self.seq_len is not None:
            raise InputError("a sequence length is for inputs that are made: these say their own sizes")
        for what, size in (("batch size", self.batch_size), ("sequence length", self.seq_len)):
            if size is not None and size < 1:
                raise InputError(f"{what} {size}: it must be at least 1")
            if size is not None and size > MOST_ELEMENTS:
                raise InputError(f"a {what} of {size:.3g} is more than a tensor can hold (2^63 - 1)")
        if self.mode not in (None, "train", "eval"):
            raise InputError(f"no mode {self.mode!r}: it is train or eval")

    @property
    def has_input(self) -> bool:
        """Whether an input was given."""
        return bool(self.specs) or self.call is not None or self.source is not None

    @classmethod
    def of(
        cls,
        model: nn.Module | str | ModelRequest,
        input_size: InputSize | Any = None,
        *,
        input_data: Any = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        batch_size: int | None = None,
        seq_len: int | None = None,
        arguments: Mapping[str, object] | None = None,
        mode: Mode | None = None,
    ) -> ModelRequest:
        """The subject that the arguments of a question describe; one that is there already comes as it is.

        `input_size` is what is no size taken for `input_data`: a mapping of keyword arguments, a tuple or a list of
        positional ones, anything else the only one; a function that returns such, or its name. `args` and `kwargs` are
        real inputs as well; `kwargs` may come beside the data of `input_data`. All real inputs have their batch
        dimension.

        Raises `InputError` where the input is given twice, or cannot be read.
        """
        if isinstance(model, ModelRequest):
            return model
        if input_size is not None and not _is_size(input_size) and input_data is None:
            input_size, input_data = None, input_size
        # What can also be iterated over is data: a graph of torch_geometric can be called, too.
        makes = isinstance(input_data, str) or (callable(input_data) and not isinstance(input_data, Iterable))
        beside = kwargs if input_data is not None and not makes else None
        if (input_size is not None) + (input_data is not None) + bool(args or (kwargs and not beside)) > 1:
            raise InputError("give the input once: as input_size, as input_data, or as args and kwargs")
        specs = () if input_size is None else _specs(input_size)
        call = source = None
        if makes:
            source = input_data
        elif input_data is not None:
            call = _joined(call_of(input_data), beside or {})
        elif args or kwargs:
            call = tuple(args), dict(kwargs or {})
        return cls(model, specs, call, source, batch_size, seq_len, dict(arguments or {}), mode)


def call_of(data: Any) -> Call:
    """`data` as arguments: a mapping gives keywords, a tuple or list positions, anything else is the only one."""
    if isinstance(data, Mapping):
        return (), dict(data)
    if isinstance(data, (tuple, list)) and not hasattr(data, "_fields"):
        return tuple(data), {}
    return (data,), {}


def _joined(call: Call, kwargs: Mapping[str, Any]) -> Call:
    twice = next((name for name in kwargs if name in call[1]), None)
    if twice is not None:
        raise InputError(f"the argument {twice!r} is given twice, in input_data and in kwargs")
    return call[0], {**call[1], **kwargs}


def _is_size(value: Any) -> bool:
    """Whether `value` is a size, a text of one, or a sequence of such; real inputs are none of these."""

    def is_one(value: Any) -> bool:
        whole = isinstance(value, (tuple, list)) and all(isinstance(n, int) for n in value)
        return whole or isinstance(value, (str, InputSpec))

    return is_one(value) or (isinstance(value, (tuple, list)) and all(map(is_one, value)))


def _specs(input_size: Any) -> tuple[InputSpec, ...]:
    """`input_size` in any of its forms: one size, one text, one spec, or a sequence of such."""
    if isinstance(input_size, (str, InputSpec)) or all(isinstance(size, int) for size in input_size):
        return (_spec(input_size),)
    return tuple(map(_spec, input_size))


def _spec(size: Any) -> InputSpec:
    if isinstance(size, InputSpec):
        return size
    return parse_input(size if isinstance(size, str) else ",".join(map(str, size)))
