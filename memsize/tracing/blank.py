"""Blank tensors: `meta` twins of real ones, with the same shape, strides, dtype, ties and flags, and no memory.

Values that models look at stay known beside them (`memsize.tracing.known`): those of small integer and boolean tensors,
of small floating buffers and inputs, and of parameters that are one number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from memsize.tracing.known import Cell, cell_of, is_small, known, remember

_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""Sparse layouts, and the methods that give their parts."""
_PLAIN_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer)


class Blanks:
    """One copying pass over tensors. The memo is `copy.deepcopy`'s, so that each tensor has one twin however reached.

    `copy_attribute` copies what hangs on a tensor as an attribute.
    """

    def __init__(self, memo: dict[int, Any], copy_attribute: Callable[[Any], Any]) -> None:
        self.memo = memo
        self._copy_attribute = copy_attribute
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._values: dict[int, tuple[torch.UntypedStorage, Cell]] = {}
        self._alive: list[Any] = []
        """What these tables know by its address."""

    def tensor(self, original: torch.Tensor, looked_at: bool = True) -> torch.Tensor:
        """The one twin of `original`. `looked_at` is False where nobody reads its values, though they are small."""
        if id(original) not in self.memo:
            twin = self._new(original, looked_at)
            self.memo[id(original)] = twin
            self._alive.append(original)
        found: torch.Tensor = self.memo[id(original)]
        return found

    def data(self, original: torch.Tensor, looked_at: bool = True) -> torch.Tensor:
        """A plain tensor in the place of `original`: no parameter, no leaf that requires a gradient."""
        if hasattr(original, "__tensor_flatten__"):
            return self._wrapper(original)
        if original.layout in _SPARSE:
            return self._sparse(original)
        if original.layout is not torch.strided or original.is_quantized or original.is_nested:
            return self._opaque(original)
        twin = self._strided(original)
        if original.is_meta:
            cell = cell_of(original)
            value = known(original)
            return twin if cell is None or value is None else remember(twin, value.clone(), Cell(cell.assumed))
        has_values = original.untyped_storage().device.type != "meta"  # a FakeTensor only seems to have some
        return self._remembered(twin, original) if looked_at and has_values and is_small(original) else twin

    def _new(self, original: torch.Tensor, looked_at: bool) -> torch.Tensor:
        if is_lazy(original):
            kind: Any = UninitializedParameter if isinstance(original, nn.Parameter) else UninitializedBuffer
            lazy: torch.Tensor = kind(requires_grad=original.requires_grad, device="meta", dtype=original.dtype)
            return lazy
        single = original.numel() == 1 or not original.is_floating_point()
        is_parameter = isinstance(original, nn.Parameter)
        twin = self.data(original, looked_at and (single or not is_parameter))
        if is_parameter and not isinstance(twin, nn.Parameter):
            twin = self._parameter(original, twin)
        elif original.requires_grad:
            twin.requires_grad_()
        return twin

    def _parameter(self, original: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """A parameter of the same class, since a library may look for its own (bitsandbytes), with its attributes."""
        kind = type(original)
        if kind in _PLAIN_TYPES:
            twin: torch.Tensor = nn.Parameter(data, requires_grad=original.requires_grad)
        else:
            twin = torch.Tensor._make_subclass(kind, data, original.requires_grad)
        attributes = {name: self._copy_attribute(value) for name, value in vars(original).items()}
        twin.__dict__.update(attributes | data.__dict__)
        return twin

    def _wrapper(self, original: torch.Tensor) -> torch.Tensor:
        """A wrapper subclass (torchao, DTensor): its inner tensors on `meta`, put together again by its own class."""
        names, context = original.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: self.tensor(getattr(original, name)) for name in names}
        rebuilt: torch.Tensor = type(original).__tensor_unflatten__(  # type: ignore[attr-defined]
            inner, context, original.shape, original.stride()
        )
        return rebuilt

    def _sparse(self, original: torch.Tensor) -> torch.Tensor:
        """Moved as a whole it would lose its elements: on `meta` PyTorch forgets how many there are."""
        names = _SPARSE[original.layout]
        make: Any = torch.sparse_coo_tensor if original.layout is torch.sparse_coo else torch.sparse_compressed_tensor
        parts = [self.data(getattr(original, name)(), False) for name in names]
        options = {} if original.layout is torch.sparse_coo else {"layout": original.layout}
        twin: torch.Tensor = make(*parts, original.shape, device="meta", check_invariants=False, **options)
        return twin._coalesced_(original.is_coalesced()) if original.layout is torch.sparse_coo else twin

    def _opaque(self, original: torch.Tensor) -> torch.Tensor:
        """Quantized, nested and MKL-DNN's tensors; those that `meta` cannot have are shared with the original."""
        try:
            return original.detach().to("meta")
        except (NotImplementedError, RuntimeError):
            return original.detach()

    def _strided(self, original: torch.Tensor) -> torch.Tensor:
        storage = original.untyped_storage()
        base = self._storages.get(storage._cdata)
        if base is None:
            base = torch.UntypedStorage(storage.nbytes(), device="meta")
            self._storages[storage._cdata] = base
            self._alive.append(storage)
        # Not as_strided: the twin of a plain tensor must not be a view of anything in autograd's eyes.
        empty = torch.empty(0, dtype=original.dtype, device="meta")
        return empty.set_(base, original.storage_offset(), original.shape, original.stride())

    def _remembered(self, twin: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
        """Views of one small block keep sharing their values; of a large one each keeps a copy of its own."""
        storage = original.untyped_storage()
        if storage.nbytes() > 4 * original.numel() * original.element_size() + 1024:
            return remember(twin, original.detach().cpu().clone())
        if storage._cdata not in self._values:
            self._values[storage._cdata] = torch.UntypedStorage(storage.nbytes()).copy_(storage), Cell()
        block, cell = self._values[storage._cdata]
        empty = torch.empty(0, dtype=original.dtype, device="cpu")
        value = empty.set_(block, original.storage_offset(), original.shape, original.stride())
        return remember(twin, value, cell)
