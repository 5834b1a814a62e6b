"""The ``nvidia-smi`` that a program's processes find: it answers for the simulated card.

It runs as a file of its own, ``python -I -S nvidia_smi.py STATE OPTION …``, and needs the standard library alone; STATE
is the card as it was when the process was started. ``-L``, ``--query-gpu=… --format=csv[,noheader][,nounits]``,
``--query-compute-apps`` and the table without options are answered, and what a card that computes nothing has none of
(load, temperature, power) is 0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

MIB = 1 << 20
DRIVER = "580.00"
Answer = tuple[Any, str]
"""A value, and its unit."""


class Gpu(NamedTuple):
    """The card at a moment; sizes in bytes."""

    name: str
    capability: str
    gpus: int
    total: int
    used: int


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-0000-0000-0000-000000000000"


FIELDS: dict[str, Callable[[Gpu, int], Answer]] = {
    "clocks.current.graphics": lambda gpu, index: (0, "MHz"),
    "compute_cap": lambda gpu, index: (gpu.capability, ""),
    "compute_mode": lambda gpu, index: ("Default", ""),
    "count": lambda gpu, index: (gpu.gpus, ""),
    "display_active": lambda gpu, index: ("Disabled", ""),
    "display_mode": lambda gpu, index: ("Disabled", ""),
    "driver_version": lambda gpu, index: (DRIVER, ""),
    "fan.speed": lambda gpu, index: (0, "%"),
    "gpu_bus_id": lambda gpu, index: (f"00000000:{index:02X}:00.0", ""),
    "gpu_name": lambda gpu, index: (gpu.name, ""),
    "gpu_serial": lambda gpu, index: ("[N/A]", ""),
    "gpu_uuid": lambda gpu, index: (uuid(index), ""),
    "index": lambda gpu, index: (index, ""),
    "memory.free": lambda gpu, index: ((gpu.total - gpu.used) // MIB, "MiB"),
    "memory.reserved": lambda gpu, index: (0, "MiB"),
    "memory.total": lambda gpu, index: (gpu.total // MIB, "MiB"),
    "memory.used": lambda gpu, index: (gpu.used // MIB, "MiB"),
    "mig.mode.current": lambda gpu, index: ("[N/A]", ""),
    "name": lambda gpu, index: (gpu.name, ""),
    "pci.bus_id": lambda gpu, index: (f"00000000:{index:02X}:00.0", ""),
    "power.draw": lambda gpu, index: ("0.00", "W"),
    "power.limit": lambda gpu, index: ("0.00", "W"),
    "temperature.gpu": lambda gpu, index: (0, ""),
    "utilization.gpu": lambda gpu, index: (0, "%"),
    "utilization.memory": lambda gpu, index: (0, "%"),
    "uuid": lambda gpu, index: (uuid(index), ""),
}
"""The fields of ``--query-gpu``, as ``nvidia-smi --help-query-gpu`` names it."""


def answered(gpu: Gpu, options: list[str]) -> str:
    """Return what ``nvidia-smi`` prints for `options`. Raises ValueError for a field that it does not have."""
    values = dict(option.partition("=")[::2] for option in _joined(options))
    indices = [int(i) for i in (values.get("--id") or values.get("-i") or "").split(",") if i.isdigit()]
    cards = indices or range(gpu.gpus)
    if "-L" in values or "--list-gpus" in values:
        return "".join(f"GPU {i}: {gpu.name} (UUID: {uuid(i)})\n" for i in cards)
    how = values.get("--format", "csv").split(",")
    if "--query-compute-apps" in values:
        names = values["--query-compute-apps"].split(",")
        return "" if "noheader" in how else ", ".join(names) + "\n"
    if "--query-gpu" in values:
        return _table(gpu, [name.strip() for name in values["--query-gpu"].split(",")], cards, how)
    return _overview(gpu, cards)


def _joined(options: list[str]) -> list[str]:
    """``-i 0`` and ``--id 0`` as ``-i=0``."""
    words: list[str] = []
    for option in options:
        if words and "=" not in words[-1] and not option.startswith("-"):
            words[-1] += f"={option}"
        else:
            words.append(option)
    return words


def _table(gpu: Gpu, names: list[str], cards: Any, how: list[str]) -> str:
    unknown = [name for name in names if name not in FIELDS]
    if unknown:
        raise ValueError(f'Field "{unknown[0]}" is not a valid field to query.')
    rows = [[FIELDS[name](gpu, index) for name in names] for index in cards]
    units = "nounits" not in how
    lines = [", ".join(f"{value} {unit}" if unit and units else str(value) for value, unit in row) for row in rows]
    if "noheader" not in how:
        lines.insert(
            0, ", ".join(f"{name} [{unit}]" if unit else name for name, (_, unit) in zip(names, rows[0], strict=True))
        )
    return "".join(f"{line}\n" for line in lines)


def _overview(gpu: Gpu, cards: Any) -> str:
    used, total = gpu.used // MIB, gpu.total // MIB
    rule = f"+{'-' * 77}+\n"
    head = f" NVIDIA-SMI {DRIVER:<30} Driver Version: {DRIVER}"
    cells = (f" {i:3}  {gpu.name:<33} {used:7}MiB / {total:6}MiB   0%  Default" for i in cards)
    rows = "".join(f"|{cell:<77}|\n" for cell in cells)
    return f"{rule}|{head:<77}|\n{rule}{rows}{rule}"


if __name__ == "__main__":
    try:
        sys.stdout.write(answered(Gpu(**json.loads(Path(sys.argv[1]).read_text("utf-8"))), sys.argv[2:]))
    except ValueError as error:
        sys.exit(str(error))
