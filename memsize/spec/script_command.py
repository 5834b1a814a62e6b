"""A script's command line, and the argument of it that a search varies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memsize.errors import InputError, suggestion


@dataclass(frozen=True, slots=True)
class VariedScript:
    """A script's `path` and its `arguments`, of which the one at `index` is ``prefix + value`` and varies.

    `name` is what the script calls it: ``--batch-size``, ``train.batch_size``.
    """

    path: str
    arguments: tuple[str, ...]
    name: str
    index: int
    prefix: str
    value: int

    @classmethod
    def of(cls, path: str, arguments: Sequence[str], name: str) -> VariedScript:
        """The script whose argument `name` varies, as ``--batch-size 8``, ``--batch-size=8``, ``-b 8`` or ``a.b=8``.

        Dashes in front, and dashes for underscores, make no difference. Raises `InputError` where there is no such
        argument, or where it is no whole number above 0.
        """
        names: list[str] = []
        for index, text in enumerate(arguments):
            head, equals, value = text.partition("=")
            if not (equals or text.startswith("-")):
                continue
            names.append(head)
            if _plain(head) != _plain(name):
                continue
            if not equals:
                value = arguments[index + 1] if index + 1 < len(arguments) else ""
            if not value.isdecimal() or not int(value):
                raise InputError(f"{head} is {value or 'empty'!r}: what varies has to be a whole number above 0")
            varied = (index, f"{head}=") if equals else (index + 1, "")
            return cls(path, tuple(arguments), head, *varied, int(value))
        hint = f" ({suggestion(name, names)})" if names else ""
        raise InputError(f"the script is given no argument {name!r}{hint}: write it with a value after {path}")

    def command(self, value: int | None = None) -> str:
        """The command line, with another value of the argument that varies."""
        return " ".join((self.path, *(self.arguments if value is None else self.valued(value))))

    def valued(self, value: int) -> tuple[str, ...]:
        """The arguments with another value of the one that varies."""
        return (*self.arguments[: self.index], f"{self.prefix}{value}", *self.arguments[self.index + 1 :])


def _plain(name: str) -> str:
    return name.lstrip("-+").replace("_", "-")
