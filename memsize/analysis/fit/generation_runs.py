"""The cache of runs behind a fit of a generation: each is composed of a few traced steps, at any batch and context."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar, Final

from torch import nn

from memsize.analysis.fit.run_cache import Run, RunCache, RunVariant
from memsize.analysis.fit.search import LIMIT
from memsize.analysis.generation.generator import Generator
from memsize.analysis.model_setups import ModelEdit
from memsize.errors import ForwardError, InputError
from memsize.model.input_tensors import input_tensors
from memsize.spec.generation import Generation
from memsize.spec.stack import INSTALLED, Stack
from memsize.spec.vary import Vary
from memsize.workloads.generation import Prompts, positions

MOST_SEQUENCES: Final = 1024
"""The largest batch of a frontier."""
_SHORT: Final = 8
"""The shortest prompt of the contexts that are traced together."""
_TOGETHER: Final = 16
"""The largest of the batches that are traced together has this many times the sequences of the smallest."""
_MOST_TOKENS: Final = 1 << 23
"""The most tokens of all sequences in a generation that is traced for several contexts."""
_INEXACT = "some steps are close to what was derived for them, not equal"


class GenerationRunCache(RunCache):
    """The generations of one model by variant and size: a batch, or the tokens of a context, new ones included.

    `generation` is the one in question; where the context varies, its prompt is where the search begins. No context is
    longer than the model has positions for. Traces of `generators` are used again. Raises `InputError` where the
    context varies and the prompt has no length, as with speech.
    """

    generates: ClassVar = True
    most_runs: ClassVar = 24
    """The scan of a state is padded to 256 tokens, or loops over them: forecasts only say about where the answer is."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        prompts: Prompts,
        generation: Generation,
        batch: int,
        vary: Vary,
        progress: Callable[[str], None],
        stack: Stack = INSTALLED,
        generators: Iterable[Generator] = (),
        whole: bool = False,
    ) -> None:
        inputs = replace(prompts(generation.prompt), batch_size=batch)
        super().__init__(name, model, inputs, training=False, vary=vary, progress=progress, stack=stack, whole=whole)
        if vary.context and input_tensors(prompts(generation.prompt + 1).call(batch)) == self.inputs:
            raise InputError(f"{name} reads an input of one length, whatever the prompt: its context does not vary")
        self.generation = generation
        self._prompts = prompts
        self._generators = {RunVariant(one.scenario, one.runner.gpu).run_key: one for one in generators}
        self._derives = vary.frontier or bool(self._generators)
        self._covered: set[tuple[Generator, Generation, int]] = set()

    @property
    def input_size(self) -> int:
        """The batch, or the context, of the generation in question."""
        whole = self.generation.prompt + self.generation.max_new_tokens
        return min(whole, self.most) if self.vary.context else self.model_inputs.batch_size

    @property
    def least(self) -> int:
        """The smallest possible size: for a context, the new tokens and one to begin with."""
        return self.generation.max_new_tokens + 1 if self.vary.context else 1

    @property
    def most(self) -> int:
        """The largest size to try: for a context, the number of the model's positions."""
        return (self.vary.context and positions(self.model)) or LIMIT

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the report about the sizes to try."""
        return (
            (f"the model has positions for {self.most:,} tokens: no more are looked at",) if self.most < LIMIT else ()
        )

    def _trace(self, variant: RunVariant, size: int) -> Run:
        assert variant.generation is not None, "only generations are run here"
        key = variant.run_key._replace(generation=None, sequences=None, split=1)
        if key not in self._generators:
            runner = self._runner(variant)
            edits = tuple(edit for edit in variant.edits if not isinstance(edit, ModelEdit))  # of trainings alone
            self._generators[key] = Generator(runner, self._prompts, variant.scenario, edits=edits)
        generation, batch, generator = variant.generation, -(-size // variant.split), self._generators[key]
        if self.vary.context:
            new = generation.max_new_tokens
            if size <= new:
                raise ForwardError(f"a context of {size} tokens has no room for a prompt and {new} new ones")
            generation = replace(generation, prompt=size - new)
            batch = variant.sequences or self.model_inputs.batch_size
            self._cover(generator, generation, batch, size)
        run = (generator.derive if self._derives else generator.run)(generation, batch)
        return run if run.exact else run.noted(_INEXACT)

    def _cover(self, generator: Generator, generation: Generation, batch: int, size: int) -> None:
        """Trace what all contexts of a batch (or of similar batches of a frontier) have in common, up to a size whose
        inputs are small themselves.
        """
        shortest, batches = replace(generation, prompt=_SHORT), [batch]
        if self.vary.frontier and batch > 1:  # a batch of 1 takes other code paths
            batches.append(min(_TOGETHER * batch, MOST_SEQUENCES))
        longest = min(self.most, max(_MOST_TOKENS // batches[-1], size)) - generation.max_new_tokens
        done = (generator, shortest, batch) in self._covered or generator.covers(generation, batch)
        if longest > _SHORT and not done:
            self._covered.add((generator, shortest, batch))
            with suppress(ForwardError, InputError):  # then each context is traced by itself
                generator.cover(shortest, batches, [_SHORT, longest], between=True, splits=0)
