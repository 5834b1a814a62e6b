"""What PyTorch's own MemTracker says of the same step: the peer that every prediction is compared with.

It follows tensors through a dispatch mode, counts each storage in blocks of 512 B, and knows no workspaces and no
segments: its peak is to be set beside `allocated`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def tracked_peak(step: Callable[[], Any], known: Iterable[Any], device: torch.device) -> int:
    """MemTracker's peak of `step` on `device`; `known` are the modules, optimizers and tensors that are there before.

    Raises whatever MemTracker does with what it cannot follow.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(*known)
    with tracker:
        step()
    return int(tracker.get_tracker_snapshot("peak").get(device, {}).get("Total", 0))
