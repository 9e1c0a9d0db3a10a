"""`top` without a terminal or a node: pictures in, lines out, at any size."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from noloco_node.terminal.picture import Picture
from noloco_node.terminal.top.activity import PHASE_COLUMNS, timeline, window
from noloco_node.terminal.top.glyphs import Frame, PlottedCurve, bars, gauge, in_ascii, plot
from noloco_node.terminal.top.keys import LEAVE_QUESTION, SAID_S, Command, Keys
from noloco_node.terminal.top.layout import Part, fit, joined, share_out, wrapped
from noloco_node.terminal.top.line_mode import SILENT_S, LineMode, standing
from noloco_node.terminal.top.screen import Display, screen
from noloco_node.views.history import HistoryView, Piece, Point, Rate, Said
from noloco_node.views.peers import PeerRow, PeersView, RunView
from noloco_node.views.status import (
    BytesView,
    Checkpoints,
    Health,
    LastRound,
    Phase,
    Rounds,
    SampleView,
    StageView,
    StatusView,
    Today,
)

NOW = 1_763_740_000.0
ME, OTTER, FALCON = "12D3KooWME81676", "12D3KooWOTTER41521", "12D3KooWFALCON7864"
NAMES = {ME: "brisk-heron", OTTER: "calm-otter", FALCON: "dry-falcon"}
REMEDY = "free some, or move NOLOCO_HOME"


def a_picture(rounds: int = 40, phase_s: float = 20.0) -> Picture:
    ends = [NOW - 4 - (40 - number) * phase_s for number in range(1, rounds + 1)]
    points, pieces = [], []
    for number, end in enumerate(ends, 1):
        loss = 1.5 + 4 / number
        evaluated = loss + 0.1 if number % 5 == 0 else None
        points.append(Point(end, number, number * 50, loss, evaluated, loss + 0.2, None, 18_400.0))
        pieces.append(Piece("phase", number, end - phase_s, end))
        if number % 4 == 0:
            pieces.append(Piece("solo", number, end, end, None, "no_partner"))
        else:
            pieces.append(Piece("swap", number, end, end + 3.1, OTTER, None, 12_600_000, 12_600_000))
    status = StatusView(
        peer_id=ME,
        name=NAMES[ME],
        version="0",
        state="training",
        run="tiny-3f9a2c81d0e4",
        round=rounds,
        rounds_target=100,
        step=rounds * 50,
        tokens_per_s=18_400.0,
        loss=1.6,
        eval_loss=1.7,
        device="cpu",
        parameters=1_000_000,
        partner=OTTER,
        busy_fraction=0.987,
        rounds=Rounds(30, 10, {"no_partner": 10}),
        bytes=BytesView(512_000_000, 515_000_000, 0.52),
        last_round=LastRound(OTTER, 3.1, 12_600_000, 12_600_000),
        checkpoint=Checkpoints(1_200_000_000, 3_100_000_000, 40),
        partners={OTTER: 30},
        peers_seen=2,
        reachable="directly",
        uptime_s=11_520.0,
        health=(Health("warning", "disk: 3.1 GB left, a checkpoint needs 1.2 GB", REMEDY),),
    )
    rows = row(OTTER, exchanges=30), row(FALCON, state="paused")
    rates = tuple(Rate(NOW - 60 + second, 2e6 if second % 20 < 3 else 0.0, 1e6) for second in range(60))
    said = tuple(Said(NOW - 30 + second, "info", f"line {second} of the log") for second in range(30))
    history = HistoryView(points=tuple(points), pieces=tuple(pieces), rates=rates, said=said, names=NAMES)
    return Picture(status, PeersView(rows), history, rates, NOW)


def row(peer: str, **changes: object) -> PeerRow:
    usual = PeerRow(peer_id=peer, name=NAMES.get(peer, peer), state="training", round=39, lag=1, loss=1.8)
    return replace(usual, **changes)


def drawn(picture: Picture, width: int, height: int, **look: object) -> list[str]:
    lines = screen(picture, Display(width=width, height=height, now=NOW + 0.5, every_s=1.0, **look))
    return [line.plain for line in lines]


# ---- the whole screen ----
PANELS = {
    (80, 24): ["loss", "this node", "rounds", "peers", "events"],
    (120, 30): ["loss", "this node", "rounds", "peers", "events"],
    (200, 50): ["loss", "this node", "partners", "rounds", "peers", "events"],
    (60, 40): ["loss", "this node", "partners", "peers", "events"],
    (40, 10): ["loss"],
}


@pytest.mark.parametrize("size", PANELS, ids=str)
def test_all_panels_are_there_and_what_is_cut_says_so(size):
    lines = drawn(a_picture(), *size)
    text = "\n".join(lines)
    assert len(lines) == size[1]
    assert all(cell_len(line) == size[0] for line in lines)
    assert all(line.startswith(" ") for line in lines), "a free column at the left"
    for name in PANELS[size]:
        assert any(f" {name} ─" in line for line in lines), name
    for words in ("brisk-heron  ● training", "round 40", "loss 1.600", "eval 1.700", "q quit", "? help"):
        assert words in text
    assert REMEDY in " ".join(line.strip() for line in lines), "the remedy is whole, on however many lines"


@pytest.mark.parametrize("size", [(80, 24), (120, 30), (200, 50), (60, 40)], ids=str)
def test_the_sample_text_on_a_few_rows(size):
    picture = a_picture()
    text = SampleView(40, "def main(", "self):\n    return 1" + 40 * "\x1b[2J and on")
    lines = [line.strip() for line in drawn(replace(picture, status=replace(picture.status, sample=text)), *size)]
    (head,) = (number for number, line in enumerate(lines) if line.startswith("sample text ─"))
    assert lines[head].endswith("after round 40")
    assert lines[head + 1].startswith("def main(self): return 1 [2J and"), "nothing that moves the cursor"
    rows = next(row for row, line in enumerate(lines[head + 1 :]) if not line or " ─" in line)
    assert 1 <= rows <= 3
    assert not any("sample text" in line for line in drawn(picture, *size)), "only where a run asks for it"
    short = replace(picture.status, sample=replace(text, text=" :\n\n"))
    lines = [line.strip() for line in drawn(replace(picture, status=short), *size)]
    (head,) = (number for number, line in enumerate(lines) if line.startswith("sample text ─"))
    assert lines[head + 1] == "def main( :"
    assert any(" ─" in line for line in lines[head + 2 : head + 4]), "no more rows than it needs"


def test_how_far_the_phase_under_way_is():
    picture = a_picture()
    long = replace(picture.status, phase=Phase(0.46, 70.0))
    assert "this phase 46%, 1 min 10 s left" in drawn(replace(picture, status=long), 120, 30)[0]
    first = replace(a_picture(rounds=0), status=replace(long, round=0, step=23))
    assert any("the first one has not ended yet: 46%, 1 min 10 s left" in line for line in drawn(first, 120, 30))
    none = replace(first.status, loss=None, tokens_per_s=None, phase=Phase(0.46, 70.0, 5.51, 900.0))
    before = drawn(replace(first, status=none), 160, 30)[1]
    assert before.startswith(" loss 5.510 so far · ") and " · 900 tokens/s · " in before, "as in `status`"
    assert "loss 5.510, " in standing(none) and "900 tokens/s, " in standing(none)


def test_what_a_small_terminal_shows():
    lines = [line.strip() for line in drawn(a_picture(), 80, 24)]
    assert lines[0].endswith("tiny-3f9a2c81d0e4")
    assert "round 40 of 100" in lines[0]
    assert lines[1] == "loss 1.600 · eval 1.700 · step 2000 · 18.4k tokens/s · busy 99% · 2 peers"
    rounds = next(number for number, line in enumerate(lines) if line.startswith("rounds ─"))
    assert "──│───── 39 ──────│───── 40 ──────│╌╌" in lines[rounds + 1]
    assert "▅" in lines[rounds + 2] and "calm-otter" in lines[rounds + 2]
    peers = next(number for number, line in enumerate(lines) if line.startswith("peers ─"))
    assert lines[peers + 2].split()[:3] == ["calm-otter", "training", "39"]
    assert lines[peers + 3].split()[:2] == ["dry-falcon", "paused"]
    assert lines[-2].endswith("line 29 of the log")


def test_a_wide_terminal_shows_what_a_volunteer_may_ask():
    text = "\n".join(drawn(a_picture(), 200, 50))
    for words in (
        "30 together · 10 solo · 10 no partner",
        "sent 512 MB · received 515 MB",
        "calm-otter in 3.1 s · sent 12.6 MB · received 12.6 MB",
        "saved at round 40 · 3.1 GB left",
        "1.0M parameters · on cpu",
        "0.52 bytes per parameter and round",
        "≤ 2.0 MB/s",
        "40%",
    ):
        assert words in text


def test_limits_of_a_day_and_idle_time():
    status = replace(
        a_picture().status, today=Today(512_000_000, 1_000, 2_000_000_000), time_s={"step": 90.0, "evaluate": 10.0}
    )
    text = "\n".join(drawn(replace(a_picture(), status=status), 200, 50))
    assert "sent 512 MB of 2.0 GB · received 1.0 kB" in text
    assert "evaluate 10.0%" in text


def test_a_stage_and_its_micro_batches():
    stage = StageView(number=2, stages=3, micro_batches_per_s=3.46, queued=4)
    picture = a_picture()
    peers = PeersView((row(OTTER, stage=1), row(FALCON, stage=3)))
    lines = drawn(replace(picture, status=replace(picture.status, stage=stage), peers=peers), 120, 40)
    assert any("stage 2 of 3 · 3.5 micro-batches/s · 4 queued" in line for line in lines)
    head = next(number for number, line in enumerate(lines) if line.startswith(" peers ─")) + 1
    assert lines[head].split()[:2] == ["peer", "stage"]
    assert "stage" not in "\n".join(drawn(picture, 120, 40))


def test_what_this_node_has_seen_of_its_peers():
    rows = PeersView((row(OTTER, exchanges=30, refused=4, quarantined_s=65.0, quarantined_why="diverged"), row(FALCON)))
    picture = a_picture()
    status = replace(picture.status, taken_back=1, peers_quarantined=1)
    picture = replace(picture, peers=rows, status=status)
    lines = drawn(picture, 80, 24)
    head = next(number for number, line in enumerate(lines) if line.startswith(" peers ─")) + 1
    assert lines[head].split() == ["peer", "state", "quarantined", "round", "lag", "loss", "together"]
    assert "  1 min 5 s, diverged  " in lines[head + 1]
    assert "1 taken back · 1 peer quarantined" in "\n".join(drawn(picture, 120, 40))
    assert "quarantined" not in "\n".join(drawn(a_picture(), 120, 40))


def test_many_peers_are_counted():
    many = tuple(row(f"peer-{number}", exchanges=number) for number in range(100))
    lines = drawn(replace(a_picture(), peers=PeersView(many)), 80, 24)
    shown = sum("peer-" in line for line in lines)
    assert any(f"and {100 - shown} others: `noloco-node peers` lists all" in line for line in lines)
    assert any("peer-99 " in line for line in lines), "the one with most rounds together"


def test_a_node_that_ended_after_its_last_round_has_finished():
    picture = a_picture()
    last = replace(picture.status, state="leaving", rounds_target=40, waiting_for="a partner for the last round")
    done = replace(picture, status=last, absence="gone")
    text = "\n".join(drawn(done, 120, 30))
    assert "a partner" not in text, "it waits for nothing any more"
    assert "○ finished" in text and "○ gone" not in text
    assert "the work is done, and the node ended 1.0 s ago: `noloco-node export` takes the model out" in text
    mode = LineMode()
    mode.lines(picture, 0.0)
    assert mode.lines(done, 1.0) == ["the work is done and the node has ended"]


def test_the_last_values_of_a_node_that_is_gone_stay():
    picture = replace(a_picture(), absence="gone")
    late = screen(picture, Display(width=80, height=24, now=NOW + 65, every_s=1.0))
    text = "\n".join(line.plain for line in late)
    assert "○ gone" in text
    assert "! no node runs here any more (for 1 min 5 s): waiting for it" in text
    assert "calm-otter" in text
    assert "1.60" in text
    silent = "\n".join(drawn(replace(picture, absence="silent"), 80, 24))
    assert "the node does not answer" in silent


def test_a_joining_node_shows_what_it_waits_for():
    status = StatusView(peer_id=ME, name="brisk-heron", version="0", state="joining", waiting_for="state, 62%")
    lines = drawn(Picture(status, PeersView(), HistoryView(), (), NOW), 80, 24)
    text = "\n".join(lines)
    for words in ("○ joining", "waiting for state, 62%", "no round has ended yet", "no other peer yet"):
        assert words in text
    assert "nothing logged yet" in text


def test_a_rendezvous_has_a_view_of_its_own():
    line = f"noloco-node join --bootstrap /ip4/203.0.113.7/tcp/4001/p2p/{ME}"
    run = RunView("3f" * 32, "tiny-3f9a2c81d0e4", FALCON, 100, 2, 1, 39)
    status = StatusView(
        peer_id=ME, name="brisk-heron", version="0", state="rendezvous", join=line, runs=(run,), peers_seen=2
    )
    rows = PeersView((row(OTTER, run="tiny"), row(FALCON, run="tiny", state="paused")))
    lines = drawn(Picture(status, rows, HistoryView(), (), NOW), 80, 24)
    text = "\n".join(lines)
    for words in ("● rendezvous", "runs ─", "tiny-3f9a2c81d0e4", "peers ─", "calm-otter", "others join with ─"):
        assert words in text
    assert line in text.replace("\n ", "").replace("  ", " ")
    assert "pause" not in lines[-1] and "leave" in lines[-1]
    assert "tokens/s" not in lines[1]


def test_keys_that_make_sense_now():
    assert "p pause" in drawn(a_picture(), 80, 24)[-1]
    paused = replace(a_picture(), status=replace(a_picture().status, state="paused"))
    assert "r resume" in drawn(paused, 80, 24)[-1]
    answered = drawn(paused, 80, 24, said="brisk-heron is paused")[-1].strip()
    assert answered.startswith("brisk-heron is paused   r resume   l leave   q quit   ? help")
    assert drawn(paused, 120, 24, said=LEAVE_QUESTION)[-1].split("   ")[0].strip() == LEAVE_QUESTION
    assert "quit" not in drawn(paused, 120, 24, said=LEAVE_QUESTION)[-1], "q is an answer now"
    helped = "\n".join(drawn(a_picture(), 80, 24, shows_help=True))
    assert "finish the swap, save, and end the node" in helped
    assert "a round averaged with a partner" in helped
    assert "lag: rounds behind this node when that peer was last seen, as its round" in helped


def test_control_characters_of_peers_are_removed():
    nasty = "\x1b[2J\x07one\ntwo[bold]\t日本語"
    said = (Said(NOW, "error", nasty),)
    picture = a_picture()
    status = replace(picture.status, health=(Health("error", nasty, nasty),), last_error=nasty, name=nasty)
    rows = PeersView((row(OTTER, name=nasty),))
    picture = replace(picture, status=status, peers=rows, history=replace(picture.history, said=said))
    for width in (40, 80, 200):
        lines = drawn(picture, width, 50)
        assert all(cell_len(line) == width and line.isprintable() for line in lines)
        assert any("two[bold]" in line for line in lines)


class Odd(random.Random):
    """Senseless values. Drawn by a random generator, because strategies for so many fields take minutes."""

    def number(self) -> float | None:
        return self.choice([None, 0.0, 0.5, 1.0, -1.0, 1e-9, 12.3, 1e15, -1e300, 1e300])

    def whole(self) -> int:
        return self.choice([0, 1, 2, 41, 10**9, 2**62])

    def word(self) -> str:
        return "".join(self.choices("ab 日\t\x1b\u0301é·…", k=self.choice([0, 1, 5, 60])))

    def at(self) -> float:
        return self.choice([0.0, NOW - 1, NOW - 60 * self.random(), NOW + 9, -1e300, 1e300])

    def peer(self) -> str:
        return self.choice([ME, OTTER, FALCON, self.word()])

    def piece(self) -> Piece:
        kind = self.choice(["phase", "swap", "solo", "taken_back"])
        return Piece(kind, self.whole(), self.at(), self.at(), self.peer(), self.word())

    def some(self, made):
        return tuple(made() for _ in range(self.choice([0, 1, 3, 30])))


def an_odd_picture(seed: int) -> Picture:
    odd = Odd(seed)
    status = StatusView(
        peer_id=odd.peer(),
        name=odd.word(),
        version=odd.word(),
        state=odd.choice(["training", "joining", "paused", "leaving", "rendezvous", odd.word()]),
        run=odd.word(),
        round=odd.whole(),
        rounds_target=1 + odd.whole(),
        step=odd.whole(),
        tokens_per_s=odd.number(),
        loss=odd.number(),
        waiting_for=odd.word(),
        busy_fraction=odd.number(),
        time_s={odd.word(): odd.random(), "step": 1.0},
        rounds=Rounds(odd.whole(), odd.whole(), {odd.word(): odd.whole()}),
        addresses=odd.some(odd.word),
        runs=odd.some(lambda: RunView(odd.word(), odd.word(), odd.peer(), odd.whole())),
        health=odd.some(lambda: Health(odd.word(), odd.word(), odd.word())),
        last_error=odd.word(),
    )
    rows = odd.some(
        lambda: row(odd.peer(), name=odd.word(), state=odd.word(), round=odd.whole(), last_seen_s=odd.number())
    )
    rates = odd.some(lambda: Rate(odd.at(), odd.whole(), -odd.random()))
    history = HistoryView(
        points=odd.some(lambda: Point(odd.at(), odd.whole(), odd.whole(), odd.number(), math.nan, odd.number())),
        pieces=odd.some(odd.piece),
        said=odd.some(lambda: Said(odd.at(), odd.word(), odd.word())),
        names={odd.peer(): odd.word()},
    )
    absence = odd.choice([None, None, "gone", "changing", "silent"])
    return Picture(status, PeersView(rows), history, rates, odd.at(), absence)


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, 210), st.integers(1, 70), st.booleans())
def test_any_picture_fits_any_screen(seed, width, height, shows_help):
    lines = drawn(an_odd_picture(seed), width, height, said="p" * (seed % 99) or None, shows_help=shows_help)
    assert len(lines) == height
    assert all(cell_len(line) == width for line in lines)
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("width", [*range(1, 12), 39, 40, 65, 66, 79, 129, 130, 149, 150, 250])
def test_every_height_is_filled(width):
    for height in (1, 2, 3, 5, 9, 10, 23, 33, 34, 70):
        lines = drawn(a_picture(), width, height)
        assert (len(lines), {cell_len(line) for line in lines}) == (height, {width})


# ---- lines ----
def test_cut_with_an_ellipsis():
    assert fit(Text("calm-otter"), 6).plain == "calm-…"
    assert fit(Text("日本語"), 5).plain == "日本…"
    assert fit(Text("ab"), 4).plain == "ab  "
    assert joined(["one", "two", "three"], 9).plain == "one · two"


@given(
    st.text(st.characters(min_codepoint=32, max_codepoint=0x3100, exclude_categories=["C", "M", "Z"]) | st.just(" "))
)
def test_wrapping_loses_no_word(text):
    lines = [line.plain for line in wrapped(Text(text), 12, 2)]
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert all(cell_len(line.rstrip()) <= 12 for line in lines)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9), st.integers(1, 4))), st.integers(0, 60)
)
def test_rows_are_divided_within_bounds(wants, height):
    parts = [Part(lambda _width, _height: [], low, low + more, keep, weight) for low, more, keep, weight in wants]
    given_rows = share_out(parts, height)
    assert sum(given_rows) <= height
    for part, rows in zip(parts, given_rows, strict=True):
        assert rows == 0 or part.least <= rows <= part.most
    dropped = [part.keep for part, rows in zip(parts, given_rows, strict=True) if not rows]
    kept = [part.keep for part, rows in zip(parts, given_rows, strict=True) if rows]
    assert not dropped or not kept or max(dropped) <= min(kept), "the least important go first"


# ---- marks ----
def test_a_falling_curve_falls():
    curve = PlottedCurve([(0.0, 4.0), (1.0, 0.0)])
    lines = plot([curve], Frame.around([curve]), 8, 4)
    columns = [min(row for row in range(4) if lines[row].plain[x] != " ") for x in range(8)]
    assert columns == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_beginning_does_not_flatten_the_rest():
    curve = PlottedCurve([(0.0, 100.0), (1.0, 10.0), (10.0, 2.0), (20.0, 1.0)])
    frame = Frame.around([curve], settled=0.25)
    assert (frame.left, frame.right, frame.low, frame.high) == (0.0, 20.0, 1.0, 2.0)
    lines = plot([curve], frame, 20, 4)
    assert not lines[0].plain[:9].strip() and lines[0].plain[10].strip() and lines[3].plain[19].strip()


def test_a_dotted_curve_has_gaps_and_the_later_curve_has_the_colour():
    flat = [(0.0, 1.0), (1.0, 1.0)]
    dotted = PlottedCurve(flat, "magenta", dotted=True)
    (alone,) = plot([dotted], Frame(0, 1, 0, 2), 9, 1)
    assert " " in alone.plain and alone.plain.strip()
    (both,) = plot([dotted, PlottedCurve(flat, "cyan")], Frame(0, 1, 0, 2), 9, 1)
    assert " " not in both.plain
    assert {str(span.style) for span in both.spans} == {"cyan"}


def test_bars_and_gauges():
    assert [line.plain for line in bars([0, 1, 4, 8], 8, 1, "")] == ["▁▁▄█"]
    assert [line.plain for line in bars([0, 4, 8], 8, 2, "")] == ["  █", "▁██"]
    assert gauge(0.5, 8, "").plain == "━━━━────"
    assert gauge(7.0, 4, "").plain == "━━━━"


def test_an_ascii_terminal():
    for line in drawn(a_picture(), 120, 40):
        plain = in_ascii(line)
        assert plain.isascii() and len(plain) == len(line)
        assert "?" not in plain.replace("? help", "")


# ---- rounds ----
def test_a_round_is_drawn_at_its_time():
    pieces = [
        Piece("phase", 1, NOW - 32, NOW - 16),
        Piece("phase", 2, NOW - 16, NOW),
        Piece("swap", 1, NOW - 16, NOW - 12, OTTER),
        Piece("solo", 2, NOW, NOW, None, "no_partner"),
    ]
    seen = window(pieces, NOW + 16, 3 * PHASE_COLUMNS)
    phases, first, second = (line.plain for line in timeline(pieces, seen, 3, ongoing=3))
    assert [phases[x] for x in (0, PHASE_COLUMNS, 2 * PHASE_COLUMNS)] == ["│"] * 3
    assert "─ 1 ─" in phases and "─ 2 ─" in phases and "╌ 3 ╌" in phases
    assert first[PHASE_COLUMNS:].startswith("▅▅▅▅ calm-otter")
    assert first[2 * PHASE_COLUMNS :].startswith("○ no partner")
    assert not second.strip()


def test_rounds_that_overlap_have_lanes_of_their_own():
    pieces = [Piece("phase", 1, NOW - 10, NOW), Piece("swap", 1, NOW - 9, NOW - 1, OTTER)]
    pieces.append(Piece("swap", 2, NOW - 8, NOW - 2, FALCON))
    lines = [line.plain for line in timeline(pieces, window(pieces, NOW, 48), 3, ongoing=None)]
    assert sum("▅" in line for line in lines) == 2


def test_a_correction_that_is_taken_back_has_a_mark_of_its_own():
    taken = Piece("taken_back", 1, NOW, NOW, OTTER, "taken_back")
    pieces = [Piece("phase", 1, NOW - 16, NOW), taken]
    lane = timeline(pieces, window(pieces, NOW + 32, 4 * PHASE_COLUMNS), 2, ongoing=None)[1]
    assert lane.plain.strip() == "× taken back, calm-otter"
    before = a_picture()
    after = replace(before, history=replace(before.history, pieces=(*before.history.pieces, taken)))
    told = LineMode()
    told.lines(before, NOW)
    assert told.lines(after, NOW) == ["round 1 taken back, calm-otter"]
    assert "   1 × taken back, calm-otter" in "\n".join(drawn(after, 200, 50))


def test_the_newest_partner_is_named_at_the_edge_too():
    pieces = [Piece("phase", 1, NOW - 10, NOW - 1), Piece("swap", 1, NOW - 1, NOW, OTTER)]
    lane = timeline(pieces, window(pieces, NOW, 48), 2, ongoing=None)[1].plain
    assert lane.endswith("calm-otter ▅▅")


# ---- keys ----
def test_leave_asks_once():
    desk = Keys()
    assert desk.press("l", 0.0) == []
    assert desk.said(1.0) == LEAVE_QUESTION
    assert desk.press("x", 1.0) == []
    assert desk.said(1.0) is None
    assert desk.press("y", 2.0) == [], "nothing was asked"
    assert desk.press("ly", 3.0) == [] and desk.said(3.0) == LEAVE_QUESTION, "typed before it was asked"
    assert desk.press("y", 3.5) == [Command.LEAVE]
    assert desk.press("l", 4.0) == []
    assert desk.press("y", 60.0) == [], "too late"
    desk.press("l", 70.0)
    desk.say("brisk-heron is training", 70.1)
    assert desk.said(70.2) == LEAVE_QUESTION, "the answer to an earlier key comes while the question is open"
    assert desk.press("y", 71.0) == [Command.LEAVE]


def test_keys_and_answers():
    desk = Keys()
    assert desk.press("prQ", 0.0) == [Command.PAUSE, Command.RESUME, Command.QUIT]
    assert desk.press("\x1b[A", 0.0) == [], "an arrow"
    assert desk.press("?", 0.0) == [] and desk.shows_help
    assert desk.press("q", 0.0) == [] and not desk.shows_help, "back from the help first"
    desk.say("paused", 10.0)
    assert desk.said(10.0 + SAID_S - 0.1) == "paused"
    assert desk.said(10.0 + SAID_S) is None


@pytest.mark.parametrize("text", ["\x1b[200~only\x1b[r y\n\x1b[201~", "\x1bOp", "\x1b[1;5q", "\x1b[A\x1b[B"])
def test_what_is_pasted_and_escape_sequences_are_no_commands(text: str):
    for cut in range(1, len(text)):
        desk = Keys()
        pressed = [desk.press(part, 0.0) for part in (text[:cut], text[cut:], "p", "r" + text + "p")]
        assert pressed == [[], [], [Command.PAUSE], [Command.RESUME, Command.PAUSE]], f"arrives in two parts: {cut}"
        assert not desk.said(0.0)


def test_a_long_text_is_not_kept_while_it_is_pasted():
    desk = Keys()
    desk.press("\x1b[200~", 0.0)
    for _ in range(2000):
        assert desk.press(1024 * "l", 0.0) == []
    assert desk.press("\x1b[201~p", 0.0) == [Command.PAUSE]


def test_escape_closes_the_help_and_the_key_after_it_counts():
    desk = Keys()
    desk.press("?", 0.0)
    assert desk.press("\x1b", 0.0) == [] and not desk.shows_help
    assert desk.press("p", 0.0) == [Command.PAUSE]


# ---- lines for a pipe ----
def test_a_finding_whose_figures_change_is_no_news():
    told, silent = LineMode(), "network: for {} no other node has stored this one's record, so nobody finds it"
    first = a_picture()

    def lines(text, level="warning"):
        return told.lines(replace(first, status=replace(first.status, health=(Health(level, text, "wait"),))), NOW)

    lines(silent.format("59 s"))
    assert [lines(silent.format(how_long)) for how_long in ("1 min", "1 min 1 s", "2 h 3 min")] == [[], [], []]
    assert lines("disk: 3.1 GB left") == ["! disk: 3.1 GB left: wait"]
    assert lines("disk: 820 MB left") == ["! disk: 820 MB left: wait"], "another unit"
    assert lines("disk: 790 MB left") == []
    assert lines("disk: 780 MB left", "error") == ["! disk: 780 MB left: wait"]


def test_a_change_is_printed_once():
    news, first = LineMode(), a_picture()
    (head, finding) = news.lines(first, 0.0)
    assert head == (
        "brisk-heron training, round 40 of 100: step 2000, loss 1.600, eval 1.700, 18.4k tokens/s, busy 99%, 2 peers"
    )
    assert finding == f"! disk: 3.1 GB left, a checkpoint needs 1.2 GB: {REMEDY}"
    assert news.lines(first, 1.0) == []
    then = a_picture(rounds=41)
    assert news.lines(then, 2.0) == [
        "round 41 with calm-otter: step 2050, loss 1.598, 18.4k tokens/s; swap 3.1 s, sent 12.6 MB, received 12.6 MB"
    ]
    (standing,) = news.lines(then, 2.0 + SILENT_S)
    assert standing == head.replace("round 40", "round 41").replace("2000", "2050"), "a sign of life"
    gone = replace(then, absence="gone")
    assert news.lines(gone, 3.0) == ["no node runs here any more: waiting for one"]
    assert news.lines(gone, 90.0) == []
    assert news.lines(then, 91.0)[0] == standing
