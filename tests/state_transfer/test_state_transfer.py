"""A joining node downloads a state over the in-memory network: whole, of one version, from any donor that has it."""

import asyncio
import gc
import logging
import re
import struct
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from donors import BUDGET, FRAGMENTS, NUMBERS, TERMS, DonorNetwork, FaultyDonor, Owner, checks, chunks, header, numbers
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_clock import in_virtual_time

from noloco_node.errors import (
    Incompatible,
    OutOfMemory,
    PeerFault,
    PeerLost,
    PeerMisbehaved,
    PeerRefused,
    SwarmUnreachable,
)
from noloco_node.host.limits import MIN_RATE_BYTES_S
from noloco_node.host.traffic import Traffic
from noloco_node.state_transfer import choose_donor, client, copies, server, slow_donors
from noloco_node.state_transfer.choose_donor import STALE_ROUNDS, Others, Wanted, fetch_state
from noloco_node.state_transfer.client import Download, LiveState, StateTerms, fetch
from noloco_node.transport.base import TAKEN_S, peer_faults
from noloco_node.version import PROTOCOL
from noloco_node.wire import messages as wire
from noloco_node.wire import peer_pb2 as pb
from noloco_node.wire import state_format
from noloco_node.wire.peer_pb2_grpc import StateStub
from noloco_node.wire.state_format import CHUNK_BYTES, Coding

DATA, OTHER = numbers(1), numbers(2)
SMALL = numbers(3, 1000)
TOTAL = len(DATA)


class Watcher:
    """What the joining node's user would see; `stop_at`: the network ends there."""

    def __init__(self, stop_at: int | None = None, stop: Any = None) -> None:
        self.places: list[int] = []
        self.bytes: list[int] = []
        self.rounds: list[int] = []
        self._stop_at, self._stop = stop_at, stop

    def queued(self, place: int) -> None:
        self.places.append(place)

    async def check_round(self, round: int) -> None:
        self.rounds.append(round)

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        self.bytes.append(done_bytes)
        if self._stop_at is not None and done_bytes >= self._stop_at:
            self._stop()


def of(state: LiveState) -> tuple[int, bytes]:
    return state.round, bytes(state.data)


async def ask(
    servicer: Owner | FaultyDonor, terms: StateTerms = TERMS, count: int = NUMBERS, **options: Any
) -> LiveState:
    network = DonorNetwork()
    if isinstance(servicer, Owner):
        await network.donor("donor", servicer)
    else:
        await network.faulty_donor("donor", servicer)
    channel = (await network.joining_node()).channel("donor")
    return await fetch(channel, terms, Download(count, **options), Watcher())


async def fetched(
    network: DonorNetwork,
    name: str = "joining",
    watcher: Watcher | None = None,
    *,
    count: int = NUMBERS,
    pace: Traffic | None = None,
    donor: str = "donor",
) -> LiveState:
    """What a node gets that joins, or asks again."""
    channel = (await network.joining_node(name)).channel(donor)
    return await fetch(channel, TERMS, Download(count), watcher or Watcher(), pace)


# ---- one donor -------------------------------------------------------------------------------------------------------
@in_virtual_time
async def test_the_state_arrives_whole_with_progress() -> None:
    network, watcher = DonorNetwork(), Watcher()
    await network.donor("donor", Owner(DATA))
    state = await fetched(network, watcher=watcher)
    assert of(state) == (12, DATA)
    assert watcher.bytes == sorted(watcher.bytes) and watcher.bytes[-1] == TOTAL and len(watcher.bytes) == FRAGMENTS


@in_virtual_time
async def test_in_bf16_it_is_half_the_bytes_rounded_to_nearest() -> None:
    state = await ask(Owner(DATA), coding=Coding.BF16)
    exact = memoryview(DATA).cast("f")
    assert all(abs(a - b) <= abs(b) * 2**-8 for a, b in zip(state.data.cast("f"), exact, strict=True))
    ties = struct.pack("<4I", 0x3F808000, 0x3F818000, 0x3F808001, 0xBF80FFFF)
    coded = Coding.BF16.encode(memoryview(ties), 0, 8)
    assert struct.unpack("<4H", coded) == (0x3F80, 0x3F82, 0x3F81, 0xBF81)


@pytest.mark.parametrize("count", [0, 1, 1000])
@in_virtual_time
async def test_small_states_arrive_too(count: int) -> None:
    for coding in Coding:
        state = await ask(Owner(numbers(1, count)), count=count, coding=coding)
        assert len(state.data) == 4 * count


@in_virtual_time
async def test_another_run_or_layout_is_refused() -> None:
    for terms in (StateTerms(b"R" * 32, b"l" * 32), StateTerms(b"r" * 32, b"L" * 32)):
        with pytest.raises(PeerRefused, match="incompatible"):
            await ask(Owner(DATA), terms)


def test_a_large_state_is_cut_into_a_thousand_fragments_at_most() -> None:
    for total in (1, CHUNK_BYTES, 30 << 20, 8 << 30, (1 << 42) - 4):
        size = state_format.fragment_bytes(total)
        assert size % CHUNK_BYTES == 0 and 1 <= state_format.fragments(total) <= state_format.MAX_FRAGMENTS
        assert (state_format.fragments(total) - 1) * size < total <= state_format.fragments(total) * size


# ---- one copy for all, and a queue -----------------------------------------------------------------------------------
@in_virtual_time
async def test_one_copy_serves_several_and_the_others_wait_and_see_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "AT_ONCE", 2)
    network, owner = DonorNetwork(bandwidth_bytes_s=1e6), Owner(DATA)
    await network.donor("donor", owner)
    watchers = [Watcher() for _ in range(4)]
    downloads = [fetched(network, f"n{i}", watchers[i]) for i in range(4)]
    states = await asyncio.gather(*downloads)
    assert {of(state) for state in states} == {(12, DATA)}
    assert len(owner.asked) == 1
    assert sorted(h.places[0] if h.places else 0 for h in watchers) == [0, 0, 1, 2]
    last = next(h for h in watchers if h.places and h.places[0] == 2)
    assert last.places == sorted(last.places, reverse=True)


