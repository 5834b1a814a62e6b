"""The inputs of a model: the positional and keyword arguments of one call, made from specs or taken from the user."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from memsize.errors import InputError, first_line
from memsize.known_values.toeplitz import cast
from memsize.known_values.values import UNREADABLE, constant_of, has_single_value, set_constant, set_filled
from memsize.loading import GpuContextFactory, load_inputs
from memsize.loading.building import input_maker, wanted_inputs
from memsize.model.meta_copy import meta_copy
from memsize.model.tensor_storage import spec_of, storage_key, tensor_bytes
from memsize.records.trace import InputTensor
from memsize.spec.inputs import MOST_ELEMENTS, InputMaker, InputRequest, InputSpec, format_shape
from memsize.spec.model_request import Call, ModelRequest, call_of
from memsize.spec.vary import Dimension
from memsize.torch_internals.pytree import map_tensors, objects_in, tensors_in


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of one call. `make(batch)` gives fresh `meta` arguments for a batch size.

    `resizable` says whether the batch size can be chosen; where it can't, `make` is only called with `batch_size`.
    `note` is a remark for the reader of a report. `typed` lists the arguments, by position or name, whose dtype
    the user chose; None stands for all of them. `specs` are what they are made of, if that is so, and `looked_up` names
    those that were made integers since an embedding looks them up.
    """

    make: Callable[[int], Call]
    batch_size: int
    resizable: bool
    note: str | None = None
    typed: frozenset[int | str] | None = frozenset()
    specs: tuple[InputSpec, ...] = ()
    looked_up: str = ""

    def call(
        self, batch_size: int | None = None, floating: torch.dtype | None = None, *, typed_too: bool = True
    ) -> Call:
        """Arguments on `meta`, floating ones cast to `floating`; those of a chosen dtype only if `typed_too`."""
        args, kwargs = self.make(self.batch_size if batch_size is None else batch_size)
        if floating is None:
            return args, kwargs
        items = _by_key(args, kwargs)
        chosen = {key: value for key, value in items.items() if typed_too or not self._is_typed(key)}
        items |= cast_floating(chosen, floating)
        return tuple(items[position] for position in range(len(args))), {name: items[name] for name in kwargs}

    def typed_dtypes(self) -> set[torch.dtype]:
        """The floating dtypes, among those that the user chose, which a cast would change."""
        args, kwargs = self.make(self.batch_size)
        chosen = [value for key, value in _by_key(args, kwargs).items() if self._is_typed(key)]
        return {tensor.dtype for tensor in tensors_in(chosen) if _is_cast(tensor)}

    def with_token_ids(self, length: int) -> ModelInputs | None:
        """The same with int64 for the input of this one size without a dtype; None if there is none."""
        for number, spec in enumerate(self.specs):
            if spec.dtype is None and spec.shape == (length,):
                specs = (*self.specs[:number], replace(spec, dtype="int64"), *self.specs[number + 1 :])
                names = ", ".join(filter(None, (self.looked_up, spec.name or "input")))
                return replace(inputs_from_specs(specs, self.batch_size), looked_up=names)
        return None

    def _is_typed(self, key: int | str) -> bool:
        return self.typed is None or key in self.typed


def inputs_for(
    subject: ModelRequest, model: nn.Module, maker: InputMaker | None, training: bool, machine: GpuContextFactory
) -> ModelInputs:
    """The inputs that `subject` specifies for its `model`, or else those that `maker`, a library's own example, makes.

    A function that wants a GPU to make them has that of `machine`.
    Raises `InputError` where there is neither.
    """
    if subject.call is not None:
        return inputs_from_call(subject.call)
    if subject.specs:
        return inputs_from_specs([_with_tokens(spec, model) for spec in subject.specs], subject.batch_size or 1)
    source = subject.source
    if isinstance(source, str):
        maker = load_inputs(source, machine)
    elif source is not None:
        maker = input_maker(source, getattr(source, "__name__", type(source).__name__))
    if maker is None:
        raise InputError(f"the model needs an input: {wanted_inputs(model)}")
    length = None if subject.seq_len is None else int(subject.seq_len)  # of lengths that vary the longest
    return inputs_from_maker(maker, InputRequest(subject.batch_size or 1, length, training))


