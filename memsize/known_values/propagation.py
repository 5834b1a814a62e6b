"""Constant propagation: the constants of an op's results, from those of its arguments.

Called after each op, when its result on `meta` exists. Where every argument is a constant, the op also runs on the real
values. Where an argument is data, some results are known all the same: filled tensors, ``isnan``, comparisons with
infinity, and the indices of a choice.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from memsize.known_values.data_dependent import (
    ALL_FINITE,
    ALL_SELECTED,
    CHECKS_PASS,
    FIXED_DRAW,
    ITEM_IS_ONE,
    compared_with_number,
    compared_with_zero,
    first_assumption,
    spread_choices,
)
from memsize.known_values.op_traits import OpTraits
from memsize.known_values.toeplitz import diagonals_of, follow, write
from memsize.known_values.values import (
    MAX_ASSUMED_ELEMENTS,
    MAX_INTEGER_ELEMENTS,
    ConstantState,
    constant_of,
    entry_of,
    has_single_value,
    is_small,
    is_uniform,
    set_constant,
    set_filled,
    set_uniform,
    set_unknown,
    state_of,
    true_share_of,
)
from memsize.torch_internals.meta import is_meta
from memsize.torch_internals.pytree import map_tensors, tensors_in
from memsize.torch_internals.sparse_tensors import PARTS

_aten = torch.ops.aten
_COPY = _aten.copy_.default
_DRAW = _aten.rand.default
_SCATTER = _aten.scatter_.value
_UNSCALE = _aten._amp_foreach_non_finite_check_and_unscale_.default


def propagate(op: OpTraits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Keep the constants of `result`, or of the tensors that the op wrote to, where they follow from the arguments."""
    if op.between_ranks:
        return
    if op.mutates:
        _propagate_write(op, func, args, kwargs)
        return
    if op.empty:
        # Uninitialized memory is read as zeros, so that every run gives the same result.
        if is_meta(result) and result.numel() and is_small(result):
            set_constant(result, torch.zeros(result.shape, dtype=result.dtype, device="cpu"))
        return
    lead = args[0] if args else None
    if isinstance(lead, list) and lead:
        lead = lead[0]
    if not isinstance(lead, torch.Tensor):
        _propagate_constants(op, func, args, kwargs, result)
    elif lead.layout in PARTS:
        return  # values are kept for strided tensors alone
    elif is_meta(lead) and entry_of(lead) is None:  # as nearly always
        if op.informative:
            _inform(op, args, kwargs, result)
    elif constant_of(lead) is None:
        state = None if diagonals_of(lead) is None else _state_for(op, func, args, kwargs)
        if state is not None and follow(op, func, args, kwargs, result, state):
            return
        if op.pointwise or not op.passive:
            _propagate_data(op, args, kwargs, result)
    else:
        _propagate_constants(op, func, args, kwargs, result)


