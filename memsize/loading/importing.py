"""The import of a target's code, and the object in it that the target names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from memsize.errors import ExitError, TargetError, UnknownTargetError, exits_caught, quoted
from memsize.loading.building import gpu_advice, user_traceback
from memsize.loading.scope import ImportScope, is_taken
from memsize.loading.target import Target


def scope_of(target: Target) -> tuple[ImportScope, str]:
    """The scope of the target's imports, and the name to import it by.

    A file in a package is imported as that package's module, so that its relative imports work; any other file as
    Python would import it from its own folder; a dotted name from the working folder or from what is installed.
    """
    if target.file is None:
        return ImportScope(Path.cwd()), str(target.module)
    folder, names = target.file.parent, [target.file.stem]
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        names.insert(0, folder.name)
        folder = folder.parent
    if len(names) == 1:
        return ImportScope(folder, script=target.file), names[0]
    dotted = ".".join(names[:-1] if names[-1] == "__init__" else names)
    return ImportScope(folder, last=target.file.parent, script=target.file), dotted


def import_target(target: Target, scope: ImportScope, name: str) -> ModuleType:
    """Import the target's module as `name`, in its entered `scope`. Raises `TargetError` where that fails."""
    try:
        with exits_caught():
            if target.file and "." not in name and target.file.stem != "__init__":
                return _execute(target.file, scope, name)
            module = importlib.import_module(name)
    except Exception as error:
        raise TargetError(_import_failure(error, target, scope)) from error
    path = getattr(module, "__file__", None)
    if target.file and not (path and Path(path).samefile(target.file)):
        raise TargetError(f"{target.file.name} is {name}, but another {name} is imported already, from {path}")
    return module


def _execute(file: Path, scope: ImportScope, name: str) -> ModuleType:
    """A fresh module made from `file`, importable in the scope as `name` unless that is another's."""
    name = f"{name}_target" if is_taken(name) or not name.isidentifier() else name
    loader = _Source(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None  # there is one for every loader
    module = importlib.util.module_from_spec(spec)
    scope.adopt(name, module)
    loader.exec_module(module)
    return module


class _Source(SourceFileLoader):
    """Compiles the file anew. Python's own cache takes two texts of the same second and size for the same."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _import_failure(error: Exception, target: Target, scope: ImportScope) -> str:
    if isinstance(error, TargetError):
        return str(error)
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and target.module and f"{target.module}.".startswith(f"{missing}."):
        return f"no module {missing!r}, neither installed nor in {scope.folder}{_dotted_hint(target)}"
    failure = f"importing {target.source} failed {user_traceback(error, scope.owns)}{gpu_advice(error)}"
    if "torchvision::" in str(error):
        from memsize.loading.torchvision_ops import remedy

        return f"{failure}; {remedy()}"
    if isinstance(error, ExitError):
        return f"{failure}; keep what runs the program below if __name__ == '__main__'"
    if missing and missing.partition(".")[0] not in sys.stdlib_module_names:
        return f"{failure}; install it where memsize is installed, or put it beside {target.source}"
    return failure


def _dotted_hint(target: Target) -> str:
    """``package.module.Net`` was meant as ``package.module:Net``, as its capital letter shows."""
    package, _, last = str(target.module).rpartition(".")
    return f" (did you mean {package}:{last}?)" if package and target.name is None else ""


def look_up(module: ModuleType, name: str, target: Target) -> Any:
    """The object that the dotted `name` means in `module`; raises `TargetError` if there is none."""
    value: Any = module
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            problem = f"{target.source} has no {quoted(name)}"
            raise UnknownTargetError("name", name, _candidates(module), problem=problem) from None
    return value


def only_class(module: ModuleType, target: Target) -> str:
    """The name of the only Module class that the target's own code defines; raises `TargetError` when it is not one."""
    from torch import nn

    defined = _defined(module)
    classes = [name for name, value in defined.items() if isinstance(value, type) and issubclass(value, nn.Module)]
    if len(classes) == 1:
        return classes[0]
    choices = classes or _candidates(module)
    if not choices:
        raise TargetError(f"{target.source} defines no torch.nn.Module class, and no function to build one")
    example = f"{target.source}:{choices[0]}"
    raise TargetError(f"{target.source} holds {', '.join(choices)}: name the one you mean, like {example}")


def _candidates(module: ModuleType) -> list[str]:
    """The names that a target could give: Module instances, and Module classes and functions of the module's own."""
    from torch import nn

    instances = [name for name, value in vars(module).items() if isinstance(value, nn.Module)]
    defined = [
        name
        for name, value in _defined(module).items()
        if (issubclass(value, nn.Module) if isinstance(value, type) else callable(value))
    ]
    return [name for name in dict.fromkeys((*defined, *instances)) if not name.startswith("_")]


def _defined(module: ModuleType) -> dict[str, Any]:
    """The classes and functions that `module` itself defines, or gives as its own when it is a package."""
    package = module.__name__
    return {
        name: value
        for name, value in vars(module).items()
        if (own := getattr(value, "__module__", None)) == package
        or (hasattr(module, "__path__") and isinstance(own, str) and own.startswith(f"{package}."))
    }
