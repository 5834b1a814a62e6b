"""A model with its constructor's arguments and its inputs. Parsed and checked once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from memsize.errors import InputError
from memsize.spec.inputs import MOST_ELEMENTS, InputSpec, parse_input, parse_inputs
from memsize.spec.options import option, parse_value
from memsize.spec.training import BASES, PEFT_CONFIGS, TrainedParts, parse_adapter, parse_base, parse_lora
from memsize.spec.vary import parse_lengths

if TYPE_CHECKING:
    from torch import nn

Mode = Literal["train", "eval"]
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of one call of a model."""


def parse_arguments(texts: Iterable[str] | Mapping[str, object]) -> Mapping[str, object]:
    """The arguments that ``name=value`` texts give: Python literals, and anything else as the string it is.

    Raises `InputError` for a text without a name, and for a name that comes twice.
    """
    if isinstance(texts, Mapping):
        return texts
    arguments: dict[str, object] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name.isidentifier():
            raise InputError(f"cannot read the argument {text!r}: write it like width=64")
        if name in arguments:
            raise InputError(f"the argument {name!r} is given twice")
        arguments[name] = parse_value(value)
    return arguments


def _read_inputs(value: str | Sequence[str]) -> tuple[InputSpec, ...]:
    texts = [value] if isinstance(value, str) else value
    if not all(isinstance(text, str) for text in texts):
        raise InputError('input is a text such as "3,64,64", or a list of such texts')
    return parse_inputs(texts)


