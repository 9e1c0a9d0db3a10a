"""What is kept for the live views: curves, a timeline, meetings; all of it bounded."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from noloco_node.base.events import Evaluated, Event, PhaseDone, RoundCommitted, TakenBack, WentSolo, as_json
from noloco_node.base.units import NOTHING
from noloco_node.observe.curves import LATEST_POINTS, PAIRS, PIECES, POINTS, RATES, Curves
from noloco_node.observe.log_tail import SAID, LogTail
from noloco_node.views.documents import document, from_json, to_json
from noloco_node.views.history import HistoryView
from noloco_node.views.round_line import round_line

ME, OTHER, THIRD = "me", "other", "third"


def phase(round: int, loss: float = 2.0) -> PhaseDone:
    return PhaseDone(round, 50 * round, loss, tokens=1000, seconds=4.0)


@dataclass(frozen=True)
class Peer:
    peer_id: str = OTHER
    boot: bytes = b"1"
    loss: float = 4.0
    eval_loss: float = 0.0
    partner: str = THIRD
    committed: int = 0


def test_a_phase_without_a_step_has_no_loss(tmp_path: Path) -> None:
    """As of a later stage that gets no micro-batch."""
    history, done = Curves(ME), replace(phase(1), loss=None, tokens=0)
    history.observe(done, 100.0)
    history.seen([Peer()])
    history.observe(replace(done, round=2), 104.0)
    assert [(point.loss, point.swarm_loss) for point in history.view().points] == [(None, None), (None, 4.0)]
    assert round_line(*history.ended(), None, None).endswith(f"loss {NOTHING}")
    events = tmp_path / "events.jsonl"
    events.write_text(json.dumps(as_json(done, 100.0)))
    again = Curves(ME)
    again.replay(events)
    assert [(point.round, point.loss) for point in again.view().points] == [(1, None)]


def test_a_round_as_points_and_pieces() -> None:
    history = Curves(ME)
    history.seen([Peer(), Peer("fourth", loss=0.0)])
    events: list[Event] = [
        phase(1),
        Evaluated(1, 3.0),
        RoundCommitted(1, OTHER, 1.5, 10, 20),
        phase(2),
        WentSolo(2, "no_partner"),
        TakenBack(1, OTHER, 9.0, 3.0),
    ]
    for second, event in enumerate(events):
        history.observe(event, 100.0 + second)
    first, second_point = history.view().points
    assert (first.round, first.loss, first.swarm_loss, first.eval_loss, first.tokens_per_s) == (1, 2.0, 3.0, 3.0, 250.0)
    assert first.swarm_eval_loss == 3.0, "nobody else said theirs"
    assert second_point.eval_loss is None
    pieces = [(piece.kind, piece.round, piece.began, piece.ended) for piece in history.view().pieces]
    assert pieces == [
        ("phase", 1, 96.0, 100.0),
        ("swap", 1, 100.5, 102.0),
        ("phase", 2, 99.0, 103.0),
        ("solo", 2, 104.0, 104.0),
        ("taken_back", 1, 105.0, 105.0),
    ]
    assert history.view().pieces[-1].partner == OTHER
    assert history.view().names.keys() == {ME, OTHER}
    assert from_json(HistoryView, to_json(history.view())) == history.view()


@pytest.mark.parametrize(("honest", "swarm"), [((4.0, 5.0), 4.5), ((), float("inf"))], ids=["few", "none"])
def test_peers_with_any_loss_leave_that_of_the_swarm_in_the_middle(honest: tuple[float, ...], swarm: float) -> None:
    """Where honest peers are more; where there are none, it is still no error."""
    history = Curves(ME)
    losses = [*honest, *([1.7e308] if honest else [1.7e308, 1.7e308, 1.7e308])]
    history.seen([Peer(str(number), loss=loss, eval_loss=loss) for number, loss in enumerate(losses)])
    history.observe(phase(1), 0.0)
    history.observe(Evaluated(1, 3.0), 0.0)
    assert history.view().points[0].swarm_loss == history.view().points[0].swarm_eval_loss == swarm


def test_meetings_of_others_are_read_from_their_records() -> None:
    history = Curves(ME)
    peer = Peer(committed=7)
    history.seen([peer])
    assert not history.view().meetings, "what it did before we looked is not counted"
    for said in (peer, replace(peer, committed=8), replace(peer, committed=8), replace(peer, committed=9, partner=ME)):
        history.seen([said])
    history.seen([replace(peer, boot=b"2", committed=1)])
    found = {(met.peer, met.partner): met.rounds for met in history.view().meetings}
    assert found == {(OTHER, THIRD): 2, (OTHER, ME): 1}


def test_rates_are_by_the_second_of_the_clock() -> None:
    history = Curves(ME)
    a_new_day = (14.0, 0, 5)
    for now, sent, received in ((10.0, 0, 0), (12.0, 100, 50), (12.0, 100, 50), (13.0, 100, 60), a_new_day):
        history.sample(sent, received, 0, now)
    assert [(rate.sent_per_s, rate.received_per_s) for rate in history.view().rates] == [(50.0, 25.0), (0.0, 10.0)]


def test_a_round_that_ends_late_has_its_own_phase_while_points_are_dropped() -> None:
    history = Curves(ME)
    for round in range(1, 5 * POINTS):
        history.observe(phase(round, float(round)), 0.0)
        history.observe(RoundCommitted(max(1, round - 3), OTHER, 1.0, 1, 1), 0.0)
        piece, point = history.ended()
        assert point and point.loss == piece.round == max(1, round - 3)


def test_rounds_that_are_done_again_replace_those_that_were_undone() -> None:
    history = Curves(ME)
    for round, loss in ((1, 5.0), (2, 4.0), (3, 3.0), (2, 4.5), (1, 6.0), (2, 5.5)):
        history.observe(phase(round, loss), 0.0)
    assert [(point.round, point.loss) for point in history.view().points] == [(1, 6.0), (2, 5.5)]


def test_everything_is_bounded() -> None:
    history, lines = Curves(ME), LogTail()
    for round in range(1, 5 * POINTS):
        history.observe(phase(round), float(round))
        history.observe(Evaluated(round, 2.0), float(round))
        history.observe(RoundCommitted(round, f"peer{round}", 1.0, 1, 1), float(round))
        history.sample(round, round, round, float(round))
    with lines.attached():
        for number in range(2 * SAID):
            logging.getLogger("noloco_node.test").warning("line %d", number)
    logging.getLogger("noloco_node.test").warning("not heard any more")
    view = history.view(lines.last())
    assert POINTS <= len(view.points) <= 2 * POINTS
    assert [point.round for point in view.points] == sorted(point.round for point in view.points)
    assert [point.round for point in view.points[-LATEST_POINTS:]] == [*range(5 * POINTS - LATEST_POINTS, 5 * POINTS)]
    assert (len(view.pieces), len(view.rates), len(view.meetings), len(view.said)) == (PIECES, RATES, PAIRS, SAID)
    assert view.said[-1].text == f"line {2 * SAID - 1}"
    json.dumps(document(view), allow_nan=False)


def test_curves_outlive_a_restart(tmp_path: Path) -> None:
    events_file = tmp_path / "events.jsonl"
    written = [json.dumps(as_json(event, 5.0)) for event in (phase(1), Evaluated(1, 3.0), phase(2, float("nan")))]
    endless = ('{"at": 1, "event": "PhaseDone", "round": Infinity}', '{"at": 1%s, "event": "PhaseDone"}' % ("0" * 400))
    phases = '{"at": %s, "event": "PhaseDone", "round": %s, "steps": 1, "loss": 1}'
    wrong = [phases % (at, round) for at, round in (("NaN", 1), (1e308, 1), (-1, 1), (1, 10**30), (1, -1))]
    damaged = ("nonsense", '{"event": "PhaseDone"}', "[]", *endless, *wrong, '{"at": 1, "eve')
    events_file.write_text("\n".join([*written, *damaged]))
    history = Curves(ME)
    history.replay(events_file)
    history.replay(tmp_path / "none")
    assert len(history.view().points) == 2
    assert [(point.at, point.round, point.loss, point.eval_loss) for point in history.view().points[:1]] == [
        (5.0, 1, 2.0, 3.0)
    ]
    assert history.view().points[0].swarm_eval_loss is None, "what the others had then is not kept"
    json.dumps(document(history.view()), allow_nan=False)
