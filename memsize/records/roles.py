"""The one table of roles, in the order in which they are stacked and listed: the longest-lived first.

A new role is one more entry. Everything that reads a trace takes it from here, and a file that names another is refused
(`memsize.records.codec`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Literal, NamedTuple


class RoleTitle(NamedTuple):
    """The presentation of a role: the plural noun for its bytes, their colour on light and on dark pages, and the
    `mark` of which bars without colours are made: the densest for what models have most of.

    `size` says what decides how many bytes there are: the parameters (one copy of them, or several), the model alone,
    or also its input.

    No two colours look alike to people who don't see red, green or blue: a test simulates them.
    """

    noun: str
    colour: str
    mark: str
    size: Literal["parameters", "model", "input"] = "input"


TITLES: Final[dict[str, RoleTitle]] = {
    "parameter": RoleTitle("parameters", "#1f7fe8", "█", "parameters"),
    "buffer": RoleTitle("buffers", "#4d7695", "▀", "model"),
    "master weight": RoleTitle("master weights", "#3e4d9a", "▐", "parameters"),
    "optimizer state": RoleTitle("optimizer state", "#52bca4", "░", "parameters"),
    "KV cache": RoleTitle("KV cache", "#780c48", "▞"),
    "workspace": RoleTitle("workspaces", "#cfd2d6", "▄", "model"),
    "gradient": RoleTitle("gradients", "#b02319", "▓", "parameters"),
    "gathered parameter": RoleTitle("gathered parameters", "#7800d8", "▙", "model"),
    "unsharded gradient": RoleTitle("unsharded gradients", "#8a425a", "▜", "model"),
    "input": RoleTitle("inputs", "#a57155", "▘"),
    "activation": RoleTitle("activations", "#e08b2e", "▒"),
    "cast copy": RoleTitle("cast copies", "#e4bf21", "▚"),
    "communication": RoleTitle("communication buffers", "#db31c0", "▟", "model"),
    "output": RoleTitle("outputs", "#c38de6", "▖"),
    "temporary": RoleTitle("temporaries", "#8fd48a", "▌"),
}

UNKNOWN: Final[dict[str, RoleTitle]] = {
    "backward": RoleTitle("gradients or temporaries", "#ff92c5", "▛"),
    "earlier": RoleTitle("older than the history", "#8f8c90", "▗"),
    "elsewhere": RoleTitle("unknown use", "#4a4650", "▝"),
}
"""Categories of blocks of a snapshot whose role is not known: those of a backward that had not ended; those that were
made before the history begins; and those made at lines that tell nothing of their use.
"""

ROLES: Final = tuple(TITLES)
PER_PARAMETER: Final = frozenset(role for role, title in TITLES.items() if title.size == "parameters")
"""Roles of the parameters and of what a training keeps for each of them."""
FIXED: Final = frozenset(role for role, title in TITLES.items() if title.size != "input")
"""Roles whose bytes are those of the model, whatever it is given."""
_PLACES: Final = {role: position for position, role in enumerate(ROLES)}

if TYPE_CHECKING:
    Role = str  # a type checker cannot read the table
else:
    Role = Literal[ROLES]
"""What a storage is for. It has one role, so the roles of live storages add up to the live total.

An `activation` is kept for backward; an `output` is the model's own, and not kept; a `cast copy` is autocast's (or a
wrapper's) copy of a parameter in another dtype, kept or not; a `KV cache` is what a language model keeps of the tokens
that it has seen. Where parameters are sharded, `parameter` and `gradient` are this rank's shards, a `gathered
parameter` is a whole one while its layer runs, and an `unsharded gradient` is that of a whole one. A `communication`
buffer is what a collective reads or writes, and nothing else. A `temporary` is everything that an op made on the way.
"""


def noun(role: str) -> str:
    """Return the plural noun for the bytes of a role, or of a key of `UNKNOWN`: ``"cast copies"``."""
    return (TITLES.get(role) or UNKNOWN[role]).noun


def colour(role: str) -> str:
    """Return the colour of a role, or of a key of `UNKNOWN`."""
    return (TITLES.get(role) or UNKNOWN[role]).colour


def mark(role: str) -> str:
    """Return the character of which bars are made for a role, or for a key of `UNKNOWN`."""
    return (TITLES.get(role) or UNKNOWN[role]).mark


def in_order(roles: Iterable[Role]) -> list[Role]:
    """`roles`, each once, in the order of the table; raises KeyError for one that it lacks."""
    return sorted(set(roles), key=_PLACES.__getitem__)
