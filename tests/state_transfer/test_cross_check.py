"""Liars among the donors, and fake divergence: over the in-memory network, with a made-up landscape of losses."""

import asyncio
import gc
import math
import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from donors import BUDGET, TERMS, DonorNetwork, FaultyDonor, Owner, answer, blocks_of, chunks, header, policy, record
from hypothesis import given
from hypothesis import strategies as st
from virtual_clock import in_virtual_time

from noloco_node.base.places import RELAYED
from noloco_node.core.verdict import Trial
from noloco_node.errors import PeerFault, SwarmUnreachable
from noloco_node.peers.record import PeerRecord
from noloco_node.state_transfer import choose_donor, client, cross_check, server
from noloco_node.state_transfer.catch_up import CatchUp
from noloco_node.state_transfer.choose_donor import Wanted
from noloco_node.state_transfer.client import LiveState, StateTerms
from noloco_node.state_transfer.cross_check import BLOCKS, distance, doubt, middle_round
from noloco_node.wire import messages as wire
from noloco_node.wire.peer_pb2_grpc import add_StateServicer_to_server

PARAMETERS = 20_000
FRESH_LOSS, GOOD_LOSS = 5.5, 2.0


def weights(seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(PARAMETERS).astype(np.float32)


TRUTH, FRESH = weights(0), weights(1)


def state(phi: np.ndarray[Any, Any], momentum: float = 0.01, seed: int = 0) -> bytes:
    delta = momentum * weights(1000 + seed)
    return np.concatenate([phi, delta]).astype(np.float32).tobytes()


def honest(seed: int, off: float = 0.03) -> bytes:
    """One of the replicas, which are a little apart."""
    return state(TRUTH + off * weights(100 + seed), seed=seed)


def loss_at(phi: np.ndarray[Any, Any]) -> float:
    """2 at the truth, 5.5 at any random weights."""
    return GOOD_LOSS + (FRESH_LOSS - GOOD_LOSS) * min(1.0, distance(phi, TRUTH) / distance(FRESH, TRUTH))


class Node:
    """A node that joins or catches up: it has these weights, and sees these peers."""

    def __init__(self, there: Collection[PeerRecord], own: np.ndarray[Any, Any] = FRESH, round: int = 0) -> None:
        self.there, self.own, self.round = there, own, round
        self.tried: list[Trial] = []
        self.adopted: list[bytes] = []
        self.on = asyncio.Event()

    async def look(self) -> Collection[PeerRecord]:
        return self.there

    def seen(self) -> Collection[PeerRecord]:
        return self.there

    def waits_for(self, what: str | None) -> None:
        pass

    async def swap_is_over(self) -> bool:
        return True

    def sample(self, blocks: Sequence[int]) -> "Future[tuple[int, bytes]]":
        return Owner(state(self.own), self.round).sample(blocks)

    def try_state(self, state: memoryview) -> "Future[Trial]":
        phi, delta = np.split(np.frombuffer(state, np.float32), 2)
        added = 0.1 * float(np.linalg.norm(delta) / np.linalg.norm(phi))
        self.tried.append(Trial(loss_at(self.own), loss_at(phi), loss_at(phi + 0.1 * delta), added, FRESH_LOSS))
        return answer(self.tried[-1])

    async def adopt(self, state: LiveState) -> None:
        self.adopted.append(bytes(state.data))
        self.own, self.round = np.split(np.frombuffer(state.data, np.float32), 2)[0], state.round

    def caught_up(self) -> None:
        self.on.set()


@dataclass(frozen=True)
class Liar:
    shows: bytes
    sends: bytes
    round: int = 50
    claims: float | None = 0.01


class Swarm:
    """Honest donors, and liars, each at a place of its own but for `places`."""

    def __init__(self, honest_ones: int, liars: Collection[Liar] = (), round: int = 50, **places: str) -> None:
        self.network = DonorNetwork()
        self.honest = {f"honest{n}": honest(n) for n in range(honest_ones)}
        self.liars = {f"liar{n}": liar for n, liar in enumerate(liars)}
        self.network.network.places.update({name: name for name in (*self.honest, *self.liars)} | places)
        self.round = round

    async def start(self) -> None:
        for name, data in self.honest.items():
            await self.network.donor(
                name, Owner(data, self.round, loss=loss_at(np.frombuffer(data, np.float32)[:PARAMETERS]))
            )
        for name, liar in self.liars.items():
            frames = [header(liar.sends, liar.round), *chunks(liar.sends)]
            await self.network.faulty_donor(name, FaultyDonor(frames, liar.round, shows=liar.shows, loss=liar.claims))

    @property
    def records(self) -> list[PeerRecord]:
        rounds = {**dict.fromkeys(self.honest, self.round), **{name: liar.round for name, liar in self.liars.items()}}
        return [record(name, round=round) for name, round in rounds.items()]

    async def catch_up(self, node: Node) -> CatchUp:
        me = await self.network.joining_node("me")
        return CatchUp(node, node, me.channel, Wanted(TERMS, 2 * PARAMETERS, BUDGET), place_of=me.place_of)


async def joined(swarm: Swarm, own: np.ndarray[Any, Any] = FRESH) -> Node:
    await swarm.start()
    node = Node(swarm.records, own)
    began = asyncio.get_running_loop().time()
    await (await swarm.catch_up(node)).fetch_first_state()
    assert asyncio.get_running_loop().time() - began < 60
    return node


# ---- a newcomer ------------------------------------------------------------------------------------------------------
RANDOM = [state(weights(seed)) for seed in (7, 8, 9)]
SCALED = state(TRUTH, momentum=1e4)
LIES: dict[str, list[Liar]] = {
    "random weights each": [Liar(data, data) for data in RANDOM],
    "the same random weights": [Liar(RANDOM[0], RANDOM[0], claims=2.0)] * 3,
    "the same random weights, and no claim": [Liar(RANDOM[0], RANDOM[0], claims=None)] * 3,
    "a claim that they are bad": [Liar(RANDOM[0], RANDOM[0], claims=5.5)] * 3,
    "samples of an honest one": [Liar(honest(0), RANDOM[0], claims=2.0)] * 3,
    "momentum that spoils": [Liar(honest(0), SCALED, claims=2.0)] * 3,
}


@pytest.mark.parametrize("liars", LIES.values(), ids=LIES)
@in_virtual_time
async def test_of_five_donors_of_which_three_lie_a_newcomer_takes_an_honest_ones_state(liars: list[Liar]) -> None:
    for _ in range(5):
        swarm = Swarm(2, liars)
        node = await joined(swarm)
        assert node.adopted[0] in swarm.honest.values() and len(node.adopted) == 1
        assert node.round == 50


@in_virtual_time
async def test_three_donors_of_one_place_do_not_say_how_far_the_run_is() -> None:
    late = [Liar(honest(seed), honest(seed), 990, 2.0) for seed in range(3)]
    for _ in range(5):
        node = await joined(Swarm(2, late, **{f"liar{n}": "one host" for n in range(3)}))
        assert node.round == 50


@in_virtual_time
async def test_who_stands_apart_is_asked_last() -> None:
    liars = [Liar(data, data) for data in RANDOM]
    for _ in range(5):
        assert len((await joined(Swarm(2, liars))).tried) == 1


@in_virtual_time
async def test_in_the_first_rounds_it_takes_what_is_like_its_own_weights() -> None:
    """Nothing has been learned yet; every replica begins with the weights that it has itself."""
    swarm = Swarm(2, [Liar(data, data, 1, 5.5) for data in RANDOM], round=1)
    swarm.honest = {name: state(FRESH + 0.02 * weights(200 + n)) for n, name in enumerate(swarm.honest)}
    node = await joined(swarm)
    assert node.adopted[0] in swarm.honest.values()


@in_virtual_time
async def test_a_run_that_learns_nothing_can_be_joined_where_all_agree() -> None:
    bad = TRUTH * -1
    swarm = Swarm(2)
    swarm.honest = {name: state(bad + 0.02 * weights(200 + n)) for n, name in enumerate(swarm.honest)}
    assert (await joined(swarm)).adopted


@pytest.mark.parametrize("same_data", [True, False])
@in_virtual_time
async def test_where_each_has_data_of_its_own_a_claim_says_nothing(
    same_data: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_donor, "TAKE_STATE_S", 50.0)
    network, data = DonorNetwork(), honest(0)
    await network.donor("donor", Owner(data, 50, loss=0.1))
    node, me = Node([record("donor", 50)]), await network.joining_node("me")
    catching = CatchUp(node, node, me.channel, Wanted(TERMS, 2 * PARAMETERS, BUDGET), same_data=same_data)
    if same_data:
        with pytest.raises(SwarmUnreachable, match="worse_than_claimed"):
            await catching.fetch_first_state()
    else:
        await catching.fetch_first_state()
        assert node.adopted == [data]


@in_virtual_time
async def test_the_test_of_a_state_may_take_longer_than_a_donor_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_donor, "TAKE_STATE_S", 50.0)

    class Slow(Node):
        def try_state(self, state: memoryview) -> "Future[Trial]":
            later: Future[Trial] = Future()
            asyncio.get_running_loop().call_later(400, later.set_result, super().try_state(state).result())
            return later

    network, data = DonorNetwork(), honest(0)
    await network.donor("donor", Owner(data, 50))
    node, me = Slow([record("donor", 50)]), await network.joining_node("me")
    await CatchUp(node, node, me.channel, Wanted(TERMS, 2 * PARAMETERS, BUDGET)).fetch_first_state()
    assert node.adopted == [data]