def inputs_from_specs(specs: Sequence[InputSpec], batch_size: int) -> ModelInputs:
    """Inputs made from specs: floating ones with unknown values, integer and boolean ones with values valid for
    look-ups.

    Integers are 0, or 1 where the name says that it is a mask, so that every position counts; those with a range are
    spread evenly over it.
    """

    def make(batch: int) -> Call:
        args = tuple(_tensor(spec, batch) for spec in specs if spec.name is None)
        return args, {spec.name: _tensor(spec, batch) for spec in specs if spec.name is not None}

    positional = [spec for spec in specs if spec.name is None]
    typed = {position for position, spec in enumerate(positional) if spec.dtype is not None}
    named = {spec.name for spec in specs if spec.name and spec.dtype}
    return ModelInputs(make, batch_size, True, typed=frozenset({*typed, *named}), specs=tuple(specs))


def _with_tokens(spec: InputSpec, model: nn.Module) -> InputSpec:
    """`spec` as int64 where it has no dtype and stands for token ids, by its name or that of the model's main input.

    Raises `InputError` where it has two dimensions, as the first of them is most often the batch.
    """
    name = spec.name or getattr(model, "main_input_name", "")
    if spec.dtype is not None or not isinstance(name, str) or not name.endswith("_ids"):
        return spec
    if len(spec.shape) == 2 and spec.name is None:
        first, second = spec.shape
        raise InputError(
            f"{name} is given without the batch: --input {second} and --batch-size {first}, or "
            f"{first},{second}:int64 for {first} × {second} token ids per sample"
        )
    return replace(spec, dtype="int64")


def inputs_from_data(data: Any) -> ModelInputs:
    """The user's own inputs: a mapping of keyword arguments, a tuple or list of positional ones, or the only one."""
    return inputs_from_call(call_of(data))


def inputs_from_call(own_call: Call) -> ModelInputs:
    """The user's own inputs, positional and by keyword.

    The tensors are not kept: meta copies of the same shapes stand in for them. Where all of them agree on their first
    dimension, it is taken to be the batch, which can then be resized.

    Raises `InputError` for values that can be read only once, and for tensors that have no meta copy.
    """
    call = _copied(own_call)
    # 0 stands for what cannot be a batch dimension.
    sizes = {0 if tensor.is_nested or not tensor.dim() else tensor.shape[0] for tensor in tensors_in(call)}
    if any(isinstance(value, PackedSequence) for value in objects_in(call)):
        sizes.add(0)  # its rows are steps of several samples
    batch = sizes.pop() if len(sizes) == 1 else 0

    def make(size: int) -> Call:
        copied: Call = meta_copy(call)
        return copied if size == batch or not batch else map_tensors(lambda t: resized(t, [0], size), copied)

    return ModelInputs(make, batch or 1, batch > 0, typed=None)


def inputs_from_maker(maker: InputMaker, request: InputRequest) -> ModelInputs:
    """Inputs from a function of the batch size; where that offers one size only, of that size."""
    typed = frozenset[int | str]() if maker.untyped else None
    if not maker.resizable:
        return replace(inputs_from_data(maker.make(request)), typed=typed)

    calls: dict[int, Call] = {}

    def make(size: int) -> Call:
        try:
            if size not in calls:
                calls[size] = _copied(call_of(maker.make(replace(request, batch_size=size))))
        except (RuntimeError, MemoryError) as error:
            raise InputError(f"inputs of batch {size:,} cannot be made: {first_line(error)}") from error
        copied: Call = meta_copy(calls[size])
        return copied

    make(request.batch_size)  # to find mistakes in them now
    return ModelInputs(make, request.batch_size, True, maker.note, typed)


