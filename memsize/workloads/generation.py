"""Tokens generated one by one, by the model's own `generate`: the prefill of the prompt, then one step for each token.

Nothing of `generate` is imitated. Each call of the model itself begins a step; the first is the prefill. After as many
steps as are asked for the run is cut off, since all that follow are alike.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Final
from weakref import ref

import torch
from torch import nn

from memsize.errors import InputError
from memsize.known_values.values import MAX_INTEGER_ELEMENTS, set_constant, set_filled
from memsize.loading.hubs import quiet
from memsize.model.input_tensors import ModelInputs, input_tensors, resized_call
from memsize.processes.patches import Patches, assigned, wrapping
from memsize.records.trace import Trace
from memsize.spec.generation import Draft, Generation
from memsize.spec.model_request import ModelRequest
from memsize.spec.vary import parse_vary
from memsize.tracing.run import Run, Setup
from memsize.workloads import Proof, Workload
from memsize.workloads.kv_caches import CachedLayer, cache_of, cached_layers, offloading_watched

PREFILL: Final = "prefill"
DECODE: Final = "decode"
END: Final = "end"
"""The phases of a generation: the prompt, each further token, and what came after the run was cut off."""

_MADE: Final = frozenset(("decoder_input_ids", "decoder_attention_mask", "labels"))
"""Arguments of a forward that `generate` makes itself."""

ASSISTANT: Final = "assistant"
"""The name of the module that a model has as its assistant."""
OF_ASSISTANT: Final = " of the assistant"
_NO_TOKEN: Final = -1
"""A token that no model picks."""

Prompts = Callable[[int], ModelInputs]
"""Makes the inputs of a prompt of as many tokens."""


class CacheRecord:
    """The contents of the cache after each forward (0: the prefill), in the latest run of a generation."""

    def __init__(self) -> None:
        self.steps: list[tuple[CachedLayer, ...]] = []

    def add(self, number: int, layers: tuple[CachedLayer, ...]) -> None:
        """Record the cache after forward `number`; a later part of a prefill takes the place of an earlier one."""
        self.steps[number:] = [layers]


class _Enough(BaseException):
    """Ends a generation after the steps that were asked for. No exception that a model might catch."""


@dataclass(frozen=True)
class GenerationSteps(Workload):
    """The prefill and the first `steps` decode steps of a generation; all of them with None.

    The setup's inputs are those of the prompt. `record` has what the cache holds after each forward, `edits` change the
    model before. `loop` takes the place of `generate`: a function of the model, those of the inputs that it
    takes, and `max_new_tokens`.
    """

    generation: Generation
    steps: int | None = None
    record: CacheRecord = field(default_factory=CacheRecord, compare=False)
    edits: tuple[Callable[[Setup], Setup], ...] = ()
    loop: Callable[..., Any] | None = None

    @property
    def proof(self) -> Proof | None:
        """One decode step shows that all repeat. A draft's model has blocks of its own."""
        if self.loop is not None or self.generation.draft is not None:
            return None
        kind = replace(self.generation, prompt=1, max_new_tokens=2), self.edits
        return Proof(kind, replace(self, steps=1, record=CacheRecord()))

    def run(self, setup: Setup) -> Trace:
        for edit in self.edits:
            setup = edit(setup)
        generate = partial(self.loop, setup.model) if self.loop else generate_of(setup.model, setup.name)
        if self.generation.uneven:
            setup = _padded(setup)
        run = Run(setup)
        args, kwargs = setup.call
        kwargs = {name: value for name, value in kwargs.items() if name not in _MADE}
        if self.generation.begun > 1:
            kwargs["decoder_input_ids"] = _begun(setup.model, self.generation.begun, setup.batch_size or 1)
        arguments = _arguments(setup.model, self.generation)
        if "generation_config" in arguments:  # generate takes what is None in the one from the other
            setup.model.generation_config = arguments["generation_config"]  # type: ignore[assignment]
        if self.loop:
            kwargs, arguments = _taken(self.loop, kwargs | {"max_new_tokens": self.generation.max_new_tokens + 1}), {}
        clock = run.ledger.clock
        with run.recording(), torch.no_grad(), setup.precision.autocast():
            clock.phase = clock.index(END)  # which is resumed: Python 3.13 frees later what the last step's frames hold
            left = self.generation.steps if self.steps is None else self.steps
            steps = _Steps(run, self.generation, left, self.record)
            with (
                clock.during(PREFILL),
                steps.counted(),
                _without_end(setup.model, partial(never_right, self.generation.draft, steps.propose)),
                offloading_watched(run.ledger) if self.generation.is_offloaded else nullcontext(),
                nullcontext() if self.loop else quiet(logging.WARNING),  # about lengths that the model's config has
            ):
                run.result = generate(*args, **kwargs, **arguments)
        if not steps.begun:
            raise InputError("step returned without a call of the model: it generates nothing")
        return run.trace()


