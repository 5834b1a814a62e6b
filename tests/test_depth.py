"""Tables, traces and models that repeat: what follows from two short ones, on tables put together by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from tests.deep import (
    Block,
    Deep,
    FoldedPath,
    Insertion,
    RepeatedBlocks,
    Repetition,
    Table,
    extended,
    find_blocks,
    insertions,
    origins,
    shorten,
)

Row = tuple[str, tuple[int, ...]]


def tables(*all_rows: list[Row]) -> list[Table]:
    """Return rows as tables, whose keys have the same numbers."""
    numbers: dict[str, int] = {}
    return [
        Table(
            np.array([numbers.setdefault(key, len(numbers)) for key, _ in rows]),
            np.array([values for _, values in rows]),
        )
        for rows in all_rows
    ]


def assert_extends(make: Callable[[int], list[Row]], depth: int, first: int = 3) -> None:
    """Check that the tables of two short models extend to that of a deep one."""
    shorter, longer, deep = tables(make(first), make(first + 1), make(depth))
    result = extended(shorter, [longer], [depth - first])
    assert result is not None
    assert result.keys.tolist() == deep.keys.tolist()
    assert result.numbers.tolist() == deep.numbers.tolist()


# -- tables -----------------------------------------------------------------------------------------------------------


def test_a_segment_that_the_longer_table_has_once_more() -> None:
    shorter, longer = tables(
        [(key, (0,)) for key in "s ab ab ab t".replace(" ", "")],
        [(key, (0,)) for key in "s ab ab ab ab t".replace(" ", "")],
    )
    # it may begin at any row from 1 to 7; it is taken from the middle: s aba [ba] bab t
    assert insertions(shorter.keys, longer.keys) == [Insertion(4, 4, 2)]
    assert insertions(shorter.keys, shorter.keys) == []
    assert insertions(longer.keys, shorter.keys) is None


@pytest.mark.parametrize(
    ("shorter", "longer"),
    [
        ("sabababt", "sababaabt"),  # a third of a block
        ("sabababt", "sababababu"),  # another end
        ("sabababt", "sabababcdt"),  # a block of another kind
        ("sabcdet", "sabcdexyt"),  # nothing that repeats
    ],
)
def test_tables_that_differ_by_more_than_repetition(shorter: str, longer: str) -> None:
    assert origins(shorter, [longer], [5]) is None


def test_a_repetition_needs_neighbours_on_both_sides() -> None:
    """Of one repetition nothing shows by how much its numbers change, nor of two on one side."""
    assert origins("sabt", ["sababt"], [3]) is None
    positions = origins("sabababt", ["sababababt"], [3])
    assert positions is not None and "".join("sabababt"[n] for n in positions) == "sababababababt"


def forward(blocks: int) -> list[Row]:
    """A stem, blocks of two ops and a head. Each op has a storage and a layer, and each block frees one before it."""
    rows: list[Row] = [("stem", (0, 1))]
    for block in range(blocks):
        # its storages are 2·block + 1 and 2·block + 2, its layers 3·block + 2 and 3·block + 3
        rows += [("norm", (2 * block + 1, 3 * block + 2)), ("fc", (2 * block + 2, 3 * block + 3))]
        rows.append(("free", (2 * block + 1, -1)))
    return [*rows, ("head", (2 * blocks + 1, 3 * blocks + 2))]


def test_indexes_that_ascend() -> None:
    assert_extends(forward, 9)


def test_indexes_that_descend() -> None:
    """A backward goes through the blocks from the last to the first, and makes its own storages meanwhile."""

    def step(blocks: int) -> list[Row]:
        rows = forward(blocks)
        for block in reversed(range(blocks)):
            new = 2 * blocks + 2 + (blocks - 1 - block)
            rows += [("gradient", (new, 3 * block + 3)), ("freed", (2 * block + 2, 3 * block + 2))]
        return [*rows, ("end", (3 * blocks + 1, 0))]

    assert_extends(step, 40)


def test_a_first_and_a_last_block_with_numbers_of_their_own() -> None:
    """The first block's input is the stem's, the last one's output is freed by the head: 7 and 9 stand there alone."""

    def rows(blocks: int) -> list[Row]:
        middle: list[Row] = [("block", (10 * number, 5)) for number in range(1, blocks - 1)]
        return [("stem", (0, 0)), ("block", (7, 5)), *middle, ("block", (10 * blocks - 10, 9)), ("head", (blocks, 0))]

    assert_extends(rows, 12, first=4)


