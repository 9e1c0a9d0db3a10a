"""`status` and `peers` as text: fits the terminal, breaks between pieces, and is plain in a pipe."""

import io
from dataclasses import replace

import pytest
from fake_node import OTHER, PEERS, STATUS
from rich.console import Console

from noloco_node.terminal.table import Column, fill, fitting
from noloco_node.terminal.text import peer_line, print_peers, print_status
from noloco_node.views.peers import GONE, PeerRow, PeersView, RunView
from noloco_node.views.status import GpuView, LastTakenBack, MemoryView, Phase, Rounds, StageView, StatusView, Today


def printed(show, view, width):
    out = Console(file=io.StringIO(), width=width, highlight=False)
    show(view, out)
    return out.file.getvalue()


FULL = replace(
    STATUS,
    steps_target=5000,
    left_s=3840.0,
    learning_rate=3e-4,
    gradient_norm=0.824,
    mfu=0.412,
    device="cuda",
    memory=MemoryView(3_210_000_000, 80_000_000_000, 812_000_000, 16_000_000_000),
    gpu=GpuView(412.3, 0.97),
)


def test_status_of_a_training_node():
    assert printed(print_status, FULL, 80).splitlines() == [
        "brisk-heron (12D3KooW…e2Xo) in tiny-3f9a2c81d0e4",
        "  training, round 41 of 100, step 2063 of 5000 · 1 h 4 min left",
        "  loss 1.870 (eval 1.920) · lr 3.00e-4 · grad norm 0.82 · 18.4k tokens/s",
        "  MFU 41% · busy 98.7%",
        "1.0M parameters on cuda · 2.1M tokens so far",
        "  memory 3.2 GB of 80.0 GB on the GPU, 812 MB of 16.0 GB beside it",
        "  GPU 412 W, 97% utilised",
        "last round with fair-hippo: 3.1 s, sent 12.6 MB, received 12.6 MB",
        "  0.4% of blocks resent",
        "41 rounds: 39 together, 2 solo (no partner)",
        "reachable directly · 17 peers seen · up 3 h 12 min",
        "  sent 512 MB, received 515 MB",
        "! disk: 3.1 GB left, a checkpoint needs 1.2 GB: free some, or move NOLOCO_HOME",
    ]


def test_status_of_a_node_that_has_just_started():
    new = StatusView(peer_id=OTHER, name="fair-hippo", version="0", state="joining", waiting_for="a run")
    assert printed(print_status, new, 80).splitlines() == [
        "fair-hippo (12D3KooW…33Jw) in no run yet · joining · waiting for a run",
        "0 peers seen · up 0 s · sent 0 B, received 0 B",
    ]


def test_a_node_with_a_peers_state_is_in_that_round_before_its_first_step():
    new = replace(STATUS, round=17, step=0, loss=None)
    assert "· training, round 17 of 100 · 18.4k tokens/s" in printed(print_status, new, 1000)


def test_how_far_the_phase_is_and_what_is_known_before_the_first_one_is_over():
    phase = Phase(0.46, 70.0, 5.51, 900.0)
    assert "step 2063 · this phase 46%, 1 min 10 s left · loss 1.870" in printed(
        print_status, replace(STATUS, phase=phase), 1000
    )
    first = replace(STATUS, round=0, step=23, loss=None, eval_loss=None, tokens_per_s=None, phase=phase)
    assert "round 0 of 100, step 23 · this phase 46%, 1 min 10 s left · loss 5.510 · 900 tokens/s" in printed(
        print_status, first, 1000
    )


def test_where_the_time_went():
    time_s = {"step": 90.0, "boundary": 0.01, "apply": 0.1, "evaluate": 1.9, "waiting": 8.0, "paused": 60.0}
    shown = printed(print_status, replace(STATUS, time_s=time_s, stall_ms=12.4, busy_fraction_minute=0.5), 1000)
    assert "busy 98.7% (last minute 50%)" in shown
    first = printed(print_status, replace(STATUS, busy_fraction_minute=STATUS.busy_fraction), 1000)
    assert "busy 98.7%" in first and "minute" not in first, "it is not over yet"
    assert (
        "\nbesides steps: waiting 8.0%, evaluate 1.9%, apply 0.1% · the last round cost 12 ms of training · "
        "paused for 1 min\n"
    ) in shown


