"""How images and volumes lie in memory while a model runs: strides of every layer's tensors, and of every op's.

The ledger's shape rules give outputs the strides that CUDA's kernels do, so an op that loses channels last shows as one
whose argument has it and whose result does not. A copy that only rearranges shows as `clone` or `_to_copy` with other
strides; those that a kernel makes on its way are known from the kernels' sources (`_HIDDEN`).

A result that is a view changes nothing, whatever its strides say: ``permute(0, 2, 3, 1)`` of channels last is row-major
and is the same memory. So an op that is given such a view and returns a row-major tensor has lost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memsize.kernels import kernel_copies, strides as layout
from memsize.kernels.tensors import channels_last_format, is_channels_last
from memsize.model.input_tensors import input_tensors
from memsize.model.tensor_storage import spec_of
from memsize.processes.patches import collector_paused
from memsize.processes.user_code import running_line
from memsize.records.layout import Audit, Copy, Format, LayerFormats, Loss, Run as FormatsRun
from memsize.torch_internals.pytree import map_tensors, tensors_in
from memsize.tracing.ledger import Ledger
from memsize.tracing.module_calls import ModuleCallRecorder
from memsize.tracing.run import Run, Setup

_aten = torch.ops.aten
_COPIES = frozenset({_aten.clone.default, _aten._to_copy.default})


def format_of(tensor: torch.Tensor) -> Format | None:
    """The format of an image or a volume; None for tensors of other ranks, and for those without strides."""
    if tensor.dim() not in (4, 5) or tensor.layout is not torch.strided or not tensor.numel():
        return None
    last = tensor.is_contiguous(memory_format=channels_last_format(tensor))
    if tensor.is_contiguous():
        return "either" if last else "row-major"
    return "channels last" if last else "other"


def convert(model: nn.Module) -> int:
    """Rearrange the weights of `model`, a copy, as ``.to(memory_format=torch.channels_last)`` does, volumes too; count
    them.
    """
    converted = 0
    for tensor in dict.fromkeys((*model.parameters(), *model.buffers())):
        if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and _is_convertible(tensor):
            tensor.data = _rearranged(tensor)
            converted += 1
    return converted


def _is_convertible(tensor: torch.Tensor) -> bool:
    """Whether `Tensor.to` would rearrange it. It goes by strides, so that the weight of a 1×1 convolution, whose
    elements lie the same either way, is channels last for cuDNN afterwards (TensorConversions.cpp, `to_impl`).
    """
    return format_of(tensor) is not None and not is_channels_last(tensor)


def _rearranged(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_meta:
        return tensor.detach().to(memory_format=channels_last_format(tensor))
    strides = layout.channels_last(tensor.shape)
    rearranged = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")
    if not isinstance(tensor, nn.Parameter):
        rearranged.__dict__.update(tensor.__dict__)  # keep the known values
    return rearranged


class FormatLedger(Ledger):
    """A ledger that also records which ops lose channels last and which copies only rearrange."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__(device)
        self.copies: list[Copy] = []
        self.losses: list[Loss] = []
        self.paths: Sequence[str] = ("",)
        """The paths of the layers, and an empty one last: the clock's layer is -1 outside of them."""
        self._last: set[int] = set()
        """Storages that were seen in channels last, and what was made of them in another order than row-major."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.count
        for tensor in _tensors(args):
            if format_of(tensor) == "channels last":
                self._last.add(self.index_of(tensor))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            for tensor, wanted in kernel_copies(func, args, kwargs):
                self._copied(func, tensor, wanted, hidden=True)
            first = result[0] if isinstance(result, (tuple, list)) and result else result
            if isinstance(first, torch.Tensor) and self.index_of(first) >= before:
                self._compare(func, args, first)
        return result

    def _compare(self, func: Any, args: Any, result: torch.Tensor) -> None:
        def was_last(tensor: torch.Tensor) -> bool:
            index = self.index_of(tensor)
            is_image = index in self._last and self.rows[index].role not in ("parameter", "buffer")
            return is_image and format_of(tensor) in ("channels last", "other")  # and not row-major as it stands

        after = format_of(result)
        if func in _COPIES:
            if not _same_order(args[0], result):
                after = _format_or_order(result)
                self._copied(func, args[0], after, hidden=False, size=result.untyped_storage().nbytes())
                if after == "row-major" and self.index_of(args[0]) in self._last:
                    self._lost(func, result)
        elif after in ("row-major", "other") and any(map(was_last, _tensors(args))):
            if after == "row-major":
                self._lost(func, result)
            else:
                self._last.add(self.index_of(result))

    def _copied(self, func: Any, source: torch.Tensor, after: Format, hidden: bool, size: int | None = None) -> None:
        copy = Copy(
            layer=self.paths[self.clock.layer],
            op=func._overloadpacket.__name__,
            tensor=spec_of(source),
            before=_format_or_order(source),
            after=after,
            bytes=source.numel() * source.element_size() if size is None else size,
            hidden=hidden,
            place=running_line(run_formats.__code__),
        )
        self.copies.append(copy)

    def _lost(self, func: Any, tensor: torch.Tensor) -> None:
        after, line = format_of(tensor) or "row-major", running_line(run_formats.__code__)
        layer = self.paths[self.clock.layer]
        self.losses.append(
            Loss(layer, op=func._overloadpacket.__name__, tensor=spec_of(tensor), after=after, place=line)
        )


def _format_or_order(tensor: torch.Tensor) -> Format:
    return format_of(tensor) or ("row-major" if tensor.is_contiguous() else "other")


def _same_order(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the elements of both lie in the same order, gaps and repetitions (a stride of 0) apart."""
    before, after = one.stride(), other.stride()
    dims = [dim for dim in range(one.dim()) if one.shape[dim] > 1 and before[dim]]
    return sorted(dims, key=lambda dim: -before[dim]) == sorted(dims, key=lambda dim: -after[dim])


