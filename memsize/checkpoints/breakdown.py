"""The parts of a checkpoint: the model, its EMA copy, the optimizer's state, and other things a training run saves.

A part is recognised by what it is (a module or its state dict; a dictionary with an optimizer's ``state`` and
``param_groups``), or else by its usual keys. The names of a module's children say nothing: ``head`` may be a small one
of many. A file without dictionaries (safetensors, GGUF, a bare ``state_dict``) is a model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from memsize.checkpoints.contents import KINDS, Contents, Group, Part, PartKind, Tensor, View
from memsize.records.dtypes import BITS, is_float

MOST_ROWS = 30
"""Rows of modules that are shown by default."""
DEEPEST = 8

_NAMES: tuple[tuple[PartKind, re.Pattern[str]], ...] = (
    ("EMA", re.compile(r"(^|[_.-])(ema|swa|polyak|shadow(_params)?|averaged?)(\d*[_.-]|\d*$)")),
    ("optimizer", re.compile(r"optim|(^|_)opt(_|$)|^adam|^sgd")),
    ("scheduler", re.compile(r"sched|(^|_)lr(_|$)")),
    (
        "other",
        re.compile(
            r"scaler|(^|_)amp(_|$)|(^|_)rng|random|callback|^loops?$|hyper|config|args|hparams|metric|loss|history|epoch"
            r"|(^|_)steps?$|^best|stats?$|statistics"
        ),
    ),
    (
        "model",
        re.compile(
            r"model|state_dict|(^|_)net(work)?(_?[a-z])?$|^module|weights?$|^params|generator|discriminator|encoder|decoder"
            r"|backbone|teacher|student|critic|actor|policy|^vae$|^unet$|^head$|classifier|^[gd]$"
        ),
    ),
)
_PACKED = re.compile(r"(^|\.)(_packed_params|_packed_weight(_ih|_hh)?|_all_weight_values)(\.|$)")
"""Names under which torch.ao's quantized modules save packed objects, as tuples."""
_FLAT_EMA = re.compile(r"^(model_ema|ema|ema_model|module_ema)$")


