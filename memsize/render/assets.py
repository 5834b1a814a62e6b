"""The files that a page is made of besides its own content: style sheets, and scripts with the libraries they use."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from markupsafe import Markup

LIBRARIES: Final = tuple(
    "dispatch timer color interpolate ease selection drag transition zoom hierarchy".split()
)  # fmt: skip
"""The modules of d3, each after those that it needs."""
SCRIPTS: Final = tuple(
    "dom size roles packed paths rows table treemap events chart moment scenes tools start".split()
)  # fmt: skip
"""Our own scripts. They share one scope, so that only what runs at once (`start`) must come last."""


@cache
def style(*names: str) -> Markup:
    """The style sheets of these names, one after the other."""
    return _markup("\n".join(_read(f"{name}.css") for name in names))


@cache
def script() -> Markup:
    """All scripts of a page as one, the libraries and their licence first."""
    libraries = [_read(f"vendor/d3-{name}.min.js") for name in LIBRARIES]
    own = "\n".join(_read(f"{name}.js") for name in SCRIPTS)
    licence = f"/*! d3\n{_read('vendor/LICENSE')}*/"
    return _markup("\n".join([licence, *libraries, "(() => {", '"use strict";', own, "})();"]))


@cache
def hashed(text: str) -> str:
    """How a Content-Security-Policy names the one inline script that it lets run."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _read(name: str) -> str:
    return files("memsize.render").joinpath("page", name).read_text(encoding="utf-8").rstrip() + "\n"


def _markup(text: str) -> Markup:
    """`text` as the content of its element, which it must not end."""
    from markupsafe import Markup

    return Markup(text.replace("</", "<\\/"))
