"""The one table of roles, in the order in which they are stacked and listed: what stays longest first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from memsize.records.trace import Role


class RoleTitle(NamedTuple):
    """What the bytes of a role are called together, and how much a table wants to show them (the most: 60)."""

    noun: str
    weight: int


TITLES: Final[dict[Role, RoleTitle]] = {
    "parameter": RoleTitle("parameters", 60),
    "buffer": RoleTitle("buffers", 35),
    "master weight": RoleTitle("master weights", 54),
    "optimizer state": RoleTitle("optimizer state", 56),
    "workspace": RoleTitle("workspaces", 40),
    "gradient": RoleTitle("gradients", 58),
    "input": RoleTitle("inputs", 20),
    "activation": RoleTitle("activations", 59),
    "cast copy": RoleTitle("cast copies", 50),
    "output": RoleTitle("outputs", 30),
    "temporary": RoleTitle("temporaries", 57),
}

ROLES: Final[tuple[Role, ...]] = tuple(TITLES)


def noun(role: Role) -> str:
    """What the bytes of `role` are called together: ``"cast copies"``."""
    return TITLES[role].noun


def in_order(roles: Iterable[Role]) -> list[Role]:
    """`roles`, each once, in the order of the table."""
    found = set(roles)
    return [role for role in ROLES if role in found]