@dataclass(frozen=True)
class ModelRequest:
    """A module, or a target built with `arguments`, and its input: one of `specs`, a `call` of real inputs, or the
    `source` that makes them, a function or its name. Where none is given, a library's model may know its own.

    `batch_size` is for inputs that are made, `seq_len` for texts that are. What is left None is for the question to
    choose. `lora`, `adapter`, `base` and `freeze` say what is trained (`memsize.spec.training`). A router sends its
    busiest expert `imbalance` times the mean number of tokens, of which it takes `capacity_factor` times at most.
    """

    model: nn.Module | str = option("", "", key="target", python="model", positional=True)
    specs: tuple[InputSpec, ...] = option(
        (),
        "Shape of an input without its batch dimension: 3,64,64, ids=512:int64, 3,64,64:float16. Repeatable.",
        key="input",
        python="input_size",
        flags=("-i", "--input"),
        kind="texts",
        read=_read_inputs,
        metavar="SHAPE",
    )
    _: KW_ONLY
    call: Call | None = None
    source: Callable[..., Any] | str | None = option(
        None,
        "Function that returns the inputs: file.py:make_inputs. It receives batch_size if it has that parameter.",
        key="inputs",
        python="input_data",
        metavar="FUNCTION",
    )
    seq_len: int | None = option(
        None,
        "Tokens per text for hf: models. With timeline also lengths that vary: 128..4096:lognormal, or a file of them.",
        annotation="int | str | None",
        kind="text",
        shown="512, or what fits",
        metavar="N",
        least=1,
        read=parse_lengths,
    )
    batch_size: int | None = option(
        None, "Samples per batch.", flags=("-b", "--batch", "--batch-size"), shown="1", least=1
    )
    arguments: Mapping[str, object] = option(
        {},
        "Argument for the constructor or function: a Python literal, or a bare word for a string. Repeatable.",
        annotation="Mapping[str, object] | None",
        flags=("--arg",),
        kind="table",
        factory=dict,
        read=parse_arguments,
        metavar="NAME=VALUE",
    )
    mode: Mode | None = option(
        None, "Run the model in training or evaluation mode.", shown="train", choices=("train", "eval")
    )
    whole: bool = option(False, "Run every layer, even if layers repeat.")
    online: bool = option(False, "Fetch the config.json of a Hub id that has no preset; never weights.")
    lora: str | None = option(
        None,
        "Train only LoRA adapters: r=16,targets=q_proj;v_proj. Also dropout=0.05, and train=classifier for modules "
        "that are trained as they are.",
        metavar="OPTIONS",
    )
    adapter: str | None = option(
        None,
        f"Train adapters of another kind, made by peft: {', '.join(PEFT_CONFIGS)}, as in dora:r=16.",
        metavar="KIND",
    )
    base: str | None = option(
        None, f"Store the linear layers frozen and quantized: {', '.join(BASES)}.", metavar="FORMAT"
    )
    freeze: str | Iterable[str] | None = option(
        None,
        "Freeze the modules and parameters of these names, separated by commas: embeddings,encoder.layer.0*.",
        kind="list",
        metavar="PATTERNS",
    )
    imbalance: float = option(
        1.0, "Tokens of the busiest expert (under ep, of the busiest GPU) as a multiple of the mean.", least=1
    )
    capacity_factor: float | None = option(
        None, "Most tokens of an expert as a multiple of the mean: the dispatcher drops the others.", least=1
    )

    def __post_init__(self) -> None:
        model: object = self.model
        if isinstance(model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(model))
        if isinstance(model, type):
            name = model.__name__
            raise InputError(
                f"the model is the class {name}: give an instance, {name}(…), or a target, 'file.py:{name}'"
            )
        if self.specs and self.source is not None:
            raise InputError("give the inputs as input or as inputs, not as both")
        if (self.specs or self.call is not None) and self.seq_len is not None:
            raise InputError("a sequence length is for inputs that memsize makes: these have their own sizes")
        for what, size in (("batch size", self.batch_size), ("sequence length", self.seq_len)):
            if size is not None and size < 1:
                raise InputError(f"{what} {size}: it must be at least 1")
            if size is not None and size > MOST_ELEMENTS:
                raise InputError(f"a {what} of {size:.3g} is more than a tensor can hold (2^63 - 1)")
        if self.mode not in (None, "train", "eval"):
            raise InputError(f"no mode {self.mode!r}: it is train or eval")
        if self.lora is not None and self.adapter is not None:
            raise InputError("lora and adapter are both given: leave one of them out")
        if self.base is not None:
            parse_base(self.base)
        self.trained_parts  # noqa: B018 - refuses what cannot be read

    @property
    def has_input(self) -> bool:
        return bool(self.specs) or self.call is not None or self.source is not None

    @property
    def trained_parts(self) -> TrainedParts:
        """The adapters, the base and the frozen parts that `lora`, `adapter`, `base` and `freeze` ask for."""
        adapter = parse_adapter(self.adapter) if self.adapter is not None else None
        adapter = parse_lora(self.lora) if self.lora is not None else adapter
        patterns = self.freeze.split(",") if isinstance(self.freeze, str) else self.freeze or ()
        return TrainedParts(adapter, self.base, tuple(filter(None, map(str.strip, patterns))))

    @property
    def busiest(self) -> float:
        """The tokens of the busiest expert as a multiple of the mean; with a capacity alone, as many as that allows."""
        if self.capacity_factor is None:
            return self.imbalance
        return min(self.capacity_factor, self.imbalance) if self.imbalance > 1 else self.capacity_factor

    @classmethod
    def of(
        cls,
        model: nn.Module | str | os.PathLike[str] | ModelRequest,
        input_size: str | Sequence[Any] | InputSpec | Any = None,
        *,
        input_data: Any = None,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> ModelRequest:
        """The subject that the arguments of a question describe; one that is there already comes as it is.

        `input_size` is a size without the batch dimension, ``(3, 64, 64)`` or ``"ids=512:int64"``, or several. What is
        no size is taken for `input_data`: a mapping of keyword arguments, a tuple or a list of positional ones,
        anything else the only one; a function that returns such, or its name. `args` and `kwargs` are real inputs as
        well; `kwargs` may come beside the data of `input_data`. All real inputs have their batch dimension. `options`
        are the other fields.

        Raises `InputError` where the input is given twice, or cannot be read.
        """
        if isinstance(model, ModelRequest):
            return model
        if input_size is not None and not _is_size(input_size) and input_data is None:
            input_size, input_data = None, input_size
        call, source = _real_inputs(input_data, args or (), kwargs or {})
        if input_size is not None and (call is not None or source is not None):
            raise InputError(_TWICE)
        specs = () if input_size is None else _specs(input_size)
        if isinstance(length := options.get("seq_len"), str):
            options["seq_len"] = parse_lengths(length)
        options["arguments"] = dict(options.get("arguments") or {})
        return cls(model, specs, call=call, source=source, **options)  # type: ignore[arg-type]


_TWICE: Final = "give the input once: as input_size, as input_data, or as args and kwargs"


def _real_inputs(data: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Call | None, Any]:
    """The call that real inputs are, or the function or its name that makes them; `kwargs` may come beside `data`."""
    if data is None:
        return ((tuple(args), dict(kwargs)) if args or kwargs else None), None
    # What can also be iterated over is data: a graph of torch_geometric can be called, too.
    makes = isinstance(data, str) or (callable(data) and not isinstance(data, Iterable))
    if args or (makes and kwargs):
        raise InputError(_TWICE)
    if makes:
        return None, data
    values, keywords = call_of(data)
    if twice := next((name for name in kwargs if name in keywords), None):
        raise InputError(f"the argument {twice!r} is given twice, in input_data and in kwargs")
    return (values, keywords | dict(kwargs)), None


def call_of(data: Any) -> Call:
    """`data` as arguments: a mapping gives keywords, a tuple or list positions, anything else is the only one."""
    if isinstance(data, Mapping):
        return (), dict(data)
    if isinstance(data, (tuple, list)) and not hasattr(data, "_fields"):
        return tuple(data), {}
    return (data,), {}


def _is_size(value: Any) -> bool:
    """Whether `value` is a size, a text of one, or a sequence of such; real inputs are none of these."""

    def is_one(value: Any) -> bool:
        whole = isinstance(value, (tuple, list)) and all(isinstance(n, int) for n in value)
        return whole or isinstance(value, (str, InputSpec))

    return is_one(value) or (isinstance(value, (tuple, list)) and all(map(is_one, value)))


def _specs(input_size: Any) -> tuple[InputSpec, ...]:
    """`input_size` in any of its forms: one size, one text, one spec, or a sequence of such."""
    is_one = isinstance(input_size, (str, InputSpec)) or all(isinstance(size, int) for size in input_size)
    sizes = (input_size,) if is_one else input_size
    texts = (size if isinstance(size, str | InputSpec) else ",".join(map(str, size)) for size in sizes)
    return tuple(parse_input(text) if isinstance(text, str) else text for text in texts)
