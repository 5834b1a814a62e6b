"""A process in which nobody reads what the user's code prints."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Send what is printed in this process to the null device, for good where it is written by C."""
    with (
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(nothing),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for descriptor in (1, 2):
            os.dup2(nothing.fileno(), descriptor)
        yield
