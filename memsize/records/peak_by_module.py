"""Each module's bytes at the peak of a run: the storages that are alive then, by the module that they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from memsize.records.aggregates import alive, live_bytes
from memsize.records.cells import Label, Path
from memsize.records.fields import BYTES, NAME, TEXT, Fields, field
from memsize.records.roles import Role
from memsize.records.trace import Trace

MOST_ROWS: Final = 20
"""The largest number of modules with a share; more are added to the modules that contain them."""


class ModuleShare(NamedTuple):
    """A module with all that is below it (None: what no module made), and its bytes at the run's peak by role.

    `most` is the most that it holds at any moment of the run, `type` the name of its class, empty where it is unknown.
    """

    path: str | None
    type: str
    roles: Mapping[Role, int]
    most: int


MODULE_FIELDS: Final = Fields[ModuleShare](
    field("path", "module", NAME, 100, "a module with all that is below it", key="module"),
    field("type", "type", TEXT, 50, "its class", get=lambda share: share.type or None),
    field("total", "at the peak", BYTES, 99, "what it holds at the peak of the run"),
    field("most", "at most", BYTES, 70, "the most that it holds at any moment"),
    get={"total": lambda share: sum(share.roles.values())},
    cell={"path": lambda share, _: Label("outside of modules") if share.path is None else Path(share.path)},
)


def peak_by_module(trace: Trace, most_rows: int = MOST_ROWS) -> tuple[ModuleShare, ...]:
    """Return one share per module, at the greatest depth that gives at most `most_rows`. They add up to the peak."""
    levels = live_bytes(trace.events)
    if not levels:
        return ()
    live = alive(trace, levels.index(max(levels)))
    paths = {trace.storages[index].layer for index in live}
    depth = max((layer.depth for layer in trace.layers), default=0) + 1
    while depth > 1 and len({_cut(trace, layer, depth) for layer in paths}) > most_rows:
        depth -= 1
    roles: dict[str | None, dict[Role, int]] = {}
    for index, size in live.items():
        storage = trace.storages[index]
        sizes = roles.setdefault(_cut(trace, storage.layer, depth), {})
        sizes[storage.role] = sizes.get(storage.role, 0) + size
    most, types = _most(trace, depth), {layer.path: layer.type for layer in trace.layers}
    order = {path: position for position, path in enumerate(types)}
    return tuple(
        ModuleShare(path, types.get(path or "", "") if path is not None else "", roles[path], most[path])
        for path in sorted(roles, key=lambda path: order.get(path or "", -1) if path is not None else len(order))
    )


def _cut(trace: Trace, layer: int, depth: int) -> str | None:
    """The path of `layer`, or of the module above it that is at `depth` modules from the top."""
    if layer < 0:
        return None
    return ".".join(trace.layers[layer].path.split(".")[:depth])


def _most(trace: Trace, depth: int) -> dict[str | None, int]:
    now: dict[str | None, int] = {}
    most: dict[str | None, int] = {}
    groups = {layer: _cut(trace, layer, depth) for layer in range(-1, len(trace.layers))}
    for storage, delta, *_ in trace.events:
        group = groups[trace.storages[storage].layer]
        now[group] = now.get(group, 0) + delta
        most[group] = max(most.get(group, 0), now[group])
    return most