def carry_over(source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return `result`, an alias of `source` with the same values (``detach``), with the constant of `source`."""
    entry = entry_of(source)
    return result if entry is None else set_constant(result, *entry)


def assumption_of(args: Any, kwargs: Any) -> str | None:
    """The assumption under which the arguments are known, if any."""
    states = [state_of(item) for item in args if isinstance(item, torch.Tensor)]
    # Most lists are sizes.
    nested = [item for item in args if isinstance(item, (list, tuple)) and item and type(item[0]) is not int]
    if nested or kwargs:
        states += [state_of(tensor) for tensor in tensors_in((nested, kwargs))]
    return first_assumption(states)


def draws_one_number(func: Any, args: Any) -> bool:
    """Whether a call draws a single random number."""
    return func is _DRAW and all(size == 1 for size in args[0])


def middle_of_range(size: list[int], dtype: torch.dtype) -> torch.Tensor:
    """The fixed draw: 0.5, the middle of the range of ``rand``."""
    return torch.full(size, 0.5, dtype=dtype, device="cpu")


# -- every argument is a constant -------------------------------------------------------------------------------------


def _propagate_constants(op: OpTraits, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Run the op on its arguments' constants too, and keep the results, or else diagonals, or a share of True.

    Where some argument is data, only diagonals may follow, or the facts of `_propagate_data`.
    """
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(first, torch.Tensor) or not is_meta(first):
        return
    real = _real_arguments(args, kwargs)
    state = _state_for(op, func, args, kwargs)
    if real is None:
        if not (op.pointwise and follow(op, func, args, kwargs, result, state)):
            _propagate_data(op, args, kwargs, result)
        return
    computed = _computed(op, func, real, first, state)
    if computed is not None:
        values = tensors_in(computed)
        if op.aliases and state.uniform and is_small(first):
            # Few enough to be stored one by one, should some of them be written to.
            state, values = state.for_view(), (value.clone(memory_format=torch.contiguous_format) for value in values)
        for tensor, value in zip(tensors_in(result), values, strict=False):
            if is_meta(tensor) and tensor.shape == value.shape:
                set_constant(tensor, value, state)
    elif not follow(op, func, args, kwargs, result, ConstantState(state.assumption)):
        if op.aliases:
            source, mask = args[0], constant_of(args[0])
            if first.dtype is torch.bool and first.numel() > source.numel() and mask is not None:
                # A mask, repeated until it is too large to keep: the same part of it stays True.
                view = state.for_view()
                view.true_share = int(mask.count_nonzero()) / max(mask.numel(), 1)
                set_constant(first, None, view)
            elif (seen := _view_of_constant(func, real)) is not None:
                view = state.for_view()
                view.uniform = not _is_dense(seen)
                set_constant(first, seen if view.uniform else seen.clone(), view)
            else:
                _share_state(source, result)
        elif op.pointwise and state.assumption and not (first.is_floating_point() or first.is_complex()):
            state.true_share = _sampled_share(func, real, tuple(first.shape))
            set_constant(first, None, state)


def _real_arguments(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    device = kwargs.get("device")
    if isinstance(device, torch.device) and device.type == "meta":
        kwargs = kwargs | {"device": torch.device("cpu")}
    flat = _real_flat(args, kwargs)
    if flat is not NotImplemented:
        return flat  # type: ignore[no-any-return]
    if any(constant_of(tensor) is None for tensor in tensors_in((args, kwargs))):
        return None
    swap: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: constant_of(tensor)  # type: ignore[assignment,return-value]  # noqa: E731
    return map_tensors(swap, args), map_tensors(swap, kwargs)


def _real_flat(args: Any, kwargs: Any) -> Any:
    """`_real_arguments` for the common case that no argument is a sequence; NotImplemented otherwise.

    It runs at every op: looking for tensors inside of arguments takes several times as long.
    """
    real = []
    for item in (*args, *kwargs.values()) if kwargs else args:
        value = item
        if isinstance(item, torch.Tensor):
            value = constant_of(item)
            if value is None:
                return None
        elif isinstance(item, (list, tuple, dict)):
            return NotImplemented
        real.append(value)
    count = len(args)
    return tuple(real[:count]), dict(zip(kwargs, real[count:], strict=True)) if kwargs else kwargs


def _state_for(op: OpTraits, func: Any, args: Any, kwargs: Any) -> ConstantState:
    lead = args[0] if args else None
    shared = state_of(lead) if op.aliases and isinstance(lead, torch.Tensor) else None
    if shared is not None:
        return shared
    drawn = FIXED_DRAW if op.random and not draws_one_number(func, args) else None
    return ConstantState(assumption_of(args, kwargs) or drawn)


def _computed(op: OpTraits, func: Any, real: Any, first: torch.Tensor, state: ConstantState) -> Any:
    """The op's result on real values; None where it is not worth keeping or cannot be computed."""
    if draws_one_number(func, real[0]):
        return middle_of_range(list(first.shape), first.dtype)
    if op.by_strides and not real[0][0].is_contiguous():
        return None  # the strides in the arguments are those of the meta tensor, not of its constant
    values = list(tensors_in(real))
    wanted = is_small(first) or (bool(state.assumption) and first.numel() <= MAX_ASSUMED_ELEMENTS)
    with suppress(Exception):  # the CPU's kernel may refuse these values: they are unknown then
        if wanted and (op.aliases or all(value.numel() <= MAX_ASSUMED_ELEMENTS for value in values)):
            return func(*real[0], **real[1])
        if op.fill is not None or all(map(has_single_value, values[:1] if op.preserving else values)):
            state.uniform = True
            return _computed_once(op, func, real, first)
        if (op.pointwise or op.preserving) and not op.random:
            return _computed_where_different(func, real, first, state)
    return None


def _view_of_constant(func: Any, real: Any) -> torch.Tensor | None:
    """A view of a constant that takes no memory of its own, such as a padding mask, expanded to all pairs of tokens."""
    with suppress(Exception):
        view = func(*real[0], **real[1])
        if (
            isinstance(view, torch.Tensor)
            and view.untyped_storage().data_ptr() == real[0][0].untyped_storage().data_ptr()
        ):
            return view
    return None


def _is_dense(value: torch.Tensor) -> bool:
    """Whether no number of a constant repeats, and there are few enough to keep those that are written to it."""
    return value.numel() <= MAX_INTEGER_ELEMENTS and all(
        stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1
    )


def _computed_where_different(func: Any, real: Any, first: torch.Tensor, state: ConstantState) -> torch.Tensor | None:
    """An elementwise op on constants that repeat along the same dimensions, computed once along those; None where they
    do not, or too many numbers differ.
    """

    def expanded(value: torch.Tensor) -> torch.Tensor:
        if not value.dim():
            return value  # a scalar takes the dtype of the others
        return (_first_element(value) if has_single_value(value) else value).expand(first.shape)

    args, kwargs = map_tensors(expanded, real)
    strides = zip(*(value.stride() for value in tensors_in((args, kwargs)) if value.dim()), strict=True)
    part = tuple(slice(None) if any(stride) else slice(1) for stride in strides)
    if first[part].numel() >= min(first.numel(), MAX_INTEGER_ELEMENTS):
        return None
    args, kwargs = map_tensors(lambda value: value[part] if value.dim() else value, (args, kwargs))
    state.uniform = True
    computed: torch.Tensor = func(*args, **kwargs)
    return computed.expand(first.shape)


def _computed_once(op: OpTraits, func: Any, real: Any, first: torch.Tensor) -> torch.Tensor | None:
    if op.fill is not None:
        value = torch.full((), op.filled_with(*real), dtype=first.dtype, device="cpu")
    elif op.pointwise:
        scalars = map_tensors(_first_element, real)
        value = func(*scalars[0], **scalars[1])
    elif op.preserving or (op.aliases and real[0][0].dtype is first.dtype):
        value = _first_element(real[0][0]).to(first.dtype)
    elif op.joins and len({_first_element(part).item() for part in real[0][0]}) == 1:
        value = _first_element(real[0][0][0]).to(first.dtype)
    else:
        return None
    return value.expand(first.shape)


def _sampled_share(func: Any, real: tuple[Any, Any], shape: tuple[int, ...]) -> float:
    """The share of True in an elementwise op's result, from its first rows: evenly spread ones are all alike."""
    rows = max(1, min(shape[0], MAX_ASSUMED_ELEMENTS // max(math.prod(shape[1:]), 1))) if shape else 1

    def first_rows(value: torch.Tensor) -> torch.Tensor:
        return value[:rows] if value.dim() == len(shape) and value.shape[0] == shape[0] else value

    sample: torch.Tensor = func(*map_tensors(first_rows, real[0]), **real[1])
    return int(sample.count_nonzero()) / max(sample.numel(), 1)


# -- some argument is data --------------------------------------------------------------------------------------------


def _propagate_data(op: OpTraits, args: Any, kwargs: Any, result: Any) -> None:
    if op.aliases:
        _share_state(args[0], result)
    elif op.informative or op.preserving:
        share = true_share_of(args[0]) if isinstance(args[0], torch.Tensor) else None
        if share is not None:
            # That of a large mask passes on to its copies, counts and comparisons with 0.
            state = state_of(args[0])
            assumption = None if state is None else state.assumption
            if op.counts:
                set_uniform(result, round(share * args[0].numel() / max(result.numel(), 1)), assumption)
            elif op.preserving or (op.comparison in ("ne", "gt") and len(args) == 2 and args[1] == 0):
                set_constant(result, None, ConstantState(assumption, true_share=share))
        elif op.informative:
            _inform(op, args, kwargs, result)
    if (op.pointwise or op.preserving) and (words := _read_as(args)) and isinstance(result, torch.Tensor):
        if op.comparison is not None and isinstance(args[1], (int, float)):
            set_uniform(result, getattr(operator, op.comparison)(1, args[1]), words)
        else:
            set_unknown(result, words)


def _read_as(args: Any) -> str | None:
    words = None
    for tensor in args:
        if isinstance(tensor, torch.Tensor) and constant_of(tensor) is None:
            state = state_of(tensor)
            if state is None or state.read_as is None:
                return None
            words = state.read_as
    return words


def _inform(op: OpTraits, args: Any, kwargs: Any, result: Any) -> None:
    if op.choice is not None:
        indices = result[op.choice[0]] if isinstance(result, (tuple, list)) else result
        spread_choices(indices, *op.choices(args, kwargs))
    elif not isinstance(result, torch.Tensor) or not is_meta(result):
        return
    elif op.checks:
        set_uniform(result, True, CHECKS_PASS)
    elif op.counts and args[0].dtype is torch.bool and result.numel():
        # As many as a selection by the same mask takes.
        set_uniform(result, args[0].numel() // result.numel(), ALL_SELECTED)
    elif op.fill is not None:
        set_filled(result, op.filled_with(args, kwargs))
    elif op.finite is not None:
        set_uniform(result, op.finite, ALL_FINITE)
    elif op.comparison is not None and args[0].is_floating_point():
        answer = compared_with_number(op.comparison, args[1])
        if len(args) == 2 and args[1] is args[0]:
            answer = op.comparison in ("eq", "le", "ge"), ALL_FINITE
        if answer is not None:
            set_uniform(result, *answer)


def tell_sign(op: OpTraits, args: Any, result: torch.Tensor) -> None:
    """Let a scalar that depends on data be positive, in scripts: some read a negative norm as not finite."""
    sign = compared_with_zero(str(op.comparison), args[1])
    if sign is not None and result.numel() == 1 and is_meta(result) and constant_of(result) is None:
        set_uniform(result, sign, ITEM_IS_ONE)


def _share_state(source: Any, result: Any) -> None:
    """Views of data share the state of `source`: a write through one of them reaches the constants of the others."""
    state = state_of(source) if isinstance(source, torch.Tensor) and is_meta(source) else None
    if state is not None:
        for tensor in tensors_in(result):
            if is_meta(tensor):
                set_constant(tensor, None, state)


# -- writes -----------------------------------------------------------------------------------------------------------


def _propagate_write(op: OpTraits, func: Any, args: Any, kwargs: Any) -> None:
    """Repeat a write of constants to constants on their values; any other write turns its target into data."""
    if func is _UNSCALE:
        # GradScaler's check writes only where it meets an infinity.
        for state in filter(None, map(state_of, args[1:2])):
            state.assumption = ALL_FINITE
        return
    if func is _SCATTER and _propagate_scatter(*args):
        return
    targets = op.targets(args, kwargs)
    states = [state for state in map(state_of, targets) if state is not None]
    if not states:
        return
    real = _real_arguments(args, kwargs)
    if real is not None and len(states) == len(targets) and not any(state.uniform for state in states):
        assumption = assumption_of(args, kwargs) or (FIXED_DRAW if op.random else None)
        with suppress(Exception):  # else they are unknown from here on; the op itself has its result
            func(*real[0], **real[1])
            for state in states:
                state.assumption = state.assumption or assumption
                state.written()
            return
    if states and targets[0] is args[0] and write(op, func, args, kwargs, states[0]):
        return
    words = _read_as(args[1:]) if func is _COPY else _read_as(args) if op.pointwise and op.fill is None else None
    for state in states:
        state.invalidate()
        state.read_as = words


def _propagate_scatter(target: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> bool:
    """A number written at constant places of a uniform tensor (a router's `one_hot`); returns whether this was such a
    write.

    Of a result that is too large to keep, only the share of those places is kept.
    """
    state, base, places = state_of(target), constant_of(target), constant_of(index)
    if state is None or not state.uniform or base is None or not is_uniform(base) or places is None:
        return False
    assumption = assumption_of((index,), {}) or state.assumption
    state.invalidate()  # views made before the write keep this state, and show other values now
    if is_small(target) or (assumption and target.numel() <= MAX_ASSUMED_ELEMENTS):
        dense = base.clone(memory_format=torch.contiguous_format).scatter_(dim, places, value)
        set_constant(target, dense, ConstantState(assumption))
    elif assumption and value and not _first_element(base):
        set_constant(target, None, ConstantState(assumption, true_share=places.numel() / target.numel()))
    return True


def _first_element(value: torch.Tensor) -> torch.Tensor:
    return value.as_strided((), (), value.storage_offset())
