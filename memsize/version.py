"""The version of memsize: what `pyproject.toml`, the command line and saved runs say."""

from typing import Final

VERSION: Final = "0.1.0"
