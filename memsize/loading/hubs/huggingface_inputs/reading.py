"""What configs say, whatever they call it: entries by any of several names, in a config or in one of its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

VISION = ("vision", "image", "visual", "video", "vit", "backbone", "encoder", "thinker")
AUDIO = ("audio", "speech", "encoder", "thinker")
TEXT = ("text", "language", "llm", "thinker", "encoder", "decoder")
"""How configs call their parts about images, sound and text, the surest name first."""


def parts(config: Any) -> Iterator[tuple[str, Any]]:
    """The configs that `config` has as entries, by name."""
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield name.removesuffix("_config"), value


def part(config: Any, kinds: tuple[str, ...]) -> Any:
    """The part of `config` that is of the first of `kinds`, parts of parts included; `config` where there is none."""
    own = list(parts(config))
    for kind in kinds:
        for name, found in own:
            if kind in name:
                return part(found, (kind,)) if kind not in ("encoder", "decoder") else found
    for _, found in own:
        deeper = part(found, kinds[:-2])
        if deeper is not found:
            return deeper
    return config


def entry(configs: tuple[Any, ...], *names: str) -> Any:
    """The first of the entries `names` that is something, in the first of `configs` that has one; else None."""
    for config in configs:
        for name in names:
            value = getattr(config, name, None)
            if value is not None:
                return value
    return None


def whole(configs: tuple[Any, ...], *names: str, default: int) -> int:
    """The first of the entries `names` that is a whole number; of a list the last."""
    for config in configs:
        for name in names:
            value = getattr(config, name, None)
            value = value[-1] if isinstance(value, (list, tuple)) and value else value
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return default


def both(size: Any) -> tuple[int, int] | None:
    """Height and width of what configs write as a size: 224, [224, 224], {"height": 224, …}, {"shortest_edge": 800}."""
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge")
        height, width = size.get("height", edge), size.get("width", edge)
    else:
        height, width = size[-2:] if isinstance(size, (list, tuple)) and len(size) > 1 else (size, size)
        height, width = (side[0] if isinstance(side, (list, tuple)) and side else side for side in (height, width))
    fits = isinstance(height, int) and isinstance(width, int) and not isinstance(height, bool)
    return (height, width) if fits else None