def test_sizes_that_grow_by_the_same_with_each_block() -> None:
    """A stack of all norms has one element of 4 bytes for each block, beside 8 bytes for the stem and the head."""

    def rows(blocks: int) -> list[Row]:
        return [*(("norm", (4, block)) for block in range(blocks)), ("stack", (8 + 4 * blocks, blocks))]

    assert_extends(rows, 100)


def test_sizes_that_grow_from_block_to_block() -> None:
    """Outputs are concatenated one after the other: after block k there are k + 1 of them."""
    assert_extends(lambda blocks: [("cat", (16 * (block + 1), block)) for block in range(blocks)], 30, first=4)


def test_values_are_extended_like_rows() -> None:
    """Three equal blocks become seven: which of the three each is like does not matter."""
    positions = origins((1, 2, 2, 2, 3), [(1, 2, 2, 2, 2, 3)], [4])
    assert positions is not None and [(1, 2, 2, 2, 3)[n] for n in positions] == [1, *[2] * 7, 3]
    assert origins((), [()], [4]) == []
    assert origins((1, 2), [(2, 1)], [4]) is None


def lines(keys: str) -> st.SearchStrategy[list[tuple[str, int, int]]]:
    """Rows: a key, what it grows by, and where it begins."""
    row = st.tuples(st.sampled_from(keys), st.integers(-3, 3), st.integers(-5, 5))
    return st.lists(row, min_size=1, max_size=4, unique_by=lambda row: row[0])


PASSES = st.lists(st.tuples(lines("uvwxyz"), lines("abcd"), st.booleans()), min_size=1, max_size=4)


@settings(max_examples=200)
@given(PASSES, lines("uvwxyz"), st.integers(4, 30), st.sampled_from((3, 4)))
def test_what_is_made_of_blocks_follows_from_two_short_ones(passes, tail, depth: int, first: int) -> None:
    """Some passes over the blocks, up or down, each with rows of its own before it: every number is affine in the
    number of blocks, and in that of the block.
    """

    def rows(blocks: int) -> list[Row]:
        result: list[Row] = []
        for head, block, is_backward in passes:
            result += [(key, (start + step * blocks, start)) for key, step, start in head]
            numbers = reversed(range(blocks)) if is_backward else range(blocks)
            result += [(key, (start + step * n, 2 * blocks - n)) for n in numbers for key, step, start in block]
        return [*result, *((key, (start + step * blocks, step)) for key, step, start in tail)]

    assert_extends(rows, first + depth, first)


# -- paths ------------------------------------------------------------------------------------------------------------

TWELVE = RepeatedBlocks("model.layers.", start=1, period=2, count=5, behind=1)
"""Block 0 is another, then 1 to 10 in pairs, and 11 is another again."""


@pytest.mark.parametrize(
    ("path", "folded", "number"),
    [
        ("", FoldedPath("", None, ""), -1),
        ("model.norm", FoldedPath("", None, "model.norm"), -1),
        ("model.layers", FoldedPath("", None, "model.layers"), -1),
        ("model.layers.0.fc", FoldedPath("", None, "model.layers.0.fc"), -1),
        ("model.layers.1.fc", FoldedPath("model.layers.", 0, ".fc"), 1),
        ("model.layers.4", FoldedPath("model.layers.", 1, ""), 4),
        ("model.layers.10.fc.weight", FoldedPath("model.layers.", 1, ".fc.weight"), 10),
        ("model.layers.11.fc", FoldedPath("model.layers.", -1, ".fc"), 11),
        ("model.layers.norm", FoldedPath("", None, "model.layers.norm"), -1),
    ],
)
def test_paths_are_folded_and_unfolded(path: str, folded: FoldedPath, number: int) -> None:
    assert TWELVE.fold(path) == (folded, number)
    assert folded.unfold(number) == path


