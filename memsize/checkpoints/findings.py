"""Rules about checkpoints: the causes of a file's size, and its oddities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from memsize.checkpoints.breakdown import Breakdown, halved
from memsize.checkpoints.contents import PROBLEMS, Contents, Match, Tensor
from memsize.records.dtypes import is_float
from memsize.records.finding import Finding, Rules, sizes
from memsize.units import Bytes

NOTEWORTHY = 0.01
"""The share of a file below which something that does no harm is not worth a sentence."""

_GGML_NAMES = ("Q", "IQ", "TQ", "MXFP", "NVFP")


@dataclass(frozen=True)
class Inspection:
    """A checkpoint, and its match with a model if one was named: the subject of the rules."""

    contents: Contents
    match: Match | None = None

    @cached_property
    def breakdown(self) -> Breakdown:
        return Breakdown(self.contents)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """The causes of its size and its oddities, most important first."""
        return RULES.findings(self)

    @property
    def size(self) -> int:
        return self.contents.size

    def share(self, count: int) -> str:
        """`count` bytes as a percentage of the files."""
        return f"{count / self.size:.0%}" if self.size else "0%"

    def matters(self, count: int) -> bool:
        return count > 0 and count >= NOTEWORTHY * self.size


RULES = Rules[Inspection]()


def _names(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    return tuple(tensor.name for tensor in tensors)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.bytes for tensor in tensors)


@RULES.rule("model-matches", "model-differs", "tied-left-out")
def fits_the_model(inspection: Inspection) -> Iterator[Finding]:
    """Whether ``load_state_dict`` would take the file, and what it would complain about."""
    match = inspection.match
    if match is None:
        return
    values: dict[str, object] = {"model": match.model, "matching": match.matching}
    if not match.differences:
        text = "The file has all {matching} tensors of {model}."
        yield Finding("model-matches", text, values, brief=text)
    else:
        counts = {problem: match.count(problem) for problem in PROBLEMS}
        values["all"] = match.matching + sum(counts.values()) - counts["unexpected"]
        values["problems"] = ", ".join(_counted(count, problem) for problem, count in counts.items() if count)
        names = tuple(difference.name for difference in match.differences)
        verb = "matches" if match.matching == 1 else "match"
        text = f"{{matching}} of the {{all}} tensors of {{model}} {verb}; {{problems}}."
        yield Finding("model-differs", text, values, layers=names, brief=text)
    if match.left_out:
        text = "The file leaves out {names}, which the model ties to other tensors of the file."
        yield Finding("tied-left-out", text, {"names": match.left_out}, layers=match.left_out)


def _counted(count: int, problem: str) -> str:
    differs = {"wrong shape": "in shape", "wrong dtype": "in dtype"}.get(problem)
    return f"{count:,} differ{'s' if count == 1 else ''} {differs}" if differs else f"{count:,} {problem}"


@RULES.rule("names-changed")
def names_changed(inspection: Inspection) -> Iterator[Finding]:
    """The change of names under which the file's tensors match the model's."""
    match = inspection.match
    if match is None or not (match.dropped or match.added or match.wrappers):
        return
    changes = [
        f"the prefix {match.dropped!r} dropped" if match.dropped else "",
        f"the prefix {match.added!r} added" if match.added else "",
        f"the path components {', '.join(map(repr, match.wrappers))} left out" if match.wrappers else "",
    ]
    yield Finding(
        "names-changed",
        "{where} match the model's after a change: {changes}. load_state_dict needs the same change.",
        {
            "where": f"The names under {match.key!r}" if match.key else "Names",
            "changes": " and ".join(change for change in changes if change),
        },
    )


@RULES.rule("missing-tensors")
def index_disagrees(inspection: Inspection) -> Iterator[Finding]:
    """Tensors that an index promises and no file has."""
    missing = inspection.contents.missing
    if missing:
        text = "{count} tensors of the index are in no file: {names}."
        yield Finding("missing-tensors", text, {"count": len(missing), "names": missing}, layers=missing)


@RULES.rule("optimizer-dominates", "optimizer-state")
def optimizer(inspection: Inspection) -> Iterator[Finding]:
    """The optimizer's state, which only resuming a training needs."""
    tensors = inspection.breakdown.of("optimizer")
    size, model = _bytes(tensors), _bytes(inspection.breakdown.of("model"))
    if inspection.matters(size):
        brief = "The optimizer's state takes {bytes}, {share} of the file; it is only needed to resume training."
        more = " The state is {times} times as large as the model's own weights." if size >= 2 * model > 0 else ""
        yield Finding(
            "optimizer-dominates" if size >= model else "optimizer-state",
            brief + more,
            {"bytes": Bytes(size), "share": inspection.share(size), "times": f"{size / model:.1f}" if model else ""},
            bytes=size,
            brief=brief,
        )


