"""Ops on lists of sharded tensors: asked about each distinct element once, DTensor answers as for the whole list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.workloads import each_once

ORIGINAL: Any = ShardingPropagator.propagate_op_sharding_non_cached
aten = torch.ops.aten


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def spec(mesh: Any, rows: int, placement: Any) -> Any:
    return DTensorSpec(mesh, (placement,), tensor_meta=TensorMeta(torch.Size([rows, 3]), (3, 1), torch.float32))


def asked(op: Any, *args: Any) -> tuple[Any, Any, list[int]]:
    """What DTensor answers for the whole lists, and for their distinct elements, and how long the lists were then."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    info = propagator.op_to_schema_info.get(op) or propagator.op_to_schema_info_for_single_dim_strategy.get(op)
    lengths: list[int] = []

    def counted(propagator: Any, schema: Any) -> Any:
        lengths.append(len(schema.args_schema[0]))
        return ORIGINAL(propagator, schema)

    whole = ORIGINAL(propagator, OpSchema(op, args, {}, schema_info=info))
    return whole, each_once(counted, propagator, OpSchema(op, args, {}, schema_info=info)), lengths


def test_a_list_is_asked_about_without_its_repetitions(mesh: Any) -> None:
    tall, small = spec(mesh, 8, Shard(0)), spec(mesh, 4, Shard(0))
    whole, once, lengths = asked(aten._foreach_mul.Scalar, [tall, small, tall, tall, small], 2.0)
    assert lengths == [2]
    assert once.output_spec == whole.output_spec
    assert [each.tensor_meta.shape[0] for each in once.output_spec] == [8, 4, 8, 8, 4]


def test_numbers_beside_the_tensors_are_those_of_the_elements_asked_about(mesh: Any) -> None:
    shards = [spec(mesh, 8, Shard(0))] * 3
    whole, once, lengths = asked(aten._foreach_addcdiv_.ScalarList, shards, shards, shards, [0.1, 0.2, 0.3])
    assert (once, lengths) == (whole, [1])


def test_elements_that_have_to_move_first_are_all_said_to(mesh: Any) -> None:
    here, whole_tensor = spec(mesh, 8, Shard(0)), spec(mesh, 8, Replicate())
    lists = [here, here, here], [whole_tensor, here, whole_tensor]
    whole, once, lengths = asked(aten._foreach_add_.List, *lists)
    assert lengths == [2]
    assert whole.needs_redistribute and once.needs_redistribute
    assert once.redistribute_schema.args_schema == whole.redistribute_schema.args_schema


def test_ops_without_lists_and_lists_without_repetitions_are_left(mesh: Any) -> None:
    tall, small = spec(mesh, 8, Shard(0)), spec(mesh, 4, Shard(0))
    whole, once, lengths = asked(aten._foreach_sqrt.default, [tall, small])
    assert (once, lengths) == (whole, [2])
    joined, again, lengths = asked(aten.cat.default, [tall, tall])
    assert (again, lengths) == (joined, [2])
