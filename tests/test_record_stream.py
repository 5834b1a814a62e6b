"""Memory that is freed while another stream may still use it: at once reusable, or once the program has waited.

Expected figures are worked out beside them; the order of streams is compared with one that looks at every path anew.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

import memsize
from memsize import AllocatorConfig, ProgramRun, Trace
from memsize.documents import document
from memsize.records.trace import DeferredFree
from tests.gpus import replay, timeline
from tests.programs import AHEAD, StreamOrder, gpu, record_of
from tests.ranks import Model, flat
from tests.records import RecordStreamCost
from tests.rules import lagging

MiB = 2**20
FIRST, SECOND, THIRD = (0, 1), (0, 2), (0, 3)


# -- the allocator ----------------------------------------------------------------------------------------------------


def test_a_block_that_others_may_use_is_not_reused_until_the_program_has_waited() -> None:
    # 10 MiB are a segment of their own; while storage 0 waits, storage 1 takes another, and storage 2 reuses the first
    events = [(0, 10 * MiB), (0, -10 * MiB), (1, 10 * MiB), (2, 10 * MiB)]
    assert replay(events).reserved.bytes == 20 * MiB
    assert replay(events, deferred={1: 2}).reserved.bytes == 20 * MiB
    assert replay(events, deferred={1: 3}).reserved.bytes == 20 * MiB
    late = replay(events, deferred={1: 4}, timeline=True)
    assert late.reserved.bytes == 30 * MiB
    # it is no longer allocated meanwhile (`free` counts it off, `free_block` returns it)
    assert late.timeline is not None
    assert late.timeline.allocated.tolist() == [10 * MiB, 0, 10 * MiB, 20 * MiB]
    assert [segment.blocks[0][2] for segment in late.segments] == [2, 1, None]


def test_a_small_block_waits_in_its_segment() -> None:
    # 512 KiB each: four fill a segment of 2 MiB, the fifth needs another while the first waits
    half = MiB // 2
    events = [*((n, half) for n in range(4)), (0, -half), (4, half)]
    assert replay(events).reserved.bytes == 2 * MiB
    late = replay(events, deferred={4: 6})
    assert late.reserved.bytes == 4 * MiB
    assert [[owner for *_, owner in segment.blocks] for segment in late.segments] == [[4, None], [None, 1, 2, 3]]


def test_a_waiting_block_does_not_merge_with_its_neighbours() -> None:
    # 5 + 15 MiB of a segment of 20: the 15 are free, the 5 wait, so that 20 MiB need a segment of their own
    events = [(0, 5 * MiB), (1, 15 * MiB), (0, -5 * MiB), (1, -15 * MiB), (2, 20 * MiB)]
    assert replay(events).reserved.bytes == 20 * MiB
    assert replay(events, deferred={2: 5}).reserved.bytes == 40 * MiB


def test_before_memory_runs_out_all_streams_are_waited_for() -> None:
    # `release_cached_blocks` begins with `synchronize_and_free_events`: the waiting segment goes back, 30 MiB suffice
    events = [(0, 20 * MiB), (0, -20 * MiB), (1, 30 * MiB)]
    assert replay(events, deferred={1: 3}, capacity=49 * MiB).final.reserved == 30 * MiB
    assert replay(events, deferred={1: 3}).final.reserved == 50 * MiB


def test_after_that_only_cuda_is_asked() -> None:
    # The 5 MiB share a segment of 20 with 15 that are in use: free again, they serve nobody, as `malloc` asks CUDA only
    events = [(0, 5 * MiB), (1, 15 * MiB), (0, -5 * MiB), (2, 5 * MiB)]
    assert replay(events, capacity=20 * MiB).out_of_memory is None
    assert replay(events, deferred={2: 4}, capacity=20 * MiB).out_of_memory is not None


def test_emptying_the_cache_waits_too() -> None:
    events = [(0, 20 * MiB), (0, -20 * MiB), (1, 30 * MiB)]
    assert replay(events, deferred={1: 3}, emptied=(2,)).reserved.bytes == 30 * MiB


def test_a_resized_storage_leaves_its_old_block_waiting() -> None:
    # 10 MiB grow to 20: both at once; the 10 are reused unless they wait
    events = [(0, 10 * MiB), (0, 10 * MiB), (1, 10 * MiB)]
    assert replay(events).reserved.bytes == 30 * MiB
    assert replay(events, deferred={1: 3}).reserved.bytes == 40 * MiB


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """Events, and for some that free a block the event before which it can be reused."""
    sizes = draw(st.lists(st.integers(1, 24 * MiB), min_size=1, max_size=12))
    live: dict[int, int] = {}
    events: list[tuple[int, int]] = []
    deferred: dict[int, int] = {}
    for storage, size in enumerate(sizes):
        events.append((storage, size))
        live[storage] = size
        for freed in draw(st.sets(st.sampled_from(sorted(live)))):
            if draw(st.booleans()):
                deferred[len(events)] = len(events) + draw(st.integers(1, 8))
            events.append((freed, -live.pop(freed)))
    return events, deferred


@settings(deadline=None)
@given(runs(), st.booleans(), st.integers(0, 2))
def test_what_waits_is_neither_free_nor_lost(
    run: tuple[list[tuple[int, int]], dict[int, int]], expandable: bool, streams: int
) -> None:
    events, deferred = run
    config = AllocatorConfig(expandable_segments=expandable)
    placed = {storage: storage % (streams + 1) for storage, _ in events}
    prompt = replay(events, config, streams=placed, timeline=True)
    late = replay(events, config, streams=placed, deferred=deferred, timeline=True)
    # blocks tile their segments, and what is live is the same
    for segment in late.segments:
        assert sum(size for _, size, _ in segment.blocks) == segment.bytes
    assert (late.requested, late.final.requested) == (prompt.requested, prompt.final.requested)
    # what waits until the next event does not wait
    at_once = replay(events, config, streams=placed, deferred={event: event + 1 for event in deferred})
    assert (at_once.reserved, at_once.final) == (prompt.reserved, prompt.final)
    # and nothing is reused while it waits: the block of a request lies nowhere in one that waits
    assert late.timeline is not None
    waiting: dict[int, tuple[int, int]] = {}
    for number, (storage, delta) in enumerate(events):
        waiting = {event: held for event, held in waiting.items() if deferred[event] > number}
        start = int(late.timeline.address[number])
        if delta > 0:
            clear = all(start + delta <= low or high <= start for low, high in waiting.values())
            assert clear, (storage, waiting)
        elif number in deferred:
            waiting[number] = (start, start - delta)


# -- which streams the program has waited for -------------------------------------------------------------------------


class Clock:
    """Counts events by hand."""

    now = 0


def order() -> tuple[StreamOrder, Clock]:
    clock = Clock()
    return StreamOrder(lambda: clock.now), clock


def test_a_block_waits_for_each_stream_that_it_was_handed_to_but_its_own() -> None:
    streams, clock = order()
    for queue in (FIRST, SECOND, THIRD):
        streams.use(7, queue)
    streams.free(7, FIRST)
    clock.now = 3
    streams.synchronize(streams.moment(FIRST))
    streams.synchronize(streams.moment(SECOND))
    assert streams.deferred(10) == (DeferredFree(0, -1),)
    clock.now = 5
    streams.synchronize(streams.moment(THIRD))
    assert streams.deferred(10) == (DeferredFree(0, 5),)
    assert streams.deferred(0) == ()


def test_its_own_stream_alone_is_nothing_to_wait_for() -> None:
    streams, _ = order()
    streams.use(7, FIRST)
    streams.free(7, FIRST)
    assert streams.deferred(10) == ()


def test_waiting_for_a_stream_that_waits_for_another_is_waiting_for_both() -> None:
    streams, clock = order()
    streams.use(7, SECOND)
    streams.free(7, FIRST)
    streams.wait(THIRD, streams.moment(SECOND))
    streams.use(8, SECOND)
    clock.now = 1
    streams.free(8, FIRST)  # after what the third waits for
    clock.now = 4
    streams.synchronize(streams.moment(THIRD))
    assert streams.deferred(10) == (DeferredFree(0, 4), DeferredFree(1, -1))
    clock.now = 6
    streams.synchronize_all()
    assert streams.deferred(10) == (DeferredFree(0, 4), DeferredFree(1, 6))


def test_the_program_is_at_most_1024_launches_ahead_of_a_stream() -> None:
    streams, clock = order()
    streams.use(7, SECOND)  # the first work of the second stream
    streams.free(7, FIRST)
    streams.launch(FIRST)
    streams.wait(FIRST, streams.moment(SECOND))  # after the first launch of the first stream
    for clock.now in range(2, 2 + AHEAD):  # launches 2 to 1,025: the last has no room until the first is done
        streams.launch(FIRST)
    assert streams.deferred(10) == (DeferredFree(0, -1),)
    clock.now += 1
    streams.launch(FIRST)  # once launch 2 is done, which comes after what its stream has waited for
    assert streams.deferred(10) == (DeferredFree(0, 2 + AHEAD),)


def test_a_stream_s_own_launches_free_what_was_handed_to_it() -> None:
    streams, clock = order()
    streams.use(7, SECOND)  # work 1
    streams.free(7, FIRST)
    for clock.now in range(1, AHEAD):
        streams.launch(SECOND)  # up to work 1,024
    assert streams.deferred(10) == (DeferredFree(0, -1),)
    clock.now = AHEAD
    streams.launch(SECOND)  # work 1,025 waits for work 1
    assert streams.deferred(10) == (DeferredFree(0, AHEAD),)


STEPS = st.one_of(
    st.tuples(st.just("free"), st.sampled_from((FIRST, SECOND, THIRD))),
    st.tuples(st.just("wait"), st.tuples(*[st.sampled_from((FIRST, SECOND, THIRD))] * 2)),
    st.tuples(st.just("synchronize"), st.sampled_from((FIRST, SECOND, THIRD))),
)


@settings(deadline=None)
@given(st.lists(STEPS, max_size=20))
def test_a_block_is_free_once_a_path_leads_from_its_stream_to_the_program(steps: list[tuple[str, object]]) -> None:
    """Beside a search through everything that was queued: each step comes after the one before it on its stream."""
    streams, clock = order()
    before: dict[int, set[int]] = {}
    last: dict[object, set[int]] = {FIRST: set(), SECOND: set(), THIRD: set()}
    reached: dict[int, int] = {}
    freed = []
    for number, (kind, what) in enumerate(steps):
        clock.now = number
        if kind == "free":
            streams.use(number, what)  # type: ignore[arg-type]
            streams.free(number, (0, 0))
            freed.append(number)
            before[number] = last[what] | {number}
            last[what] = before[number]
        elif kind == "wait":
            later, earlier = what  # type: ignore[misc]
            streams.wait(later, streams.moment(earlier))
            last[later] = last[later] | last[earlier]
        else:
            streams.synchronize(streams.moment(what))  # type: ignore[arg-type]
            for each in last[what]:
                reached.setdefault(each, number)
    assert streams.deferred(99) == tuple(DeferredFree(each, reached.get(each, -1)) for each in freed)


# -- collectives -------------------------------------------------------------------------------------------------------

GATHERING = """
    import os
    import sys
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    os.environ["TORCH_NCCL_AVOID_RECORD_STREAMS"] = sys.argv[1]
    part = torch.zeros(10 * 2**20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        if "plain" in sys.argv:
            whole = torch.empty(20 * 2**20, dtype=torch.uint8, device="cuda")
            dist.broadcast(whole, 0)
        else:
            parts = torch.ops._c10d_functional.all_gather_into_tensor(part, 2, dist.group.WORLD.group_name)
            whole = torch.ops._c10d_functional.wait_tensor(parts)
            del parts
        for _ in range(int(sys.argv[2])):
            whole.add_(1)
        if "read" in sys.argv:
            whole[0].item()
"""


@pytest.mark.parametrize(
    ("stack", "arguments", "most"),
    [
        # segments of 10 and twice 20 MiB; or else a third of 20 MiB, for what the second result leaves waiting
        ("torch=2.7", ("0", "1"), 70 * MiB),
        ("torch=2.7", ("0", "1", "read"), None),
        ("torch=2.7", ("0", "1024"), 70 * MiB),
        ("torch=2.7", ("0", "1025"), None),  # the last has no room until the first of them runs, after the collective
        ("torch=2.7", ("1", "1"), None),
        ("torch=2.7", ("0", "1", "plain"), None),  # one that the program waits for itself
        ("torch=2.8", ("0", "1"), None),
    ],
)
def test_collectives_hand_their_buffers_to_a_stream_before_release_2_8(
    stack: str, arguments: tuple[str, ...], most: int | None, tmp_path: Path
) -> None:
    script = tmp_path / "gather.py"
    script.write_text(textwrap.dedent(GATHERING))
    run = memsize.run(script, arguments, gpu="a100", gpus=2, stack=stack, steps=0)
    assert isinstance(run, ProgramRun)
    assert run.peak.reserved == 50 * MiB
    assert (run.peak.lag and run.peak.lag.reserved) == most
    records = stack == "torch=2.7" and arguments[0] == "0" and "plain" not in arguments
    assert any("TORCH_NCCL_AVOID_RECORD_STREAMS=1 prevents" in note for note in run.trace.notes) == records


# -- programs ---------------------------------------------------------------------------------------------------------


def handed_over() -> None:
    """10 MiB, freed while a second stream may still read them."""
    beside = torch.cuda.Stream()
    x = torch.empty(10 * MiB, dtype=torch.uint8, device="cuda")
    beside.wait_stream(torch.cuda.current_stream())
    x.record_stream(beside)


def event_beside() -> torch.cuda.Event:
    """It comes when what is queued on the second stream is done."""
    event = torch.cuda.Event()
    event.record(torch.cuda.Stream(stream_id=1, device_index=0, device_type=1))
    return event


def number_after(event: torch.cuda.Event) -> torch.Tensor:
    """What the default stream computes once an event has come."""
    event.wait()
    return torch.ones(3, device="cuda")


WAITS: dict[str, Callable[[], object]] = {
    "the device": torch.cuda.synchronize,
    "the accelerator": torch.accelerator.synchronize,
    "an event": lambda: event_beside().synchronize(),
    "an event that has come": lambda: event_beside().query(),
    "a number": lambda: number_after(event_beside()).sum().item(),
    "a comparison": lambda: torch.equal(*[number_after(event_beside())] * 2),
    "a copy": lambda: number_after(event_beside()).cpu(),
    "a copy into what is there": lambda: torch.empty(3).copy_(number_after(event_beside())),
}
GOES_ON: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "the default stream": lambda: torch.cuda.current_stream().synchronize(),
    "a number of the default stream": lambda: torch.ones(3, device="cuda").sum().item(),
    "a number on the CPU": lambda: torch.ones(3).sum().item(),
    "a copy that goes on": lambda: number_after(event_beside()).to("cpu", non_blocking=True),
}


@pytest.mark.parametrize("what", [*WAITS, *GOES_ON])
def test_what_waits_for_the_stream_frees_the_block(what: str) -> None:
    with gpu() as program:
        handed_over()
        (WAITS | GOES_ON)[what]()
        torch.empty(10 * MiB, dtype=torch.uint8, device="cuda")
    found, large = record_of(program), 10 * MiB
    # a block of 10 MiB is a segment of its own; the numbers and copies beside it have one of 2 MiB
    small = found.peak.reserved - large
    assert small in (0, 2 * MiB)
    assert found.peak.lag == (None if what in WAITS else RecordStreamCost(1, 2 * large + small))
    assert found.peak.device.high - found.peak.device.low >= (0 if what in WAITS else large)


def test_an_event_of_before_is_not_waited_for_long_enough() -> None:
    with gpu() as program:
        early = event_beside()
        handed_over()
        early.synchronize()
        torch.empty(10 * MiB, dtype=torch.uint8, device="cuda")
    assert record_of(program).peak.lag == RecordStreamCost(1, 20 * MiB)


def test_a_lag_may_reserve_no_more_and_still_run_out_of_memory() -> None:
    assert lagging(RecordStreamCost(2, 10 * MiB, runs_out=True), 10 * MiB).text() == (
        "At most 10.00 MiB are reserved if the GPU lags behind: record_stream handed 2 tensors to another "
        "stream, whose memory can be reused only after that stream is done with it; PyTorch waits for that stream "
        "before it gives up, and may still run out of memory."
    )


PREFETCHING = """
    import sys
    import torch
    from torch import nn

    beside = torch.cuda.Stream()

    def batches():
        for _ in range(6):
            with torch.cuda.stream(beside):
                batch = torch.randn(4096, 1024).cuda(non_blocking=True)  # 16 MiB
            torch.cuda.current_stream().wait_stream(beside)
            batch.record_stream(torch.cuda.current_stream())
            yield batch

    model = nn.Linear(1024, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for batch in batches():
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if "read" in sys.argv:
            loss.item()
"""


def test_batches_that_are_fetched_ahead_wait_for_the_stream_that_computes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PREFETCHING))
    run = memsize.run(script, gpu="t4", steps=0)
    assert isinstance(run, ProgramRun)
    # six batches of 16 MiB, of which five are freed, each when the next one is there: two at once, or else all of them
    assert run.peak.lag == RecordStreamCost(5, run.peak.reserved + 4 * 16 * MiB)
    (finding,) = (each for each in run.findings if each.code == "run-lags")
    assert finding.bytes == 64 * MiB
    assert "64.00 MiB more: record_stream handed 5 tensors to another stream" in finding.text()
    assert document(run).figures("MiB")["peak"]["lag"]["tensors"] == 5
    assert any("record_stream" in note for note in timeline(run.trace).notes)


def test_who_reads_the_loss_waits_in_each_step(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PREFETCHING))
    run = memsize.run(script, ["read"], gpu="t4", steps=0)
    assert isinstance(run, ProgramRun)
    # the batch of the step before is freed once the next one's is there, and reused by the one after that
    assert run.peak.lag is None and len(run.trace.deferred) == 5
    assert not [each for each in run.findings if each.code == "run-lags"]


@pytest.fixture(scope="module")
def sharded() -> dict[bool, memsize.StepTrace]:
    ids = torch.zeros(2, 8, dtype=torch.long)
    return {
        limited: memsize.trace(
            Model(512), ids, world=memsize.World(2), step=flat(limit_all_gathers=limited), gpu="t4", steps=2
        )
        for limited in (True, False)
    }


def test_the_first_fsdp_gathers_ahead_as_far_as_it_is_let(sharded: dict[bool, memsize.StepTrace]) -> None:
    """It hands gathered parameters to the stream that computes, and `limit_all_gathers` waits for the last but one."""
    limited, unlimited = sharded[True].peak, sharded[False].peak
    assert limited.reserved == unlimited.reserved
    assert limited.lag is not None and unlimited.lag is not None
    assert limited.reserved < limited.lag.reserved < unlimited.lag.reserved
    assert "record_stream" in str(sharded[True])


def test_the_record_comes_back_from_a_file(sharded: dict[bool, memsize.StepTrace], tmp_path: Path) -> None:
    trace: Trace = sharded[True].trace
    assert trace.deferred
    sharded[True].save(tmp_path / "run.memsize")
    assert memsize.load(tmp_path / "run.memsize").trace.deferred == trace.deferred
