"""The runs behind a fit of a generation: each is put together from a few traced steps, at any batch and context."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar, Final

from torch import nn

from memsize.analysis.fit.run_cache import Run, RunCache, RunVariant
from memsize.analysis.fit.search import LIMIT
from memsize.analysis.generation.generator import Generator
from memsize.analysis.generation.prompts import Prompts, positions
from memsize.errors import ForwardError, InputError
from memsize.model.input_tensors import input_tensors
from memsize.spec.generation import Generation
from memsize.spec.stack import INSTALLED, Stack
from memsize.spec.vary import Vary

MOST_SEQUENCES: Final = 1024
"""The largest batch of a frontier."""
_SHORT: Final = 8
"""The shortest prompt of those that are not traced by themselves."""
_TOGETHER: Final = 16
"""How many times as many sequences the largest of some batches has that have generations in common."""
_MOST_TOKENS: Final = 1 << 23
"""The most tokens of all sequences in what contexts have in common."""
_INEXACT = "some steps are close to what was derived for them, not equal"


class GenerationTrials(RunCache):
    """The generations of one model by variant and size: a batch, or the tokens of a context, the new ones included.

    `generation` is what is asked for; where the context varies, its prompt is where the search begins. No context
    is looked at that is longer than the model has positions for. What the `known` generators have traced is not
    traced again. Raises `InputError` where the context varies and the prompt has no length, as that of speech.
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
        say: Callable[[str], None],
        stack: Stack = INSTALLED,
        known: Iterable[Generator] = (),
    ) -> None:
        inputs = replace(prompts(generation.prompt), batch_size=batch)
        super().__init__(name, model, inputs, False, vary, say, stack=stack)
        if vary.context and input_tensors(prompts(generation.prompt + 1).call(batch)) == self.inputs:
            raise InputError(f"{name} reads an input of one length, whatever the prompt: its context does not vary")
        self.generation = generation
        self._prompts = prompts
        self._generators = {RunVariant(each.scenario, each.runner.gpu).events: each for each in known}
        self._derives = vary.frontier or bool(self._generators)
        self._covered: set[tuple[Generator, Generation, int]] = set()

    @property
    def asked(self) -> int:
        """The batch, or the context, that was asked for."""
        whole = self.generation.prompt + self.generation.new
        return min(whole, self.most) if self.vary.context else self.model_inputs.batch_size

    @property
    def least(self) -> int:
        """The smallest size: of a context the new tokens and one to begin with."""
        return self.generation.new + 1 if self.vary.context else 1

    @property
    def most(self) -> int:
        """The largest size that is looked at: of a context as many tokens as the model has positions for."""
        return (self.vary.context and positions(self.model)) or LIMIT

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know about the sizes that are looked at."""
        return (
            (f"the model has positions for {self.most:,} tokens: no more are looked at",) if self.most < LIMIT else ()
        )

    def _trace(self, variant: RunVariant, size: int) -> Run:
        assert variant.generation is not None, "what is asked of a generation"
        generation, batch, generator = variant.generation, -(-size // variant.split), self._generator(variant)
        if self.vary.context:
            generation = self._of_context(generation, size)
            batch = variant.sequences or self.model_inputs.batch_size
            self._cover(generator, generation, batch, size)
        made = (generator.derive if self._derives else generator.run)(generation, batch)
        return made if made.exact else made.noted(_INEXACT)

    def _of_context(self, generation: Generation, tokens: int) -> Generation:
        """The generation whose last token is the `tokens`th. Raises `ForwardError` where there is none."""
        if tokens <= generation.new:
            raise ForwardError(f"a context of {tokens} tokens has no room for a prompt and {generation.new} new ones")
        return replace(generation, prompt=tokens - generation.new)

    def _generator(self, variant: RunVariant) -> Generator:
        """What all sizes of a variant share."""
        key = variant.events._replace(generation=None, sequences=None, split=1)
        if key not in self._generators:
            runner = self._runner(variant)
            self._generators[key] = Generator(runner, self._prompts, variant.scenario, edits=variant.edits)
        return self._generators[key]

    def _cover(self, generator: Generator, generation: Generation, batch: int, size: int) -> None:
        """Trace once what contexts have in common: all of a batch, or of those of a frontier that are like it, up to a
        size whose inputs are small themselves.
        """
        asked, batches = replace(generation, prompt=_SHORT), self._alike(batch)
        longest = min(self.most, max(_MOST_TOKENS // batches[-1], size)) - generation.new
        done = (generator, asked, batch) in self._covered or generator.covers(generation, batch)
        if longest > _SHORT and not done:
            self._covered.add((generator, asked, batch))
            with suppress(ForwardError, InputError):  # then each is traced by itself
                generator.cover(asked, batches, [_SHORT, longest], between=True, splits=0)

    def _alike(self, batch: int) -> tuple[int, ...]:
        """The batches that are looked at together with `batch`; one sequence makes other tensors than several."""
        if not self.vary.frontier or batch == 1:
            return (batch,)
        return batch, min(_TOGETHER * batch, MOST_SEQUENCES)