def test_a_stage_and_its_micro_batches():
    first = StageView(number=1, stages=2, nodes=(3, 1), micro_batches_per_s=2.04, under_way=3, most_under_way=4, lost=2)
    text = printed(print_status, replace(STATUS, stage=first), 200)
    assert "stage 1 of 2 (nodes at each: 3, 1)" in text
    assert "2.0 micro-batches/s" in text and "3 of 4 under way" in text and "2 lost" in text and "queued" not in text
    text = printed(print_status, replace(STATUS, stage=replace(first, number=2, most_under_way=0, queued=5)), 200)
    assert "5 queued" in text and "under way" not in text


def test_a_limited_day_is_shown_with_its_limit():
    limited = replace(STATUS, today=Today(sent=512_000_000, received=515_000_000, sent_limit=2 * 10**9))
    assert "sent 512 MB of 2.0 GB, received 515 MB today" in printed(print_status, limited, 200)
    unlimited = replace(STATUS, today=Today(sent=1, received=1))
    assert "sent 512 MB, received 515 MB\n" in printed(print_status, unlimited, 200)


def test_status_of_a_rendezvous_shows_whole_addresses():
    view = replace(STATUS, state="rendezvous", health=())
    lines = printed(print_status, view, 80).splitlines()
    assert "rendezvous" in lines[0]
    assert STATUS.addresses[0] in lines


@pytest.mark.parametrize("width", [40, 80, 120, 1000])
def test_peers_fit(width):
    lines = printed(print_peers, PEERS, width).splitlines()
    assert len(lines) == 2
    assert all(len(line.rstrip()) <= width for line in lines)
    assert lines[1].startswith("calm-otter")
    assert OTHER not in lines[1]


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (40, "peer state round lag"),
        (64, "peer id state round lag loss"),
        (80, "peer id state round lag tokens/s loss together"),
        (100, "peer id state round lag tokens/s loss via last seen together"),
        (120, "peer id state round lag tokens/s loss via last seen sent received together"),
    ],
)
def test_a_wider_terminal_shows_more_of_each_peer(width, titles):
    """Of peers with long names, too."""
    crowd = replace(PEERS, peers=(*PEERS.peers, replace(PEERS.peers[0], name="modest-hedgehog")))
    head, *rows = printed(print_peers, crowd, width).splitlines()
    assert " ".join(head.split()) == titles
    if "id" in titles.split():
        assert all(row.split()[1] == "12D3KooW…33Jw" for row in rows)


BAD = replace(PEERS.peers[0], name="modest-hedgehog", failed=3, refused=1, taken_back=2)
BANNED = replace(BAD, quarantined_s=750.0, quarantined_why="taken_back")
ABSENT = PeerRow(peer_id="12D3KooWABSENT", name="dry-falcon", state=GONE, round=0, lag=0, quarantined_s=5.0)


def test_a_swap_that_failed_is_only_a_column():
    view = PeersView((*PEERS.peers, replace(BAD, refused=0, taken_back=0)))
    head, usual, failed = printed(print_peers, view, 120).splitlines()
    assert head.split()[-1] == "failed"
    assert (usual.split()[-1], failed.split()[-1]) == ("0", "3")


def test_peers_that_did_wrong_have_a_table_of_their_own():
    lines = printed(print_peers, PeersView((*PEERS.peers, BANNED, ABSENT)), 80).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["peer", "calm-otter", "modest-hedgehog"]
    assert [line.rstrip() for line in lines[3:]] == [
        "",
        "what this node itself has seen of some",
        "peer             together  failed  refused  taken back  quarantined",
        "modest-hedgehog        39       3        1           2  12 min 30 s, taken back",
        "dry-falcon              0       0        0           0  5.0 s",
    ]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_quarantine_is_shown_at_every_width(width):
    lines = printed(print_peers, PeersView((BAD, BANNED)), width).splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    assert lines[-1].rstrip().endswith("12 min 30 s, taken back")


def test_only_a_peer_that_has_gone():
    assert len(printed(print_peers, PeersView((ABSENT,)), 80).splitlines()) == 4


