"""How an op on lists of sharded tensors is divided: each distinct element is asked about once.

An optimizer updates hundreds of parameters in one op. DTensor finds out for each of them where its result is: it runs
the op on tensors of the whole size, and goes through the whole list again. Most of them are alike, as layers repeat.

Source: torch/distributed/tensor/_sharding_prop.py and _ops/single_dim_strategy.py (2.11 to 2.14).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

_BY_ELEMENT: Final = ("aten::_foreach_", "aten::_amp_foreach_", "aten::_fused_")
"""The ops that do the same with each element of their lists."""


def each_once(original: Callable[[Any, Any], Any], spec: type) -> Callable[[Any, Any], Any]:
    """`ShardingPropagator.propagate_op_sharding_non_cached`, asked about a list without its repetitions.

    `spec` is the class of what describes a sharded tensor.
    """

    def propagate(propagator: Any, schema: Any) -> Any:
        places = _places(schema, spec)
        if len(set(places)) == len(places):
            return original(propagator, schema)
        firsts = [places.index(number) for number in range(max(places) + 1)]
        found = original(propagator, _picked(schema, firsts, len(places)))
        suggested, results = found.redistribute_schema, found.output_spec
        return replace(
            found,
            output_spec=_pick(results, places, len(firsts)),
            redistribute_schema=suggested and _picked(suggested, places, len(firsts)),
        )

    return propagate


def _places(schema: Any, spec: type) -> list[int]:
    """For each element of the lists of tensors, its number among the distinct ones; none without lists."""
    if not schema.op.name().startswith(_BY_ELEMENT):
        return []
    lists = [each for each in schema.args_schema if isinstance(each, (list, tuple)) and each and type(each[0]) is spec]
    if len(set(map(len, lists))) != 1:
        return []
    numbers: dict[tuple[Any, ...], int] = {}
    return [numbers.setdefault(row, len(numbers)) for row in zip(*lists, strict=True)]


def _picked(schema: Any, places: Sequence[int], length: int) -> Any:
    """`schema` with these elements of each list that is so long."""
    args = tuple(_pick(each, places, length) for each in schema.args_schema)
    return type(schema)(schema.op, args, schema.kwargs_schema, schema_info=schema.schema_info)


def _pick(value: Any, places: Sequence[int], length: int) -> Any:
    if not isinstance(value, (list, tuple)) or len(value) != length:
        return value
    return type(value)(value[place] for place in places)
