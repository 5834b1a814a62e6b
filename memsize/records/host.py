"""`HostUse`: the memory of the host that a program takes beside its GPU."""

from __future__ import annotations

from typing import Final, NamedTuple


class HostUse(NamedTuple):
    """Bytes of host memory, each at its own peak, and what all of them take at one time, `needs`.

    `tensors` are pageable: copies from the GPU, offloaded weights and optimizer state, and what is computed from them.
    `pinned` is what pinned tensors ask for, `blocks` the powers of two that PyTorch keeps for them. `managed` are the
    pages of paged optimizers, `batches` those that the workers of data loaders make ahead.
    """

    tensors: int = 0
    pinned: int = 0
    blocks: int = 0
    managed: int = 0
    batches: int = 0
    needs: int = 0

    @property
    def rows(self) -> tuple[HostRow, ...]:
        """The kinds of memory that there are, and their sum."""
        kinds = (
            HostRow("tensors", self.tensors, self.tensors),
            HostRow("pinned memory", self.pinned, self.blocks),
            HostRow("paged optimizer state", self.managed, self.managed),
            HostRow("batches made ahead", self.batches, self.batches),
        )
        used = tuple(row for row in kinds if row.reserved)
        return (*used, HostRow("at one time", None, self.needs)) if used else ()


class HostRow(NamedTuple):
    """One kind of host memory: the bytes that tensors ask for at most, and those that the process keeps for them."""

    kind: str
    requested: int | None
    reserved: int


UNUSED: Final = HostUse()
"""A run that takes none of the host's memory."""