@in_virtual_time
async def test_a_state_that_was_refuted_is_gone_before_the_next_one_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them may not fit into memory."""
    monkeypatch.setattr(choose_donor, "TAKE_STATE_S", 50.0)
    refuted: list[weakref.ref[memoryview]] = []
    left: list[int] = []

    class Watching(Node):
        def try_state(self, state: memoryview) -> "Future[Trial]":
            gc.collect()
            left.append(sum(one() is not None for one in refuted))
            refuted.append(weakref.ref(state))
            return super().try_state(state)

    network = DonorNetwork()
    for name, data in zip(("one", "two"), RANDOM, strict=False):
        await network.donor(name, Owner(data, 50, loss=0.1))
    node, me = Watching([record("one", 50), record("two", 50)]), await network.joining_node("me")
    with pytest.raises(SwarmUnreachable):
        await CatchUp(node, node, me.channel, Wanted(TERMS, 2 * PARAMETERS, BUDGET)).fetch_first_state()
    assert left == [0, 0]


@in_virtual_time
async def test_where_only_liars_are_left_it_says_so_and_has_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_donor, "TAKE_STATE_S", 50.0)
    liars = [Liar(data, data) for data in RANDOM]
    with pytest.raises(SwarmUnreachable, match=r"worse_than_claimed|no_better"):
        await joined(Swarm(0, liars))


@in_virtual_time
async def test_a_donor_that_does_not_answer_costs_seconds() -> None:
    swarm = Swarm(2)
    swarm.network.network.places["gone"] = "gone"
    await swarm.start()
    node = Node([*swarm.records, *(record(f"gone{n}", round=50) for n in range(5))])
    began = asyncio.get_running_loop().time()
    await (await swarm.catch_up(node)).fetch_first_state()
    assert node.adopted and asyncio.get_running_loop().time() - began < 2 * cross_check.SOON_S


# ---- a node that catches up ------------------------------------------------------------------------------------------
async def caught_up(swarm: Swarm, node: Node, partners: Collection[str], diverged_from: Collection[str]) -> bool:
    """Whether it believed itself diverged."""
    await swarm.start()
    node.there = swarm.records
    catching = await swarm.catch_up(node)
    for partner in partners:
        catching.round_over(None, partner)
    believes = [catching.round_over("diverged", partner) for partner in diverged_from][-1]
    if believes:
        catching.start(diverged=True)
        await node.on.wait()
    return believes


CROWD = [Liar(RANDOM[0], RANDOM[0], claims=1.0)] * 5


@pytest.mark.parametrize("partners", [["honest0"], ["honest0", "liar0"], ["honest0", "liar0", "liar1"]])
@in_virtual_time
async def test_fake_divergence_two_honest_nodes_and_a_crowd(partners: list[str]) -> None:
    """The ranges of their codecs were spoiled, so that their swaps diverge; all that train but one are made up."""
    node = Node((), TRUTH + 0.03 * weights(300), round=50)
    for liars in (CROWD, [Liar(SCALED, SCALED, claims=1.0)] * 5, [Liar(honest(0), RANDOM[0], claims=2.0)] * 5):
        believed = await caught_up(Swarm(1, liars), node, partners, ["honest0", *(f"liar{n}" for n in range(5))])
        assert not node.adopted
        assert believed == (len(partners) > 1)


@in_virtual_time
async def test_a_crowd_alone_cannot_make_it_give_up_what_is_better() -> None:
    node = Node((), TRUTH + 0.03 * weights(300), round=50)
    assert await caught_up(Swarm(0, CROWD), node, ["liar0", "liar1"], ["liar0", "liar1"])
    assert not node.adopted and node.tried


@in_virtual_time
async def test_who_really_stands_apart_takes_an_honest_state() -> None:
    node = Node((), weights(400), round=50)
    assert await caught_up(Swarm(4, CROWD[:2]), node, ["honest0", "honest1"], ["honest0", "honest1"])
    assert node.adopted[0] in (honest(2), honest(3))


@in_virtual_time
async def test_a_newcomer_whose_first_state_was_bad_takes_another() -> None:
    node = Node((), weights(7), round=50)
    assert await caught_up(Swarm(4, CROWD[:2]), node, [], ["honest0", "honest1"])
    assert node.adopted[0] in (honest(2), honest(3))


@in_virtual_time
async def test_two_nodes_never_take_each_others_state() -> None:
    network = DonorNetwork()
    nodes = {"a": Node([record("b", round=50)], TRUTH, 50), "b": Node([record("a", round=50)], FRESH, 50)}
    for name, node in nodes.items():
        me = network.transports[name] = network.network.join(name)
        service = server.StateService(me.caller, me.caller, lambda: (50, None), policy())
        service.begin(TERMS, Owner(state(node.own), 50), 8 * PARAMETERS)
        me.serve(lambda grpc_server, service=service: add_StateServicer_to_server(service, grpc_server))
        await me.start()
    for name, other in (("a", "b"), ("b", "a")):
        me = network.transports[name]
        catching = CatchUp(
            nodes[name], nodes[name], me.channel, Wanted(TERMS, 2 * PARAMETERS, BUDGET), place_of=me.place_of
        )
        catching.round_over(None, other)
        assert not any(catching.round_over("diverged", other) for _ in range(20))


@in_virtual_time
async def test_what_is_worse_than_its_own_is_not_taken_after_an_absence() -> None:
    """It is far behind, as the records say."""
    swarm = Swarm(0, [Liar(RANDOM[0], RANDOM[0], 500, None)] * 3)
    await swarm.start()
    node = Node(swarm.records, TRUTH, round=50)
    catching = await swarm.catch_up(node)
    assert catching.is_behind()
    catching.start(diverged=False)
    await node.on.wait()
    assert not node.adopted and len(node.tried) == 3


# ---- the parts -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("losses", "claimed", "new", "agreed", "why"),
    [
        ((5.5, 2.0, 2.0), 2.0, True, False, None),
        ((5.5, 2.0, 2.0), None, True, False, None),
        ((5.5, 5.49, 5.49), None, True, False, "no_better_than_new"),
        ((5.5, 5.6, 5.6), None, True, True, None),
        ((5.5, 2.0, 2.0), 0.01, True, True, "worse_than_claimed"),
        ((5.5, 2.0, 3.0), 2.0, True, True, "spoiled_momentum"),
        ((5.5, math.nan, 2.0), None, True, True, "nonfinite"),
        ((5.5, 2.0, math.inf), None, True, True, "nonfinite"),
        ((2.0, 2.1, 2.1), None, False, False, None),
        ((2.0, 2.4, 2.4), None, False, True, "worse_than_own"),
        ((0.0072, 0.0198, 0.0198), 0.0072, False, False, None),
        ((math.nan, 9.0, 9.0), None, False, False, None),
        ((-1.0, -2.0, -2.0), -2.0, True, False, None),
        ((-2.0, -1.0, -1.0), None, False, False, "worse_than_own"),
    ],
)
def test_doubt(
    losses: tuple[float, float, float], claimed: float | None, new: bool, agreed: bool, why: str | None
) -> None:
    assert doubt(Trial(*losses, added=0.1, new=5.5), claimed, new=new, agreed=agreed) == why
    assert doubt(Trial(*losses, added=math.inf, new=5.5), claimed, new=new, agreed=agreed) is not None


def test_distance() -> None:
    assert distance(TRUTH, TRUTH) == distance(0 * TRUTH, 0 * TRUTH) == 0
    assert distance(TRUTH, FRESH) == pytest.approx(math.sqrt(2), rel=0.02)
    assert distance(TRUTH, 3e38 * np.ones_like(TRUTH)) == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize(
    ("rounds", "middle"),
    [
        ({"a1": 50}, 50),
        ({"a1": 50, "a2": 90, "a3": 90}, 90),
        ({"a1": 90, "a2": 90, "a3": 90, "b1": 50, "c1": 50}, 50),
        ({"a1": 50, "a2": 50, "a3": 50, "b1": 0}, 50),
        ({"a1": 50, "b1": 90, "b2": 90, "b3": 90}, 90),
        ({"a1": 50, "a2": 50, "b1": 90, "b2": 90, "b3": 90}, 50),
        ({"a1": 50, "b1": 50, "c1": 0, "r1": 0, "r2": 0}, 50),
        ({"a1": 50, "b1": 0, "r1": 50}, 50),
    ],
)
def test_a_place_has_one_vote_about_the_round_and_a_relay_none_beside_three(
    rounds: dict[str, int], middle: int
) -> None:
    """Who comes over a relay may be of one of the other places."""
    assert middle_round(rounds, lambda peer: RELAYED if peer[0] == "r" else peer[0]) == middle


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(0, 1000), min_size=1))
def test_the_middle_is_a_round_that_somebody_said(rounds: dict[str, int]) -> None:
    assert middle_round(rounds, lambda peer: peer[0]) in rounds.values()


# ---- the server ------------------------------------------------------------------------------------------------------
async def asked(
    donor: Owner | FaultyDonor | None, *requests: tuple[StateTerms, list[int], int], wait_s: float = 10.0
) -> list[Any]:
    """What comes, or the fault's reason, for each request of blocks with a size in bytes."""
    network, answers = DonorNetwork(), list[Any]()
    match donor:
        case Owner():
            await network.donor("donor", donor)
        case FaultyDonor():
            await network.faulty_donor("donor", donor)
        case None:
            transport = network.network.join("donor")
            service = server.StateService(transport.caller, transport.caller, lambda: (0, None), policy())
            transport.serve(lambda grpc_server: add_StateServicer_to_server(service, grpc_server))
            await transport.start()
    channel = (await network.joining_node()).channel("donor")
    for terms, blocks, size in requests:
        try:
            answers.append(await client.sample(channel, terms, blocks, size))
        except PeerFault as fault:
            answers.append(fault.reason)
        await asyncio.sleep(wait_s)
    return answers


