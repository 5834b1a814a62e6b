"""One forward of one twin under one scenario, as a `Trace`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memsize.errors import ForwardError
from memsize.record import Failure, Layer, Storage, StoredTensor, Trace
from memsize.stored import stored_tensors
from memsize.tracing.calls import Calls, Seen
from memsize.tracing.failure import explain
from memsize.tracing.feed import Call, input_tensors
from memsize.tracing.ledger import Ledger
from memsize.tracing.nest import tensors_in
from memsize.tracing.quiet import undisturbed
from memsize.tracing.reach import parameters_reached

PHASES = ("setup", "forward")


@dataclass(frozen=True)
class Setup:
    """What to run: a twin that is ours to run, its arguments, and the region its forward runs in.

    `region` is entered with the ledger already listening; it is given the ledger and may tell it of cast copies.
    `rewrite` says how the scenario stores the twin's tensors where that is not how the twin itself holds them.
    """

    model: str
    scenario: str
    twin: nn.Module
    call: Call
    training: bool
    batch_size: int | None = None
    device: str = "meta"
    region: Callable[[Ledger], AbstractContextManager[Any]] = lambda _: nullcontext()
    rewrite: Callable[[tuple[StoredTensor, ...]], tuple[StoredTensor, ...]] = lambda tensors: tensors
    notes: tuple[str, ...] = ()


def run_forward(setup: Setup) -> Trace:
    """The trace of one forward in gradient mode, with what autograd keeps at its end.

    Raises `ForwardError` when the model's own code fails; its `trace` holds the layers that ran.
    """
    twin = setup.twin.train(setup.training)
    if any(is_lazy(tensor) for tensor in (*twin.parameters(), *twin.buffers())):
        _give_shapes(setup)
    tensors = stored_tensors(twin)
    ledger = Ledger(setup.device)
    calls = Calls(twin, ledger)
    _enter_inputs(ledger, twin, setup.call)
    args, kwargs = setup.call
    hooks = torch.autograd.graph.saved_tensors_hooks(ledger.saved, lambda tensor: tensor)
    with undisturbed():
        try:
            with torch.enable_grad(), calls.watched(), hooks, ledger, setup.region(ledger):
                result = twin(*args, **kwargs)
                for tensor in tensors_in(result):
                    ledger.mark(tensor, "output")
                kept = {reference.index for reference in ledger.live.values()}
        except Exception as error:
            failure = explain(error, calls, ledger)
            alive = {reference.index for reference in ledger.live.values()}
            partial = _trace(setup, calls, ledger, tensors, alive, failure)
            raise ForwardError(_message(failure), partial) from error
    tensors = _with_use(tensors, twin, ledger, parameters_reached(tensors_in(result)))
    ledger.close()
    return _trace(setup, calls, ledger, tensors, kept, None)


def stored_only(name: str, model: nn.Module) -> Trace:
    """What `model` stores, as a trace without a run: layers and tensors, no calls, no outputs, no events."""
    setup = Setup(name, "as-given", model, ((), {}), model.training)
    ledger = Ledger()
    return _trace(setup, Calls(model, ledger), ledger, stored_tensors(model), set(), None)


def _give_shapes(setup: Setup) -> None:
    """One forward ahead of the run, in which lazy modules learn their shapes; why it fails is for the run to say."""
    args, kwargs = setup.call
    ledger = Ledger(setup.device)
    with suppress(Exception), undisturbed(), torch.no_grad(), ledger, setup.region(ledger):
        setup.twin(*args, **kwargs)


def _enter_inputs(ledger: Ledger, twin: nn.Module, call: Call) -> None:
    for parameter in twin.parameters():
        if not is_lazy(parameter):
            ledger.enter(parameter, "parameter")
    for buffer in twin.buffers():
        if not is_lazy(buffer):
            ledger.enter(buffer, "buffer")
    for tensor in tensors_in(call):
        ledger.enter(tensor, "input")
    ledger.phase = 1


def _with_use(
    tensors: tuple[StoredTensor, ...], twin: nn.Module, ledger: Ledger, reached: set[int]
) -> tuple[StoredTensor, ...]:
    """`tensors` with what the run showed of them: whether an op read them, whether a gradient can reach them."""
    held: dict[str, torch.Tensor] = dict(twin.named_parameters(remove_duplicate=False))
    held |= dict(twin.named_buffers(remove_duplicate=False))

    def seen(tensor: StoredTensor) -> StoredTensor:
        source = held.get(tensor.name)
        if source is None:
            return tensor
        used = not ledger.addresses(source).isdisjoint(ledger.read)
        return replace(tensor, used=used, differentiable=id(source) in reached)

    return tuple(seen(tensor) for tensor in tensors)


def _trace(
    setup: Setup,
    calls: Calls,
    ledger: Ledger,
    tensors: tuple[StoredTensor, ...],
    kept: set[int],
    failure: Failure | None,
) -> Trace:
    storages = ledger.storages()
    tensors = setup.rewrite(tensors)
    return Trace(
        model=setup.model,
        scenario=setup.scenario,
        training=setup.training,
        batch_size=setup.batch_size,
        torch=str(torch.__version__),
        inputs=input_tensors(setup.call),
        layers=_layers(calls.seen, tensors, storages, kept),
        tensors=tensors,
        phases=PHASES,
        storages=storages,
        events=tuple(ledger.events),
        assumptions=tuple(ledger.values.assumptions),
        notes=(*setup.notes, *ledger.values.notes),
        failure=failure,
    )


def _layers(
    seen: list[Seen], tensors: Iterable[StoredTensor], storages: tuple[Storage, ...], kept: set[int]
) -> tuple[Layer, ...]:
    saved, cast = [0] * (len(seen) + 1), [0] * (len(seen) + 1)
    for index in kept:
        storage = storages[index]
        if storage.saved_by >= 0:
            saved[storage.saved_by] += storage.bytes
        if storage.role == "cast copy":
            cast[storage.layer] += storage.bytes
    own: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        own.setdefault(tensor.layer, []).append(tensor)
    return tuple(_layer(s, own.get(s.path, []), saved[i], cast[i]) for i, s in enumerate(seen))


def _layer(seen: Seen, own: list[StoredTensor], saved: int, cast: int) -> Layer:
    weights = [t for t in own if t.kind in ("parameter", "packed")]
    return Layer(
        path=seen.path,
        type=seen.type,
        depth=seen.depth,
        leaf=seen.leaf,
        calls=seen.calls,
        outputs=tuple(seen.outputs),
        parameters=sum(t.elements for t in weights if t.tied_to is None),
        trainable=sum(t.elements for t in weights if t.trainable and t.tied_to is None),
        parameter_bytes=sum(t.bytes for t in weights),
        buffer_bytes=sum(t.bytes for t in own if t.kind == "buffer"),
        output_bytes=sum(output.bytes for output in seen.outputs),
        saved_bytes=saved,
        cast_bytes=cast,
    )


def _message(failure: Failure) -> str:
    where = f"{failure.layer} ({failure.type})" if failure.layer else f"the model ({failure.type})"
    given = f"\nIt was given {', '.join(failure.inputs)}." if failure.inputs else ""
    return f"the forward failed in {where}: {failure.reason}{given}"