@RULES.rule("duplicate-weights-ema")
def ema(inspection: Inspection) -> Iterator[Finding]:
    """A second, averaged copy of the weights."""
    copies, model = inspection.breakdown.of("EMA"), inspection.breakdown.of("model")
    size = _bytes(copies)
    if model and inspection.matters(size):
        brief = "An averaged copy of the weights takes {bytes}, {share} of the file."
        text = f"{brief} The model's own weights take {{model}}; inference needs one of the two."
        values = {"bytes": Bytes(size), "share": inspection.share(size), "model": Bytes(_bytes(model))}
        yield Finding("duplicate-weights-ema", text, values, bytes=size, brief=brief)


@RULES.rule("view-keeps-whole-storage")
def views(inspection: Inspection) -> Iterator[Finding]:
    """Tensors that were saved as views: torch.save writes the whole storage behind each."""
    wide = sorted((t for t in inspection.contents.tensors if t.unneeded), key=lambda t: -t.unneeded)
    size = sum(tensor.unneeded for tensor in wide)
    if inspection.matters(size) or size >= 2**20:
        brief = "{bytes}, {share} of the file, belong to no tensor: torch.save wrote the whole storages behind views."
        text = f"{brief} {{names}} {{few}} of a larger tensor: save tensor.clone() instead."
        values = {"names": _names(wide), "share": inspection.share(size), **sizes(bytes=size)}
        values |= {"few": "is a view" if len(wide) == 1 else "are views"}
        yield Finding("view-keeps-whole-storage", text, values, bytes=size, layers=_names(wide), brief=brief)


@RULES.rule("unnamed-storage", "unclaimed-bytes")
def orphans(inspection: Inspection) -> Iterator[Finding]:
    """Storages that no tensor names, and bytes that belong to no record."""
    size = inspection.breakdown.unowned
    if size:
        text = "No tensor refers to {bytes} of tensor data."
        yield Finding("unnamed-storage", text, {"bytes": Bytes(size)}, bytes=size)
    rest = sum(file.bytes_for("unclaimed") for file in inspection.contents.files)
    if rest:
        text = "{bytes} belong to no record of the format: appended data, or left over from an older write."
        yield Finding("unclaimed-bytes", text, {"bytes": Bytes(rest)}, bytes=rest)


@RULES.rule("float64-tensors")
def doubles(inspection: Inspection) -> Iterator[Finding]:
    """float64 tensors, which are seldom meant."""
    wide = [tensor for tensor in inspection.contents.tensors if tensor.spec.dtype == "float64"]
    size = _bytes(wide)
    if inspection.matters(size):
        text, names = "{names} in float64 take {bytes}; float32 would take half.", _names(wide)
        yield Finding("float64-tensors", text, {"names": names, "bytes": Bytes(size)}, bytes=size, layers=names)


