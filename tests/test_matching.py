"""Which layer of one model is which of another, on models made by hand: no torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from memsize import Comparison, Trace
from tests.records import LayerChange, compared, layer, matched, stored, totals

Module = tuple[str, tuple[int, ...]]
"""A module's type, and the shape of its weight: none where it is empty."""


def model(**modules: Module) -> Trace:
    """A model whose modules are those of `modules` by path (``a__b`` is ``a.b``), each after the one that it is in."""
    paths = {name.replace("__", "."): module for name, module in modules.items()}
    leaves = {path: not any(other.startswith(f"{path}.") for other in paths) for path in paths}
    tensors = [stored(f"{path}.weight", "float32", *shape) for path, (_, shape) in paths.items() if shape]
    layers = [layer("", "Net", leaf=False)]
    layers += [layer(path, kind, leaf=leaves[path]) for path, (kind, _) in paths.items()]
    return Trace("Net", "as-given", True, 1, "2.13", (), tuple(layers), tuple(tensors))


def numbered(*modules: Module) -> Trace:
    """An `nn.Sequential`."""
    trace = model(**{f"m{place}": module for place, module in enumerate(modules)})
    layers = tuple(replace(each, path=each.path.removeprefix("m")) for each in trace.layers)
    tensors = tuple(replace(t, name=t.name.removeprefix("m"), layer=t.layer.removeprefix("m")) for t in trace.tensors)
    return replace(trace, layers=layers, tensors=tensors)


def said(before: Trace, after: Trace) -> dict[str, str]:
    """What happened to each layer that changed: ``{"fc → head": "renamed"}``."""
    return {_path(change): ", ".join(change.how) for change in compared(before, after).layer_changes}


def _path(change: LayerChange) -> str:
    return " → ".join(dict.fromkeys(path for path in (change.before, change.after) if path is not None))


CONV: Module = ("Conv2d", (8, 8, 3, 3))
WIDE: Module = ("Conv2d", (12, 8, 3, 3))
RELU: Module = ("ReLU", ())
NORM: Module = ("BatchNorm2d", (8,))
BLOCK = {"a": ("Block", ()), "a__q": ("Linear", (4, 4)), "a__k": ("Linear", (4, 4))}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param(model(fc=CONV), model(fc=CONV), {}, id="nothing"),
        pytest.param(model(fc=CONV), model(fc=WIDE), {"fc": "resized"}, id="another width"),
        pytest.param(model(fc=CONV), model(head=CONV), {"fc → head": "renamed"}, id="another name"),
        pytest.param(model(fc=CONV), model(head=WIDE), {"fc → head": "renamed, resized"}, id="name and width"),
        pytest.param(
            # A twentieth of the elements: that is another layer.
            model(fc=("Linear", (10, 40))),
            model(head=("Linear", (10, 2))),
            {"fc": "removed", "head": "added"},
            id="too different to be the same",
        ),
        pytest.param(model(fc=CONV), model(fc=NORM), {"fc": "resized, replaced"}, id="another class"),
        pytest.param(
            # The places of a Sequential are no names: what follows an inserted layer is not changed.
            numbered(CONV, RELU, WIDE, RELU),
            numbered(CONV, NORM, RELU, WIDE, RELU),
            {"1": "added", "1 → 2": "renamed", "2 → 3": "renamed", "3 → 4": "renamed"},
            id="inserted into a list",
        ),
        pytest.param(
            numbered(CONV, CONV, CONV), numbered(CONV, CONV), {"2": "removed"}, id="one of several that are alike"
        ),
        pytest.param(
            # The most alike first: 12 of 16 rows, not 12 of 8.
            model(a=("Linear", (8, 4)), b=("Linear", (16, 4))),
            model(c=("Linear", (12, 4))),
            {"b → c": "renamed, resized", "a": "removed"},
            id="the most alike",
        ),
        pytest.param(
            model(**BLOCK),
            model(net=("Wrapper", ()), **{name.replace("a", "net__a", 1): what for name, what in BLOCK.items()}),
            {"net": "added", "a → net.a": "renamed"},
            id="moved into a wrapper",
        ),
        pytest.param(
            model(**BLOCK),
            model(**BLOCK, b=("Block", ()), b__q=("Linear", (4, 4)), b__v=("Linear", (4, 5))),
            {"b": "added"},
            id="a part that is new",
        ),
        pytest.param(
            model(**BLOCK),
            model(b=("Block", ()), b__q=("Linear", (4, 4)), b__k=("Linear", (4, 6))),
            {"a → b": "renamed", "a.k → b.k": "resized"},
            id="renamed with a change inside",
        ),
    ],
)
def test_what_happened_to_each_layer(before: Trace, after: Trace, expected: dict[str, str]) -> None:
    assert said(before, after) == expected


def test_a_part_is_counted_as_a_whole() -> None:
    (change,) = compared(model(), model(**BLOCK)).layer_changes
    assert (change.before, change.after, change.layers) == (None, "a", 3)
    assert change.sizes[1].parameters == 2 * 4 * 4
    assert change.sizes[1].stored == 2 * 4 * 4 * 4


def test_tensors_follow_their_layers() -> None:
    found = compared(numbered(CONV, WIDE), numbered(NORM, CONV, WIDE))
    pairs = {pair.name: pair.before and pair.before.name for pair in found.pairs}
    assert pairs == {"1.weight": "0.weight", "2.weight": "1.weight", "0.weight": None}
    renamed = found.tables()["changes"].records()[0]
    assert (renamed["name"], renamed["renamed_from"], renamed["changed"]) == ("1.weight", "0.weight", False)


def test_a_conversion_is_the_same_layer_by_layer() -> None:
    half = model(fc=CONV)
    half = replace(half, tensors=tuple(stored(t.name, "float16", *t.spec.shape) for t in half.tensors))  # type: ignore[arg-type]
    assert said(model(fc=CONV), half) == {"fc": "stored differently"}


KINDS = st.sampled_from([CONV, WIDE, RELU, NORM, ("Linear", (3, 5)), ("Linear", (4, 5))])
SEQUENCES = st.lists(KINDS, max_size=7).map(lambda modules: numbered(*modules))


@given(SEQUENCES, SEQUENCES)
def test_laws(before: Trace, after: Trace) -> None:
    """Every layer is in one pair, rows add up to the change of the model, and the same model did not change."""
    pairs = matched(before, after)
    for side, trace in enumerate((before, after)):
        nodes = [pair[side] for pair in pairs]
        paths = [node.layer.path for node in nodes if node]
        assert sorted(paths) == sorted(layer.path for layer in trace.layers)
    found = compared(before, after)
    grown = totals(after).stored - totals(before).stored
    assert sum(change.sizes[1].stored - change.sizes[0].stored for change in found.layer_changes) == grown
    assert sum(pair.bytes for pair in found.pairs) == grown
    assert compared(after, after).is_same


def test_it_is_the_same_where_nothing_differs() -> None:
    same: Comparison = compared(model(**BLOCK), model(**BLOCK))  # type: ignore[arg-type]
    assert same.is_same and not same.layer_changes
    assert not compared(model(fc=CONV), model(fc=WIDE)).is_same