@in_virtual_time
async def test_a_donor_sends_the_blocks_that_were_asked_for() -> None:
    whole = state(TRUTH)
    last = PARAMETERS // 256
    (sample,) = await asked(Owner(whole, 12, loss=2.5), (TERMS, [3, last, 0], 4 * (256 + PARAMETERS % 256 + 256)))
    assert (sample.round, sample.eval_loss) == (12, 2.5)
    assert sample.blocks == blocks_of(whole, [3, last, 0])


@in_virtual_time
async def test_a_donor_refuses_what_it_cannot_answer() -> None:
    other = StateTerms(b"o" * 32, TERMS.layout)
    beyond, many = [PARAMETERS // 256 + 1], [0] * 257
    answers = await asked(Owner(state(TRUTH)), (other, [0], 1024), (TERMS, beyond, 1024), (TERMS, many, 257 * 1024))
    assert answers == ["failed_precondition"] * 3
    assert await asked(None, (TERMS, [0], 1024)) == ["failed_precondition"], "it has no weights yet"
    assert await asked(FaultyDonor([]), (TERMS, [0], 1024)) == ["unimplemented"]


@in_virtual_time
async def test_a_sample_of_another_size_or_a_loss_that_is_none_is_a_breach() -> None:
    short, odd = FaultyDonor([], shows=state(TRUTH)), FaultyDonor([], shows=state(TRUTH), loss=math.inf)
    assert await asked(short, (TERMS, [0], 1020)) == ["bad_blocks"]
    assert await asked(odd, (TERMS, [0], 1024)) == ["bad_eval_loss"]


@in_virtual_time
async def test_a_caller_that_asks_again_and_again_is_refused() -> None:
    requests = [(TERMS, [0], 1024)] * 5
    answers = await asked(Owner(state(TRUTH)), *requests, wait_s=server.SAMPLE_EVERY_S / 3)
    assert [answer == "failed_precondition" for answer in answers] == [False, True, True, False, True]
    samples = server._Samples()
    sent = [samples.may_have_one(f"peer{n}", f"place{n}", BLOCKS, n / 100) for n in range(1000)]
    assert sum(sent) == server.SAMPLES_A_MINUTE
    assert samples.may_have_one("another", "place1", BLOCKS, 70.0)


def test_one_place_leaves_samples_for_others() -> None:
    samples = server._Samples()
    assert sum(samples.may_have_one(f"peer{n}", "here", BLOCKS, n / 100) for n in range(1000)) == 20
    assert samples.may_have_one("another", "elsewhere", BLOCKS, 10.0)


@pytest.mark.parametrize("blocks", [1, BLOCKS, 4 * BLOCKS])
@pytest.mark.parametrize("upload_bytes_s", [32_000.0, 64_000.0, 200_000.0, None])
def test_samples_take_a_quarter_of_a_limited_upload(upload_bytes_s: float | None, blocks: int) -> None:
    """One place had 87 kB/s of 64, and swaps waited behind. A newcomer finds some all the same."""
    samples = server._Samples(upload_bytes_s)
    hour = [samples.may_have_one(f"peer{n}", f"place{n}", blocks, n) for n in range(3600)]
    bytes_s = 4 * wire.BLOCK * blocks * sum(hour) / 3600
    assert bytes_s <= (upload_bytes_s / 4 if upload_bytes_s else 1 << 16) * 1.1
    assert sum(hour[:100]) >= 13, "at once"


def test_three_places_leave_samples_for_a_fourth_one() -> None:
    """They had all that a donor sends in a minute."""
    samples = server._Samples()
    for n in range(1000):
        samples.may_have_one(f"peer{n}", f"place{n % 3}", BLOCKS, n / 100)
    assert sum(samples.may_have_one(f"newcomer{n}", "elsewhere", BLOCKS, 10.0) for n in range(9)) > 5