def input_tensors(call: Call) -> tuple[InputTensor, ...]:
    """The record of every tensor in a call, named by argument (``"input_ids"``) or position (``"0"``).

    Memory that several of them share is counted with the first.
    """
    args, kwargs = call
    named = [(str(position), value) for position, value in enumerate(args)] + list(kwargs.items())
    met: set[Hashable] = set()
    records = []
    for name, tensor in ((name, tensor) for name, value in named for tensor in tensors_in(value)):
        key = storage_key(tensor)
        records.append(InputTensor(name, spec_of(tensor), 0 if key in met else tensor_bytes(tensor)))
        met.add(key)
    return tuple(records)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating tensors in `dtype`, known values included.

    Those of less than two bytes per element are quantized, and stay as they are.
    """

    return map_tensors(lambda tensor: cast(tensor, dtype) if _is_cast(tensor) else tensor, value)


def _is_cast(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


def _copied(call: Call) -> Call:
    for value in objects_in(call):
        if isinstance(value, Iterator):
            raise InputError(
                f"the input holds a {type(value).__name__}, which can be read only once: give a list of it"
            )
    if any(tensor.is_nested and tensor.layout is torch.strided for tensor in tensors_in(call)):
        raise InputError("nested tensors in the strided layout do not run without a device: use layout=torch.jagged")
    try:
        copied: Call = meta_copy(call)
    except (RuntimeError, NotImplementedError) as error:
        kinds = ", ".join(sorted({type(t).__name__ for t in tensors_in(call)} - {"Tensor", "Parameter"}))
        raise InputError(f"the input's tensors cannot be copied to meta ({kinds}): {error}") from error
    return copied


def _tensor(spec: InputSpec, batch: int) -> torch.Tensor:
    shape = (batch, *spec.shape)
    dtype: torch.dtype = getattr(torch, spec.dtype or "float32")
    if math.prod(shape) * dtype.itemsize > MOST_ELEMENTS:
        raise InputError(f"an input of {format_shape(shape)} has more bytes than a tensor can (2^63 - 1)")
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    if dtype.is_floating_point or dtype.is_complex or dtype in UNREADABLE:
        return tensor
    if spec.span is None:
        return set_filled(tensor, 1 if "mask" in (spec.name or "") else 0)
    # Each about as often, in rising order.
    low, high = spec.span
    share = torch.arange(tensor.numel(), dtype=torch.float64, device="cpu") / max(tensor.numel() - 1, 1)
    return set_constant(tensor, (low + (share * (high - low)).round()).to(dtype).reshape(shape))


def _by_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    positions: dict[int | str, Any] = dict(enumerate(args))
    return positions | kwargs


def resized(tensor: torch.Tensor, dims: Iterable[int], size: int) -> torch.Tensor:
    """A new tensor like `tensor` with `size` elements along each of `dims`; known values repeat along them."""
    dims, shape, value = list(dims), list(tensor.shape), constant_of(tensor)
    for dim in dims:
        shape[dim] = size
    result = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    if value is None:
        return result
    if has_single_value(value):
        return set_filled(result, value.flatten()[0].item())
    for dim in dims:
        value = value.index_select(dim, torch.arange(size) % value.shape[dim])
    return set_constant(result, value)


def resized_call(call: Call, dimensions: Iterable[Dimension], size: int) -> Call:
    """The call with the size of some of its inputs' dimensions changed."""
    dims: dict[str, list[int]] = {}
    for dimension in dimensions:
        dims.setdefault(dimension.name, []).append(dimension.dim)
    args, kwargs = call

    def changed(name: str, value: Any) -> Any:
        return map_tensors(lambda tensor: resized(tensor, dims[name], size), value) if name in dims else value

    return (
        tuple(changed(str(position), value) for position, value in enumerate(args)),
        {name: changed(name, value) for name, value in kwargs.items()},
    )
