"""The config of a Hub id: from the local cache, from the presets, or with `online` from the Hub itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memsize.errors import TargetError, UnknownTargetError, first_line, nearest, quoted
from memsize.loading.hubs import import_library
from memsize.loading.presets import presets

LONGEST_CONFIG = 16 * 2**20
"""Bytes of a config."""


def hub_config(name: str, online: bool) -> Path | dict[str, Any]:
    """Return the config of the Hub id `name` as a file, or as the entries of a preset.

    Raises `TargetError` with the nearest presets where there is none, or what the Hub refuses.
    """
    if cached := _cached(name):
        return cached
    if name in presets():
        return dict(presets()[name].config)
    if online:
        return _fetched(name)
    problem = f"no folder, file, preset or cached config is called {quoted(name)} (--online fetches its config.json)"
    if not nearest(name, tuple(presets())):
        raise TargetError(problem)
    raise UnknownTargetError("preset", name, presets(), problem=problem)


def _cached(name: str) -> Path | None:
    with _refused(name):
        path = import_library("huggingface_hub").try_to_load_from_cache(name, "config.json")
    return Path(path) if isinstance(path, str) else None


def _fetched(name: str) -> Path:
    """Download the config.json of `name`, and nothing else, into the local cache."""
    hub = import_library("huggingface_hub")
    with _refused(name):
        metadata = hub.get_hf_file_metadata(hub.hf_hub_url(name, "config.json"))
        if metadata.size is None or metadata.size > LONGEST_CONFIG:
            size = "no size" if metadata.size is None else f"{metadata.size:,} bytes"
            raise TargetError(f"the config.json of {name} has {size}: memsize fetches up to {LONGEST_CONFIG:,} bytes")
        with _no_progress_bar(hub):
            return Path(hub.hf_hub_download(name, "config.json"))


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
        raise TargetError(f"cannot get the config of {quoted(name)} from the Hub: {first_line(error)}") from error
