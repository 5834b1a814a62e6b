"""mmcv's compiled operators, where mmcv-lite or a build without them is installed: its Python code runs above them.

Deformable attention is simulated. Any other operator can be imported, as OpenMMLab's libraries do for layers that a
model may not have, and raises where it is called.

Source: mmcv 2.1, `utils/ext_loader.py`, `ops/multi_scale_deform_attn.py` and
`ops/csrc/pytorch/cuda/ms_deform_attn_cuda.cu`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor


def _attend(value: Tensor, _shapes: Tensor, _starts: Tensor, locations: Tensor, *_: Any, **__: Any) -> Tensor:
    """The output [batch, queries, heads · channels] for `value` [batch, keys, heads, channels]."""
    batch, _keys, heads, channels = value.shape
    return value.new_zeros((batch, locations.shape[1], heads * channels))


def _writes(*_: Any, **__: Any) -> None:
    """A kernel that writes to tensors that are there."""


_SIMULATED: Final[dict[str, Callable[..., Any]]] = {
    "ms_deform_attn_forward": _attend,
    "ms_deform_attn_backward": _writes,
}


def _operator(name: str) -> Callable[..., Any]:
    """Return the operator of a name; what only Python looks for is not there."""
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"memsize does not simulate mmcv's compiled operator {name}")

    return _SIMULATED.get(name, refuse)


KERNELS: Final[dict[str, dict[str, Any]]] = {"mmcv._ext": {"__getattr__": _operator}}