def test_the_same_block_has_the_same_folded_path_at_any_depth() -> None:
    [deeper] = Repetition(((TWELVE,),)).with_counts([9])
    assert (TWELVE.stop, deeper.stop) == (11, 19)
    assert deeper.fold("model.layers.19.fc")[0] == TWELVE.fold("model.layers.11.fc")[0]
    assert deeper.fold("model.layers.11.fc")[0] == TWELVE.fold("model.layers.1.fc")[0]


# -- blocks of models -------------------------------------------------------------------------------------------------


def repeated(model: nn.Module) -> RepeatedBlocks | None:
    """The only stack of a model."""
    blocks = find_blocks(model)
    if blocks is None:
        return None
    [stack] = blocks.stacks
    return stack.repeated


def linears(*widths: int) -> list[nn.Module]:
    return [nn.Linear(width, width) for width in widths]


def test_blocks_in_a_list_and_in_a_sequential() -> None:
    assert repeated(Deep(12)) == RepeatedBlocks("layers.", 0, 1, 12)
    assert repeated(nn.Sequential(*linears(*(4,) * 9))) == RepeatedBlocks("", 0, 1, 9)


def test_blocks_with_a_numbered_name() -> None:
    model = nn.Module()
    for number in range(8):
        model.add_module(f"encoder_layer_{number}", Block())
    assert repeated(nn.ModuleDict({"encoder": model})) == RepeatedBlocks("encoder.encoder_layer_", 0, 1, 8)


def test_blocks_that_are_not_numbered_from_zero() -> None:
    model = nn.Module()
    for number in range(1, 12):
        model.add_module(f"layer{number}", Block())
    assert repeated(model) is None


def test_a_period_of_several_blocks() -> None:
    assert repeated(nn.ModuleList(linears(*(4, 4, 6) * 8))) == RepeatedBlocks("", 0, 3, 8)


def test_other_blocks_before_and_behind() -> None:
    assert repeated(nn.ModuleList(linears(6, 6, *(4,) * 10, 8))) == RepeatedBlocks("", 2, 1, 10, behind=1)


def test_the_blocks_that_hold_most_modules() -> None:
    """5 linears, and 10 blocks of 3 modules: to count the linears apart takes a short model more than it is worth."""
    model = nn.ModuleDict({"a": nn.ModuleList(linears(*(4,) * 5)), "b": nn.ModuleList(Block() for _ in range(10))})
    assert repeated(model) == RepeatedBlocks("b.", 0, 1, 10)


def test_several_stacks() -> None:
    """Those of equally many periods are one group; it is worth a short model more to count 9 and 30 apart."""
    stacks = {"a": linears(*(4,) * 30), "b": linears(*(4, 6) * 9), "c": [*linears(6), *(Block() for _ in range(30))]}
    blocks = find_blocks(nn.ModuleDict({name: nn.ModuleList(modules) for name, modules in stacks.items()}))
    assert blocks is not None and blocks.repetition == Repetition(
        (
            (RepeatedBlocks("a.", 0, 1, 30), RepeatedBlocks("c.", 1, 1, 30)),
            (RepeatedBlocks("b.", 0, 2, 9),),
        )
    )
    # the dictionary, three lists, and a linear before the blocks of c; then 30 + 90 and 18
    assert (blocks.others, blocks.whole) == (5, 143)
    assert blocks.modules((3, 4)) == 5 + 3 * (1 + 3) + 4 * 2
    # (3, 3), and one more of each
    assert blocks.shortest == 5 + 12 + 6
    assert blocks.first_runs == (5 + 12 + 6) + (5 + 16 + 6) + (5 + 12 + 8)


