"""A subject opened: its model loaded or built, its inputs made, and the process kept as it was around its code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from memsize.errors import ExitError, InputError, MemsizeError, exits_caught
from memsize.loading.target import parse_target
from memsize.spec.model_request import ModelRequest
from memsize.spec.vary import Lengths

if TYPE_CHECKING:
    from torch import nn

    from memsize.loading import GpuContextFactory
    from memsize.model.input_tensors import ModelInputs
    from memsize.spec.generation import Draft
    from memsize.spec.inputs import InputMaker
    from memsize.workloads.generation import Prompts


class Opened(NamedTuple):
    """A subject as something to run: its name, the model, its inputs and its training flag; and the notes on it."""

    run: tuple[str, nn.Module, ModelInputs, bool]
    notes: tuple[str, ...]


class Loaded(NamedTuple):
    """A subject's model: its name, what is to be said of it, what makes its inputs, and the GPU for code that wants
    one.
    """

    name: str
    model: nn.Module
    notes: tuple[str, ...]
    maker: InputMaker | None
    machine: GpuContextFactory


def refuse_resizing(model: ModelRequest) -> None:
    """Raise `InputError` for a batch size beside real inputs, which have their own."""
    if model.call is not None and model.batch_size is not None:
        raise InputError("batch_size is for inputs that memsize makes: real inputs already have a batch dimension")


@contextmanager
def opened(
    subject: ModelRequest,
    report_progress: Callable[[str], None] = lambda _: None,
    gpu: str | None = None,
    own: bool = False,
) -> Iterator[Opened]:
    with model_of(subject, report_progress, gpu, own=own) as loaded:
        yield with_inputs(subject, loaded)


def with_inputs(subject: ModelRequest, loaded: Loaded) -> Opened:
    from memsize.model.input_tensors import inputs_for

    training = subject.mode != "eval"
    inputs = inputs_for(subject, loaded.model, loaded.maker, training=training, machine=loaded.machine)
    run = (loaded.name, loaded.model, inputs, training)
    return Opened(run, (*loaded.notes, *filter(None, [inputs.note])))


def prompts_of(subject: ModelRequest, loaded: Loaded) -> Prompts:
    """The prompts of a model that generates, by their length. Raises `InputError` where they have none."""
    from memsize.workloads.generation import prompts_of

    maker = loaded.maker
    goes_on = maker and replace(maker, make=lambda request: maker.make(replace(request, goes_on=True)))
    return prompts_of(subject, lambda prompted: with_inputs(prompted, loaded._replace(maker=goes_on)).run[2])


@contextmanager
def assisted(
    loaded: Loaded, draft: Draft | None, assistant: nn.Module | str | None, report_progress: Callable[[str], None]
) -> Iterator[Draft | None]:
    """The `draft` of a generation with the number of tokens that the `assistant` proposes, which the model has as a
    module of its own while this is open. Raises `InputError` where transformers wouldn't have that assistant.
    """
    from memsize.workloads import generation

    if draft is not None and not hasattr(loaded.model, "_get_candidate_generator"):
        kind = type(loaded.model).__name__
        raise InputError(f"{kind} generates in its own way: only models of transformers are assisted")
    if draft is None or assistant is None:
        yield draft
        return
    with model_of(ModelRequest.of(assistant, mode="eval"), report_progress) as loaded_assistant:
        generation.generate_of(loaded_assistant.model, loaded_assistant.name)
        with generation.assisted(loaded.model, loaded_assistant.model):
            config = getattr(loaded_assistant.model, "generation_config", None)
            count = getattr(config, "num_assistant_tokens", None)
            tokens = count if isinstance(count, int) and count else draft.tokens
            yield replace(draft, assistant=loaded_assistant.name, tokens=tokens)


@contextmanager
def model_of(
    subject: ModelRequest,
    report_progress: Callable[[str], None] = lambda _: None,
    gpu: str | None = None,
    own: bool = False,
) -> Iterator[Loaded]:
    """The subject's model. While open, a target's own imports work as it expects.

    The user's code runs only in here: one thread at a time, and the process is as it was afterwards. Where it wants a
    GPU and there is none, it has that of the name `gpu`. With `own` the model's forward is its own training step.
    """

    def machine() -> AbstractContextManager[None]:
        from memsize.device.cards import card
        from memsize.records.gpu import DEFAULT_GPU
        from memsize.virtual.region import machine_with

        return machine_with(card(gpu or DEFAULT_GPU))

    if isinstance(subject.source, str):
        parse_target(subject.source)
    if isinstance(subject.model, str):
        target = parse_target(subject.model)  # what cannot be one shows before torch is loaded
        from memsize.loading import load

        report_progress(f"loading {subject.model}")
        with _users_code_runs():
            loaded = load(target, subject.arguments, machine, own=own, online=subject.online)
            with loaded.importable(), _guarded(loaded.module), _routed(subject):
                module = _with_trained_parts(loaded.module, subject)
                notes = (*loaded.notes, *_notes(module, subject))
                yield Loaded(loaded.name, module, notes, maker=loaded.inputs, machine=machine)
        return
    from torch import nn

    model: object = subject.model
    if not isinstance(model, nn.Module):
        got = type(model).__name__
        raise MemsizeError(f"expected a torch.nn.Module or a target such as 'model.py:Test', got {got}")
    if subject.online:
        raise InputError("--online is for the model of a Hub id: this module exists already")
    if subject.arguments:
        raise InputError("arguments are for a target, which is built with them: this module exists already")
    with _users_code_runs(), _guarded(model), _routed(subject):
        module = _with_trained_parts(model, subject)
        yield Loaded(type(model).__name__, module, _notes(module, subject), maker=None, machine=machine)


def _with_trained_parts(model: nn.Module, subject: ModelRequest) -> nn.Module:
    if not (parts := subject.trained_parts):
        return model
    from memsize.precision.adapters import with_trained_parts

    return with_trained_parts(model, parts)


def _notes(model: nn.Module, subject: ModelRequest) -> tuple[str, ...]:
    """Name the options of `subject` that only affect a part of `model`, or of its inputs."""
    lengths, notes = subject.seq_len, []
    if isinstance(lengths, Lengths):
        notes.append(
            f"of texts with {lengths.shortest:,} to {lengths:,} tokens, the longest are run; memsize timeline compares "
            "batches of varying lengths in training"
        )
    if subject.base is None and subject.busiest == 1:
        return tuple(notes)
    from memsize.model.experts import expert_parameters
    from memsize.precision.layouts import base_layout

    experts, fused = expert_parameters(model)
    if subject.busiest != 1 and not experts:
        notes.append("no experts were recognized in the model: imbalance only affects choices by top-k, argmax or sort")
    elif subject.busiest != 1 and experts == fused:
        notes.append(
            "all experts of a layer share one weight: an imbalance matters to loops over them and under --parallel ep; "
            "grouped products take the same memory"
        )
    if subject.base is not None and fused and not base_layout(subject.base).experts:
        notes.append(
            f"{subject.base} converts linear layers only: the experts' weights, {fused:,} parameters, stay as the "
            "scenario has them; mxfp4 and nvfp4 convert them too"
        )
    return tuple(notes)


def _routed(subject: ModelRequest) -> AbstractContextManager[None]:
    from memsize.known_values.data_dependent import imbalanced

    return imbalanced(subject.busiest)


@contextmanager
def _users_code_runs() -> Iterator[None]:
    from memsize.torch_internals.isolation import isolated

    try:
        with exits_caught(), isolated():
            yield
    except ExitError as error:
        from memsize.loading.building import user_traceback
        from memsize.processes.user_code import is_users

        raise MemsizeError(f"the model ended the program {user_traceback(error, is_users)}") from error


@contextmanager
def _guarded(model: nn.Module) -> Iterator[None]:
    """While open, errors of the user's own code name its line, and the globals of the model's code are restored after.

    Raises `MemsizeError` for a model that is endless, or that must not even be copied.
    """
    from memsize.loading.building import users_failures_told
    from memsize.model.meta_tensors import refuse_endless, refuse_traced_model
    from memsize.model.restored_globals import restored_globals

    with users_failures_told():
        refuse_endless(model)
        refuse_traced_model(model)
        with restored_globals(model):
            yield