@in_virtual_time
async def test_beyond_a_queue_of_some_length_the_answer_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "AT_ONCE", 1)
    monkeypatch.setattr(server, "MAX_WAITING", 1)
    network = DonorNetwork(bandwidth_bytes_s=1e6)
    await network.donor("donor", Owner(DATA))
    downloads = [fetched(network, f"n{i}") for i in range(3)]
    results = await asyncio.gather(*downloads, return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["LiveState", "LiveState", "PeerRefused"]


@in_virtual_time
async def test_a_peer_that_is_gone_frees_its_place_and_one_that_calls_again_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "AT_ONCE", 1)
    network = DonorNetwork(bandwidth_bytes_s=1e5)
    await network.donor("donor", Owner(DATA))
    watcher = Watcher()
    leaves = asyncio.create_task(fetched(network, "first"))
    await asyncio.sleep(1)
    waits = asyncio.create_task(fetched(network, "second"))
    await asyncio.sleep(1)
    last = asyncio.create_task(fetched(network, "third", watcher))
    await asyncio.sleep(1)
    again = asyncio.create_task(fetched(network, "second"))
    with pytest.raises(PeerRefused):
        await waits  # its newer call has taken its place
    leaves.cancel()
    assert of(await again) == of(await last) == (12, DATA)
    assert watcher.places[0] == 2 and 1 in watcher.places


def test_one_place_leaves_turns_and_waiting_places_for_others() -> None:
    queue = server.DownloadQueue()
    flood = [queue.join(f"flood{n}", "here") for n in range(99)]
    places = [ticket and ticket.place() for ticket in flood]
    assert places[: server.AT_ONCE] == [0] * server.OF_PLACE + [1, 2]
    assert places.index(None) == server.AT_ONCE + server.MAX_WAITING
    newcomer = queue.join("newcomer", "elsewhere")
    assert newcomer is not None and newcomer.place() == 0, "its turn: the place of the others has all that it may have"
    others = [queue.join(f"other{n}", "elsewhere") for n in range(99)]
    mine, theirs = sum(map(bool, others)), sum(t is not None and t.place() is not None for t in flood)
    assert abs(mine - theirs) <= 2, "half of the queue for each place"
    assert flood[0] is not None and flood[0].place() == 0, "whose turn it is stays"


def test_the_first_of_a_place_goes_before_the_second_of_another() -> None:
    """Four readers at two places, each a little faster than one that is too slow, kept all newcomers waiting."""
    queue = server.DownloadQueue()
    two = [queue.join(f"reader{n}", f"place {n % 2}") for n in range(4)]
    assert [ticket and ticket.place() for ticket in two] == [0] * 4
    newcomers = [queue.join(f"newcomer{n}", f"elsewhere {n}") for n in range(3)]
    assert [ticket and ticket.place() for ticket in newcomers] == [0, 0, 3]
    assert None not in [ticket and ticket.place() for ticket in two], "who reads goes on"
    for ticket in two[:2]:
        assert ticket
        queue.leave(ticket)
    assert [ticket and ticket.place() for ticket in (*two[2:], newcomers[2])] == [0, 0, 1]


@in_virtual_time
async def test_a_download_that_makes_room_hears_that_the_donor_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "AT_ONCE", 2)
    monkeypatch.setattr(server, "OF_PLACE", 1)
    monkeypatch.setattr(server, "MAX_WAITING", 2)
    network = DonorNetwork(bandwidth_bytes_s=1e5)
    network.network.places = {f"n{n}": "here" for n in range(4)}
    await network.donor("donor", Owner(DATA))
    crowd = []
    for n in range(4):
        crowd.append(asyncio.create_task(fetched(network, f"n{n}")))
        await asyncio.sleep(1)
    assert of(await fetched(network, "elsewhere")) == (12, DATA)
    results = await asyncio.gather(*crowd, return_exceptions=True)
    assert [str(result) if isinstance(result, PeerRefused) else "" for result in results] == ["", "", "", "busy"]


@in_virtual_time
async def test_a_waiting_peer_is_told_its_place_when_it_changes_and_not_when_others_behind_it_hang_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "AT_ONCE", 1)
    network, watcher = DonorNetwork(bandwidth_bytes_s=1e5), Watcher()
    await network.donor("donor", Owner(DATA))
    tasks = []
    for name in ("served", "waits"):
        tasks.append(asyncio.create_task(fetched(network, name, watcher)))
        await asyncio.sleep(1)
    for _ in range(20):
        hangs_up = asyncio.create_task(fetched(network, "behind"))
        await asyncio.sleep(0.2)
        hangs_up.cancel()
    await asyncio.gather(*tasks)
    assert watcher.places.count(1) <= 1 + 30 / server.SAY_PLACE_S


def on_a_slow_link() -> Traffic:
    return Traffic(download_bytes_s=MIN_RATE_BYTES_S)


@pytest.mark.parametrize("slow_is", ["the reader", "the donor"])
@in_virtual_time
async def test_slow_readers_keep_no_newcomer_from_a_fresh_state(monkeypatch: pytest.MonkeyPatch, slow_is: str) -> None:
    """They have both copies. Who reads as fast as the donor sends keeps what he has."""
    monkeypatch.setattr(client, "ASIDE_BYTES", 1 << 30)
    network, owner = DonorNetwork(), Owner(DATA * 4, 1)
    await network.donor("donor", owner, **({} if slow_is == "the reader" else {"max_upload": 2 * MIN_RATE_BYTES_S}))
    readers = []
    for name in ("first", "second"):
        pace = on_a_slow_link() if slow_is == "the reader" else None
        readers.append(asyncio.create_task(fetched(network, name, count=4 * NUMBERS, pace=pace)))
        await asyncio.sleep(copies.SHARED_S + 1)
        owner.round += 1
    await asyncio.sleep(100)
    owner.round = 500
    state = await fetched(network, "newcomer", count=4 * NUMBERS)
    assert state.round == (500 if slow_is == "the reader" else 2)
    assert (await readers[0]).round == 1, "the first of them has it to the end"
    if slow_is == "the reader":
        with pytest.raises(PeerRefused, match="busy"):
            await readers[1]
    else:
        assert (await readers[1]).round == 2


@in_virtual_time
async def test_slow_readers_leave_their_turns_to_others_and_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ASIDE_BYTES", 1 << 30)
    network, clock = DonorNetwork(), asyncio.get_running_loop().time
    await network.donor("donor", Owner(DATA * 4))
    slow = [
        asyncio.create_task(fetched(network, f"slow{n}", count=4 * NUMBERS, pace=on_a_slow_link()))
        for n in range(server.AT_ONCE)
    ]
    await asyncio.sleep(1)
    began = clock()
    await fetched(network, "newcomer", count=4 * NUMBERS)
    assert clock() - began < 100 < 4 * TOTAL / MIN_RATE_BYTES_S
    assert {(await reader).round for reader in slow} == {12}


