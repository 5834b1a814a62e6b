"""What a search varies: the batch, or dimensions of the input that grow together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from memsize.errors import InputError
from memsize.records.trace import InputTensor

BATCH: Final = "batch"
_HOW: Final = "vary batch, seq_len, image, or dimensions such as 0:1 or input_ids:1,attention_mask:1"
_SEQUENCE: Final = ("seq_len", "length")
_IMAGE: Final = ("image", "size")


@dataclass(frozen=True, slots=True)
class Place:
    """One dimension of one input, counted as PyTorch does: 0 is the batch."""

    name: str
    dim: int


@dataclass(frozen=True, slots=True)
class Vary:
    """The dimensions that take the size that is searched for; none stands for the batch.

    `text` is what was asked for: ``"batch"``; ``"seq_len"``, the first dimension after the batch; ``"image"``, the last
    two together; or places such as ``"0:1"``, an input's name or position and a dimension.
    """

    text: str = BATCH
    named: tuple[Place, ...] = ()

    @property
    def batch(self) -> bool:
        """Whether the batch is what varies."""
        return self.text == BATCH

    def places(self, inputs: Sequence[InputTensor]) -> tuple[Place, ...]:
        """The dimensions of `inputs` (with their batch) that vary; raises `InputError` where there are none such."""
        if self.batch:
            return ()
        found = self.named or tuple(_by_kind(self.text, inputs))
        sizes = {_size(place, inputs) for place in found}
        if len(sizes) != 1:
            raise InputError(f"cannot vary {self.text}: the inputs have no such dimension, or not of one size; {_HOW}")
        return found

    def size(self, inputs: Sequence[InputTensor]) -> int:
        """The size that those dimensions have in `inputs`."""
        return _size(self.places(inputs)[0], inputs)


def parse_vary(text: str) -> Vary:
    """What `text` names; raises `InputError` when it cannot be read."""
    word = text.strip().lower()
    if word in (BATCH, *_SEQUENCE, *_IMAGE):
        return Vary("seq_len" if word in _SEQUENCE else "image" if word in _IMAGE else BATCH)
    return Vary(text.strip(), tuple(map(_place, text.split(","))))


def _place(text: str) -> Place:
    name, _, dim = (part.strip() for part in text.partition(":"))
    if not name or not dim.isdecimal():
        raise InputError(f"cannot read {text!r} as something that varies: {_HOW}")
    if dim == "0":
        raise InputError(f"{text!r} is the batch: vary batch instead")
    return Place(name, int(dim))


def _by_kind(kind: str, inputs: Sequence[InputTensor]) -> list[Place]:
    if kind == "seq_len":
        first = next((tensor.spec.shape[1] for tensor in inputs if len(tensor.spec.shape) > 1), None)
        alike = [tensor for tensor in inputs if len(tensor.spec.shape) > 1 and tensor.spec.shape[1] == first]
        return [Place(tensor.name, 1) for tensor in alike]
    images = [tensor for tensor in inputs if len(tensor.spec.shape) > 3]
    return [Place(tensor.name, len(tensor.spec.shape) - back) for tensor in images for back in (2, 1)]


def _size(place: Place, inputs: Sequence[InputTensor]) -> int:
    tensor = next((tensor for tensor in inputs if tensor.name == place.name), None)
    if tensor is None:
        raise InputError(f"no input {place.name!r}: known: {', '.join(tensor.name for tensor in inputs)}")
    if place.dim >= len(tensor.spec.shape):
        raise InputError(f"input {place.name!r} is {tensor.spec}: it has no dimension {place.dim}")
    return tensor.spec.shape[place.dim]
