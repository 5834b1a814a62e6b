"""Values that are known although nothing is computed: PyTorch's own results on the CPU are the oracle."""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

import memsize
from memsize.errors import DataDependentError
from tests.conftest import Python
from tests.kernels import cuda_semantics
from tests.known_values import (
    ALL_FINITE,
    ALL_SELECTED,
    BALANCED,
    CHECKS_PASS,
    COMPARED_EQUAL,
    COPIED_VALUES,
    CPU_AUTOCAST,
    FIXED_DRAW,
    ITEM_IS_ONE,
    MASKS_COVER_IMAGE,
    NOT_EQUAL,
    constant_of,
    diagonals_of,
    filled,
    first_assumption,
    spread_choices,
    state_of,
)
from tests.models import Ledger, MetaDispatchMode

META, CPU = torch.device("meta"), torch.device("cpu")


def written_through_views(device: torch.device) -> Tensor:
    mask = torch.zeros(4, 10, dtype=torch.bool, device=device)
    mask[:, :3] = True
    mask[0, 5:7] |= True
    mask.view(-1).logical_not_()
    return mask


def filled_by_index(device: torch.device) -> Tensor:
    counts = torch.arange(12, device=device).view(3, 4)
    counts[torch.tensor([0, 2], device=device), torch.tensor([1, 3], device=device)] = 9
    counts[:, [0, -1]] += 100
    counts.index_put_((torch.tensor([1], device=device),), torch.tensor(7, device=device), accumulate=True)
    return counts


def masked(device: torch.device) -> Tensor:
    steps = torch.arange(6, device=device)
    causal = steps[:, None] >= steps[None, :]
    return torch.zeros(6, 6, device=device).masked_fill(~causal, -math.inf)


def copied_over(device: torch.device) -> Tensor:
    target = torch.empty(2, 3, dtype=torch.long, device=device).fill_(5)
    target[1].copy_(torch.tensor([1, 2, 3], device=device))
    return torch.where(target > 2, target, -target)


def written_with_out(device: torch.device) -> Tensor:
    total = torch.zeros(3, dtype=torch.long, device=device)
    torch.add(torch.arange(3, device=device), 4, out=total)
    return total


def one_value_of_a_large_mask(device: torch.device) -> Tensor:
    ones = torch.ones(2, 3, 400, 400, device=device)
    small = F.interpolate(ones, size=(7, 7)).to(torch.bool)[0]
    return small.logical_not().any() | small.all()


def a_view_of_one_value_is_written(device: torch.device) -> Tensor:
    row = torch.zeros(2, 600, 600, device=device)[:, 0, :5]
    row[0, 2] = 3
    return row