def generate_of(model: nn.Module, name: str) -> Callable[..., Any]:
    """The model's own `generate`. Raises `InputError` where it has none."""
    generate: Callable[..., Any] | None = getattr(model, "generate", None)
    if not callable(generate):
        pipeline = name.partition(" ")[0]
        hint = "; --step loop.py:function gives a loop of your own"
        if name.startswith("diffusers:"):
            hint = f": memsize generate '{pipeline}' --gpu a100"
        raise InputError(f"{name} has no generate method: it generates no tokens{hint}")
    return generate


def positions(model: nn.Module) -> int | None:
    """Return the number of positions in the config of a transformers model; None where it does not say."""
    config: Any = getattr(model, "config", None)
    of_text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(config, "max_position_embeddings", None) or getattr(of_text, "max_position_embeddings", None)
    return count if isinstance(count, int) and count > 0 else None


def prompts_of(request: ModelRequest, inputs: Callable[[ModelRequest], ModelInputs]) -> Prompts:
    """Make prompts of any length, the user's own by resizing them. Raises `InputError` where those have no length."""
    if not request.has_input:
        return cache(lambda length: inputs(replace(request, seq_len=length)))
    original = inputs(request)
    dimensions = parse_vary("seq_len").dimensions(input_tensors(original.call()))

    @cache
    def prompt(length: int) -> ModelInputs:
        return replace(original, make=lambda batch: resized_call(original.make(batch), dimensions, length))

    return prompt


def have_own_length(prompts: Prompts, length: int) -> bool:
    """Whether prompts of this length and of another are the same input, such as a spectrogram, but for what `generate`
    makes of them itself.
    """
    calls = [prompts(tokens).call(1) for tokens in (length, length - 1 or 2)]
    one, other = ([(t.name, t.spec) for t in input_tensors(call) if t.name not in _MADE] for call in calls)
    return one == other


def _padded(setup: Setup) -> Setup:
    args, kwargs = setup.call
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, torch.Tensor):
        raise InputError(f"{setup.name} is given no attention_mask: its prompts cannot be uneven")
    if len(mask) == 1:
        return setup
    if mask.numel() > MAX_INTEGER_ELEMENTS:
        most = f"masks of more than {MAX_INTEGER_ELEMENTS:,} are not followed"
        raise InputError(f"uneven prompts of {mask.numel():,} tokens in all: {most}")
    values = torch.ones(mask.shape, dtype=mask.dtype, device="cpu")
    values[0, 0] = 0
    return replace(setup, call=(args, kwargs | {"attention_mask": set_constant(torch.empty_like(mask), values)}))


