"""What a GPU shows of a run: the caching allocator's blocks and segments, library workspaces, and the CUDA context.

    requested ≤ allocated (blocks) ≤ reserved (segments) ≤ device (reserved + context)

Everything here is arithmetic on events and needs no torch and no GPU.
"""

from __future__ import annotations

__all__ = [
    "AllocatorConfig",
    "Card",
    "Interval",
    "Replay",
    "card",
    "context",
    "cublas_workspace",
    "cublaslt_workspace",
    "replay",
]

from memsize.device.allocator import Replay, replay
from memsize.device.cards import Card, card
from memsize.device.config import AllocatorConfig
from memsize.device.context import Interval, context
from memsize.device.workspace import cublas_workspace, cublaslt_workspace
