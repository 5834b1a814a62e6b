"""A checkpoint against a model: which tensors the model lacks, which the file lacks, which differ in shape or dtype.

Names are compared after the change that makes most of them meet: a prefix dropped (``module.`` of DataParallel,
``_orig_mod.`` of torch.compile, the key that the weights stand under), or one added.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from memsize.checkpoints.breakdown import Breakdown
from memsize.checkpoints.contents import Difference, Match, Problem, Tensor
from memsize.records.trace import TensorSpec

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")
"""Steps that wrappers add to the names of the wrapped modules: compile, FSDP, checkpointing, DataParallel."""
_DEEPEST_PREFIX = 4


class Expected(NamedTuple):
    """One tensor of the model. `tied` names the earlier one that shares its memory."""

    spec: TensorSpec
    tied: str | None = None


@dataclass(frozen=True, slots=True)
class _Naming:
    dropped: str = ""
    added: str = ""
    wrappers: tuple[str, ...] = ()

    def of(self, name: str) -> str | None:
        """The name as the model would have it; None for one outside the prefix."""
        if not name.startswith(self.dropped):
            return None
        name = name[len(self.dropped) :]
        if self.wrappers:
            name = re.sub(rf"(?<![^.])(?:{'|'.join(self.wrappers)})\.", "", name)
        return self.added + name

    @property
    def size(self) -> tuple[int, int]:
        """The size of the change, by which the plainest of several equally good ones is chosen."""
        return len(self.wrappers), len(self.dropped) + len(self.added)


def compared(breakdown: Breakdown, expected: Mapping[str, Expected], model: str) -> Match:
    """Compare the model part of a checkpoint with the tensors that a model expects, by name."""
    tensors = breakdown.of("model") or breakdown.of("EMA") or list(breakdown.contents.tensors)
    naming = _naming(tuple(tensor.name for tensor in tensors), expected)
    plain = [tensor for tensor in tensors if tensor.wrapper is None]
    named = {name: tensor for tensor in plain if (name := naming.of(tensor.name)) is not None}
    matches = _stems(naming, [tensor for tensor in tensors if tensor.wrapper is not None]) | named
    left_out = tuple(name for name, wanted in expected.items() if name not in matches and wanted.tied in matches)
    rows = [_compared(name, wanted, matches.get(name)) for name, wanted in expected.items() if name not in left_out]
    differences = [row for row in rows if row]
    root = _root(naming.dropped, tensors, breakdown)
    outside = {t.name: t for t in plain if naming.of(t.name) is None and t.keys[: len(root)] == root}
    for name, tensor in (named | outside).items():
        if name not in expected or name in outside:
            differences.append(Difference(name, "unexpected", tensor.spec, None, tensor.bytes))
    key = ".".join(root)
    dropped = naming.dropped.removeprefix(f"{key}.") if key else naming.dropped
    return Match(model, rows.count(None), tuple(differences), key, dropped, naming.added, naming.wrappers, left_out)


def _compared(name: str, wanted: Expected, tensor: Tensor | None) -> Difference | None:
    if tensor is None:
        return Difference(name, "missing", None, wanted.spec, 0)
    problem: Problem = "wrong dtype"
    if tensor.wrapper is None and tensor.spec.shape != wanted.spec.shape:
        problem = "wrong shape"
    elif tensor.wrapper is None and tensor.spec.dtype == wanted.spec.dtype:
        return None
    return Difference(name, problem, tensor.spec, wanted.spec, tensor.bytes)


def _stems(naming: _Naming, pieces: Sequence[Tensor]) -> dict[str, Tensor]:
    """The first piece of each tensor that is kept in several, by any name that the whole of it may have."""
    stems: dict[str, Tensor] = {}
    for piece in pieces:
        name = naming.of(piece.name)
        while name:
            stems.setdefault(name, piece)
            name = name.rpartition(".")[0]
    return stems


def _naming(names: Sequence[str], expected: Mapping[str, Expected]) -> _Naming:
    wanted = set(expected)
    infixes = tuple(wrapper for wrapper in _WRAPPERS if any(f".{wrapper}." in f".{name}" for name in names))
    options = [_Naming()]
    for wrappers in ((), infixes) if infixes else ((),):
        options.append(_Naming(wrappers=wrappers))
        options += [_Naming(prefix, "", wrappers) for prefix in _prefixes(names)]
        options += [_Naming("", prefix, wrappers) for prefix in _prefixes(tuple(expected))]

    def matching(naming: _Naming) -> int:
        return sum(naming.of(name) in wanted for name in names)

    return min(options, key=lambda option: (-matching(option), option.size))


def _prefixes(names: Sequence[str]) -> list[str]:
    counts: Counter[str] = Counter()
    for name in names:
        steps = name.split(".")[:-1][:_DEEPEST_PREFIX]
        counts.update(".".join(steps[:length]) + "." for length in range(1, len(steps) + 1))
    return [prefix for prefix, _ in counts.most_common(16)]


def _root(prefix: str, tensors: Sequence[Tensor], breakdown: Breakdown) -> tuple[str, ...]:
    """The key under which the tensors with this prefix stand: others below it are unexpected, those beside it not.

    There is none where the model is all of the file.
    """
    first = next((tensor for tensor in tensors if tensor.name.startswith(prefix)), None)
    parts = zip(breakdown.contents.tensors, breakdown.tensor_parts, strict=True)
    root = next((part.root for tensor, part in parts if tensor is first), 0)
    return first.keys[: min(root, 1)] if first else ()


def expected_from(module: object) -> dict[str, Expected]:
    """The tensors of a module's ``state_dict()``, with their ties."""
    import torch

    from memsize.model.tensor_storage import spec_of, storage_key

    first: dict[object, str] = {}
    expected: dict[str, Expected] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():  # type: ignore[attr-defined]
        if isinstance(tensor, torch.Tensor) and not torch.nn.parameter.is_lazy(tensor):
            key = (storage_key(tensor), tuple(tensor.shape)) if tensor.numel() else (name, ())
            expected[name] = Expected(spec_of(tensor), first.get(key))
            first.setdefault(key, name)
    return expected
