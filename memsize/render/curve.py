"""Memory against the size of a run as a picture in a web page: a line for each scenario, and the memory of GPUs."""

from __future__ import annotations

from typing import Any, Final

from memsize.documents.sections import Curve, Limit, Line
from memsize.render.plot import Frame, round_ticks, ticks
from memsize.units import format_bytes, unit_for

COLOURS: Final = ("parameter", "activation", "optimizer state", "KV cache", "gathered parameter", "cast copy", "input")
"""Roles in whose colours lines are drawn, one after the other; red is that of limits."""
_ROOM: Final = 34
"""The width of a number."""
_BEYOND: Final = 1.12
"""How far the picture goes on beyond the largest size and the most bytes."""


def picture(curve: Curve, unit: str) -> dict[str, Any]:
    """Everything that the template draws of a curve, in the picture's units."""
    top = max(size for line in curve.lines for _, size in line.points)
    limits = [limit for limit in curve.limits if limit.size <= 2 * top]
    most = max(top, *(limit.size for limit in limits), 1)
    widest = max(size for line in curve.lines for size, _ in line.points)
    frame = Frame(round(widest * _BEYOND) + 1, round(most * _BEYOND), top=24, bottom=330)
    scale = unit_for(frame.most, unit)
    drawn = [_line(frame, line, COLOURS[n % len(COLOURS)], curve.axis, unit) for n, line in enumerate(curve.lines)]
    answers = sorted((line["answer"] for line in drawn if line["answer"]), reverse=True)
    return {
        "frame": frame,
        "unit": scale.name,
        "ticks": ticks(frame, scale),
        "sizes": [(frame.x(size), f"{size:,}") for size in round_ticks(frame.events - 1, 1)],
        "lines": drawn,
        # Numbers stand at the left of their lines, where the next line leaves room.
        "answers": [a for a, b in zip(answers, [*answers[1:], (0.0, 0.0, "")], strict=True) if a[0] - b[0] > _ROOM],
        "limits": [_limit(frame, limit, unit) for limit in limits],
        "sizes_of_limits": [(limit.title, limit.size) for limit in limits],
        "first": next((line.answer[0] for line in curve.lines if line.answer), 0),
        "off": [_limit(frame, limit, unit) for limit in curve.limits if limit not in limits],
    }


def _line(frame: Frame, line: Line, role: str, axis: str, unit: str) -> dict[str, Any]:
    answer = line.answer
    text = f"{', '.join(line.names)}: {f'largest {axis} {answer[0]:,}' if answer else 'none fits'}"
    return {
        "role": role,
        "name": ", ".join(line.names),
        "sizes": line.points,
        "text": text,
        "points": " ".join(f"{frame.x(size):g},{frame.y(need):g}" for size, need in line.points),
        "marks": [
            (frame.x(size), frame.y(need), f"{axis} {size:,} needs {format_bytes(need, unit)}")
            for size, need in line.points
        ],
        "answer": (frame.x(answer[0]), frame.y(answer[1]), f"{answer[0]:,}") if answer else None,
    }


def _limit(frame: Frame, limit: Limit, unit: str) -> tuple[float, str]:
    return frame.y(limit.size), f"{limit.title}: {format_bytes(limit.size, unit)}"