def test_rates_and_indexes_may_differ() -> None:
    model = Deep(10)
    for number, block in enumerate(model.layers):
        block.rate = nn.Dropout(0.1 + number / 20)
        block.fc.layer_index = 5 + number
    blocks = find_blocks(model)
    assert blocks is not None
    assert [stack.counting for stack in blocks.stacks] == [{("", "index"), ("fc", "layer_index")}]


def differs_in_an_index(model: Deep) -> None:
    model.layers[5].index = 7


def differs_in_a_rate_that_is_none(model: Deep) -> None:
    for block in model.layers:
        block.drop = nn.Dropout(0.5)
    model.layers[5].drop.p = 0.0


def differs_in_a_shape(model: Deep) -> None:
    model.layers[5].fc = nn.Linear(4, 4, bias=False)


def differs_in_a_buffer(model: Deep) -> None:
    model.layers[5].register_buffer("scale", torch.ones(1))


def differs_in_what_is_trained(model: Deep) -> None:
    model.layers[5].requires_grad_(False)


def differs_in_a_hook(model: Deep) -> None:
    model.layers[5].register_forward_hook(lambda module, args, output: output * 1)


def differs_in_a_forward(model: Deep) -> None:
    model.layers[5].forward = lambda x: x


def differs_in_a_tie(model: Deep) -> None:
    model.layers[5].fc.weight = model.layers[6].fc.weight


def holds_a_module_twice(model: Deep) -> None:
    model.layers[5].fc = model.layers[6].fc


@pytest.mark.parametrize(
    "change",
    [
        differs_in_an_index,
        differs_in_a_rate_that_is_none,
        differs_in_a_shape,
        differs_in_a_buffer,
        differs_in_what_is_trained,
        differs_in_a_hook,
        differs_in_a_forward,
        differs_in_a_tie,
        holds_a_module_twice,
    ],
)
def test_a_block_that_differs_is_none_of_them(change: Callable[[Deep], None]) -> None:
    model = Deep(12)
    change(model)
    stack = repeated(model)
    assert stack is None or not stack.start <= 5 < stack.stop


def test_a_module_that_all_blocks_share() -> None:
    model = Deep(12)
    for block in model.layers:
        block.norm = model.layers[0].norm
    assert repeated(model) == RepeatedBlocks("layers.", 0, 1, 12)


def test_too_few_blocks() -> None:
    assert repeated(Deep(4)) is None
    assert repeated(nn.ModuleList(linears(*(4, 6) * 4))) is None


def test_a_shortened_model_is_as_if_it_had_been_built_so() -> None:
    model = nn.Module()
    kinds = ["dense", *["sparse"] * 10, "last"]
    model.config = SimpleNamespace(kinds=kinds, pattern=("dense", "last"), num_hidden_layers=12, num_heads=12)
    model.kinds = tuple(kinds)
    model.layers = nn.ModuleList([*linears(6), *(Block(number) for number in range(1, 11)), *linears(8)])
    model.n_layers, model.heads = 12, 12
    model.layers[0].layers_behind = 12
    model.layers[-1].index = 11
    model.layers[-1].count = 3
    assert repeated(model) == RepeatedBlocks("layers.", 1, 1, 10, behind=1)
    blocks = find_blocks(model)
    assert blocks is not None
    shorten(model, blocks, [3])
    assert [name for name, _ in model.named_children()] == ["layers"]
    assert list(model.layers._modules) == ["0", "1", "2", "3", "4"]
    assert [getattr(block, "index", None) for block in model.layers] == [None, 1, 2, 3, 4]
    assert model.layers[-1].count == 3
    assert model.config.kinds == ["dense", "sparse", "sparse", "sparse", "last"]
    assert model.kinds == ("dense", "sparse", "sparse", "sparse", "last")
    assert model.config.pattern == ("dense", "last")
    assert (model.config.num_hidden_layers, model.config.num_heads) == (5, 12)
    assert (model.n_layers, model.heads, model.layers[0].layers_behind) == (5, 12, 12)
