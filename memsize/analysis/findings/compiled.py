"""The rule about compiled code: what it keeps for backward and allocates, compared with the same model uncompiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from memsize.analysis.findings.evidence import Evidence
from memsize.records.finding import Finding, Rules, join_names, sizes
from memsize.records.gpu import GpuEstimate
from memsize.records.roles import noun
from memsize.records.trace import Trace
from memsize.spec.scenario import COMPILED
from memsize.units import Bytes

RULES = Rules[Evidence]()
_ROLES: Final = 3
"""How many roles a sentence names."""


class _Result(NamedTuple):
    """A tensor that is kept for backward, with the operation and the module that it is the result of."""

    bytes: int
    dtype: str
    op: str
    type: str
    module: str

    @property
    def description(self) -> str:
        """``silu in Block``, or ``float32 copies in RMSNorm``."""
        kind = {"_to_copy": self.dtype, "convert_element_type": self.dtype, "constant_pad_nd": "padded"}.get(self.op)
        results = f"{kind} copies" if kind else self.op
        return f"{results} in {self.type}" if self.type else results


_ALIKE: Final[tuple[Callable[[_Result], object], ...]] = (
    lambda result: result,
    lambda result: (result.module, result.dtype, result.bytes),  # compiled code may compute it by another operation
    lambda result: (result.op, result.dtype, result.bytes),
    lambda result: (result.module, result.op, result.dtype),  # it pads rows
)
"""When results of two runs are the same tensor, the strictest rule first."""


@RULES.rule("compiled")
def compiled(evidence: Evidence) -> Iterator[Finding]:
    """Compare each compiled scenario with the same one uncompiled, where both were run."""
    runs = {"as-given": evidence.as_given, **evidence.runs}
    shown = list[tuple[str, list[_Result], list[_Result]]]()
    for name, trace in runs.items():
        base, is_compiled, _ = name.partition(COMPILED)
        if is_compiled and base in runs:
            before, after = _saved(runs[base]), _saved(trace)
            recomputed, added = _exchanged(before, after)
            less = _bytes(before) - _bytes(after)
            padding = _bytes(recomputed) - _bytes(added) - less
            values: dict[str, object] = {"name": name, "first": base, "change": Bytes(abs(less))}
            text = "{name} keeps the same for backward as {first}"
            if less or recomputed:
                text = f"{{name}} keeps {{change}} {'more' if less < 0 else 'less'} for backward than {{first}}"
            if recomputed:
                text += f": it recomputes {_named(recomputed, 'recomputed', values)}"
            if added:
                instead = " instead" if recomputed else ""
                text += f"{', and' if recomputed else ': it'} keeps {_named(added, 'added', values)}{instead}"
            text = f"{text}."
            if padding:
                values |= sizes(padding=abs(padding))
                text += (
                    f" What both keep takes {{padding}} {'more' if padding > 0 else 'less'} in compiled code's layouts."
                )
            brief = "" if (base, recomputed, added) in shown else text  # which other modes keep, too
            shown.append((base, recomputed, added))
            for run, peaks in (("training", evidence.peaks), ("inference", evidence.inference)):
                if base in peaks and name in peaks:
                    text += f" Its {run} {_peak_change(peaks[base], peaks[name], run, values)}."
            yield Finding("compiled", text, values, bytes=abs(less), brief=brief)


def _saved(trace: Trace) -> list[_Result]:
    """The results that a run keeps for backward, without its inputs."""
    outside = ("", "")
    modules = [(layer.type, layer.path) for layer in trace.layers]
    return [
        _Result(s.bytes, s.dtype, s.op, *(modules[s.layer] if s.layer >= 0 else outside))
        for s in trace.storages
        if s.saved_by >= 0 and s.role != "input"
    ]


def _bytes(results: Iterable[_Result]) -> int:
    return sum(result.bytes for result in results)


def _exchanged(before: list[_Result], after: list[_Result]) -> tuple[list[_Result], list[_Result]]:
    """The results of `before` that `after` lacks, and those that it has beyond them."""
    for alike in _ALIKE:
        before, after = _without(before, after, alike), _without(after, before, alike)
    return before, after


def _without(results: list[_Result], others: list[_Result], alike: Callable[[_Result], object]) -> list[_Result]:
    rest, left = [], Counter(map(alike, others))
    for result in results:
        left[key := alike(result)] -= 1
        if left[key] < 0:
            rest.append(result)
    return rest


def _named(results: Sequence[_Result], name: str, values: dict[str, object]) -> str:
    """The operations with their bytes, the most first; figures go to the `values` of the sentence."""
    by_operation = Counter[str]()
    for result in results:
        by_operation[result.description] += result.bytes
    largest = by_operation.most_common()
    values |= sizes(**{f"{name}{number}": size for number, (_, size) in enumerate(largest)})
    return join_names(tuple(f"{what} ({{{name}{number}}})" for number, (what, _) in enumerate(largest)))


def _peak_change(before: GpuEstimate, after: GpuEstimate, run: str, values: dict[str, object]) -> str:
    """How the peak of a run moves, and the roles that move it most."""
    if before.requested == after.requested:
        return "peak stays the same"
    changes = Counter({noun(role): after.roles.get(role, 0) - size for role, size in before.roles.items()})
    changes.update({noun(role): size for role, size in after.roles.items() if role not in before.roles})
    largest = sorted(filter(lambda role: changes[role], changes), key=lambda role: -abs(changes[role]))[:_ROLES]
    values |= sizes(**{f"{run}{number}": abs(changes[role]) for number, role in enumerate(largest)})
    values |= sizes(**{f"{run}_change": abs(after.requested - before.requested)})
    parts = tuple(
        f"{{{run}{number}}} {'more' if changes[role] > 0 else 'less'} of {role}" for number, role in enumerate(largest)
    )
    direction = "higher" if after.requested > before.requested else "lower"
    return f"peak is {{{run}_change}} {direction}: {join_names(parts)}"
