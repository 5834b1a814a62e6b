"""The config files of a Hub id: in the local cache, or fetched from the Hub; never weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from memsize.errors import TargetError, first_line, quoted
from memsize.files import parse_json, read
from memsize.loading.hubs import import_library
from memsize.loading.presets import SAVED_CONFIG

CONFIG: Final = "config.json"
"""Of a model of transformers, and of a part of a pipeline."""
PIPELINE: Final = "model_index.json"
"""Names the parts of a pipeline of diffusers."""
_LONGEST: Final = 16 * 2**20
"""Bytes of a config."""
_MOST_VALUES: Final = 500_000
"""Values of a config; the longest list the labels of 20,000 classes, twice."""


def read_config(file: Path) -> Any:
    """Return the JSON of a config. Raises `OSError`, or `ValueError` where it is none or too long."""
    return parse_json(read(file, _LONGEST), _MOST_VALUES)


def cached_file(name: str, file: str) -> Path | None:
    """Return the file of the Hub id `name` in the local cache, where it is there."""
    with _refused(name):
        path = import_library("huggingface_hub").try_to_load_from_cache(name, file)
    return Path(path) if isinstance(path, str) else None


def fetched_file(name: str, file: str) -> Path:
    """Download one config of the Hub id `name`, and nothing else, into the local cache.

    Raises `TargetError` where the Hub has none, refuses it, or it is too long.
    """
    hub = import_library("huggingface_hub")
    with _refused(name):
        metadata = hub.get_hf_file_metadata(hub.hf_hub_url(name, file))
        if metadata.size is None or metadata.size > _LONGEST:
            size = "no size" if metadata.size is None else f"{metadata.size:,} bytes"
            raise TargetError(f"the {file} of {name} has {size}: memsize fetches up to {_LONGEST:,} bytes")
        with _no_progress_bar(hub):
            return Path(hub.hf_hub_download(name, file))


@contextmanager
def _no_progress_bar(hub: Any) -> Iterator[None]:
    shown = not hub.utils.are_progress_bars_disabled()
    hub.utils.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            hub.utils.enable_progress_bars()


@contextmanager
def _refused(name: str) -> Iterator[None]:
    """Turn what huggingface_hub raises, such as for a name that is no Hub id, into one line."""
    try:
        yield
    except TargetError:
        raise
    except Exception as error:  # its own errors, those of its HTTP client, and OSError
        raise TargetError(
            f"cannot get the config of {quoted(name)} from the Hub: {first_line(error)}; one that you saved is "
            f"{SAVED_CONFIG}"
        ) from error