def test_of_many_slow_readers_the_place_that_has_most_gives_one_up() -> None:
    queue = server.DownloadQueue()

    def slow(peer: str, place: str) -> server.Ticket:
        ticket = queue.join(peer, place)
        assert ticket is not None and ticket.place() == 0
        queue.slows_down(ticket)
        return ticket

    here = [slow(f"here{n}", "here") for n in range(3)]
    others = [slow(f"other{n}", f"place{n}") for n in range(server.MAX_SLOW - 1)]
    assert [ticket.place() for ticket in here] == [0, None, None]
    last = slow("last", "elsewhere")
    assert last.place() == 0 and not last.slow and not any(t.place() for t in others), "it keeps its turn"
    assert slow("here0", "here").slow, "no new turn for who calls again"
    waits = [queue.join(f"waits{n}", f"far{n}") for n in range(server.AT_ONCE)][-1]
    assert waits is not None and waits.place() == 1
    queue.slows_down(waits)
    assert waits.place() == 1, "nor for who waits, and does not read its place"


@in_virtual_time
async def test_who_hangs_up_again_and_again_costs_one_copy_a_round_and_few_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    network, owner = DonorNetwork(), Owner(DATA)
    await network.donor("donor", owner)
    for _ in range(30):
        begun = asyncio.Event()
        hangs_up = asyncio.create_task(fetched(network, watcher=Watcher(1, begun.set)))
        await begun.wait()
        hangs_up.cancel()
        await asyncio.sleep(copies.SHARED_S + 1)
    assert len(owner.asked) == 1
    assert caplog.text.count("the state of round 12") == 20


@in_virtual_time
async def test_who_asks_again_and_again_where_there_is_no_memory_for_a_copy_fills_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    network, owner = DonorNetwork(), Owner(DATA, at_once=False)
    await network.donor("donor", owner)
    channel = (await network.joining_node()).channel("donor")
    for _ in range(30):
        asking = asyncio.create_task(fetch(channel, TERMS, Download(NUMBERS), Watcher()))
        await asyncio.sleep(1)
        owner.asked.pop().set_exception(OutOfMemory("there is no memory for a copy"))
        with pytest.raises(PeerRefused, match="leaving"):
            await asking
    assert caplog.text.count("no memory") == 20