class FormatCalls(ModuleCallRecorder):
    """The calls of modules, with the formats of what they were given and returned in the first forward."""

    def __init__(self, model: nn.Module, ledger: Ledger) -> None:
        super().__init__(model, ledger)
        self.received: dict[int, list[Format]] = {}
        self.returned: dict[int, list[Format]] = {}

    def _returned(self, index: int, result: Any, start: int, arguments: list[tuple[torch.Tensor, int]]) -> None:
        super()._returned(index, result, start, arguments)
        self.received.setdefault(index, []).extend(_formats(tensor for tensor, _ in arguments))
        self.returned.setdefault(index, []).extend(_formats(tensors_in(result)))


class _FormatRun(Run):
    ledger: FormatLedger
    calls: FormatCalls

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, tables=False)
        # The instruments of a plain run have only seen the inputs.
        self.ledger = FormatLedger(setup.device)
        self.calls = FormatCalls(setup.model, self.ledger)
        self.ledger.paths = (*(entry.path for entry in self.calls.seen), "")
        self.enter_inputs()


def run_formats(setup: Setup) -> FormatsRun:
    """The formats of one forward in gradient mode; raises `ForwardError` when the model's own code fails."""
    run = _FormatRun(setup)
    with run.recording(), torch.enable_grad(), setup.precision.autocast():
        run.result = setup.model(*setup.call[0], **setup.call[1])
    calls, ledger = run.calls, run.ledger
    layers = tuple(
        LayerFormats(
            path=seen.path,
            type=seen.type,
            depth=seen.depth,
            leaf=seen.leaf,
            calls=seen.calls,
            parameters=tuple(_formats(seen.module.parameters(recurse=False))),
            inputs=tuple(calls.received.get(index, ())),
            outputs=tuple(calls.returned.get(index, ())),
            specs=tuple(output.spec for output in seen.outputs),
        )
        for index, seen in enumerate(calls.seen)
    )
    formats = FormatsRun(layers=layers, copies=tuple(ledger.copies), losses=tuple(ledger.losses))
    ledger.close()
    return formats


def audit(prepared: Callable[[], Setup]) -> Audit:
    """A model run as it is, and in channels last. `prepared` gives a fresh setup, ready to run, each time."""
    setup = prepared()
    inputs, training = input_tensors(setup.call), setup.training
    with collector_paused():
        plain = run_formats(setup)
        setup = prepared()
        converted = convert(setup.model)
        floating = (tensor for tensor in tensors_in(setup.call) if tensor.is_floating_point())
        images = {id(tensor) for tensor in floating if _is_convertible(tensor)}
        call = map_tensors(lambda tensor: _rearranged(tensor) if id(tensor) in images else tensor, setup.call)
        last = run_formats(replace(setup, call=call))
    double = any(parameter.dtype is torch.float64 for parameter in setup.model.parameters())
    return Audit(
        model=setup.name,
        inputs=inputs,
        scenario=setup.scenario,
        training=training,
        plain=plain,
        last=last,
        converted=converted,
        converted_inputs=len(images),
        double=double,
    )


def _formats(tensors: Any) -> Iterator[Format]:
    return (format_ for format_ in map(format_of, tensors) if format_ is not None)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    for item in value:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _tensors(item)