PROGRAMS: dict[str, Callable[[torch.device], Tensor]] = {
    "writes through views": written_through_views,
    "writes by index": filled_by_index,
    "a causal mask": masked,
    "copies": copied_over,
    "an out argument": written_with_out,
    "one value of a large mask": one_value_of_a_large_mask,
    "a view of one value": a_view_of_one_value_is_written,
    "numbers from a list": lambda device: torch.tensor([[1, 2], [3, 4]], device=device) * 2,
    "numbers from a tensor": lambda device: torch.ones(2, device=device).new_tensor([3, 4, 5]),
    "as_tensor": lambda device: torch.as_tensor([1.5, 2.5], device=device),
    "a list by name": lambda device: (
        torch.tensor(data=[1, 2], device=device) + torch.asarray(obj=[3, 4], device=device)
    ),
    "a tensor by name": lambda device: torch.full_like(input=torch.zeros(2, device=device), fill_value=3),
    "detached": lambda device: torch.arange(4, device=device).detach()[1:],
    "one hot": lambda device: F.one_hot(torch.arange(5, device=device) % 3, 3).sum(0),
    "running sums": lambda device: torch.full((2, 5), 2, device=device).cumsum(1).flip(1),
    "transposed and joined": lambda device: torch.cat(
        [torch.eye(3, device=device).t(), torch.zeros(1, 3, device=device)]
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_known_values_are_those_of_a_real_run(name: str) -> None:
    expected = PROGRAMS[name](CPU)
    with MetaDispatchMode():
        result = PROGRAMS[name](META)
        found = constant_of(result)
    assert result.is_meta
    assert found is not None
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@given(st.lists(st.sampled_from(["view", "slice", "add", "fill", "where", "unknown", "index"]), max_size=8))
def test_what_is_known_is_never_wrong(steps: list[str]) -> None:
    """Whatever is done to a tensor and its views: a value that still counts as known is the real one."""
    pairs = []
    with MetaDispatchMode():
        for device in (META, CPU):
            torch.manual_seed(0)
            pairs.append(_walk(steps, torch.arange(24, device=device).view(4, 6)))
    for blank, real in zip(*pairs, strict=True):
        found = constant_of(blank)
        assert found is None or torch.equal(found, real)


def _walk(steps: list[str], tensor: Tensor) -> list[Tensor]:
    seen = [tensor]
    for step in steps:
        last = seen[-1]
        if step == "view":
            seen.append(last.t())
        elif step == "slice":
            seen.append(last[: max(1, len(last) - 1)])
        elif step == "add":
            last.add_(1)
        elif step == "fill":
            last[0].fill_(3)
        elif step == "where":
            seen.append(torch.where(last > 4, last, 0))
        elif step == "index":
            last[[0]] = 8
        else:
            last[0].copy_(torch.empty(1 << 12, device=last.device)[: last.shape[1]].zero_())
    return seen


MASK_STEPS = """
    triu tril transpose permute rows columns other-rows expand select unsqueeze repeat clone bool compare log double
    where fill add write-mask write-view write-triu copy write-base one-row""".split()


@given(st.lists(st.sampled_from(MASK_STEPS), max_size=9), st.integers(-4, 4))
def test_what_is_known_of_a_large_mask_is_never_wrong(steps: list[str], diagonal: int) -> None:
    """The same with matrices that are known by their diagonals; 8 elements count as large here."""
    pairs = []
    with (
        mock.patch.multiple("memsize.known_values.values", MAX_FLOAT_ELEMENTS=8, MAX_INTEGER_ELEMENTS=8),
        MetaDispatchMode(),
    ):
        for device in (META, CPU):
            pairs.append(_masks(steps, torch.full((7, 5), -math.inf, device=device), diagonal))
        for blank, real in zip(*pairs, strict=True):
            found, diagonals = constant_of(blank), diagonals_of(blank)
            if found is None and diagonals is not None:
                found = filled(diagonals, blank.shape)
            if found is not None and first_assumption([state_of(blank)]) is None:
                assert found.dtype is real.dtype
                assert torch.allclose(found, real, equal_nan=True)


PADDING_STEPS = (
    "expand float invert fill where compare row column rows clone write write-row write-base fill-base".split()
)


@given(st.lists(st.sampled_from(PADDING_STEPS), max_size=9))
def test_what_is_known_of_an_expanded_padding_mask_is_never_wrong(steps: list[str]) -> None:
    """The same with a mask of one row, repeated for every token; 9 elements count as large here."""
    pairs = []
    with (
        mock.patch.multiple("memsize.known_values.values", MAX_FLOAT_ELEMENTS=4, MAX_INTEGER_ELEMENTS=8),
        mock.patch("memsize.known_values.propagation.MAX_INTEGER_ELEMENTS", 8),
        MetaDispatchMode(),
    ):
        pairs = [_paddings(steps, device) for device in (META, CPU)]
        for blank, real in zip(*pairs, strict=True):
            known_values = constant_of(blank)
            if known_values is not None:
                assert known_values.dtype is real.dtype
                assert torch.equal(known_values, real)


def _paddings(steps: list[str], device: torch.device) -> list[Tensor]:
    seen = [F.pad(torch.ones(1, 3, dtype=torch.long, device=device), (0, 4))]
    for step in steps:
        last = seen[-1]
        if step == "expand":
            seen.append(last[:, None].expand(-1, 6, -1) if last.dim() == 2 else last)
        elif step == "float":
            seen.append(last.to(torch.float32))
        elif step == "invert":
            seen.append(1 - last.long())
        elif step == "fill":
            seen.append(last.masked_fill(last > 0, 5))
        elif step == "where":
            seen.append(torch.where(last > 0, 2.0, -math.inf))
        elif step == "compare":
            seen.append(last <= 0)
        elif step == "row":
            seen.append(last[:, 0] if last.dim() > 2 else last)
        elif step == "column":
            seen.append(last[..., 2:])
        elif step == "rows":
            seen.append(last[1:] if len(last) > 1 else last)
        elif step == "clone":
            seen.append(last.clone())
        elif step == "write" and all(last.stride()) and last.dtype is not torch.bool:
            last.add_(1)
        elif step == "write-row" and all(last.stride()):
            last[..., 0] = 3
        elif step == "write-base":
            seen[0][:, 4] = 7
        elif step == "fill-base":
            seen[0].copy_(torch.empty(1 << 12, device=device)[:7].zero_())
    return seen


def _masks(steps: list[str], tensor: Tensor, diagonal: int) -> list[Tensor]:
    seen = [tensor.triu(diagonal)]
    for step in steps:
        last, matrix = seen[-1], seen[-1].shape[-2:]
        if step in ("triu", "tril"):
            seen.append(getattr(last, step)(diagonal))
        elif step == "transpose":
            seen.append(last.transpose(-1, -2))
        elif step == "permute":
            seen.append(last.unsqueeze(0).permute(*range(1, last.dim() - 1), 0, last.dim(), last.dim() - 1))
        elif step == "rows":
            seen.append(last[..., 1:, :])
        elif step == "columns":
            seen.append(last[..., : max(2, matrix[1] - 1)])
        elif step == "other-rows":
            seen.append(last[..., ::2, :])
        elif step == "expand":
            seen.append(last.expand(3, *last.shape) if last.dim() < 4 else last)
        elif step == "select":
            seen.append(last[0] if last.dim() > 2 else last)
        elif step == "unsqueeze":
            seen.append(last.unsqueeze(0) if last.dim() < 4 else last)
        elif step == "repeat":
            seen.append(last.repeat(2, *[1] * (last.dim() - 1)))
        elif step == "clone":
            seen.append(last.clone())
        elif step == "bool":
            seen.append(last.bool())
        elif step == "compare":
            seen.append(last == seen[0] if matrix == seen[0].shape else last == 0)
        elif step == "log":
            seen.append(last.float().log())
        elif step == "double":
            seen.append(last.double())
        elif step == "where":
            seen.append(torch.where(last.bool(), 0.0, -math.inf))
        elif step == "fill":
            seen.append(last.float().masked_fill(last == 0, 3))
        elif step == "add":
            seen.append(last + last.transpose(-1, -2) if matrix[0] == matrix[1] else last + 1)
        elif step == "write-mask":
            seen.append(torch.zeros(last.shape, device=last.device).masked_fill_(last.bool(), 2))
        elif step == "write-view" and _is_written(last):
            last[..., 1:].logical_not_()
        elif step == "write-triu" and _is_written(last):
            last.triu_(1)
        elif step == "copy" and _is_written(last):
            last.copy_(torch.ones(last.shape, device=last.device).tril())
        elif step == "write-base" and _is_written(last):
            seen[0].fill_(4)
        elif step == "one-row" and _is_written(last):
            last[..., 0, :] = 1
    return seen


def _is_written(tensor: Tensor) -> bool:
    return 0 not in tensor.stride()


def sliding_window(size: int, device: torch.device) -> Tensor:
    ones = torch.ones(size, size, dtype=torch.bool, device=device)
    return ~(ones.tril() & ones.triu(-16))


def as_in_the_old_tutorial(size: int, device: torch.device) -> Tensor:
    mask = (torch.triu(torch.ones(size, size, device=device)) == 1).transpose(0, 1)
    return mask.float().masked_fill(mask == 0, -math.inf).masked_fill(mask == 1, 0.0)


LARGE_MASKS: dict[str, Callable[[int, torch.device], Tensor]] = {
    "PyTorch's own": lambda size, device: nn.Transformer.generate_square_subsequent_mask(size, device),
    "the logarithm of a triangle": lambda size, device: torch.tril(torch.ones(size, size, device=device)).log(),
    "a boolean triangle": lambda size, device: torch.triu(torch.ones(size, size, device=device), diagonal=1).bool(),
    "a triangle of booleans": lambda size, device: torch.ones(size, size, dtype=torch.bool, device=device).triu(1),
    "the old tutorial's": as_in_the_old_tutorial,
    "where": lambda size, device: torch.where(torch.ones(size, size, device=device).tril() > 0, 0.0, -math.inf),
    "a sliding window": sliding_window,
}


@pytest.mark.parametrize("size", [33, 512, 4096])
@pytest.mark.parametrize("name", LARGE_MASKS)
def test_an_encoder_finds_out_whether_its_mask_is_causal(name: str, size: int) -> None:
    """It compares the mask with a causal one. Of 4,096 positions, no more than 8,191 numbers are stored."""
    layer = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True, device=META)
    encoder = nn.TransformerEncoder(layer, 1)
    with cuda_semantics(), MetaDispatchMode(), mock.patch.object(F, "scaled_dot_product_attention") as attend:
        attend.side_effect = lambda query, *_, **__: query
        mask = LARGE_MASKS[name](size, META)
        encoder(torch.empty(2, size, 4, device=META), mask=mask)
        diagonals = diagonals_of(mask)
    assert diagonals is None or diagonals.numel() == 2 * size - 1
    assert (diagonals is not None) == (size == 4096 or mask.is_floating_point())
    [call] = attend.call_args_list
    assert call.args[5] is (name != "a sliding window")


@pytest.mark.parametrize("length", [700, 1800])
def test_a_padding_mask_that_is_expanded_to_all_pairs_can_be_read(length: int) -> None:
    """As Longformer does, which pads to a multiple of its window and reads whether a token attends to all."""
    with cuda_semantics(), MetaDispatchMode():
        mask = F.pad(torch.ones(2, length, dtype=torch.long, device=META), (0, 100))
        tokens = torch.ones(2, 1, length + 100, 1, dtype=torch.bool, device=META)
        pairs = torch.where(tokens & (mask[:, None, None] > 0), 0.0, -65504.0)
        row = pairs[:, 0, 0, :]
        row[mask == 2] = 65504.0
        assert pairs.shape == (2, 1, length + 100, length + 100) and row.shape == (2, length + 100)
        assert not (row > 0).any().item() and (row < 0).sum().item() == 2 * 100


def test_writing_something_unknown_makes_every_view_unknown() -> None:
    with MetaDispatchMode():
        base = torch.zeros(4, 4, device=META)
        row, detached = base[1], base.detach()
        base[0].copy_(torch.empty(1 << 11, device=META)[:4])
        assert constant_of(base) is constant_of(row) is constant_of(detached) is None


def test_a_view_that_got_values_of_its_own_is_forgotten_with_its_base() -> None:
    with MetaDispatchMode():
        base = torch.zeros(1 << 12, device=META)
        head = base[:4]
        head[0] = 1
        assert constant_of(base) is None
        assert constant_of(head) is not None
        base.copy_(torch.empty(1 << 12, device=META))
        assert constant_of(head) is None


def test_replaced_data_is_not_taken_for_the_old() -> None:
    with MetaDispatchMode():
        tensor = torch.zeros(3, device=META)
        tensor.data = torch.empty(5, device=META)
        assert constant_of(tensor) is None


def test_repeats_that_are_all_alike_are_not_what_is_repeated() -> None:
    """`repeat_interleave(repeats)` gives places, of which one number many times tells nothing."""
    with MetaDispatchMode():
        repeats = torch.ones(300_000, dtype=torch.int64, device="meta")
        places = torch.repeat_interleave(repeats, output_size=300_000)
    assert (known := constant_of(places)) is None or torch.equal(known, torch.arange(300_000))


def test_a_known_number_names_things() -> None:
    with MetaDispatchMode():
        index = torch.tensor(3, device=META)
        assert f"expert_{index}" == "expert_3"
        assert 3 in torch.arange(5, device=META)[[0, -2]]


# -- what is taken for granted ----------------------------------------------------------------------------------------


def unknown(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor that nobody knows the values of."""
    return torch.empty(1 << 20, dtype=dtype, device=META)[: math.prod(shape)].view(shape)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 9))
def test_choices_are_spread_evenly_and_distinct(rows: int, experts: int, wanted: int) -> None:
    chosen = min(wanted, experts)
    indices = torch.empty(rows, chosen, dtype=torch.long, device=META)
    spread_choices(indices, -1, experts)
    values = constant_of(indices)
    assert values is not None
    assert all(len(set(row)) == chosen for row in values.tolist())
    counts = Counter(values.flatten().tolist())
    # rows·chosen choices over the experts: none gets more than one above another
    assert max(counts.values()) - min(counts.get(expert, 0) for expert in range(experts)) <= 1


CHOICES: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda scores: scores.topk(2).indices,
    "argmax": lambda scores: scores.argmax(-1),
    "argmax kept": lambda scores: scores.argmax(1, keepdim=True),
    "max": lambda scores: scores.max(-1).indices,
    "sort": lambda scores: scores.sort(descending=True).indices,
    "argsort": lambda scores: scores.argsort(stable=True),
    "multinomial": lambda scores: scores.softmax(-1).multinomial(2),
    "along the rows": lambda scores: scores.topk(2, dim=0).indices,
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_by_unknown_scores_have_values(name: str) -> None:
    mode = MetaDispatchMode()
    with mode:
        indices = CHOICES[name](unknown(6, 4))
        values = constant_of(indices)
        assert values is not None
        assert values.shape == indices.shape
        assert not mode.evaluator.assumptions  # nothing was decided yet
        assert indices.max().item() < 6
    assert list(mode.evaluator.assumptions) == [BALANCED]


def test_routing_stays_even_where_its_masks_are_too_large_to_keep() -> None:
    mode = MetaDispatchMode()
    with mode:
        chosen = torch.empty(200_000, 64, device=META).topk(2).indices
        mask = F.one_hot(chosen, 64).permute(2, 1, 0)
        assert constant_of(mask) is None
        assert mask.sum((-1, -2)).gt(0).nonzero().shape == (64, 1)
        # 200,000·2 choices among 64 experts
        assert [places.shape for places in torch.where(mask[3])] == [(6_250,)] * 2
    assert list(mode.evaluator.assumptions) == [BALANCED]


@pytest.mark.parametrize("tokens", [24, 30_000, 200_000])
def test_routing_stays_even_where_cuda_writes_its_masks(tokens: int) -> None:
    """Masks that are known as integers are (24·2·64), as what is assumed (30,000·2·64), and by their share alone."""
    mode = MetaDispatchMode()
    with mode, cuda_semantics():
        chosen = torch.empty(tokens, 64, device=META).topk(2).indices
        mask = F.one_hot(chosen, 64).permute(2, 1, 0)
        assert (constant_of(mask) is None) == (tokens == 200_000)
        # tokens·2 choices among 64 experts; of 48 or 60,000 the 4th expert has 1 or 938
        share = {24: 1, 30_000: 938, 200_000: 6_250}[tokens]
        assert [places.shape for places in torch.where(mask[3])] == [(share,)] * 2
    assert list(mode.evaluator.assumptions) == [BALANCED]


def test_a_number_that_is_assigned_is_on_the_host() -> None:
    """CUDA fills with it; on other devices PyTorch makes a tensor of it first."""
    ledger = Ledger("meta")
    with ledger:
        table = torch.zeros(4, 6, dtype=torch.int64, device=META)
        mask = torch.ones(4, 6, dtype=torch.bool, device=META).tril()
        table[1:3, -2:] = 7
        table[0] = True
        table[..., 2] = 5
        table[mask] = -3
        table[None] += 1
    # the table, the mask and what it was made of
    assert [storage.bytes for storage in ledger.storages(frozenset())] == [8 * 4 * 6, 4 * 6, 4 * 6]
    ledger.close()
    expected = torch.zeros(4, 6, dtype=torch.int64)
    expected[1:3, -2:], expected[0], expected[..., 2] = 7, 1, 5
    expected[torch.ones(4, 6, dtype=torch.bool).tril()] = -3
    values = constant_of(table)
    assert values is not None and values.equal(expected + 1)


def test_what_was_seen_before_a_write_is_forgotten() -> None:
    """A view of zeros, and zeros that something unknown is written to."""
    with MetaDispatchMode():
        zeros = torch.zeros(200_000, 64, dtype=torch.int64, device=META)
        before = zeros[:2]
        zeros.scatter_(1, torch.empty(200_000, 1, 64, device=META).topk(1).indices[..., 0], 1)
        assert constant_of(before) is None and constant_of(zeros) is None
        written = torch.zeros(4, 4, dtype=torch.int64, device=META)
        written.scatter_(1, unknown(4, 1).to(torch.int64), 1)
        assert constant_of(written) is None


def test_a_selection_keeps_everything_and_its_count_agrees() -> None:
    mode = MetaDispatchMode()
    with mode:
        scores = unknown(5, 3)
        keep = scores > 0.5
        assert scores[keep].shape == (15,)
        assert scores.masked_select(keep).shape == (15,)
        assert keep.nonzero().shape == (15, 2)
        assert [len(places) for places in torch.where(keep)] == [15, 15]
        assert int(keep.sum()) == 15
        assert keep.sum(1).tolist() == [3] * 5
        assert scores[keep[:, 0]].shape == (5, 3)
        assert scores.unique().shape == (15,)
        assert scores.unique(dim=0).shape == (5, 3)
    assert list(mode.evaluator.assumptions) == [ALL_SELECTED]


def test_boxes_that_are_known_are_suppressed_where_torchvision_can() -> None:
    pytest.importorskip("torchvision", exc_type=Exception)
    kernel = torch._C._dispatch_has_kernel_for_dispatch_key("torchvision::nms", "CPU")
    mode = MetaDispatchMode()
    with mode:
        boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 2], [4, 4, 6, 6]], device=META)
        scores = torch.tensor([0.5, 0.9, 0.7], device=META)
        assert torch.ops.torchvision.nms(boxes, scores, 0.5).tolist() == ([1, 2] if kernel else [0, 1, 2])
        assert torch.ops.torchvision.nms(unknown(3, 4), scores, 0.5).tolist() == [0, 1, 2]
    assert list(mode.evaluator.assumptions) == [ALL_SELECTED]


def test_masks_are_pasted_over_the_whole_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision's Mask R-CNN reads the corners of its boxes; a module of that name stands for it here."""

    def paste_masks_in_image(_: Any, boxes: Tensor, __: tuple[int, int]) -> list[int]:
        return [int(corner) for box in boxes.to(torch.int64) for corner in box]

    module = ModuleType("torchvision.models.detection.transform")
    module.paste_masks_in_image = paste_masks_in_image  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    mode = MetaDispatchMode()
    with mode:
        assert module.paste_masks_in_image(None, torch.tensor([[1.0, 2, 3, 4]], device=META), (30, 40)) == [1, 2, 3, 4]
        assert not mode.evaluator.assumptions
        assert module.paste_masks_in_image(None, unknown(2, 4), (30, 40)) == [0, 0, 40, 30] * 2
    assert list(mode.evaluator.assumptions) == [MASKS_COVER_IMAGE]
    assert module.paste_masks_in_image is paste_masks_in_image


def test_known_masks_select_exactly() -> None:
    mode = MetaDispatchMode()
    with mode:
        mask = torch.tensor([True, False, True, True], device=META)
        assert unknown(4, 3)[mask].shape == (3, 3)
        assert unknown(2, 4).masked_select(mask).shape == (6,)
        assert mask.nonzero().flatten().tolist() == [0, 2, 3]
        assert torch.tensor([3, 1, 3], device=META).unique().tolist() == [1, 3]
        assert torch.arange(2, device=META).repeat_interleave(torch.tensor([2, 1], device=META)).tolist() == [0, 0, 1]
        assert unknown(3, 2)[torch.zeros(3, dtype=torch.bool, device=META)].shape == (0, 2)
    assert not mode.evaluator.assumptions


def test_known_masks_select_exactly_however_wide_they_are_spread() -> None:
    mode = MetaDispatchMode()
    with mode:
        mask = torch.arange(100, device=META) < 30
        wide = mask[:, None].expand(100, 2**13)  # more elements than are kept
        assert unknown(100, 2**13)[wide].numel() == 30 * 2**13
        assert int(wide.sum()) == 30 * 2**13
        assert unknown(100, 2**13)[~mask].shape == (70, 2**13)
        wide[:50] = False
        assert constant_of(mask) is None
    assert not mode.evaluator.assumptions


def test_data_is_nowhere_exactly_a_number() -> None:
    mode = MetaDispatchMode()
    with mode:
        images = unknown(2, 3, 8, 8)
        # Images that consist of zeros alone are taken for padding.
        real = (images == 0.0).sum(dim=(-1, -2, -3)) != 3 * 8 * 8
        assert not mode.evaluator.assumptions
        assert images[real].shape == (2, 3, 8, 8)
    assert list(mode.evaluator.assumptions) == [NOT_EQUAL]


def test_what_pytorch_checks_of_data_is_in_order() -> None:
    mode = MetaDispatchMode()
    with mode:
        torch._check_tensor_all(unknown(5) >= 0)
    assert list(mode.evaluator.assumptions) == [CHECKS_PASS]


def test_counts_of_unknown_choices_are_even() -> None:
    mode = MetaDispatchMode()
    with mode:
        counts = unknown(10, dtype=torch.long).bincount(minlength=4)
        assert counts.tolist() == [3, 3, 2, 2]
        with pytest.raises(DataDependentError, match="bincount"):
            unknown(10, dtype=torch.long).bincount()
    assert list(mode.evaluator.assumptions) == [BALANCED]


def test_finite_values_are_assumed_only_once_asked() -> None:
    mode = MetaDispatchMode()
    with mode:
        values = unknown(3, 4)
        checks = (values.isnan().any(), values.isinf().any(), ~values.isfinite().all(), (values != values).any())
        assert not mode.evaluator.assumptions
        assert not any(bool(check) for check in checks)
        assert bool((values < math.inf).all())
    assert list(mode.evaluator.assumptions) == [ALL_FINITE]


def test_a_number_of_the_data_is_on_the_side_of_zero_where_it_is_read() -> None:
    """A norm below zero means that one is not finite, to DeepSpeed. Of more numbers than one nothing is said."""
    mode = MetaDispatchMode()
    mode.evaluator.lenient = True
    with mode:
        norm = unknown(3).norm()
        below, above = (~norm.isfinite() | (norm < 0)).any(), (norm >= 0) & (norm > 0.0)
        assert not mode.evaluator.assumptions
        assert not bool(below) and bool(above)
        assert constant_of(unknown(3) < 0) is None and constant_of(norm < 2) is None
    assert list(mode.evaluator.assumptions) == [ALL_FINITE, ITEM_IS_ONE]


def test_numbers_copies_and_comparisons() -> None:
    mode = MetaDispatchMode()
    with mode:
        values = unknown(3)
        assert values.sum().item() == 1.0
        assert values.cpu().tolist() == [1.0] * 3
        assert (values > 0).cpu().tolist() == [True] * 3
        assert torch.equal(values, values + 1)
        assert torch.allclose(values, values)
        assert not torch.equal(values, unknown(4))
        with pytest.raises(DataDependentError, match="bool tensor"):
            bool(values.sum() > 0)
        with pytest.raises(DataDependentError, match="int64 tensor"):
            int(unknown(1, dtype=torch.long))
    assert set(mode.evaluator.assumptions) == {ITEM_IS_ONE, COPIED_VALUES, COMPARED_EQUAL}


def test_a_printed_number_needs_no_value() -> None:
    """On a GPU ``f"{loss:.4f}"`` prints the number of a single value; without a format, here it prints the tensor."""
    mode = MetaDispatchMode()
    with mode:
        loss, count = unknown(3).sum(), unknown(3).sum().long()
        assert f"{loss:.4f} {count:>3d} {torch.tensor(2.5, device=META):.2f}" == "1.0000   0 2.50"
        assert f"{loss}".startswith("tensor(")
        with pytest.raises(TypeError):
            f"{unknown(3):.4f}"
    assert list(mode.evaluator.assumptions) == [COPIED_VALUES]


@pytest.mark.parametrize("asks", ["item", "compare"])
def test_a_loop_that_waits_for_the_data_names_its_line(asks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memsize.known_values.evaluation._MOST_READS", 50)

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rounds = 0

        def forward(self, x: Tensor) -> Tensor:
            while x.abs().max().item() > 1e-3 if asks == "item" else torch.equal(x, x * 0.5):
                x, self.rounds = x * 0.5, self.rounds + 1
            return x

    line = Loop.forward.__code__.co_firstlineno + 1
    with pytest.raises(
        memsize.ForwardError, match="has read a data-dependent number, whose value is assumed, 50 times"
    ) as raised:
        memsize.trace(Loop(), (4,), optimizer=None)
    assert f"at test_constants.py:{line}" in str(raised.value)
    assert "--execute" in str(raised.value)


def test_loops_with_limits_of_their_own_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line counts by itself, and what is known is no assumption."""
    monkeypatch.setattr("memsize.known_values.evaluation._MOST_READS", 50)
    with MetaDispatchMode():
        total = 0.0
        for _ in range(50):
            total += unknown(3).sum().item()
        for _ in range(50):
            total += unknown(3).sum().item()
        count = torch.zeros((), dtype=torch.int64, device=META)
        while count.item() < 200:
            count += 1
        assert total == 100


def test_autocast_for_the_cpu_is_said_to_do_nothing() -> None:
    class Net(nn.Module):
        def __init__(self, device: str, enabled: bool = True) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.region = {"device_type": device, "dtype": torch.bfloat16, "enabled": enabled}

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(**self.region):
                y: Tensor = self.layer(x)
                return y

    on_cpu = memsize.trace(Net("cpu"), (4,), optimizer=None).trace
    assert CPU_AUTOCAST in on_cpu.notes
    assert on_cpu.layers[0].outputs[0].spec.dtype == "float32"
    for other in (Net("cuda"), Net("cpu", enabled=False)):
        assert CPU_AUTOCAST not in memsize.trace(other, (4,), optimizer=None).trace.notes


def test_one_random_number_falls_in_the_middle() -> None:
    mode = MetaDispatchMode()
    with mode:
        assert torch.rand([]).item() == torch.rand(1, device=META).item() == 0.5
        assert not mode.evaluator.assumptions
        several = torch.rand(4, device=META) < 0.5
        assert 0 <= int(several.sum()) <= 4
    assert list(mode.evaluator.assumptions) == [FIXED_DRAW]


# -- Python's face ----------------------------------------------------------------------------------------------------


def test_cuda_by_name_means_where_the_run_is() -> None:
    with MetaDispatchMode():
        places = (
            torch.zeros(2, device="cuda"),
            torch.tensor([1, 2], device="cuda:0"),
            torch.arange(3, device=torch.device("cuda", 0)),
            unknown(2).cuda(),
            torch.ones(2).to("cuda"),
            torch.ones(2).to(0, torch.float16),
            unknown(2).new_zeros(3, device="cuda"),
            torch.nn.Linear(2, 2).cuda().weight,
        )
        assert all(tensor.is_meta for tensor in places)
        torch.cuda.synchronize()
        assert constant_of(places[4].float()) is not None


def test_nothing_stays_in_place() -> None:
    names = ("to", "cuda", "__getitem__", "new_tensor", "__format__")
    before = (torch.tensor, torch.zeros, torch.cuda.synchronize, *(getattr(Tensor, name) for name in names))
    inherited = [name in vars(Tensor) for name in names]
    with suppress(ZeroDivisionError), MetaDispatchMode():
        assert torch.tensor is not before[0]
        raise ZeroDivisionError
    after = (torch.tensor, torch.zeros, torch.cuda.synchronize, *(getattr(Tensor, name) for name in names))
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert [name in vars(Tensor) for name in names] == inherited


class Labelled(Tensor):
    """A class of one's own, made before a run."""


def test_tensors_are_no_sequences_afterwards() -> None:
    number, labelled = torch.tensor(3), torch.tensor(4).as_subclass(Labelled)
    for _ in range(2):
        with MetaDispatchMode():
            assert torch.tensor([number, number]).tolist() == [3, 3]
        assert torch.tensor([number, labelled]).tolist() == [3, 4]
        assert torch.tensor([nn.Parameter(torch.tensor(2.0), False)]).tolist() == [2.0]
    assert list(torch.arange(3)) == [0, 1, 2] and torch.arange(3)[[0, -1]].tolist() == [0, 2]


def test_other_threads_see_pytorch_as_it_is() -> None:
    seen: list[Any] = []

    def look() -> None:
        seen.append(torch.tensor([1, 2], device=META))

    with MetaDispatchMode():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert constant_of(seen[0]) is None


@pytest.mark.parametrize("batch_first", [True, False])
def test_packing_gives_what_the_cpu_gives(batch_first: bool) -> None:
    data, lengths = torch.randn((4, 20, 3) if batch_first else (20, 4, 3)), torch.tensor([20, 12, 7, 7])
    packed = pack_padded_sequence(data, lengths, batch_first)
    with MetaDispatchMode():
        copied = pack_padded_sequence(data.to(META), lengths.to(META), batch_first)
    assert copied.data.is_meta and copied.data.shape == packed.data.shape == (46, 3)
    assert torch.equal(copied.batch_sizes, packed.batch_sizes)


@pytest.mark.parametrize("lengths", [[7, 12], [12, 0], [12], []])
def test_wrong_lengths_are_refused_as_the_cpu_refuses_them(lengths: list[int]) -> None:
    data, steps = torch.randn(2, 20, 3), torch.tensor(lengths, dtype=torch.int64)
    with pytest.raises(RuntimeError) as real:
        pack_padded_sequence(data, steps, True)
    with MetaDispatchMode(), pytest.raises(RuntimeError) as copied:
        pack_padded_sequence(data.to(META), steps, True)
    assert str(copied.value).splitlines()[0] == str(real.value).splitlines()[0]


PACKED_STEP = """
import sys
import torch, memsize
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]

memsize.trace(Net(), (torch.randn(3, 9, 8), torch.tensor([4, 9, 2])), optimizer="adamw")
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


@pytest.mark.thorough
def test_a_step_on_packed_sequences_imports_no_compiler(warm_python: Python) -> None:
    done = warm_python("-c", PACKED_STEP)
    assert (done.stdout, done.stderr) == ("[]\n", "")