def _taken(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _arguments(model: nn.Module, generation: Generation) -> dict[str, object]:
    """The arguments of `generate` beside the inputs: the model's own settings, in which no sequence ends early."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return generation.arguments
    config = endless(config)
    config.update(**generation.arguments)
    assistant = assistant_of(model)
    if assistant is None:
        return {"generation_config": config}
    assistant.generation_config = endless(assistant.generation_config)
    assistant.generation_config.num_assistant_tokens_schedule = "constant"  # it always proposes as many
    return {"generation_config": config, "assistant_model": assistant}


def _begun(model: nn.Module, tokens: int, batch: int) -> torch.Tensor:
    """Make the first tokens of a decoder; `generate` would put the start token before any that begin with another."""
    config: Any = _arguments(model, Generation(prompt=1))["generation_config"]
    first = config.decoder_start_token_id
    ids = torch.empty(batch, tokens, dtype=torch.int64, device="meta")
    return set_constant(ids, torch.full((batch, tokens), first, device="cpu"))


def _without_end(model: nn.Module, drafted: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """While open, `generate` makes static caches for a token less, ends no beam search, and proposes by `drafted`."""

    def shorter(prepare: Callable[..., Any], *args: Any, max_cache_len: int, **kwargs: Any) -> Any:
        return prepare(*args, max_cache_len=max_cache_len - 1, **kwargs)

    functions: dict[str, Callable[..., Any]] = {
        "_prepare_static_cache": shorter,
        "_beam_search_has_unfinished_sequences": lambda looks, *args, **kwargs: looks(*args, **kwargs) is not None,
        "_get_candidate_generator": lambda propose, *args, **kwargs: drafted(propose(*args, **kwargs)),
    }
    own = [wrapping(model, name, function) for name, function in functions.items() if hasattr(model, name)]
    return Patches().applied(own)


class _Steps:
    """Counts the forwards of a run and ends it after `steps` of them, those of the prefill apart."""

    def __init__(self, run: Run, generation: Generation, steps: int, record: CacheRecord) -> None:
        self.run = run
        self.clock = run.ledger.clock
        self.prefills = generation.prefills
        self.steps = steps
        self.record = record
        record.steps = []
        self.begun = 0
        """How many forwards have begun, or the proposals for them."""
        self.proposed = False
        """Whether the next forward checks what was proposed, and has begun so."""
        self.drafted: tuple[CachedLayer, ...] = ()
        """What the assistant's cache holds."""

    @contextmanager
    def counted(self) -> Iterator[None]:
        model, assistant = self.run.setup.model, assistant_of(self.run.setup.model)
        with ExitStack() as handles:
            handles.enter_context(assigned(self.run.calls, "forward", self.forward))
            handles.callback(model.register_forward_hook(self.forwarded, with_kwargs=True).remove)
            if assistant is not None:
                handles.callback(assistant.register_forward_hook(self.assisted, with_kwargs=True).remove)
            with suppress(_Enough):
                yield
                self.clock.phase = self.clock.index(END)

    def propose(self) -> None:
        self._begin()
        self.proposed = True

    def forward(self) -> str:
        if not self.proposed:
            self._begin()
        self.proposed = False
        return self._phase

    def forwarded(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.begun and not self.clock.backward:
            layers = cached_layers(self.run, cache_of(kwargs, output))
            self.record.add(self.clock.step, (*layers, *self.drafted))

    def assisted(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        layers = cached_layers(self.run, cache_of(kwargs, output))
        self.drafted = tuple(layer._replace(kind=f"{layer.kind}{OF_ASSISTANT}") for layer in layers)

    def _begin(self) -> None:
        if self.begun >= self.prefills + self.steps:
            self.clock.phase = self.clock.index(END)
            raise _Enough
        self.begun += 1
        self.clock.step = max(self.begun - self.prefills, 0)
        self.clock.phase = self.clock.index(self._phase)

    @property
    def _phase(self) -> str:
        return DECODE if self.clock.step else PREFILL


# -- tokens that are proposed before each step: by an assistant of the model, or from its prompt -----------------------


@contextmanager
def assisted(model: nn.Module, assistant: nn.Module) -> Iterator[None]:
    """While open, the assistant is a module of the model. Raises `InputError` where transformers wants tokenizers."""
    theirs, own = _vocabulary(assistant), _vocabulary(model)
    if theirs != own:
        raise InputError(
            f"the assistant has a vocabulary of {theirs} tokens, the model one of {own}: transformers would translate "
            "between their tokenizers, which is not followed"
        )
    if hasattr(model, ASSISTANT):
        raise InputError(f"the model has an attribute {ASSISTANT} of its own: there is no place for another")
    model.add_module(ASSISTANT, assistant)
    try:
        yield
    finally:
        delattr(model, ASSISTANT)


def assistant_of(model: nn.Module) -> Any:
    """The module that `assisted` gave the model; None where it has none."""
    return model._modules.get(ASSISTANT)


def endless(config: Any) -> Any:
    """The settings of a generation in which no sequence ends early: the token that ends one is a value."""
    config = copy.deepcopy(config)
    config.eos_token_id, config.max_length = None, None
    for token in ("pad_token_id", "bos_token_id", "decoder_start_token_id"):
        if not isinstance(getattr(config, token, None), int):  # which one it is makes no difference
            setattr(config, token, 0)
    return config


def never_right(draft: Draft | None, begins: Callable[[], None], candidates: Any) -> Any:
    """Patch the candidate generator of a `draft` to propose tokens that the model never picks, and to call `begins`
    before. A prompt in which tokens are looked up is made to repeat itself, so that there are some.
    """
    itself, propose = ref(candidates), type(candidates).get_candidates  # no circle, which would keep its tensors

    def get_candidates(tokens: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        begins()
        if draft and draft.assistant is None:
            set_filled(tokens, 0)
        proposed, logits = propose(itself(), tokens, **kwargs)
        if proposed is not tokens:
            set_filled(proposed, _NO_TOKEN)
        return proposed, logits

    if draft is not None:  # and not a loop of one's own
        candidates.get_candidates = get_candidates
    return candidates


def _vocabulary(model: nn.Module) -> int | None:
    config: Any = getattr(model, "config", None)
    return getattr(config.get_text_config(), "vocab_size", None) if config is not None else None
