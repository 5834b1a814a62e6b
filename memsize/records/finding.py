"""Findings: a cause in numbers, with the sentence that a renderer makes of them; and tables of rules that find them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar, cast

from memsize.units import AUTO, Bytes, format_span, format_together

Severity = Literal["error", "warning", "note"]
"""How serious a problem is: an error breaks a check."""
SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "note")
"""The most serious first."""
SHOWN_NAMES = 2
"""The number of names that a sentence spells out from a long list."""


class Moment(NamedTuple):
    """The moment after `event` of the run of `scenario`, as its trace counts events."""

    scenario: str
    event: int


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause, with its stable `code`, the bytes it is about (None where it has no one figure) and its layers.

    `template` is the sentence, with a `{name}` for each of `values`: `Bytes` are drawn in the reader's unit, other
    integers with thousands separators, tuples of names joined and shortened; a format after the colon wins over that.
    `brief` is the same in fewer words, for a finding that belongs to the answer's verdict. `moment` is when it happens,
    where it is about a moment of a run.
    """

    code: str
    bytes: int | None = field(default=None, kw_only=True)
    layers: tuple[str, ...] = field(default=(), kw_only=True)
    template: str
    values: Mapping[str, object] = field(default_factory=dict)
    brief: str = field(default="", kw_only=True)
    moment: Moment | None = field(default=None, kw_only=True)

    def validate(self) -> None:
        """Raise ValueError where a sentence names values that the finding lacks, or formats them as none does."""
        for template in (self.template, self.brief):
            for _, name, spec, conversion in Formatter().parse(template):
                if name is not None and (name not in self.values or spec not in _SPECS or conversion):
                    raise ValueError(f"a sentence has no value for {name!r:.60} in {template!r:.60}")
            _Sentence(AUTO).vformat(template, (), self.values)

    def text(self, unit: str = AUTO) -> str:
        """The sentence, with byte figures in `unit`."""
        return _Sentence(unit).vformat(self.template, (), self.values)

    def in_brief(self, unit: str = AUTO) -> str:
        """The shortest form of the finding."""
        return _Sentence(unit).vformat(self.brief or self.template, (), self.values)


_SPECS: Final = ("", ",", ".0%")
"""How a sentence may format a value; a file could ask for any width."""


_ENDS: Final = "{low} to {high}"
"""The ends of an interval in a sentence, which share a unit: ``7.25 to 7.47 GiB``."""


class _Sentence(Formatter):
    """A `str.format` that draws values as memsize does."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.sizes: dict[int, str] = {}

    def vformat(self, format_string: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        used = (kwargs.get(name or "") for _, name, _, _ in self.parse(format_string))
        self.sizes = format_together({value for value in used if isinstance(value, Bytes)}, self.unit)
        if _ENDS in format_string:
            low, high = (cast(int, kwargs[name]) for name in ("low", "high"))
            largest = max(self.sizes)
            format_string = format_string.replace(_ENDS, format_span(low, high, self.unit, beside=largest))
        return super().vformat(format_string, args, kwargs)

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec:
            return str(super().format_field(value, format_spec))
        if isinstance(value, Bytes):
            return self.sizes[value]
        if isinstance(value, int) and not isinstance(value, bool):
            return f"{value:,}"
        if isinstance(value, tuple):
            return join_names(value)
        return str(value)


def sizes(**counts: int | None) -> dict[str, object]:
    """Byte figures among the values of a finding; a figure that is missing is 0."""
    return {name: Bytes(count or 0) for name, count in counts.items()}


def join_names(names: tuple[object, ...]) -> str:
    """Names as a phrase: ``a``, ``a and b``, ``a, b and c``, ``a, b and 14 more``; with commas in some of them
    ``a; b, c; and 14 more``. The model's own path is empty.
    """
    words = [str(name) or "the model itself" for name in names]
    comma, also = ("; ", "; and ") if any(", " in word for word in words) else (", ", " and ")
    if len(words) > SHOWN_NAMES + 1:
        words = [*words[:SHOWN_NAMES], f"{len(words) - SHOWN_NAMES} more"]
    *first, last = words or [""]
    return f"{comma.join(first)}{also}{last}" if first else last


def layer_in_words(path: str) -> str:
    """A layer's path inside a sentence: one that is a number, as in a Sequential, would read as a count."""
    return f"layer {path}" if path.isdigit() else path


def optimizer_in_words(name: str) -> str:
    """An optimizer after "with": ``adamw``, and for ``own`` that of the model or of its Trainer."""
    return "its own optimizer" if name == "own" else name


def moment_in_words(phase: str, layer: str | None, step: int = 0) -> str:
    """A moment of a run: ``backward``, ``backward 2 of conv.2``, ``forward of layer 1``."""
    numbered = f"{phase} {step}" if step else phase
    return f"{numbered} of {layer_in_words(layer)}" if layer else numbered


E = TypeVar("E")
Rule = Callable[[E], Iterator[Finding]]
"""Looks at evidence and says what it found, or nothing."""


class Rules(Generic[E]):
    """The rules about one kind of evidence, run in the order in which they are written.

        RULES = Rules[Evidence]()

        @RULES.rule("tied-parameters")
        def tied(evidence: Evidence) -> Iterator[Finding]: ...

    Each declares the codes of its findings, and how serious they are to a check. Codes are stable: scripts, tests and
    the documentation name them.
    """

    def __init__(self) -> None:
        self._rules: list[tuple[tuple[str, ...], Rule[E]]] = []
        self.severity: dict[str, Severity] = {}
        """The severity of each code."""

    @property
    def codes(self) -> tuple[str, ...]:
        """Every code that a finding may have, once."""
        return tuple(dict.fromkeys(code for codes, _ in self._rules for code in codes))

    def rule(self, *codes: str, severity: Severity = "note") -> Callable[[Rule[E]], Rule[E]]:
        """A decorator that adds a rule whose findings have one of `codes`."""

        def add(rule: Rule[E]) -> Rule[E]:
            self._rules.append((codes, rule))
            self.severity |= dict.fromkeys(codes, severity)
            return rule

        return add

    def __add__(self, other: Rules[E]) -> Rules[E]:
        """These rules, then the others."""
        both = Rules[E]()
        both._rules = [*self._rules, *other._rules]
        both.severity = self.severity | other.severity
        return both

    def findings(self, evidence: E) -> tuple[Finding, ...]:
        """Return the findings of all rules; raise `ValueError` if a rule yields a code that it does not declare."""
        findings_by_rule = [(codes, finding) for codes, rule in self._rules for finding in rule(evidence)]
        if unsaid := [finding.code for codes, finding in findings_by_rule if finding.code not in codes]:
            raise ValueError(f"no rule says that it finds {', '.join(unsaid)}")
        return tuple(finding for _, finding in findings_by_rule)
