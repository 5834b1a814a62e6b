"""Memory snapshots as PyTorch writes them, built entry by entry for the tests of what explains them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

MiB = 1 << 20
Fields = dict[str, Any]
TORCH = "/venv/lib/python3.12/site-packages/torch"


def frames(*calls: str) -> list[Fields]:
    """Frames from ``"file:line:name"``, innermost first; a call of C++ is its name alone."""
    found = []
    for call in calls:
        filename, _, rest = call.partition(".py:")
        line, _, name = rest.partition(":")
        found.append(
            {"filename": f"{filename}.py", "line": int(line), "name": name}
            if rest
            else {"filename": "??", "line": 0, "name": call}
        )
    return found


MODEL = frames(f"{TORCH}/nn/modules/module.py:900:_apply", "/home/me/train.py:5:main")
DATA = frames(f"{TORCH}/utils/data/dataloader.py:700:__next__", "/home/me/train.py:8:main")
FORWARD = frames(
    f"{TORCH}/nn/modules/linear.py:125:forward",
    f"{TORCH}/nn/modules/module.py:1751:_call_impl",
    "/home/me/net.py:12:forward",
    f"{TORCH}/nn/modules/module.py:1751:_call_impl",
    "/home/me/train.py:9:main",
)
BACKWARD = frames("at::native::mm", "torch::autograd::generated::MmBackward0::apply(std::vector)", "clone")
STATE = frames(f"{TORCH}/optim/adamw.py:150:_init_group", "/home/me/train.py:11:main")
UPDATE = frames(f"{TORCH}/optim/adamw.py:400:_multi_tensor_adamw", "/home/me/train.py:11:main")
WORKSPACE = frames("at::cuda::getNewWorkspace()", *(f"{f['filename']}:{f['line']}:{f['name']}" for f in FORWARD))
OTHER = frames("/home/me/train.py:7:main")


class Recorder:
    """A GPU on which blocks are made and given up: each takes what it asks for in a segment of its own, rounded up to
    512 bytes, unless `segment` opens one for several.
    """

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.entries: list[Fields] = []
        self.segments: list[Fields] = []
        self._next = (device + 1) << 40

    def segment(self, size: int) -> Fields:
        """A new segment that is free as a whole."""
        made = {"device": self.device, "address": self._next, "total_size": size, "stream": 0, "blocks": []}
        made["blocks"].append({"address": self._next, "size": size, "requested_size": 0, "state": "inactive"})
        self.segments.append(made)
        self._write("segment_alloc", self._next, size, [])
        self._next += size
        return made

    def alloc(self, size: int, stack: list[Fields], *, recorded: bool = True, **more: str) -> int:
        """A block of `size` bytes; one that is not `recorded` is older than the history."""
        rounded = -(-size // 512) * 512
        free = self._free(rounded)
        if free is None:
            length = len(self.entries)
            free = self.segment(rounded)["blocks"][0]
            if not recorded:
                del self.entries[length:]
        if free["size"] > rounded:
            self._split(free, rounded)
        free |= {"requested_size": size, "state": "active_allocated", "frames": stack if recorded else []}
        if recorded:
            self._write("alloc", free["address"], size, stack, **more)
        return int(free["address"])

    def free(self, address: int, stack: list[Fields] | None = None) -> None:
        """Give up the block at `address`."""
        block = next(b for s in self.segments for b in s["blocks"] if b["address"] == address)
        for action in ("free_requested", "free_completed"):
            self._write(action, address, block["requested_size"], stack or [])
        block |= {"state": "inactive", "requested_size": 0, "frames": []}

    def oom(self, size: int, free: int, stack: list[Fields]) -> None:
        """A request that fails."""
        self.entries.append({"action": "oom", "device_free": free, "size": size, "stream": 0, "frames": stack})

    def _free(self, size: int) -> Fields | None:
        blocks = (b for s in self.segments for b in s["blocks"])
        return next((b for b in blocks if b["state"] == "inactive" and b["size"] >= size), None)

    def _split(self, block: Fields, size: int) -> None:
        owner = next(s for s in self.segments if any(b is block for b in s["blocks"]))
        place = next(i for i, b in enumerate(owner["blocks"]) if b is block)
        rest = {"address": block["address"] + size, "size": block["size"] - size, "requested_size": 0}
        owner["blocks"].insert(place + 1, rest | {"state": "inactive"})
        block["size"] = size

    def _write(self, action: str, address: int, size: int, stack: list[Fields], **more: str) -> None:
        self.entries.append({"action": action, "addr": address, "size": size, "stream": 0, "frames": stack, **more})


def written(path: Path, *recorders: Recorder) -> Path:
    """The snapshot of several GPUs in a file, by Python's own pickler as PyTorch uses it."""
    made = {
        "segments": [segment for recorder in recorders for segment in recorder.segments],
        "device_traces": [recorder.entries for recorder in recorders],
        "allocator_settings": {},
        "external_annotations": [],
    }
    path.write_bytes(pickle.dumps(made))
    return path
