"""Evaluate ops on `meta` tensors that need values: `.item()`, output shapes, ops without a meta kernel.

The assumptions on which the model's decisions rest are collected in `assumptions`, further remarks for the reader in
`notes`; both are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from memsize.errors import DataDependentError
from memsize.known_values.data_dependent import (
    CHECKS_PASS,
    COMPARED_EQUAL,
    COPIED_VALUES,
    ITEM_IS_ONE,
    PADDING_COMPUTED,
    first_assumption,
    mixed_devices,
)
from memsize.known_values.op_traits import OpTraits
from memsize.known_values.propagation import assumption_of, draws_one_number, middle_of_range
from memsize.known_values.toeplitz import diagonals_of, filled
from memsize.known_values.values import constant_of, is_small, set_constant, state_of
from memsize.processes.user_code import running_line
from memsize.torch_internals.meta import MetaMemo, is_meta, run_kernel
from memsize.torch_internals.pytree import map_tensors, tensors_in
from memsize.torch_internals.sparse_tensors import (
    PARTS,
    is_in_coordinates,
    stored_elements,
    with_parts,
    zeros_in_coordinates,
)

_aten = torch.ops.aten
_PACK = _aten._pack_padded_sequence.default
_CPU = torch.device("cpu")
_MEMO = MetaMemo()
_HOST_LIMIT = 2**31
"""Bytes of stand-in arguments that an op without a meta kernel may take on the CPU."""
_MOST_READS = 10_000
"""How often one line may read assumed numbers: more than any loop with a limit of its own is likely to."""


class Evaluator:
    """The evaluation of one run's ops. Constants are attributes of their tensors.

    A `lenient` evaluator, for scripts, answers every question about an unknown value, and leaves loops that wait for
    one to its `observer`, which it calls with each assumption behind a decision.
    """

    def __init__(self, lenient: bool = False) -> None:
        self.lenient = lenient
        self.observer: Callable[[str], None] | None = None
        self.assumptions: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        self._reads: Counter[str] = Counter()
        """How often each line of the user's code has read an assumed number."""

    def evaluate(self, op: OpTraits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op's result on `meta`, by PyTorch's own kernel or, where it has none, by one run on the CPU."""
        special = SPECIAL.get(op.name)
        result = NotImplemented if special is None else special(self, *args, **kwargs)
        if result is not NotImplemented:
            return result
        if op.data_dependent is not None and is_meta(args[0]):
            result = op.data_dependent(self.rely_on, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if op.quantizes:
            return self._on_cpu(func, op, args, kwargs)
        try:
            # Views and writes are nothing to remember.
            if op.mutates:
                return run_kernel(func, args, kwargs)
            return func(*args, **kwargs) if op.aliases else _MEMO.run(func, args, kwargs)
        except NotImplementedError:
            return self._on_cpu(func, op, args, kwargs)
        except RuntimeError as error:
            if op.dynamic:
                return self._on_cpu(func, op, args, kwargs)
            # Single numbers on the CPU go with any device.
            met = {tensor.device.type for tensor in tensors_in((args, kwargs)) if tensor.dim() or is_meta(tensor)}
            if len(met) < 2:
                raise
            args, kwargs = as_stand_ins((args, kwargs))
            try:
                result = func(*args, **kwargs)
            except RuntimeError:
                raise error from None
            self.notes[mixed_devices()] = None
            return result

    def rely_on(self, assumption: str | None) -> None:
        """Note that a decision of the model rests on `assumption`."""
        if assumption is not None:
            self.assumptions[assumption] = None
            if self.observer is not None:
                self.observer(assumption)

    def _decide_on(self, assumption: str | None) -> None:
        """The same for a number that the model reads. A loop that waits for an assumed number to change never ends."""
        if assumption is None:
            return
        self.rely_on(assumption)
        if self.lenient:
            return
        line = running_line()
        self._reads[line] += 1
        if self._reads[line] > _MOST_READS:
            raise DataDependentError(
                f"this line has read a data-dependent number, whose value is assumed, {_MOST_READS:,} times: "
                f"a loop that waits for it to change never ends ({assumption})"
            )

    # -- questions about values ---------------------------------------------------------------------------------------

    def _item(self, tensor: torch.Tensor) -> Any:
        value = constant_of(tensor)
        if value is not None:
            self._decide_on(first_assumption([state_of(tensor)]) if is_meta(tensor) else None)
            return value.item()
        state = state_of(tensor)
        read_as = state and state.read_as
        if read_as or tensor.is_floating_point():
            self._decide_on(read_as or ITEM_IS_ONE)
            return torch.ones((), dtype=tensor.dtype, device="cpu").item()
        if self.lenient:
            self.rely_on(COPIED_VALUES)
            return _plausible(tensor.dtype)
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise DataDependentError(
            f"the model reads a data-dependent value from a {dtype} tensor (bool(), int() or .item())"
        )

    def _compare(self, a: torch.Tensor, b: torch.Tensor, *options: Any, **more: Any) -> bool:
        left, right = diagonals_of(a), diagonals_of(b)
        if left is None or right is None or a.shape != b.shape:
            left, right = constant_of(a), constant_of(b)
        if a.shape != b.shape and not (options or more):
            return False
        if left is None or right is None:
            is_check = a.dim() == 0 and a.dtype is torch.bool  # PyTorch itself asks whether something is wrong (istft)
            self._decide_on(CHECKS_PASS if is_check else COMPARED_EQUAL)
            return not is_check
        self.rely_on(assumption_of((a, b), {}))
        return torch.allclose(left, right, *options, **more) if options or more else torch.equal(left, right)

    def _draw(self, size: list[int], **options: Any) -> Any:
        """A single random number is a decision (skip this layer?): it falls in the middle of its range."""
        if not draws_one_number(_aten.rand.default, (size,)):
            return NotImplemented
        device = options.get("device")
        middle = middle_of_range(size, options.get("dtype") or torch.get_default_dtype())
        return _to_meta_with_constant(middle) if device is not None and device.type == "meta" else middle

    def _to(self, tensor: torch.Tensor, **options: Any) -> Any:
        """A copy to the CPU, where tensors have values, or of a sparse tensor, part by part."""
        device = options.get("device")
        if tensor.layout in PARTS and options.get("layout") in (None, tensor.layout):
            return self._to_in_parts(tensor, device or tensor.device, options.get("dtype"))
        if not is_meta(tensor) or device is None or device.type != "cpu":
            return NotImplemented
        value, dtype = self._values(tensor), options.get("dtype")
        return value.to(dtype) if dtype is not None and dtype is not value.dtype else value.clone()

    def _values(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values that a copy of `tensor` has on the CPU, to be read only; numbers that are assumed, as one."""
        value, diagonals, state = constant_of(tensor), diagonals_of(tensor), state_of(tensor)
        if diagonals is not None:
            value = filled(diagonals, tensor.shape)
        if value is not None:
            self.rely_on(first_assumption([state]))
            return value
        read_as = state and state.read_as
        self.rely_on(read_as or COPIED_VALUES)
        number = 1 if read_as else _plausible(tensor.dtype)
        return torch.full((), number, dtype=tensor.dtype, device="cpu").expand(tensor.shape)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, *_: Any, **__: Any) -> Any:
        """A copy into memory of the CPU, which takes none on the GPU."""
        if is_meta(target) or not is_meta(source):
            return NotImplemented
        return target.copy_(self._to(source, device=_CPU) if source.layout in PARTS else self._values(source))

    def _to_in_parts(self, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
        """Each part is copied as it would be by itself; a dtype is that of the values."""

        def copied(part: torch.Tensor) -> torch.Tensor:
            part_dtype = dtype if dtype is not None and part.dtype is tensor.dtype else part.dtype
            result = self._to(part, dtype=part_dtype, device=device)
            return part.to(device, part_dtype, copy=True) if result is NotImplemented else result

        return with_parts(tensor, copied)

    def _pack(self, data: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
        """Pack padded sequences. PyTorch wants the lengths on the CPU, but the run has put the caller's on `meta`.

        The result is made here: PyTorch's `meta` kernel concatenates steps in Python that imports torch._dynamo.
        Wrong lengths are left to it (aten/src/ATen/native/PackedSequence.cpp), as their checks come first.
        """
        if not is_meta(data):
            return NotImplemented
        lengths = self._to(lengths, device=_CPU) if is_meta(lengths) else lengths
        samples, longest = data.shape[:2] if batch_first else data.shape[1::-1]
        steps = lengths.tolist()
        in_order = len(steps) == samples and steps == sorted(steps, reverse=True)
        if not steps or not in_order or not 0 < steps[-1] <= steps[0] <= longest:
            return _PACK(data, lengths, batch_first)
        running = lengths > torch.arange(steps[0], device=_CPU)[:, None]
        return data.new_empty((sum(steps), *data.shape[2:])), running.sum(1)

    def _left_aligned(self, tensor: torch.Tensor, _mask: torch.Tensor) -> Any:
        """Whether a padded batch can become a nested tensor, which is not followed here."""
        if not is_meta(tensor):
            return NotImplemented
        self.rely_on(PADDING_COMPUTED)
        return False

    # -- what has no meta kernel --------------------------------------------------------------------------------------

    def _on_cpu(self, func: Any, op: OpTraits, args: Any, kwargs: Any) -> Any:
        tensors = list(tensors_in((args, kwargs)))
        decides = [t for t in tensors if op.dynamic and (len(tensors) == 1 or not t.is_floating_point())]
        if any(constant_of(t) is None for t in decides):
            raise DataDependentError(f"the output shape of {func._overloadpacket} depends on the data")
        self.rely_on(first_assumption([state_of(t) for t in decides if is_meta(t)]))
        if sum(stored_elements(t) * t.element_size() for t in tensors if is_meta(t)) > _HOST_LIMIT:
            raise NotImplementedError(
                f"{func} has no meta kernel, and its arguments are too large to run it on the CPU instead"
            ) from None
        exact = all(constant_of(tensor) is not None and not tensor.is_quantized for tensor in tensors)
        result = func(*_on_host(args), **_on_host(kwargs))
        if not (exact and op.dynamic):
            note = f"{func._overloadpacket} was run on the CPU: PyTorch cannot tell its output without computing it"
            self.notes[note] = None
        return map_tensors(_to_meta_with_constant if exact else _to_meta, result)


SPECIAL: dict[str, Callable[..., Any]] = {
    "aten::_local_scalar_dense": Evaluator._item,
    "aten::_to_copy": Evaluator._to,
    "aten::copy_": Evaluator._copy,
    "aten::rand": Evaluator._draw,
    "aten::_pack_padded_sequence": Evaluator._pack,
    "aten::_nested_tensor_from_mask_left_aligned": Evaluator._left_aligned,
    **dict.fromkeys(("aten::equal", "aten::allclose"), Evaluator._compare),
}
"""Ops that ask for values, by name, and the functions that evaluate them; NotImplemented leaves an op to PyTorch."""


def as_stand_ins(value: Any) -> Any:
    """Return `value` with its tensors on `meta`, where small ones keep their values as constants."""
    return map_tensors(lambda tensor: tensor if is_meta(tensor) else _to_meta_with_constant(tensor), value)


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor as a meta tensor. There are no quantized meta tensors: these stay where they are."""
    if is_meta(tensor) or tensor.is_quantized:
        return tensor
    return with_parts(tensor, _to_meta) if tensor.layout in PARTS else tensor.to("meta")


def _to_meta_with_constant(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor as a meta tensor that keeps its values as a constant, where it is small."""
    result = _to_meta(tensor)
    return result if result is tensor or not is_small(tensor) else set_constant(result, tensor.detach())


def _on_host(value: Any) -> Any:
    if isinstance(value, dict) and isinstance(value.get("device"), torch.device):
        value = value | {"device": _CPU}

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        if is_in_coordinates(tensor):
            return zeros_in_coordinates(tensor)
        constant = constant_of(tensor)
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=_CPU) if constant is None else constant

    return map_tensors(stand_in, value)


def _plausible(dtype: torch.dtype) -> Any:
    return 1.0 if dtype.is_floating_point or dtype.is_complex else dtype is torch.bool or 0