@RULES.rule("fp32-could-be-half")
def could_be_half(inspection: Inspection) -> Iterator[Finding]:
    """Weights in float32 that inference rarely needs to be."""
    weights = [tensor for tensor in inspection.breakdown.of("model") if tensor.spec.dtype == "float32"]
    size = _bytes(weights)
    if size and size >= _bytes(inspection.breakdown.of("model")) / 2 and inspection.matters(size):
        text = "The model's float32 weights would shrink from {bytes} to {half} in float16 or bfloat16."
        values = {"bytes": Bytes(size), "half": Bytes(halved(weights))}
        yield Finding("fp32-could-be-half", text, values, bytes=size // 2, brief=text)


@RULES.rule("mixed-dtypes")
def mixed(inspection: Inspection) -> Iterator[Finding]:
    """Find weights of several dtypes: only part of the model was converted."""
    floats: dict[str, list[Tensor]] = {}
    for tensor in inspection.breakdown.of("model"):
        if is_float(tensor.spec.dtype) and tensor.bytes:
            floats.setdefault(tensor.spec.dtype, []).append(tensor)
    if len(floats) < 2 or any(_is_block(tensor) for tensor in inspection.breakdown.of("model")):
        return
    fewest = min(floats, key=lambda dtype: _bytes(floats[dtype]))
    shares = ", ".join(f"{dtype} {{{dtype}}}" for dtype in floats)
    yield Finding(
        "mixed-dtypes",
        f"The model's weights are in several dtypes: {shares}. In {fewest}: {{names}}.",
        {"names": _names(floats[fewest])} | {dtype: Bytes(_bytes(tensors)) for dtype, tensors in floats.items()},
        bytes=_bytes(floats[fewest]),
        layers=_names(floats[fewest]),
    )


def _is_block(tensor: Tensor) -> bool:
    return tensor.spec.dtype.startswith(_GGML_NAMES)


@RULES.rule("bits-per-weight")
def blocks(inspection: Inspection) -> Iterator[Finding]:
    """The bits per weight of quantization in blocks."""
    tensors = inspection.contents.tensors
    if not any(map(_is_block, tensors)):
        return
    size, elements = _bytes(tensors), sum(tensor.elements for tensor in tensors)
    brief = "Each weight takes {bits} bits on average, scales included."
    text = f"{brief} All {{elements}} take {{bytes}}; float16 would take {{half}}."
    values = {"elements": elements, "bits": f"{8 * size / elements:.2f}", **sizes(bytes=size, half=2 * elements)}
    yield Finding("bits-per-weight", text, values, bytes=size, brief=brief)


@RULES.rule("module-prefix")
def prefixed(inspection: Inspection) -> Iterator[Finding]:
    """Names that all begin as a wrapper's do."""
    if inspection.match is not None:
        return
    names: dict[str, list[str]] = {"model": [], "EMA": []}
    for tensor, part in zip(inspection.contents.tensors, inspection.breakdown.tensor_parts, strict=True):
        if part.kind in names:
            names[part.kind].append(".".join(tensor.keys[part.root :]))
    for prefix, wrapper in _PREFIXES.items():
        kinds = tuple(kind for kind, stems in names.items() if stems and all(name.startswith(prefix) for name in stems))
        if kinds:
            yield Finding(
                "module-prefix",
                "All names of the {kinds} begin with {prefix}, the prefix of {wrapper}: drop it before "
                "load_state_dict of the plain model, or no name will match.",
                {"kinds": kinds, "prefix": repr(prefix), "wrapper": wrapper},
            )
            return


_PREFIXES = {
    "module._orig_mod.": "DataParallel around torch.compile",
    "_orig_mod.module.": "torch.compile around DataParallel",
    "module.": "DataParallel",
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FSDP",
}


@RULES.rule("shared-storage")
def shared(inspection: Inspection) -> Iterator[Finding]:
    """Tensors that share memory and are stored once."""
    ties = [tensor for tensor in inspection.contents.tensors if tensor.shared_with]
    if ties:
        yield Finding(
            "shared-storage",
            "{names} {share} storage with {owners}, which is stored and counted once.",
            {
                "names": _names(ties),
                "share": "shares" if len(ties) == 1 else "share",
                "owners": tuple(dict.fromkeys(tensor.shared_with for tensor in ties)),
            },
            layers=_names(ties),
        )


@RULES.rule("whole-model-pickled", "code-in-pickle")
def pickled_code(inspection: Inspection) -> Iterator[Finding]:
    """Classes that only an unrestricted load would build."""
    contents = inspection.contents
    if contents.module:
        yield Finding(
            "whole-model-pickled",
            "The file holds a pickled {module}, not its state_dict: it loads only where the same model code can be "
            "imported.",
            {"module": contents.module},
        )
    if contents.classes:
        yield Finding(
            "code-in-pickle",
            "The pickle names {names} besides tensors: torch.load(weights_only=True) refuses them unless they are "
            "allowed, and weights_only=False would import and call them.",
            {"names": contents.classes},
            layers=contents.classes,
        )
