"""The simulation: which attributes of other libraries it replaces, where, and that nothing else replaces any."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import memsize
from tests.process import Patches, SuspendablePatches, current, open_simulation, running

PACKAGE = Path(memsize.__file__).parent
PATCHES = PACKAGE / "processes" / "patches.py"
OWN_OBJECTS = {"CheckpointStandIn", "config", "mask", "model", "module", "part", "pool"}
"""What `setattr` and `delattr` may be called on: a class, configurations, parts of a copied model, free blocks."""


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != PATCHES:
            yield path, ast.parse(path.read_text())


def foreign_names(tree: ast.Module) -> set[str]:
    """Modules, and what is imported from them, that are not memsize's own."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("memsize"):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns to, or deletes."""
    found: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        found = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
        found = [node.target]
    while found:
        target = found.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            found += target.elts
        else:
            yield target


def root(target: ast.expr) -> str:
    """The name that a chain of attributes starts from."""
    while isinstance(target, (ast.Attribute, ast.Subscript)):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""


def test_one_module_assigns_to_attributes_of_other_libraries() -> None:
    assignments = [
        f"{path.relative_to(PACKAGE)}:{target.lineno}: {ast.unparse(target)}"
        for path, tree in modules()
        for foreign in [foreign_names(tree)]
        for node in ast.walk(tree)
        for target in targets(node)
        if isinstance(target, ast.Attribute) and root(target) in foreign
    ]
    assert assignments == []


def test_setattr_is_called_on_own_objects_alone() -> None:
    owners = {
        ast.unparse(node.args[0])
        for _, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr")
    }
    assert owners <= OWN_OBJECTS


def test_patches_are_restored_last_first_also_after_an_error() -> None:
    owner, patches = SimpleNamespace(a=1), Patches()
    with suppress(KeyError), patches.applied([(owner, "a", 2), (owner, "a", 3), (owner, "b", 4)]):
        assert vars(owner) == {"a": 3, "b": 4}
        raise KeyError
    assert vars(owner) == {"a": 1}
    assert len(patches) == 0


def test_patches_are_restored_where_one_of_them_cannot_be_applied() -> None:
    owner = SimpleNamespace(a=1)
    with pytest.raises(TypeError), Patches().applied([(owner, "a", 2), (int, "real", 3)]):
        pass
    assert vars(owner) == {"a": 1}


def test_suspended_patches_are_back_with_those_of_modules_imported_meanwhile() -> None:
    owner = SimpleNamespace(a=1)
    patches = SuspendablePatches(Patches(), [(owner, "a", 2)], {"json": lambda module: [(owner, "b", module.__name__)]})
    with patches.suspended():
        assert vars(owner) == {"a": 1}
    assert vars(owner) == {"a": 1}  # they were not applied before
    patches.apply()
    assert vars(owner) == {"a": 2, "b": "json"}
    with patches.suspended(), patches.suspended():
        assert vars(owner) == {"a": 1}
    assert vars(owner) == {"a": 2, "b": "json"}
    patches.restore()
    assert vars(owner) == {"a": 1}


def test_a_simulation_lists_its_patches() -> None:
    with memsize.virtual_gpu("t4"):
        simulation = current()
        assert simulation is not None and simulation is running()
        lines = str(simulation.patches).splitlines()
        assert {"torch.compile", "torch._C._cuda_getDeviceCount", "torch.Tensor.device"} <= set(lines)
        assert "threading.Thread.start" in lines
    assert current() is running() is None
    assert len(simulation.patches) == 0
    assert repr(simulation.patches) == "nothing is replaced"


def test_threads_of_a_virtual_gpu_run_in_its_simulation() -> None:
    seen = []
    with memsize.virtual_gpu("t4"):
        thread = threading.Thread(target=lambda: seen.append((current(), torch.ones(2, device="cuda").is_cuda)))
        thread.start()
        thread.join()
        assert seen == [(current(), True)]


def test_a_simulation_is_not_seen_outside_of_its_context() -> None:
    outside = copy_context()
    with open_simulation() as simulation, open_simulation() as again:
        assert simulation is again is current()
        assert outside.run(current) is None
