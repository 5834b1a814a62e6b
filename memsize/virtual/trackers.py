"""Experiment trackers while a program runs: what it logs are stand-ins, which belong into nobody's dashboard.

Each is switched off as its own documentation says, by an environment variable. MLflow knows no such switch: it is given
a folder that is removed afterwards. TensorBoard writes new files, as the program says.

Known limit: a mode that the program passes by itself (``wandb.init(mode="online")``) wins.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

_OFF: Final = {
    "WANDB_MODE": "disabled",
    "COMET_AUTO_LOG_DISABLE": "1",
    "NEPTUNE_MODE": "debug",
    "SWANLAB_MODE": "disabled",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
_ELSEWHERE: Final = "MLFLOW_TRACKING_URI"


@contextmanager
def trackers_off() -> Iterator[None]:
    """While open, trackers that the program imports keep what they are told to themselves."""
    with TemporaryDirectory(prefix="memsize-", ignore_cleanup_errors=True) as folder:
        switches = {**_OFF, _ELSEWHERE: Path(folder).as_uri()}
        before = {name: os.environ.get(name) for name in switches}
        os.environ.update(switches)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