@in_virtual_time
async def test_who_hangs_up_while_the_state_is_hashed_does_not_have_it_hashed_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread goes on: a few callers would take all threads of the node."""
    begun = 0

    async def hash_slowly(size_bytes: int, work: Callable[[Coding], wire.StateHeader], coding: Coding) -> Any:
        nonlocal begun
        begun += 1
        await asyncio.sleep(30)
        return work(coding)

    monkeypatch.setattr(copies, "aside", hash_slowly)
    network, owner = DonorNetwork(), Owner(DATA)
    await network.donor("donor", owner)
    for _ in range(20):
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                await fetched(network)
    assert begun == 1
    assert of(await fetched(network)) == (12, DATA) and begun == 1


class HangsUp(Exception):
    pass


def hang_up() -> None:
    raise HangsUp


@in_virtual_time
async def test_one_place_causes_few_copies_of_a_large_state_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That calls and hangs up once the copy before is dropped."""
    monkeypatch.setattr(copies, "COPIED_BYTES_S", TOTAL / 290)
    network, owner = DonorNetwork(), Owner(DATA)
    await network.donor("donor", owner)
    network.network.places |= {f"n{n}": "one place" for n in range(20)}
    for n in range(20):
        if n % 5 == 0:
            with pytest.raises(HangsUp):
                await fetched(network, f"n{n}", Watcher(TOTAL // 2, hang_up))
        else:
            with pytest.raises(PeerRefused, match="busy"):
                await fetched(network, f"n{n}")
        owner.round += 1
        await asyncio.sleep(copies.KEPT_S + 1)
    assert len(owner.asked) == 4
    assert (await fetched(network, "elsewhere")).round == owner.round


@in_virtual_time
async def test_who_broke_off_a_very_large_state_may_begin_again_while_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a machine that ran out of memory, and is back in minutes: a node that joins asks for TAKE_STATE_S."""
    monkeypatch.setattr(copies, "COPIED_BYTES_S", TOTAL / 1750)  # as of 7 B parameters
    network, owner = DonorNetwork(), Owner(DATA)
    await network.donor("donor", owner)
    with pytest.raises(HangsUp):
        await fetched(network, "n", Watcher(TOTAL // 2, hang_up))
    await asyncio.sleep(copies.KEPT_S + 1)
    with pytest.raises(PeerRefused, match="busy"):
        await fetched(network, "n")
    await asyncio.sleep(choose_donor.TAKE_STATE_S - copies.KEPT_S)
    assert (await fetched(network, "n")).round == owner.round


@in_virtual_time
async def test_a_place_that_has_caused_too_many_gets_what_is_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "COPIED_BYTES_S", TOTAL / 290)
    network, owner = DonorNetwork(), Owner(DATA)
    await network.donor("donor", owner)
    network.network.places |= {"one": "one place", "two": "one place"}
    with pytest.raises(HangsUp):
        await fetched(network, "one", Watcher(TOTAL // 2, hang_up))
    owner.round += copies.SHARED_ROUNDS + 1
    assert of(await fetched(network, "two")) == (12, DATA) and len(owner.asked) == 1


@in_virtual_time
async def test_a_place_whose_nodes_read_their_states_may_cause_any_number_of_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As three machines of a laboratory that join a run of one node, minutes apart."""
    monkeypatch.setattr(copies, "COPIED_BYTES_S", TOTAL / 290)
    network, owner = DonorNetwork(), Owner(DATA)
    await network.donor("donor", owner)
    network.network.places |= {f"n{n}": "one place" for n in range(3)}
    for n in range(3):
        assert (await fetched(network, f"n{n}")).round == owner.round
        owner.round += copies.SHARED_ROUNDS + 1
        await asyncio.sleep(copies.KEPT_S + 1)


@in_virtual_time
async def test_copies_are_few_and_are_dropped_after_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ASIDE_BYTES", 1 << 30)  # simulated time does not wait for threads
    network, owner = DonorNetwork(), Owner(DATA * 4)
    service = await network.donor("donor", owner, max_upload=32e3)  # 5 minutes for one
    slow = []
    for number in range(4):
        slow.append(asyncio.create_task(fetched(network, f"n{number}", count=4 * NUMBERS)))
        await asyncio.sleep(copies.SHARED_S + 1)
        owner.round += 1
    assert len(owner.asked) == copies.MAX_COPIES
    assert [state.round for state in await asyncio.gather(*slow)] == [12, 13, 13, 13]
    assert service._copies is not None and len(service._copies._held) == 1
    last = weakref.ref(service._copies._held[0])
    await asyncio.sleep(copies.KEPT_S + 1)
    gc.collect()
    assert not service._copies._held and last() is None


@in_virtual_time
async def test_a_copy_of_many_rounds_ago_is_sent_to_nobody_new() -> None:
    network, owner = DonorNetwork(), Owner(DATA)
    await network.donor("donor", owner)
    came = []
    for number, rounds in enumerate((0, copies.SHARED_ROUNDS, 1)):
        owner.round += rounds
        came.append((await fetched(network, f"n{number}")).round - 12)
    assert came == [0, 0, copies.SHARED_ROUNDS + 1]


@in_virtual_time
async def test_weights_that_a_donor_has_given_up_are_for_who_has_begun_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A phase of minutes, in which it takes a peer's state: of the same round, from a place that may cause no copy."""
    monkeypatch.setattr(copies, "COPIED_BYTES_S", 1.0)
    network, owner = DonorNetwork(), Owner(DATA)
    service = await network.donor("donor", owner)
    download, begun = Download(NUMBERS), (await network.joining_node("begun")).channel("donor")
    with pytest.raises(HangsUp):
        await fetch(begun, TERMS, download, Watcher(TOTAL // 2, hang_up))
    owner.data = OTHER
    service.weights_replaced()
    with pytest.raises(PeerRefused, match="busy"):
        await fetch(begun, TERMS, Download(NUMBERS), Watcher())
    assert of(await fetched(network, "new")) == (12, OTHER)
    assert of(await fetch(begun, TERMS, download, Watcher())) == (12, DATA)


@in_virtual_time
async def test_downloads_of_weights_that_a_donor_has_given_up_end_as_they_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "ASIDE_BYTES", 1 << 30)  # simulated time does not wait for threads
    network, owner = DonorNetwork(), Owner(DATA * 4)
    service = await network.donor("donor", owner, max_upload=32e3)  # 5 minutes for one
    begun = []
    for number in range(copies.MAX_COPIES):
        begun.append(asyncio.create_task(fetched(network, f"n{number}", count=4 * NUMBERS)))
        await asyncio.sleep(copies.SHARED_S + 1)
        owner.round += 1
    owner.data = OTHER * 4
    service.weights_replaced()
    with pytest.raises(PeerRefused, match="busy"):
        await fetched(network, "new", count=4 * NUMBERS)
    assert [of(state)[1] for state in await asyncio.gather(*begun)] == [DATA * 4] * copies.MAX_COPIES


@in_virtual_time
async def test_a_copy_during_which_the_weights_are_replaced_is_sent_to_nobody() -> None:
    network, owner = DonorNetwork(), Owner(DATA, at_once=False)
    service = await network.donor("donor", owner)
    early = asyncio.create_task(fetched(network, "early"))
    await asyncio.sleep(1)
    service.weights_replaced()
    owner.asked[0].set_result((12, memoryview(DATA)))
    with pytest.raises(PeerRefused, match="busy"):
        await early
    owner.data, owner.at_once = OTHER, True
    assert of(await fetched(network, "early")) == (12, OTHER)


@pytest.mark.parametrize("hangs_up", ["while it is made", "before it is sent"])
@in_virtual_time
async def test_a_copy_that_nobody_came_for_is_dropped(hangs_up: str) -> None:
    network, owner = DonorNetwork(), Owner(DATA, at_once=False)
    service = await network.donor("donor", owner)
    download = asyncio.create_task(fetched(network))
    await asyncio.sleep(1)
    assert service._copies is not None
    if hangs_up == "while it is made":
        download.cancel()
        await asyncio.sleep(1)
        owner.asked[0].set_result((12, memoryview(DATA)))
    else:
        async with service._copies._hashing:
            owner.asked[0].set_result((12, memoryview(DATA)))
            await asyncio.sleep(1)
            download.cancel()
            await asyncio.sleep(1)
    await asyncio.sleep(1)
    assert len(service._copies._held) == 1
    await asyncio.sleep(copies.KEPT_S + 1)
    assert not service._copies._held


@in_virtual_time
async def test_a_joining_node_sees_that_its_donor_is_still_copying() -> None:
    network, owner, watcher = DonorNetwork(), Owner(DATA, at_once=False), Watcher()
    await network.donor("donor", owner)
    download = asyncio.create_task(fetched(network, watcher=watcher))
    await asyncio.sleep(2 * client.FRAME_S)
    owner.asked[0].set_result((12, memoryview(DATA)))
    assert of(await download) == (12, DATA)
    assert watcher.places and set(watcher.places) == {0}


async def takes_little(network: DonorNetwork, name: str, gap_s: float) -> None:
    """Somebody reads one frame each `gap_s`."""
    request = wire.encode_state_request(wire.StateRequest(PROTOCOL, TERMS.run_id, TERMS.layout))
    call = StateStub((await network.joining_node(name)).channel("donor")).Fetch(request)
    stream = aiter(call)
    with suppress(PeerLost):
        while True:
            with peer_faults():
                await anext(stream)
            await asyncio.sleep(gap_s)


@pytest.mark.parametrize("gap_s", [100 * TAKEN_S, 0.9 * TAKEN_S], ids=["never", "a trickle"])
@in_virtual_time
async def test_a_peer_that_reads_too_slowly_loses_its_place(monkeypatch: pytest.MonkeyPatch, gap_s: float) -> None:
    monkeypatch.setattr(client, "ASIDE_BYTES", 1 << 30)
    network = DonorNetwork()
    service = await network.donor("donor", Owner(DATA))
    idle = [asyncio.create_task(takes_little(network, f"n{i}", gap_s)) for i in range(server.AT_ONCE)]
    await asyncio.sleep(1)
    assert of(await fetched(network, "honest")) == (12, DATA)
    assert asyncio.get_running_loop().time() < 3 * TAKEN_S
    await asyncio.sleep(3 * TAKEN_S + copies.KEPT_S)
    assert service._copies is not None and not service._copies._held
    for task in idle:
        task.cancel()


@in_virtual_time
async def test_the_slowest_allowed_download_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ASIDE_BYTES", 1 << 30)
    network = DonorNetwork()
    await network.donor("donor", Owner(DATA * 8))
    state = await fetched(network, count=8 * NUMBERS, pace=on_a_slow_link())
    assert state.data == DATA * 8 and asyncio.get_running_loop().time() > 2 * TAKEN_S


@pytest.mark.parametrize("at_once", [1, 4])
@in_virtual_time
async def test_the_days_upload_quota_holds_for_downloads_at_once(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(server, "AT_ONCE", at_once)
    network = DonorNetwork(bandwidth_bytes_s=1e6)
    service = await network.donor("donor", Owner(DATA), daily_upload=int(1.5 * TOTAL))
    downloads = [fetched(network, f"n{number}") for number in range(8)]
    results = await asyncio.gather(*downloads, return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["LiveState", *7 * ["PeerRefused"]]
    assert service._pace.used.sent < 1.1 * TOTAL
    assert {str(result) for result in results if isinstance(result, PeerRefused)} == {"paused"}


@in_virtual_time
async def test_samples_leave_half_of_the_days_upload_for_swaps() -> None:
    """Callers of three places took 15 MB a minute, and so all of it in hours."""
    network = DonorNetwork()
    service = await network.donor("donor", Owner(DATA), daily_upload=8 * server.SAMPLE_BYTES)
    channel, sent = (await network.joining_node()).channel("donor"), 0
    for _ in range(8):
        with suppress(PeerFault):
            await client.sample(channel, TERMS, [0] * wire.MAX_SAMPLE_BLOCKS, server.SAMPLE_BYTES)
            sent += 1
        await asyncio.sleep(server.SAMPLE_EVERY_S)
    assert sent == 3 and service._pace.used.sent < 4 * server.SAMPLE_BYTES


@in_virtual_time
async def test_who_asks_for_a_fragment_that_does_not_exist_frees_no_quota() -> None:
    network = DonorNetwork()
    service = await network.donor("donor", Owner(DATA))
    channel, whole = (await network.joining_node()).channel("donor"), Download(NUMBERS)
    await fetch(channel, TERMS, whole, Watcher())
    request = wire.StateRequest(PROTOCOL, TERMS.run_id, TERMS.layout, whole.coding, whole.root, whole.fragments + 1)
    stream = aiter(StateStub(channel).Fetch(wire.encode_state_request(request)))
    assert wire.decode_state(await anext(stream)) == wire.Refusal(wire.Code.INCOMPATIBLE)
    assert service._reserved._bytes == 0


@in_virtual_time
async def test_who_hangs_up_while_its_state_waits_for_the_upload_has_nobody_wait() -> None:
    """100 such calls in 10 s counted as 13 MB, and a swap waited for three minutes."""
    network = DonorNetwork()
    service = await network.donor("donor", Owner(DATA), max_upload=64_000.0)
    channel = (await network.joining_node()).channel("donor")
    for _ in range(100):
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await fetch(channel, TERMS, Download(NUMBERS), Watcher())
    began = asyncio.get_running_loop().time()
    await service._pace.sending(CHUNK_BYTES)
    assert asyncio.get_running_loop().time() < began + 10 and service._pace.used.sent < 1_000_000


@in_virtual_time
async def test_an_upload_obeys_its_limit() -> None:
    network = DonorNetwork()
    await network.donor("donor", Owner(DATA), max_upload=1e5)
    clock = asyncio.get_running_loop().time
    began = clock()
    await fetched(network)
    assert clock() - began == pytest.approx(TOTAL / 1e5, rel=0.1)


# ---- breaks ----------------------------------------------------------------------------------------------------------
@in_virtual_time
async def test_what_came_before_a_break_is_not_sent_again() -> None:
    network, owner = DonorNetwork(), Owner(DATA)
    await network.donor("donor", owner)
    channel, download = (await network.joining_node()).channel("donor"), Download(NUMBERS)
    broken = asyncio.Event()
    first = asyncio.create_task(fetch(channel, TERMS, download, Watcher(TOTAL // 2, broken.set)))
    await broken.wait()
    first.cancel()
    await asyncio.wait({first})
    owner.round += 1  # and the donor has gone on
    watcher = Watcher()
    assert of(await fetch(channel, TERMS, download, watcher)) == (12, DATA)
    assert watcher.bytes[0] >= 0.45 * TOTAL
    assert not watcher.rounds, "and nobody asks whether it has become too old"


def there(*names: str) -> Callable[[], Awaitable[Others]]:
    async def others() -> Others:
        return Others(names, names, frozenset({"9.8.7"}))

    return others


def ignored(_: str) -> None:
    pass


async def taken(
    network: DonorNetwork, look: Callable[[], Awaitable[Others]], wanted: Wanted, say: Callable[[str], None] = ignored
) -> LiveState | None:
    node = await network.joining_node()
    return await fetch_state(node.channel, look, wanted, say, checks(node, wanted.numbers))


@pytest.mark.parametrize("same", [True, False], ids=["same-version", "own-version"])
@in_virtual_time
async def test_another_donor_takes_over(monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    """The first one dies when half is here."""
    monkeypatch.setattr(choose_donor.random, "choice", lambda found: found[0])
    one, two = map(choose_donor.peer_names.name_of, ("one", "two"))
    network, said = DonorNetwork(), list[str]()
    await network.donor("one", Owner(DATA))
    await network.donor("two", Owner(DATA if same else OTHER))

    def say(what: str) -> None:
        said.append(what)
        if what.startswith(f"state from {one}, 50%"):
            network.network.vanish("one")

    state = await taken(network, there("one", "two"), Wanted(TERMS, NUMBERS, BUDGET), say)
    assert state is not None and of(state) == (12, DATA if same else OTHER), "never a mixture"
    percent = [int(s.split("%")[0].split()[-1]) for s in said if s.startswith(f"state from {two}") and "%" in s]
    assert (percent[0] >= 45) is same


@in_virtual_time
async def test_over_a_connection_that_breaks_again_and_again_each_byte_comes_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As over a relay that carries some bytes at a time."""
    monkeypatch.setattr(choose_donor.random, "choice", lambda found: found[0])
    network, said, breaks = DonorNetwork(), list[str](), iter(range(8, 96, 8))
    await network.donor("relayed", Owner(DATA))
    await network.donor("unrelated", Owner(OTHER))
    cut = next(breaks)

    def say(what: str) -> None:
        nonlocal cut
        said.append(what)
        percent = re.search(r"(\d+)%", what)
        if percent and int(percent[1]) >= cut:
            cut = next(breaks, 101)
            network.network.vanish("relayed")
            network.network.admit(network.transports["relayed"])

    state = await taken(network, there("relayed", "unrelated"), Wanted(TERMS, NUMBERS, BUDGET), say)
    assert state is not None and of(state) == (12, DATA)
    assert cut > 100, "eleven times"
    percents = [int(found[1]) for what in said if (found := re.search(r"(\d+)%", what))]
    assert all(after >= before - 5 for before, after in pairwise(percents)), "a fragment, a twentieth, at a time"


@in_virtual_time
async def test_a_slow_connection_that_breaks_often_gets_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all it takes longer than a node waits for a sign of progress."""
    monkeypatch.setattr(client, "ASIDE_BYTES", 1 << 30)
    network, data, breaks = DonorNetwork(), DATA * 8, iter(range(6, 96, 6))
    await network.donor("relayed", Owner(data), max_upload=MIN_RATE_BYTES_S)
    broken, cut = 0, next(breaks)

    def say(what: str) -> None:
        nonlocal broken, cut
        percent = re.search(r"(\d+)%", what)
        if percent and int(percent[1]) >= cut:
            broken, cut = broken + 1, next(breaks, 101)
            network.network.vanish("relayed")
            network.network.admit(network.transports["relayed"])

    state = await taken(network, there("relayed"), Wanted(TERMS, 8 * NUMBERS, BUDGET), say)
    assert state is not None and state.data == data
    assert broken > choose_donor.MOST_BREAKS
    assert asyncio.get_running_loop().time() > 2 * choose_donor.TAKE_STATE_S


@in_virtual_time
async def test_a_node_that_waits_at_a_busy_donor_turns_to_an_idle_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ASIDE_BYTES", 1 << 30)
    monkeypatch.setattr(choose_donor.random, "choice", lambda found: found[0])
    network = DonorNetwork()
    await network.donor("busy", Owner(DATA * 8), max_upload=MIN_RATE_BYTES_S)
    await network.donor("idle", Owner(OTHER * 8))
    crowd = (fetched(network, f"n{i}", count=8 * NUMBERS, donor="busy") for i in range(server.AT_ONCE))
    others = asyncio.gather(*crowd)
    await asyncio.sleep(5)
    wanted = Wanted(TERMS, 8 * NUMBERS, BUDGET)
    state = await taken(network, there("busy", "idle"), wanted)
    assert state is not None and state.data == OTHER * 8
    others.cancel()


@in_virtual_time
async def test_where_all_are_busy_it_waits_its_turn_at_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ASIDE_BYTES", 1 << 30)
    network, others = DonorNetwork(), []
    for name in ("one", "two"):  # each gives what it has in 10 minutes
        await network.donor(name, Owner(DATA * 8), max_upload=4 * len(DATA) * 8 / 600)
        for i in range(server.AT_ONCE):
            others.append(asyncio.create_task(fetched(network, f"{name}{i}", count=8 * NUMBERS, donor=name)))
    await asyncio.sleep(5)
    wanted = Wanted(TERMS, 8 * NUMBERS, BUDGET)
    state = await taken(network, there("one", "two"), wanted)
    assert state is not None and state.data == DATA * 8
    await asyncio.gather(*others)


# ---- faulty donors ---------------------------------------------------------------------------------------------------
GOOD = header(SMALL)
FLIPPED = bytes([SMALL[0] ^ 1]) + SMALL[1:]
NAN = SMALL[:-4] + struct.pack("<f", float("nan"))
FAULTS: list[tuple[list[wire.StateFrame], type[PeerFault]]] = [
    ([], PeerLost),
    ([GOOD], PeerLost),
    ([GOOD, *chunks(FLIPPED)], PeerMisbehaved),
    ([header(NAN), *chunks(NAN)], PeerMisbehaved),
    ([GOOD, wire.StateChunk(SMALL + b"x")], PeerMisbehaved),
    ([GOOD, wire.StateChunk(SMALL[:1])], PeerMisbehaved),
    ([GOOD, wire.StateChunk(b"")], PeerMisbehaved),
    ([GOOD, GOOD], PeerMisbehaved),
    ([header(SMALL, fragment=1), *chunks(SMALL)], PeerMisbehaved),
    ([header(SMALL, root=b"r" * 32), *chunks(SMALL)], PeerMisbehaved),
    ([header(SMALL, digests=b"d" * 64), *chunks(SMALL)], PeerMisbehaved),
    ([header(SMALL, total_bytes=1 << 40), *chunks(SMALL)], PeerMisbehaved),
    ([wire.StateChunk(SMALL)], PeerMisbehaved),
    ([wire.Refusal(wire.Code.BUSY)], PeerRefused),
]


@pytest.mark.parametrize(("frames", "fault"), FAULTS)
@in_virtual_time
async def test_a_faulty_donor_is_a_peer_fault(frames: list[wire.StateFrame], fault: type[PeerFault]) -> None:
    with pytest.raises(fault):
        await ask(FaultyDonor(frames), count=1000)


@in_virtual_time
async def test_a_valid_answer_is_the_state() -> None:
    assert of(await ask(FaultyDonor([wire.StatePlace(2), GOOD, *chunks(SMALL)]), count=1000)) == (12, SMALL)


@in_virtual_time
async def test_a_donor_that_says_a_place_again_and_again_is_given_up() -> None:
    frames: list[wire.StateFrame] = [*100 * [wire.StatePlace(1)], GOOD, *chunks(SMALL)]
    assert of(await ask(FaultyDonor(frames), count=1000)) == (12, SMALL)
    with pytest.raises(PeerMisbehaved, match="too_many_frames"):
        await ask(FaultyDonor(2 * [wire.StatePlace(1)] + frames), count=1000)


@in_virtual_time
async def test_a_donor_that_falls_silent_is_given_up() -> None:
    with pytest.raises(PeerLost, match="silent"):
        await ask(FaultyDonor([GOOD], silent=True), count=1000)


async def beside_an_honest_one(faulty: FaultyDonor, witness: FaultyDonor | None = None) -> LiveState | None:
    network = DonorNetwork()
    await network.faulty_donor("faulty", faulty)
    await network.donor("honest", Owner(SMALL))
    await network.faulty_donor("witness", witness or FaultyDonor([wire.Refusal(wire.Code.BUSY)], 12))
    return await taken(network, there("faulty", "honest", "witness"), Wanted(TERMS, 1000, BUDGET))


@pytest.mark.parametrize(
    "frames",
    [
        [GOOD, *chunks(FLIPPED)],
        [header(SMALL, round=BUDGET + 1), *chunks(SMALL)],
        [header(FLIPPED, round=0), *chunks(FLIPPED)],
        [header(FLIPPED, round=STALE_ROUNDS + 13), *chunks(FLIPPED)],
        [header(NAN), *chunks(NAN)],
        [wire.Refusal(wire.Code.INCOMPATIBLE)],
    ],
    ids=["wrong bytes", "beyond the run", "stale", "far ahead", "not a number", "another run"],
)
@in_virtual_time
async def test_the_next_donor_is_asked_instead(monkeypatch: pytest.MonkeyPatch, frames: list[wire.StateFrame]) -> None:
    faulty = FaultyDonor(frames, shows=SMALL)
    monkeypatch.setattr(choose_donor.random, "choice", lambda found: found[0])
    state = await beside_an_honest_one(faulty)
    assert state is not None and of(state) == (12, SMALL)
    assert faulty.asked == 1


async def slowly(donors: dict[str, FaultyDonor | None], data: bytes) -> tuple[LiveState | None, float]:
    """And how long it took. None: an honest donor."""
    network = DonorNetwork()
    for name, faulty in donors.items():
        await (network.faulty_donor(name, faulty) if faulty else network.donor(name, Owner(data)))
    began = asyncio.get_running_loop().time()
    state = await taken(network, there(*donors), Wanted(TERMS, len(data) // 4, BUDGET))
    return state, asyncio.get_running_loop().time() - began


@pytest.mark.parametrize("at_once", [0.0, 0.8], ids=["from the beginning", "when most of it is here"])
@in_virtual_time
async def test_a_donor_that_would_take_hours_is_left_while_there_are_others(
    monkeypatch: pytest.MonkeyPatch, at_once: float
) -> None:
    monkeypatch.setattr(client, "ASIDE_BYTES", 1 << 30)
    monkeypatch.setattr(choose_donor.random, "choice", lambda found: found[0])
    data = DATA * (32 if at_once == 0 else 160)
    frames = [header(data), *chunks(data)]
    gaps = [0.0 if n < at_once * len(frames) else client.FRAME_S - 1 for n in range(len(frames))]
    slow = FaultyDonor(frames, 12, shows=data, gaps=gaps)
    state, lasted_s = await slowly({"first": slow, "second": None}, data)
    assert state is not None and state.data == data
    assert lasted_s < 3 * slow_donors.PACE_S
    if at_once == 0:
        state, lasted_s = await slowly({"first": slow}, data)
        assert state is not None and lasted_s > slow_donors.LONG_S, "nobody else has it"


@in_virtual_time
async def test_a_donor_whose_queue_goes_on_for_ever_is_left_while_there_are_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each place is nearer, and soon enough."""
    monkeypatch.setattr(choose_donor.random, "choice", lambda found: found[0])
    places = [wire.StatePlace(32 - n // 2) for n in range(64)]
    slow = FaultyDonor([*places, header(DATA), *chunks(DATA)], 12, shows=DATA, gaps=[29.0] * 64)
    state, lasted_s = await slowly({"first": slow, "second": None}, DATA)
    assert state is not None and lasted_s < 3 * choose_donor.QUEUE_S


@in_virtual_time
async def test_a_copy_that_begins_when_its_turn_came_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The donor says that it copies, again and again: of a large model that takes a while."""
    monkeypatch.setattr(choose_donor.random, "choice", lambda found: found[0])
    places = [5, 4, 3, 2, 1, 0, 0, 0]
    frames = [*map(wire.StatePlace, places), header(DATA), *chunks(DATA)]
    patient = FaultyDonor(frames, 12, shows=DATA, gaps=[0.0, *4 * [29.0], *4 * [10.0]])
    busy = FaultyDonor([wire.Refusal(wire.Code.BUSY)], 12)
    assert (await slowly({"first": patient, "second": busy}, DATA))[0] is not None and patient.asked == 1


class Endless(FaultyDonor):
    """Begins another version at each call, and never sends all of it."""

    async def Fetch(  # noqa: N802
        self, request: pb.StateRequest, context: Any
    ) -> AsyncIterator[pb.StateFrame]:
        data = struct.pack("<f", self.asked + 1) * NUMBERS
        self.frames = [wire.StatePlace(1), header(data), *chunks(data)[:3]]
        async for frame in super().Fetch(request, context):
            yield frame


PLACE, BUSY = wire.StatePlace(1), wire.Refusal(wire.Code.BUSY)


@pytest.mark.parametrize("silent", [False, True], ids=["at once", "after a while"])
@pytest.mark.parametrize(
    "frames",
    [[PLACE], [PLACE, BUSY], None],
    ids=["in a queue, hangs up", "in a queue, refuses", "another version each time"],
)
@in_virtual_time
async def test_a_donor_that_breaks_off_again_and_again_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, frames: list[wire.StateFrame] | None, silent: bool
) -> None:
    monkeypatch.setattr(choose_donor, "TAKE_STATE_S", 50.0)
    network = DonorNetwork()
    await network.faulty_donor("donor", FaultyDonor(frames, 12, silent) if frames else Endless([], 12, silent))
    with pytest.raises(SwarmUnreachable, match="no peer sent its state"):
        await taken(network, there("donor"), Wanted(TERMS, NUMBERS, BUDGET))
    most_s = choose_donor.TAKE_STATE_S + (choose_donor.MOST_BREAKS + 1) * (client.FRAME_S + choose_donor.RETRY_S)
    assert asyncio.get_running_loop().time() <= most_s


@in_virtual_time
async def test_a_donor_whose_versions_never_end_is_left_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_donor.random, "choice", lambda found: found[0])
    endless = Endless([], 12, shows=DATA)
    state, _ = await slowly({"first": endless, "second": None}, DATA)
    assert state is not None and of(state) == (12, DATA)
    assert 1 <= endless.asked <= 1 + choose_donor.RESUME_TRIES


@in_virtual_time
async def test_who_waits_in_a_queue_to_the_end_is_told_so() -> None:
    """And not that nobody trains."""
    network = DonorNetwork()
    await network.faulty_donor("donor", FaultyDonor(100 * [PLACE], 12, gaps=100 * [10.0]))
    with pytest.raises(SwarmUnreachable, match=r"no peer sent its state .*the last one: was still waited for"):
        await taken(network, there("donor"), Wanted(TERMS, NUMBERS, BUDGET))


@in_virtual_time
async def test_one_witness_with_a_false_round_discredits_nobody() -> None:
    faulty = [FaultyDonor([wire.Refusal(wire.Code.BUSY)], round) for round in (BUDGET + 5, 1 << 60)]
    state = await beside_an_honest_one(faulty[0], witness=faulty[1])
    assert state is not None and state.round == 12


@pytest.mark.parametrize(
    ("witnesses", "fault"),
    [
        ([], None),
        ([50 + STALE_ROUNDS, 50 + STALE_ROUNDS], None),
        ([50 + STALE_ROUNDS + 1, 50 + STALE_ROUNDS + 1], "stale_state"),
        ([BUDGET], None),
        ([BUDGET, 50], None),
        ([50 - STALE_ROUNDS], None),
        ([50 - STALE_ROUNDS - 1], "far_ahead"),
        ([0, 50], None),
    ],
)
@in_virtual_time
async def test_two_witnesses_must_agree_and_the_lower_of_two_rounds_is_believed(
    witnesses: list[int], fault: str | None
) -> None:
    network, names = DonorNetwork(), [f"w{number}" for number in range(len(witnesses))]
    for name, round in zip(names, witnesses, strict=True):
        await network.faulty_donor(name, FaultyDonor([], round))
    await network.faulty_donor("donor", FaultyDonor([header(SMALL, round=50), *chunks(SMALL)], 50))

    async def others() -> Others:
        return Others(["donor"], ["donor", *names])

    taking = taken(network, others, Wanted(TERMS, 1000, BUDGET))
    if fault is None:
        state = await taking
        assert state is not None and state.round == 50
    else:
        with pytest.raises(SwarmUnreachable, match=fault):
            await taking


@in_virtual_time
async def test_an_honest_donors_old_copy_is_stale_by_the_round_that_it_is_in_itself() -> None:
    """One place of three says that the run is where the copy is."""
    network = DonorNetwork()
    await network.faulty_donor("donor", FaultyDonor([header(SMALL, round=0), *chunks(SMALL)], 30))
    await network.faulty_donor("honest", FaultyDonor([], 30))
    await network.faulty_donor("liar", FaultyDonor([], 0))

    async def others() -> Others:
        return Others(["donor"], ["donor", "honest", "liar"])

    with pytest.raises(SwarmUnreachable, match="stale_state"):
        await taken(network, others, Wanted(TERMS, 1000, BUDGET))


@in_virtual_time
async def test_where_all_donors_are_faulty_a_joining_node_fails_and_one_with_weights_goes_on() -> None:
    network = DonorNetwork()
    await network.faulty_donor("faulty", FaultyDonor([GOOD, *chunks(FLIPPED)], 12))
    with pytest.raises(SwarmUnreachable, match="bad_digest"):
        await taken(network, there("faulty"), Wanted(TERMS, 1000, BUDGET))
    assert await taken(network, there("faulty"), Wanted(TERMS, 1000, BUDGET, own_round=1)) is None


@pytest.mark.parametrize("honest", [False, True], ids=["all", "all but one, which is busy"])
@in_virtual_time
async def test_who_is_refused_as_incompatible_by_everybody_ends(honest: bool) -> None:
    """With a busy one among them it waits: that one may say something else."""
    network, names = DonorNetwork(), ["one", "two", *(["busy"] if honest else [])]
    for name in names:
        code = wire.Code.BUSY if name == "busy" else wire.Code.INCOMPATIBLE
        await network.faulty_donor(name, FaultyDonor([wire.Refusal(code)]))
    match = None if honest else r"they say 9\.8\.7.*where a script brings the model, make it the same"
    began = asyncio.get_running_loop().time()
    with pytest.raises(SwarmUnreachable if honest else Incompatible, match=match):
        await taken(network, there(*names), Wanted(TERMS, 1000, BUDGET))
    assert (asyncio.get_running_loop().time() - began < choose_donor.INCOMPATIBLE_S + 10) is not honest


# ---- anything at all -------------------------------------------------------------------------------------------------
ORIGINALS = [wire.encode_state(frame).SerializeToString() for frame in (GOOD, *chunks(SMALL))]


@st.composite
def mutations(draw: st.DrawFn) -> list[pb.StateFrame]:
    """A correct donor's messages with a byte changed, cut, doubled or out of order."""
    frames = [bytearray(original) for original in ORIGINALS]
    for _ in range(draw(st.integers(1, 3))):
        frame = frames[draw(st.integers(0, len(frames) - 1))]
        at = draw(st.integers(0, max(0, len(frame) - 1)))
        match draw(st.sampled_from(["change", "cut", "garbage", "double", "swap"])):
            case "change" if frame:
                frame[at] ^= draw(st.integers(1, 255))
            case "cut":
                del frame[at:]
            case "garbage":
                frame[at:at] = draw(st.binary(max_size=20))
            case "double":
                frames.append(bytearray(frame))
            case _:
                frames.reverse()
    parsed = []
    for frame in frames:
        try:
            parsed.append(pb.StateFrame.FromString(bytes(frame)))
        except DecodeError:
            break
    return parsed


@given(mutations())
@settings(max_examples=300)
def test_whatever_arrives_ends_as_a_fault_or_as_the_state(frames: list[pb.StateFrame]) -> None:
    download = Download(1000)
    fragment = bytearray()
    try:
        for number, message in enumerate(frames):
            frame = wire.decode_state(message)
            if number == 0 and isinstance(frame, wire.StateHeader):
                download.begin(frame)
            elif isinstance(frame, wire.StateChunk) and len(frame.data) == download.next_bytes and download.root:
                fragment[:] = frame.data
                download.add(fragment)
            else:
                return
    except PeerFault as fault:
        assert fault.reason
    assert len(download.result().data) in (0, 4000)
    assert download.done == 0 or bytes(download.result().data) == SMALL
