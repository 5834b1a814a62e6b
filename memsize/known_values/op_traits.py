"""Facts about each op that constant propagation needs: from its schema, its tags and the tables here."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from memsize.known_values.data_dependent import DataDependentOp, data_dependent_ops, sparse_ops

_FILLS: dict[str, Any] = {
    **dict.fromkeys(("aten::zeros", "aten::zeros_like", "aten::new_zeros"), 0),
    **dict.fromkeys(("aten::ones", "aten::ones_like", "aten::new_ones"), 1),
    **dict.fromkeys(("aten::full", "aten::full_like", "aten::new_full"), "fill_value"),
}
"""Ops that fill a tensor with one number: the number, or the name of the argument that gives it."""

_EMPTY = frozenset(
    f"aten::{name}"
    for name in "empty empty_like empty_strided empty_permuted new_empty new_empty_strided _efficientzerotensor".split()
)
"""Ops whose results are read as zeros: those of `_efficientzerotensor` have no memory that a kernel could read."""
_QUANTIZING = frozenset(
    f"aten::{name}"
    for name in "quantize_per_tensor quantize_per_tensor_dynamic quantize_per_channel dequantize".split()
)
"""Ops into and out of quantized tensors, which only the CPU has: PyTorch's `meta` kernels return plain tensors."""
_BY_STRIDES = frozenset({"aten::as_strided", "aten::_reshape_alias"})

_PRESERVING = frozenset(
    f"aten::{name}"
    for name in """
    _to_copy clone repeat index gather index_select roll flip rot90 take take_along_dim all any amax
    amin max min mean upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
    adaptive_avg_pool2d _adaptive_avg_pool2d max_pool2d_with_indices""".split()
)
"""Ops that make a uniform result of a uniform first argument, with the same number in it."""

_FINITE = {"isnan": False, "isinf": False, "isposinf": False, "isneginf": False, "isfinite": True}
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})

_CHOICES: dict[str, tuple[int, int | None, bool]] = {
    "aten::topk": (1, 2, True),
    "aten::sort": (1, 1, True),
    "aten::sort.stable": (1, None, True),
    "aten::argsort": (0, 1, True),
    "aten::argsort.stable": (0, None, True),
    **dict.fromkeys(("aten::argmax", "aten::argmin"), (0, 1, False)),
    **dict.fromkeys(("aten::max.dim", "aten::min.dim", "aten::median.dim", "aten::mode"), (1, 1, False)),
    "aten::kthvalue": (1, 2, False),
    "aten::multinomial": (0, None, True),
}
"""Ops that choose by value: which result has the indices, which argument the dimension, whether one choice is several
indices."""

_COUNTING = frozenset({"aten::sum", "aten::sum.dim_IntList", "aten::count_nonzero", "aten::count_nonzero.dim_IntList"})
_FLATTENING = frozenset({"aten::argmax", "aten::argmin"})


class OpTraits:
    """The traits of one overload: which arguments it writes, and what can be known of its results."""

    def __init__(self, func: Any) -> None:
        schema, tags = func._schema, func.tags
        self.name: str = func.name()
        packet = self.name.partition(".")[0]
        short = packet.removeprefix("aten::")
        self.mutates: bool = schema.is_mutable
        arguments = enumerate(schema.arguments)
        self.written = tuple((p, a.name) for p, a in arguments if a.alias_info is not None and a.alias_info.is_write)
        self.aliases = not self.mutates and any(result.alias_info is not None for result in schema.returns)
        self.between_ranks = packet.startswith("_c10d_functional::")
        """Whether the result is what other processes sent, too."""
        self.pointwise = torch.Tag.pointwise in tags
        self.random = torch.Tag.nondeterministic_seeded in tags
        self.quantizes = packet in _QUANTIZING
        self.joins = packet in ("aten::cat", "aten::stack")
        self.preserving = packet in _PRESERVING
        self.by_strides = packet in _BY_STRIDES
        self.empty = packet in _EMPTY
        self.fill: Any = _FILLS.get(packet)
        if isinstance(self.fill, str):
            names = [argument.name for argument in schema.arguments]
            self.fill = (names.index(self.fill), self.fill) if self.fill in names else None
        self.finite = _FINITE.get(short)
        self.comparison = short if short in _COMPARISONS and packet.startswith("aten::") else None
        self.choice = _CHOICES.get(self.name)
        self.counts = self.name in _COUNTING
        self.checks = packet == "aten::_is_all_true"  # only torch._check asks this
        answers = (self.fill, self.finite, self.comparison, self.choice)
        self.informative = self.checks or self.counts or any(answer is not None for answer in answers)
        """Whether something can be known of the results although the first argument is data."""
        self.passive = not (self.aliases or self.informative or self.preserving)
        """Whether nothing is known of the results where the first argument is data."""
        self.data_dependent: DataDependentOp | None = data_dependent_ops().get(self.name)
        self.dynamic = self.data_dependent is not None or torch.Tag.dynamic_output_shape in tags
        self.data_dependent = self.data_dependent or sparse_ops().get(self.name)

    def targets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for position, name in self.written:
            value = args[position] if position < len(args) else kwargs.get(name)
            if isinstance(value, torch.Tensor):
                tensors.append(value)
            elif isinstance(value, (list, tuple)):
                tensors += [item for item in value if isinstance(item, torch.Tensor)]
        return tensors

    def filled_with(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The number that a call fills its result with."""
        if not isinstance(self.fill, tuple):
            return self.fill
        position, name = self.fill
        return args[position] if position < len(args) else kwargs[name]

    def choices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | None, int]:
        """The dimension along which a call chooses indices (None: one index per row), and among how many."""
        assert self.choice is not None
        _, position, several = self.choice
        tensor = args[0]
        missing = None if self.name in _FLATTENING else -1
        dim = kwargs.get("dim", args[position] if position is not None and position < len(args) else missing)
        if dim is None:
            return None, tensor.numel()
        return dim if several else None, tensor.shape[dim] if tensor.dim() else 1


@cache
def traits_of(func: Any) -> OpTraits:
    return OpTraits(func)