def test_a_line_for_each_peer_says_it_too():
    assert peer_line(PEERS.peers[0]) == "calm-otter training, round 40, loss 1.900 (12D3KooW…33Jw)"
    assert peer_line(BANNED).endswith(", loss 1.900, quarantined for 12 min 30 s, taken back (12D3KooW…33Jw)")
    assert peer_line(ABSENT) == "dry-falcon gone, quarantined for 5.0 s (12D3KooW…SENT)"


def test_corrections_that_were_taken_back():
    view = replace(STATUS, taken_back=2, last_taken_back=LastTakenBack(OTHER, 38, 2.314, 1.918), peers_quarantined=1)
    lines = printed(print_status, view, 80).splitlines()
    at = lines.index("2 corrections taken back")
    assert lines[at + 1] == "  last that of fair-hippo, round 38: eval loss 2.314 with it, 1.918 without"
    assert "reachable directly · 17 peers seen · 1 quarantined · up 3 h 12 min" in lines
    gone = replace(view, last_taken_back=LastTakenBack(OTHER, 38, None, 1.918))
    assert "eval loss - with it, 1.918 without" in printed(print_status, gone, 80), "JSON has no infinities"


def test_the_reasons_of_solo_rounds_are_words():
    reasons = {"partner_diverged": 4, "backing_off": 3, "all_quarantined": 2, "taken_back": 1}
    shown = printed(print_status, replace(STATUS, rounds=Rounds(3, 10, reasons)), 1000)
    assert "(4 partner says diverged, 3 waiting to call again, 2 all peers quarantined, 1 taken back)" in shown


def test_a_large_loss_is_shown_without_decimals():
    rows = PeersView(tuple(replace(PEERS.peers[0], loss=loss) for loss in (12345.678, -1234.4)))
    assert {"12346", "-1234"} <= set(printed(print_peers, rows, 120).split())


def test_figures_of_one_peer_take_at_most_the_last_column_from_the_others():
    boaster = replace(PEERS.peers[0], round=1 << 53, lag=-(1 << 53), loss=1e15, eval_loss=-1e15, tokens_per_s=1e15)
    titles = printed(print_peers, PEERS, 80).splitlines()[0].split()
    lines = printed(print_peers, PeersView((*PEERS.peers, boaster)), 80).splitlines()
    assert titles[-1:] == ["together"] and lines[0].split() == titles[:-1]
    assert "100000…" in lines[-1] and max(map(len, lines)) <= 80


def test_no_peers():
    assert printed(print_peers, PeersView(), 80) == "no other peer is known yet\n"


def test_what_a_peer_sends_is_not_markup():
    hostile = replace(PEERS.peers[0], name="[red]x[/red]", state="[link=http://x]")
    assert "[red]x[/red]" in printed(print_peers, PeersView((hostile,)), 1000)


def test_the_least_important_column_is_left_out_first():
    columns = (Column("aaaa"), Column("bbbb", keep=2), Column("cccc", keep=1))
    rows = [["1", "2", "3"]]
    assert fitting(columns, rows, 18) == [0, 1, 2]
    assert fitting(columns, rows, 17) == [0, 1]
    assert fitting(columns, rows, 11) == [0]
    assert fitting(columns, rows, 1) == [0]


def test_pieces_break_between_them_only():
    assert fill(["one", "two", "three"], 9) == "one · two\n  three"
    assert fill(["longer than the width"], 5) == "longer than the width"


RUNS = (
    RunView("3f" * 32, "tiny-3f3f3f3f3f3f", OTHER, rounds=100, peers=1, training=1, round=40),
    RunView("ab" * 32, "big-abababababab", OTHER, rounds=7),
)


def test_a_visitor_sees_peers_below_their_run():
    row = replace(PEERS.peers[0], run=RUNS[0].run)
    lines = printed(print_peers, PeersView((row,), RUNS), 200).splitlines()
    assert lines[0] == "tiny-3f3f3f3f3f3f · 1 peer (1 training) · round 40 of 100"
    assert lines[1].split() == ["peer", "id", "state", "round", "lag", "tokens/s", "loss", "last", "seen"]
    assert lines[2].startswith("calm-otter")
    assert lines[3] == "big-abababababab · 0 peers · 7 rounds in all"


def test_a_rendezvous_names_the_runs_it_knows():
    view = replace(STATUS, state="rendezvous", runs=RUNS, health=())
    assert "tiny-3f3f3f3f3f3f · 1 peer (1 training) · round 40 of 100" in printed(print_status, view, 80).splitlines()
