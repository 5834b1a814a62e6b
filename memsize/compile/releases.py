"""The switches of PyTorch's compiler that decide what compiled code allocates, as a release has them.

Source: torch/_inductor/config.py and torch/_functorch/config.py of PyTorch 2.4 to 2.14.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch._functorch import config as functorch
from torch._inductor import config as inductor

from memsize.spec.stack import Release

SINCE: Final[dict[Release, tuple[tuple[Any, str], ...]]] = {
    (2, 6): ((inductor, "reorder_for_peak_memory"), (functorch, "donated_buffer")),
    (2, 7): ((inductor, "inplace_padding"), (inductor, "online_softmax")),
    (2, 8): ((inductor, "triton.coalesce_tiling_analysis"), (functorch, "treat_parameters_as_free_to_save")),
    (2, 10): (
        (inductor, "loop_index_inversion_in_fusion"),
        (inductor, "loop_ordering_after_fusion"),
        (inductor, "triton.mix_order_reduction"),
    ),
    (2, 12): (
        (inductor, "delay_realize_cheap_outputs"),
        (inductor, "keep_addmm_fused_for_half_dtypes"),
        (functorch, "guess_tangent_strides_as_outputs"),
    ),
    (2, 13): ((inductor, "loop_reindexing_after_fusion"),),
}
"""By the first release in which they are on."""


@contextmanager
def switches_of(release: Release | None) -> Iterator[None]:
    """While open, what `release` doesn't do yet is off; None is the installed one."""
    later = [switch for first, switches in SINCE.items() if release and release < first for switch in switches]
    off = {
        module: {name: False for of, name in later if of is module and name in module._config}
        for module in (inductor, functorch)
    }
    with inductor.patch(off[inductor]), functorch.patch(off[functorch]):
        yield
