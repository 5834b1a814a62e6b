"""Runs ops where values matter: keeps known values up to date, answers `.item()`, and computes what `meta` cannot.

What had to be taken for granted is in `assumptions` once a decision relied on it, what a reader should know in
`notes`; both are shown.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from memsize.constants.arguments import assumed_by, blank, mixes_devices, moved, on_host, real_arguments, sampled_share
from memsize.constants.assumptions import (
    APART,
    CHECKED,
    COPIED,
    EQUAL,
    FINITE,
    KEEPS,
    MIXED,
    NUMBER,
    PADDED,
    RANDOM,
    assumed_of,
    spread_evenly,
    with_infinity,
    with_number,
)
from memsize.constants.known import (
    ASSUMED_ELEMENTS,
    Cell,
    cell_of,
    is_constant,
    is_small,
    known,
    remember,
    share_of,
    uniform,
)
from memsize.constants.opinfo import OpInfo
from memsize.constants.selection import selections
from memsize.internals.meta_memo import MetaMemo
from memsize.internals.pytree import map_tensors, tensors_in

_aten = torch.ops.aten
_ITEM = _aten._local_scalar_dense.default
_TO = _aten._to_copy.default
_COMPARED = (_aten.equal.default, _aten.allclose.default)
_DRAW = _aten.rand.default
_PACK = _aten._pack_padded_sequence.default
_LEFT_ALIGNED = _aten._nested_tensor_from_mask_left_aligned.default
_SCATTER = _aten.scatter_.value
_UNSCALE = _aten._amp_foreach_non_finite_check_and_unscale_.default
_MEMO = MetaMemo()
_HOST_LIMIT = 2**31
"""Bytes of stand-in arguments that an op without a meta kernel may take on the CPU."""


class UnknownValueError(RuntimeError):
    """The model's control flow or an output's shape depends on a value that only real data has."""


class Values:
    """The known values of one run. Everything it learns is on the tensors themselves."""

    def __init__(self) -> None:
        self.assumptions: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        self._ops: dict[Any, OpInfo] = {}
        self._selections = selections()

    def carry(self, source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """`result` is `source` under another name: what is known of one is known of the other."""
        cell = cell_of(source)
        return result if cell is None else remember(result, known(source), cell)

    def rely(self, assumption: str | None) -> None:
        """A decision of the model's rests on `assumption`."""
        if assumption is not None:
            self.assumptions[assumption] = None

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op's result on `meta`, by PyTorch's own kernel or, where it has none, by one run on the CPU."""
        special = _SPECIAL.get(func)
        result = NotImplemented if special is None else special(self, *args, **kwargs)
        if result is not NotImplemented:
            return result
        op = self._ops.get(func) or self._learn(func)
        if op.name in self._selections and args[0].is_meta:
            result = self._selections[op.name](self.rely, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if op.quantizes:
            return self._on_cpu(func, op, args, kwargs)
        try:
            return _MEMO.run(func, args, kwargs)
        except NotImplementedError:
            return self._on_cpu(func, op, args, kwargs)
        except RuntimeError as error:
            if op.dynamic:
                return self._on_cpu(func, op, args, kwargs)
            if not mixes_devices(args, kwargs):
                raise
            return self._with_host_tensors_moved(func, args, kwargs, error)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Keep the values of `result` beside it when they follow from known ones."""
        op = self._ops.get(func) or self._learn(func)
        if op.mutates:
            self._follow_write(func, op, args, kwargs)
            return
        if op.empty:
            _follow_empty(result)
            return
        lead = args[0] if args else None
        if isinstance(lead, list) and lead:
            lead = lead[0]
        if isinstance(lead, torch.Tensor) and known(lead) is None:  # as nearly always
            self._follow_unknown(op, args, kwargs, result)
        else:
            self._follow_known(func, op, args, kwargs, result)

    def _learn(self, func: Any) -> OpInfo:
        info = self._ops[func] = OpInfo(func)
        return info

    # -- known values -------------------------------------------------------------------------------------------------

    def _follow_known(self, func: Any, op: OpInfo, args: Any, kwargs: Any, result: Any) -> None:
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        if not isinstance(first, torch.Tensor) or not first.is_meta:
            return
        real = real_arguments(args, kwargs)
        if real is None:
            self._follow_unknown(op, args, kwargs, result)
            return
        cell = self._cell(func, op, args, kwargs)
        computed = self._computed(func, op, real, first, cell)
        values = () if computed is None else tensors_in(computed)
        if op.aliases and cell.uniform and is_small(first):
            # Few enough to be told apart, should some of them be written.
            cell, values = cell.part(), (value.clone(memory_format=torch.contiguous_format) for value in values)
        for tensor, value in zip(tensors_in(result), values, strict=False):
            if tensor.is_meta and tensor.shape == value.shape:
                remember(tensor, value, cell)
        if computed is not None:
            return
        if op.aliases and first.dtype is torch.bool and first.numel() > args[0].numel():
            _expand_share(args[0], first, cell)
        elif op.aliases:
            _share_cells(args[0], result)
        elif op.pointwise and cell.assumed and _is_whole(first):
            cell.share = sampled_share(func, real, tuple(first.shape))
            remember(first, None, cell)

    def _cell(self, func: Any, op: OpInfo, args: Any, kwargs: Any) -> Cell:
        """That of the memory which the result shares, or a new one that assumes what the arguments do."""
        lead = args[0] if args else None
        shared = cell_of(lead) if op.aliases and isinstance(lead, torch.Tensor) else None
        if shared is not None:
            return shared
        return Cell(assumed_by(args, kwargs) or (RANDOM if op.random and not _is_single(func, args) else None))

    def _computed(self, func: Any, op: OpInfo, real: Any, first: torch.Tensor, cell: Cell) -> Any:
        """The op's result on real values, None where that isn't worth having or can't be had."""
        if _is_single(func, real[0]):
            return _middle(list(first.shape), first.dtype)
        if op.placed_by_strides and not real[0][0].is_contiguous():
            return None
        values = list(tensors_in(real))
        wanted = is_small(first) or (bool(cell.assumed) and first.numel() <= ASSUMED_ELEMENTS)
        with suppress(Exception):  # whatever the CPU's kernel can't do with these values, they are unknown then
            if wanted and all(value.numel() <= ASSUMED_ELEMENTS for value in values):
                return func(*real[0], **real[1])
            if all(map(is_constant, values)):
                cell.uniform = True
                return _computed_once(func, op, real, first)
        return None

    def _follow_unknown(self, op: OpInfo, args: Any, kwargs: Any, result: Any) -> None:
        """What can be known of a result although an argument is not."""
        if op.aliases:
            _share_cells(args[0], result)
        elif op.informative or op.preserving:
            share = share_of(args[0]) if isinstance(args[0], torch.Tensor) else None
            if share is not None:
                _pass_share_on(op, args, result, share)
            elif op.informative:
                self._inform(op, args, kwargs, result)

    def _inform(self, op: OpInfo, args: Any, kwargs: Any, result: Any) -> None:
        if op.choice is not None:
            indices = result[op.choice[0]] if isinstance(result, (tuple, list)) else result
            spread_evenly(indices, *op.choices(args, kwargs))
        elif not isinstance(result, torch.Tensor) or not result.is_meta:
            return
        elif op.checks:
            uniform(result, True, CHECKED)
        elif op.counts and args[0].dtype is torch.bool and result.numel():
            # As many as a selection by the same truth values takes.
            uniform(result, args[0].numel() // result.numel(), KEEPS)
        elif op.fill is not None:
            number = op.filled_with(args, kwargs)
            dense = torch.full(result.shape, number, dtype=result.dtype, device="cpu") if is_small(result) else None
            uniform(result, number) if dense is None else remember(result, dense)
        elif op.finite is not None:
            uniform(result, op.finite, FINITE)
        elif op.comparison is not None and args[0].is_floating_point():
            same = len(args) == 2 and args[1] is args[0]
            answer = op.comparison in ("eq", "le", "ge") if same else with_infinity(op.comparison, args[1])
            exact = with_number(op.comparison, args[1])
            if answer is not None:
                uniform(result, answer, FINITE)
            elif exact is not None:
                uniform(result, exact, APART)

    def _follow_write(self, func: Any, op: OpInfo, args: Any, kwargs: Any) -> None:
        """A write of known values into known ones is made on both; any other makes what is written unknown."""
        if func is _UNSCALE:
            # GradScaler's check writes only where it meets an infinity.
            for cell in filter(None, map(cell_of, args[1:2])):
                cell.assumed = FINITE
            return
        if func is _SCATTER and _follow_scatter(*args):
            return
        targets = op.targets(args, kwargs)
        cells = [cell for cell in map(cell_of, targets) if cell is not None]
        if not cells:
            return
        real = real_arguments(args, kwargs)
        if real is not None and len(cells) == len(targets) and not any(cell.uniform for cell in cells):
            assumed = assumed_by(args, kwargs) or (RANDOM if op.random else None)
            with suppress(Exception):  # the values end here; the op itself has been answered
                func(*real[0], **real[1])
                for cell in cells:
                    cell.assumed = cell.assumed or assumed
                    cell.changed()
                return
        for cell in cells:
            cell.forget()

    # -- questions about values ---------------------------------------------------------------------------------------

    def _item(self, tensor: torch.Tensor) -> Any:
        value = known(tensor)
        if value is not None:
            self.rely(assumed_of([cell_of(tensor)]) if tensor.is_meta else None)
            return value.item()
        if tensor.is_floating_point():
            self.rely(NUMBER)
            return 1.0
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise UnknownValueError(
            f"the model reads a value that depends on the data out of a {dtype} tensor (bool(), int() or .item())"
        )

    def _compare(self, a: torch.Tensor, b: torch.Tensor, *options: Any, **more: Any) -> bool:
        left, right = known(a), known(b)
        if a.shape != b.shape and not (options or more):
            return False
        if left is None or right is None:
            is_check = a.dim() == 0 and a.dtype is torch.bool  # PyTorch itself asks whether something is wrong (istft)
            self.rely(CHECKED if is_check else EQUAL)
            return not is_check
        self.rely(assumed_by((a, b), {}))
        return torch.allclose(left, right, *options, **more) if options or more else torch.equal(left, right)

    def _draw(self, size: list[int], **options: Any) -> Any:
        """One random number alone is a decision (skip this layer?): it falls in the middle of its range."""
        if not _is_single(_DRAW, (size,)):
            return NotImplemented
        device = options.get("device")
        middle = _middle(size, options.get("dtype") or torch.get_default_dtype())
        return moved(middle) if device is not None and device.type == "meta" else middle

    def _to(self, tensor: torch.Tensor, **options: Any) -> Any:
        """A copy to the CPU, where numbers are real."""
        device = options.get("device")
        if not tensor.is_meta or device is None or device.type != "cpu":
            return NotImplemented
        value = known(tensor)
        if value is None:
            self.rely(COPIED)
            value = torch.full(tensor.shape, _plausible(tensor.dtype), dtype=tensor.dtype, device="cpu")
        else:
            self.rely(assumed_of([cell_of(tensor)]))
        dtype = options.get("dtype")
        return value.to(dtype) if dtype is not None and dtype is not value.dtype else value.clone()

    def _pack(self, data: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
        """Lengths are wanted on the CPU; where the caller put them was ours to say."""
        if not lengths.is_meta:
            return NotImplemented
        return _PACK(data, self._to(lengths, device=torch.device("cpu")), batch_first)

    def _left_aligned(self, tensor: torch.Tensor, _mask: torch.Tensor) -> Any:
        """Whether a padded batch can become a nested tensor, which nobody here follows."""
        if not tensor.is_meta:
            return NotImplemented
        self.rely(PADDED)
        return False

    # -- what meta cannot do ------------------------------------------------------------------------------------------

    def _on_cpu(self, func: Any, op: OpInfo, args: Any, kwargs: Any) -> Any:
        tensors = list(tensors_in((args, kwargs)))
        self._check_possible(func, op, tensors)
        if sum(t.numel() * t.element_size() for t in tensors if t.is_meta) > _HOST_LIMIT:
            raise NotImplementedError(
                f"{func} has no meta kernel, and its arguments are too large to run it on the CPU instead"
            ) from None
        exact = all(known(tensor) is not None and not tensor.is_quantized for tensor in tensors)
        result = func(*on_host(args), **on_host(kwargs))
        if not (exact and op.dynamic):
            self.notes[
                f"{func._overloadpacket} was run on the CPU: PyTorch cannot tell its output without computing it"
            ] = None
        return map_tensors(moved if exact else blank, result)

    def _check_possible(self, func: Any, op: OpInfo, tensors: list[torch.Tensor]) -> None:
        decides = [t for t in tensors if op.dynamic and (len(tensors) == 1 or not t.is_floating_point())]
        if any(known(t) is None for t in decides):
            raise UnknownValueError(f"the output shape of {func._overloadpacket} depends on the data")
        self.rely(assumed_of([cell_of(t) for t in decides if t.is_meta]))

    def _with_host_tensors_moved(self, func: Any, args: Any, kwargs: Any, error: RuntimeError) -> Any:
        there = map_tensors(lambda tensor: tensor if tensor.is_meta else moved(tensor), (args, kwargs))
        try:
            result = func(*there[0], **there[1])
        except RuntimeError:
            raise error from None
        self.notes[MIXED] = None
        return result


_SPECIAL: dict[Any, Callable[..., Any]] = {
    _ITEM: Values._item,
    _TO: Values._to,
    _DRAW: Values._draw,
    _PACK: Values._pack,
    _LEFT_ALIGNED: Values._left_aligned,
    **dict.fromkeys(_COMPARED, Values._compare),
}
"""Ops that ask for values, and what answers instead of PyTorch; NotImplemented leaves it to PyTorch after all."""


def _follow_empty(result: torch.Tensor) -> None:
    """Memory that nothing was written to reads as zeros: what a model makes of it must not change between runs."""
    if result.is_meta and result.numel() and is_small(result):
        remember(result, torch.zeros(result.shape, dtype=result.dtype, device="cpu"))


def _follow_scatter(target: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> bool:
    """A number written at known places into a tensor that was one number everywhere (a router's `one_hot`). Of what is
    too large to keep, the share of the places is known. Returns whether there was anything to follow.
    """
    cell, base, places = cell_of(target), known(target), known(index)
    if cell is None or not cell.uniform or base is None or places is None:
        return False
    assumed = assumed_by((index,), {}) or cell.assumed
    cell.forget()  # views from before are of another time
    if is_small(target) or (assumed and target.numel() <= ASSUMED_ELEMENTS):
        remember(target, base.clone(memory_format=torch.contiguous_format).scatter_(dim, places, value), Cell(assumed))
    elif assumed and value and not _first(base):
        remember(target, None, Cell(assumed, share=places.numel() / target.numel()))
    return True


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _share_cells(source: Any, result: Any) -> None:
    """Views whose values are not known still share the memory of `source`."""
    cell = cell_of(source) if isinstance(source, torch.Tensor) and source.is_meta else None
    if cell is not None:
        for tensor in tensors_in(result):
            if tensor.is_meta:
                remember(tensor, None, cell)


def _expand_share(source: torch.Tensor, result: torch.Tensor, cell: Cell) -> None:
    """Known truth values that are repeated until they are too many to keep: the same part of them stays true."""
    value = known(source)
    assert value is not None  # asked only of what is known
    part = cell.part()
    part.share = int(value.count_nonzero()) / max(value.numel(), 1)
    remember(result, None, part)


def _pass_share_on(op: OpInfo, args: Any, result: torch.Tensor, share: float) -> None:
    """Copies, counts and comparisons with 0 of truth values of which only their share is known."""
    cell = cell_of(args[0])
    assumed = None if cell is None else cell.assumed
    if op.counts:
        uniform(result, round(share * args[0].numel() / max(result.numel(), 1)), assumed)
    elif op.preserving or (op.comparison in ("ne", "gt") and len(args) == 2 and args[1] == 0):
        remember(result, None, Cell(assumed, share=share))


def _computed_once(func: Any, op: OpInfo, real: Any, first: torch.Tensor) -> torch.Tensor | None:
    """The result of an op all of whose arguments are the same everywhere, where it is too."""
    if op.fill is not None:
        value = torch.full((), op.filled_with(*real), dtype=first.dtype, device="cpu")
    elif op.pointwise:
        scalars = map_tensors(_first, real)
        value = func(*scalars[0], **scalars[1])
    elif op.preserving or (op.aliases and real[0][0].dtype is first.dtype):
        value = _first(real[0][0]).to(first.dtype)
    elif op.joins and len({_first(part).item() for part in real[0][0]}) == 1:
        value = _first(real[0][0][0]).to(first.dtype)
    else:
        return None
    return value.expand(first.shape)


def _is_single(func: Any, args: Any) -> bool:
    """Whether a call draws one random number alone."""
    return func is _DRAW and all(size == 1 for size in args[0])


def _middle(size: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(size, 0.5, dtype=dtype, device="cpu")


def _first(value: torch.Tensor) -> torch.Tensor:
    return value.as_strided((), (), value.storage_offset())


def _plausible(dtype: torch.dtype) -> Any:
    return 1.0 if dtype.is_floating_point or dtype.is_complex else dtype is torch.bool
