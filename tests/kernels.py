"""What kernels take, as tests ask for it: by an op and its arguments."""

from __future__ import annotations

from typing import Any

from memsize.kernels import rules
from memsize.kernels.registry import TEMPORARIES, Temporary


def kernel_temporaries(op: Any, args: Any) -> list[Temporary]:
    """Return the allocations alive at the peak of the kernel of `op`, besides its arguments and results."""
    rules()
    return list(TEMPORARIES[op](*args)) if op in TEMPORARIES else []