class Breakdown:
    """`contents` taken apart: by part, by dtype, by module."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents

    @cached_property
    def tensor_parts(self) -> tuple[Part, ...]:
        """The part of each tensor, in the order of the tensors."""
        marks = {mark.keys: mark.kind for mark in self.contents.marks}
        containers = {tensor.keys[:-1] for tensor in self.contents.tensors}
        heads = {keys[0] for keys in containers if keys and not _PACKED.search(keys[0])}
        named = "model" in {*marks.values(), *map(_kind_of, heads)}
        memo: dict[tuple[str, ...], Part] = {}
        parts = []
        for tensor in self.contents.tensors:
            inner = tensor.keys[:-1]
            if not inner:
                parts.append(_part_at_top(tensor, heads, marks))
                continue
            if inner not in memo:
                memo[inner] = _part_below(inner, marks, named)
            parts.append(memo[inner])
        return tuple(parts)

    def of(self, kind: PartKind) -> list[Tensor]:
        pairs = zip(self.contents.tensors, self.tensor_parts, strict=True)
        return [tensor for tensor, part in pairs if part.kind == kind]

    @cached_property
    def parts(self) -> tuple[Group, ...]:
        """One group for each kind of part that there is, named by the keys it stands under."""
        roots: dict[PartKind, dict[str, None]] = {kind: {} for kind in KINDS}
        for tensor, part in zip(self.contents.tensors, self.tensor_parts, strict=True):
            roots[part.kind].setdefault(".".join(tensor.keys[: part.root]))
        groups = []
        for kind in (kind for kind in KINDS if roots[kind]):
            names = [root for root in roots[kind] if root]
            groups.append(_group(kind, ", ".join(names[:4]) + (" …" if len(names) > 4 else ""), self.of(kind)))
        return tuple(groups)

    @cached_property
    def dtypes(self) -> tuple[Group, ...]:
        """One group for each dtype, the largest first."""
        members: dict[str, list[Tensor]] = {}
        for tensor in self.contents.tensors:
            members.setdefault(tensor.spec.dtype, []).append(tensor)
        groups = [_group("model", dtype, tensors) for dtype, tensors in members.items()]
        return tuple(sorted(groups, key=lambda group: -group.bytes))

    def modules(self, view: View) -> Iterator[Group]:
        """One group for each module that `view` tells apart, part by part, in the order of the file."""
        members: dict[tuple[PartKind, str, tuple[str, ...]], list[Tensor]] = {}
        every = self._folded_steps if view.folded else self._plain_steps
        for tensor, part, steps in zip(self.contents.tensors, self.tensor_parts, every, strict=True):
            root = ".".join(tensor.keys[: part.root])
            members.setdefault((part.kind, root, steps[: view.depth]), []).append(tensor)
        for (kind, root, steps), tensors in sorted(members.items(), key=lambda item: KINDS.index(item[0][0])):
            yield _group(kind, ".".join([root, *steps] if root else steps), tensors, root)

    @cached_property
    def fitting_view(self) -> View:
        """The view with the most rows up to `MOST_ROWS`, at the least depth. Numbers are folded if that shows more."""
        plain, folded = self._fitting_depth(self._plain_steps), self._fitting_depth(self._folded_steps)
        return View(folded, folded=True) if folded > plain else View(plain)

    def _fitting_depth(self, every: tuple[tuple[str, ...], ...]) -> int:
        best, most = 1, 0
        for depth in range(1, DEEPEST + 1):
            seen: set[tuple[PartKind, tuple[str, ...], tuple[str, ...]]] = set()
            for tensor, part, steps in zip(self.contents.tensors, self.tensor_parts, every, strict=True):
                seen.add((part.kind, tensor.keys[: part.root], steps[:depth]))
                if len(seen) > MOST_ROWS:
                    return best
            best, most = (depth, len(seen)) if len(seen) > most else (best, most)
        return best

    @cached_property
    def _folded_steps(self) -> tuple[tuple[str, ...], ...]:
        """The plain steps with a star for every number."""
        star = {step: "*" if step.isdecimal() else step for steps in self._plain_steps for step in steps}
        return tuple(tuple([star[step] for step in steps]) for steps in self._plain_steps)

    @cached_property
    def _plain_steps(self) -> tuple[tuple[str, ...], ...]:
        """The steps of each tensor's name below its part. An optimizer's are grouped by kind, not by parameter."""
        steps: list[tuple[str, ...]] = []
        # Of 100,000 names a few thousand steps differ: one text for each.
        one: dict[str, str] = {}
        for tensor, part in zip(self.contents.tensors, self.tensor_parts, strict=True):
            inner = tensor.keys[part.root :]
            if part.kind == "optimizer" and len(inner) > 2 and inner[0] == "state":
                steps.append((".".join(("state", "*", *inner[2:])),))
            else:
                steps.append(tuple([one.setdefault(step, step) for step in ".".join(inner).split(".")]))
        return tuple(steps)

    @cached_property
    def unowned(self) -> int:
        """Bytes of storages that no tensor names at all."""
        named = {tensor.storage for tensor in self.contents.tensors}
        return sum(s.bytes for index, s in enumerate(self.contents.storages) if index not in named)

    @cached_property
    def unneeded(self) -> int:
        """Bytes of storages that no tensor covers, although one names the storage."""
        return sum(tensor.unneeded for tensor in self.contents.tensors)


def halved(tensors: Iterable[Tensor]) -> int:
    """The bytes of `tensors` with two bytes per element of float32 and float64, and all others as they are."""
    return sum(
        tensor.bytes * 16 // BITS[tensor.spec.dtype]
        if is_float(tensor.spec.dtype) and BITS[tensor.spec.dtype] > 16
        else tensor.bytes
        for tensor in tensors
    )


def _group(kind: PartKind, name: str, tensors: Sequence[Tensor], root: str = "") -> Group:
    own = [tensor for tensor in tensors if tensor.shared_with is None]
    return Group(
        kind=kind,
        name=name,
        tensors=len(tensors),
        elements=sum(tensor.elements for tensor in own),
        bytes=sum(tensor.bytes for tensor in tensors),
        unneeded=sum(tensor.unneeded for tensor in tensors),
        dtypes=tuple(dict.fromkeys(tensor.spec.dtype for tensor in tensors)),
        root=root,
    )


def _kind_of(key: str) -> PartKind | None:
    lowered = key.lower()
    return next((kind for kind, pattern in _NAMES if pattern.search(lowered)), None)


def _part_at_top(tensor: Tensor, heads: set[str], marks: Mapping[tuple[str, ...], PartKind]) -> Part:
    whole = marks.get(())
    if whole is not None and whole != "model":
        return Part(whole, 0)
    head, dot, _ = tensor.name.partition(".")
    if dot and _FLAT_EMA.match(head):
        return Part("EMA", 0)
    beside = bool(heads) and not dot and whole is None
    return Part("other" if beside else "model", 0)


def _part_below(keys: tuple[str, ...], marks: Mapping[tuple[str, ...], PartKind], named: bool) -> Part:
    """The part of the tensors under `keys`. `named`: some part of the file is called a model."""
    for length in range(len(keys), -1, -1):
        kind = marks.get(keys[:length])
        if kind == "model":
            if len(keys) > length and _FLAT_EMA.match(keys[length]):
                return Part("EMA", length)
            above = (_kind_of(key) or "model" for key in keys[: min(length, 2)])
            return Part(next((kind for kind in above if kind != "model"), "model"), length)
        if kind is not None:
            return Part(kind, length)
    if _PACKED.search(keys[0]):
        return Part("model", 0)
    kinds = [_kind_of(key) for key in keys[:2]]
    for length, kind in enumerate(kinds, 1):
        if kind is not None and kind != "model":
            return Part(kind, length)
    if kinds[0] == "model":
        return Part("model", 1)
    if "model" in kinds:
        return Part("model", 2)
    beside = named or (len(keys) > 1 and keys[1].isdecimal())
    return Part("other" if beside else "model", 1)
