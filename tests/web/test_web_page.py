"""The page in a real browser: with real nodes that meet, are paused and are killed, and in every state it may be in.

Needs Chromium (`apt-get install chromium`); says so where it is skipped.
"""

import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import browser
import pytest
from browser import CHROMIUM, Tab
from canned_node import BARE, bare, busy
from ports import quiet_port
from real_nodes import QUICK, Node, RealNodes, until
from served_page import served

from noloco_node.views.history import HistoryView, Piece, Said
from noloco_node.views.peers import PeersView, RunView
from noloco_node.views.status import GpuView, Health, LastTakenBack, Phase, SampleView, StageView
from noloco_node.web import server

pytestmark = [
    pytest.mark.skipif(not CHROMIUM.exists(), reason="no Chromium here: apt-get install chromium"),
    pytest.mark.timeout(300),
]

DEVICES = {"wide": (1400, 900), "phone": (390, 844)}
FILLED = """
({
  curves: [...document.querySelectorAll('#loss .curve')].map((curve) => curve.points.numberOfItems),
  phases: document.querySelectorAll('#timeline rect.phase').length,
  swaps: document.querySelectorAll('#timeline rect.swap').length,
  rows: document.querySelectorAll('#peers tbody tr').length,
  met: document.querySelectorAll('#meetings td.met:not(.m0)').length,
  said: document.querySelectorAll('#log li').length,
  wider: document.documentElement.scrollWidth - innerWidth,
})
"""
PALE = """
(() => {
  const paint = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const known = {};
  const rgba = (colour) => known[colour] ??= painted(colour);
  const painted = (colour) => {
    paint.clearRect(0, 0, 1, 1);
    paint.fillStyle = colour;
    paint.fillRect(0, 0, 1, 1);
    return [...paint.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => {
    const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = colour.map((part) => linear(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (at) => {
    if (at.classList?.contains('inside')) return rgba(getComputedStyle(document.querySelector('rect.phase')).fill);
    for (let one = at; one; one = one.parentElement) {
      const colour = rgba(getComputedStyle(one).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return rgba('Canvas');
  };
  const pale = [];
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (words.nextNode()) {
    const at = words.currentNode.parentElement;
    if (!words.currentNode.textContent.trim() || !at.checkVisibility()) continue;
    const style = getComputedStyle(at);
    const [one, other] = [light(rgba(at.namespaceURI.endsWith('svg') ? style.fill : style.color)), light(behind(at))];
    const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.6 && style.fontWeight >= 700);
    if (contrast < (large ? 3 : 4.5)) pale.push(`${contrast.toFixed(2)} ${words.currentNode.textContent}`);
  }
  return pale;
})()
"""


@pytest.fixture(scope="module")
def only_tab() -> Iterator[Tab]:
    with browser.opened() as tab:
        yield tab


@pytest.fixture
def tab(only_tab: Tab) -> Iterator[Tab]:
    """Blank, wide and light. No request may go to another site."""
    only_tab.show(width=1400, height=900, dark=False)
    only_tab.go("about:blank")
    only_tab.asked.clear()
    only_tab.complaints.clear()
    yield only_tab
    assert {urlsplit(url).hostname for url in only_tab.asked if not url.startswith("about:")} == {"127.0.0.1"}


@pytest.fixture
def real_nodes() -> Iterator[RealNodes]:
    with RealNodes() as real_nodes:
        yield real_nodes


def page_of(node: Node) -> str:
    return until(lambda: node.printed(r"web page: (http://127\.0\.0\.1:\d+/)"), "a page")


def look(tab: Tab, shots: Path | None = None) -> None:
    """As a person would on a screen and on a telephone, by day and by night; and keep screenshots."""
    for device, (width, height) in DEVICES.items():
        for dark in (False, True):
            tab.show(width=width, height=height, dark=dark, scale=1 if width > 1000 else 2)
            tab.until(f"document.querySelector('#loss svg')?.clientWidth <= {width}")
            assert tab.value(PALE) == []
            if shots:
                tab.picture(shots / f"{device}-{'dark' if dark else 'light'}.png")
        filled = tab.value(FILLED)
        assert filled["wider"] <= 0, "nothing sticks out of a narrow screen"
    tab.show(width=1400, height=900, dark=False)


def test_real_nodes_from_alone_to_killed(tab: Tab, real_nodes: RealNodes, tmp_path: Path) -> None:
    # the default rate comes down to noise within seconds: then a swap that a busy machine delays raises the loss
    run = real_nodes.paced(seconds=1.0, learning_rate=1e-4, outer=QUICK)
    first = real_nodes.node("first", "start", str(run), "--web", "127.0.0.1:0")
    page = page_of(first)
    tab.go(page)
    tab.value("window.loadedOnce = true")

    tab.until("document.querySelector('#note h2').innerText === 'No other node yet'", 60)
    line = tab.text("#note code")
    assert line == f"noloco-node {' '.join(first.invitation())}"
    assert tab.text("#peers .quiet") == "0 others"

    real_nodes.node("second", *line.split()[1:])
    tab.until(f"(({FILLED}).swaps >= 3) && (({FILLED}).rows === 2)", 90)
    assert tab.value("document.querySelector('#note').hidden")
    filled = tab.value(FILLED)
    assert len(filled["curves"]) == 4
    assert min(filled["curves"]) >= 2
    assert filled["phases"] >= 3
    assert filled["met"] == 2
    assert filled["said"] >= 3
    look(tab, tmp_path)
    sys.stdout.write(f"screenshots: {tmp_path}\n")

    step = "Number(document.querySelector('#figures > :nth-child(3) dd').innerText.replace(',', ''))"
    before = tab.value(step)
    tab.until(f"{step} >= {before + 2}")
    assert tab.value("window.loadedOnce"), "live, without loading it again"

    assert tab.value("document.querySelector('#acts').hidden"), "read-only without the token"
    tab.go("about:blank")
    tab.go(f"{page}#token={(first.home / 'web.token').read_text().strip()}")
    tab.until("document.querySelector('#acts').checkVisibility()")
    assert tab.value("location.href") == page, "the token does not stay in sight"
    tab.value("document.querySelector('#pause').click()")
    tab.until("document.querySelector('#state').innerText === 'paused'")
    assert first.ask("status")["state"] == "paused"
    tab.value("document.querySelector('#pause').click()")
    tab.until("document.querySelector('#state').innerText === 'training'")
    tab.until(f"({FILLED}).swaps >= 3")
    assert tab.complaints == []

    first.kill()
    tab.until("document.querySelector('#banner').innerText.startsWith('The node does not answer since')")
    assert tab.text("#state") == "gone"
    last = tab.value(FILLED)
    assert last["swaps"] >= 3, "the last picture stays"
    assert last["rows"] == 2
    assert all(complaint.startswith("network: Failed to load") for complaint in tab.complaints), tab.complaints


def test_a_real_node_to_the_end_of_its_run_with_what_its_model_writes(tab: Tab, real_nodes: RealNodes) -> None:
    run = real_nodes.manifest(steps=4, rounds=4, codec='"fp32"')
    with run.open("a") as more:
        more.write('\n[sample]\nprompt = "def main("\nevery = 2\ntokens = 24\n')
    node = real_nodes.node("alone", "start", str(run), "--web", "127.0.0.1:0")
    tab.go(page_of(node))
    tab.until("document.querySelector('#note').innerText.includes('The node has ended')", 120)
    assert tab.text("#state") == "finished"
    assert tab.text("#figures > :nth-child(3)").endswith("of 16, round 4 of 4")

    losses = [(str(done["round"]), f"{done['loss']:.3f}") for done in node.events("PhaseDone")]
    assert re.findall(r"round (\d) [^:]*: step \d+ of 16, loss ([\d.]+)", tab.text("#log")) == losses
    written = node.events("Sampled")
    assert [event["round"] for event in written] == [2, 4]
    assert tab.value("document.querySelector('#sample .text').textContent") == f"def main({written[-1]['text']}"
    again = json.loads(node.run("sample", "def main(", "--tokens", "24", "--json", within_s=120).stdout)
    assert again["continuation"] == written[-1]["text"], "what anybody can let it say afterwards"


def test_it_is_filled_and_legible_on_every_screen(tab: Tab, tmp_path: Path) -> None:
    node = busy(300, 45)
    node.now = replace(
        node.now,
        phase=Phase(0.46, 70.0, 1.5, 9800.0),
        mfu=0.41,
        gpu=GpuView(412.3, 0.97),
        memory=replace(node.now.memory, device=71_000_000_000, device_limit=85_000_000_000),
        health=(
            Health("warning", "disk: 3.1 GB left, a checkpoint needs 1.2 GB", "free some, or move NOLOCO_HOME"),
            Health("error", "network: degraded, p2pd was killed", "it is being started again"),
        ),
    )
    with served(node, tmp_path) as page:
        tab.go(page.url)
        tab.until(f"({FILLED}).rows === 46")
        assert (
            tab.text("#health p:last-child") == "Error: network: degraded, p2pd was killed. It is being started again."
        )
        assert tab.text("#figures").split("\n")[6:21] == [
            *("Step", "15,000", "of 10,000, round 300 of 200"),
            *("Time left", "16 min", "of this phase: 46%, 1 min 10 s left"),
            *("Tokens per second", "9.8k", "12.3M so far, MFU 41%"),
            *("Learning rate", "2.74e-3", "of the last step"),
            *("Gradient norm", "0.81", "before clipping"),
        ]
        assert "GPU 97% utilised, 412 W" in tab.text("#figures > :nth-child(9)")
        assert "of 85.0 GB; this machine 812 MB of 16.8 GB" in tab.text("#figures > :nth-child(8)")
        assert tab.text("#sample .quiet") == "after round 300"
        assert tab.text("#sample .text").startswith("def main(self, name):\n")
        assert tab.text("#meetings .quiet") == "the 40 of 46 with most rounds"
        look(tab)
        tab.show(width=1400, height=900, dark=False, calm=True)
        assert tab.value("document.getAnimations().length") == 0, "calm for whoever wants it so"
    assert [line for line in tab.complaints if not line.startswith("network: ")] == []


@pytest.mark.parametrize(("place", "words"), [("#about dd", "peer id"), ("#health p", "remedy")])
def test_what_somebody_marks_to_copy_it_stays_marked(tab: Tab, tmp_path: Path, place: str, words: str) -> None:
    node = busy()
    node.now = replace(node.now, health=(Health("warning", "network: only outgoing", "choose a port with --listen"),))
    with served(node, tmp_path) as page:
        tab.go(page.url)
        tab.until(f"({FILLED}).rows === 8")
        tab.value(f"getSelection().selectAllChildren(document.querySelector('{place}'))")
        marked = tab.value("getSelection().toString()")
        assert (node.now.peer_id if words == "peer id" else "Choose a port") in marked
        node.now = replace(node.now, step=node.now.step + 1, uptime_s=node.now.uptime_s + 9)
        tab.until(f"document.querySelector('#figures').innerText.includes('{node.now.step:,}')")
        assert tab.value("getSelection().toString()") == marked


ROWS = "[...document.querySelectorAll('#peers tbody tr')]"
HEADS = "[...document.querySelectorAll('#peers thead th')].filter((one) => !one.hidden).map((one) => one.innerText)"


def test_what_this_node_has_seen_of_its_peers(tab: Tab, tmp_path: Path) -> None:
    node = busy()
    first, second, *others = node.others.peers

    def cells(name: str) -> list[str]:
        row = f"{ROWS}.find((row) => row.innerText.startsWith('{name}'))"
        return tab.value(f"[...{row}.children].map((cell) => cell.innerText)")

    with served(node, tmp_path) as page:
        tab.go(page.url)
        tab.until(f"({FILLED}).rows === 8")
        assert not {"quarantined", "taken back", "refused", "failed"} & set(tab.value(HEADS)), "among honest peers"

        banned = replace(first, taken_back=2, refused=1, quarantined_s=750.0, quarantined_why="taken_back")
        absent = replace(second, state="gone", round=0, lag=0, loss=None, last_seen_s=None, quarantined_s=60.0)
        node.others = PeersView((banned, absent, *others))
        taken = Piece("taken_back", 40, time.time(), time.time(), first.peer_id, "taken_back")
        node.past = replace(node.past, pieces=(*node.past.pieces, taken))
        last = LastTakenBack(first.peer_id, 40, 2.314, 1.918)
        reasons = {"backing_off": 3, "partner_diverged": 1}
        node.now = replace(
            node.now,
            taken_back=2,
            last_taken_back=last,
            peers_quarantined=2,
            rounds=replace(node.now.rounds, by_reason=reasons),
        )
        tab.until("document.querySelector('#peers tbody').innerText.includes('12 min')")
        assert tab.value(HEADS)[:7] == ["name", "state", "quarantined", "taken back", "refused", "round", "lag"]
        before = cells(first.name)
        assert before[2].endswith("s, taken back")
        assert before[3:5] == ["2", "1"]
        until(lambda: cells(first.name)[2] != before[2], "it counts down by itself", 30)
        gone = cells(second.name)
        assert gone[1] == "gone"
        assert gone[5:7] == ["–", "–"], "its round is not known"
        assert "solo: waiting to call again, partner says diverged" in tab.text("#figures")
        assert tab.text("#figures > :last-child").split("\n")[:2] == ["Peers", "6"]
        assert tab.text("#figures > :last-child").endswith(", 2 quarantined")
        assert f"2 corrections, the last that of {first.name} in round 40" in tab.text("#about")
        assert "held-out loss 2.314 with it, 1.918 without" in tab.text("#about")
        assert tab.value("document.querySelectorAll('#timeline path.back').length") == 1
        look(tab, tmp_path)
    assert [line for line in tab.complaints if not line.startswith("network: ")] == []


def test_a_run_with_stages(tab: Tab, tmp_path: Path) -> None:
    node = busy()
    stage = StageView(
        number=2, stages=3, nodes=(3, 2, 1), micro_batches_per_s=3.46, under_way=4, queued=5, lost=6, sent=8_000_000
    )
    with served(node, tmp_path) as page:
        tab.go(page.url)
        tab.until(f"({FILLED}).rows === 8")
        assert "stage" not in tab.value(HEADS) and "Stage" not in tab.text("#figures"), "in a run without"
        first, *others = node.others.peers
        node.others = PeersView((replace(first, stage=3), *(replace(other, stage=1) for other in others)))
        node.now = replace(node.now, stage=stage, time_s={"step": 60.0, "data": 40.0})
        tab.until("document.querySelector('#figures').innerText.includes('nodes at each: 3, 2, 1')")
        figures = tab.text("#figures").split("\n")
        at = figures.index("Stage")
        assert figures[at : at + 9] == [
            *("Stage", "2 of 3", "nodes at each: 3, 2, 1"),
            *("Micro-batches a second", "3.5", "4 under way, 5 queued, 6 lost"),
            *("Activations sent", "8.0 MB", "received 0 B"),
        ]
        assert "waiting for other stages" in tab.text("#time")
        tab.until(f"({HEADS}).includes('stage')")
        column = tab.value(HEADS).index("stage")
        held = tab.value(f"{ROWS}.map((row) => row.children[{column}].innerText)")
        assert sorted(held) == ["1"] * (len(others)) + ["2", "3"], "this node's row too"
        look(tab, tmp_path)
    assert [line for line in tab.complaints if not line.startswith("network: ")] == []


def test_charts_and_tables_work_by_keyboard(tab: Tab, tmp_path: Path) -> None:
    with served(busy(), tmp_path) as page:
        tab.go(page.url)
        tab.until(f"({FILLED}).rows === 8")

        def press(key: str) -> None:
            for kind in ("keyDown", "keyUp"):
                tab.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, text="\r" if key == "Enter" else "")

        tab.value("document.querySelector('#loss svg').focus()")
        press("End")
        assert tab.text("#loss .tip").startswith("round 40, step 2000\n")
        assert tab.text("#loss .tip").endswith("learning rate 2.74e-3\n\ngradient norm 0.81\n\n9.8k tokens/s")
        press("ArrowLeft")
        assert tab.text("#loss .tip").startswith("round 39, step 1950\n")
        assert "this node" in tab.text("#loss .unseen"), "and it is said to whoever does not see it"
        press("Escape")
        assert tab.value("document.querySelector('#loss .tip').hidden")
        tab.value("document.querySelector('#timeline svg').focus()")
        press("Home")
        assert tab.text("#timeline .tip").startswith("round ")

        column = (
            "[...document.querySelectorAll('#peers tbody tr:not(.self) > :nth-child(7)')]"
            ".map((cell) => Number(cell.innerText.replace('k', '')))"
        )
        head = "[...document.querySelectorAll('#peers thead button')].find((one) => one.innerText === 'tokens/s')"
        tab.value(f"{head}.focus()")
        press("Enter")
        rates = tab.value(column)
        assert rates == sorted(rates, reverse=True)
        assert tab.value(f"{head}.parentElement.getAttribute('aria-sort')") == "descending"
        press("Enter")
        assert tab.value(column) == sorted(rates)
        assert tab.text("#peers tbody tr") == tab.value("document.querySelector('#peers tr.self').innerText"), "first"


def test_every_state_has_its_words(tab: Tab, tmp_path: Path) -> None:
    node = bare()
    node.now = replace(BARE, state="starting", waiting_for="the network daemon")
    with served(node, tmp_path) as page:
        tab.go(page.url)
        tab.until("document.querySelector('#note').innerText.includes('It waits for the network daemon.')")
        assert not tab.value("document.querySelector('#loss').checkVisibility()")
        node.now = replace(BARE, state="joining", waiting_for="state from calm-otter, 46% of 12.6 MB, 12 s left")
        tab.until("document.querySelector('#note').innerText.includes('calm-otter, 46% of 12.6 MB, 12 s left.')")
        bar = "document.querySelector('#note .progress')"
        assert tab.value(f"{bar}.checkVisibility() && {bar}.getAttribute('aria-valuenow')") == "46"
        node.now = replace(BARE, state="rendezvous", join="noloco-node join --bootstrap /ip4/192.0.2.7", runs=(RUN,))
        node.others = PeersView(tuple(replace(row, run="tiny") for row in busy().others.peers))
        tab.until("document.querySelector('#note h2').innerText === 'A rendezvous'")
        assert tab.text("#note code") == node.now.join
        assert tab.text("#runs tbody").split("\t")[:4] == ["tiny-3f9a2c81d0e4", "7", "5", "40 of 200"]
        tab.until(f"({FILLED}).rows === 7")
        assert not tab.value("document.querySelector('#figures').checkVisibility()")
        full = busy()
        node.now, node.others, node.past = replace(full.now, state="finished", round=200), full.others, full.past
        tab.until(
            "document.querySelector('#note').innerText.includes('Round 200, the last one, is done: held-out loss 5.')"
        )
        assert tab.text("#note code") == "noloco-node export --to my-model"
        assert tab.text("#state") == "finished"
        assert tab.value("document.title").startswith("finished · round 200 · loss 1.")
        assert tab.complaints == []


RUN = RunView("3f9a2c81d0e4" + 52 * "0", "tiny-3f9a2c81d0e4", BARE.peer_id, 200, 7, 5, 40)


def test_the_last_moment_of_a_node_is_told_to_its_page(tab: Tab, tmp_path: Path) -> None:
    node = busy()
    with served(node, tmp_path) as page:
        tab.go(page.url)
        tab.until(f"({FILLED}).rows === 8")
        node.now = replace(node.now, state="leaving", round=200)
    tab.until("document.querySelector('#state').innerText === 'finished'")


@pytest.mark.parametrize("last", ["finished", "leaving", "training"])
def test_a_node_whose_run_is_over_has_finished_and_is_not_gone(tab: Tab, tmp_path: Path, last: str) -> None:
    """Whatever the page heard last: a node that has done its rounds ends at once."""
    node = busy()
    node.now = replace(node.now, state=last, round=200, step=10_000, left_s=0.0)
    with served(node, tmp_path) as page:
        tab.go(page.url)
        tab.until(f"({FILLED}).rows === 8")
    tab.until("document.querySelector('#note').innerText.includes('The node has ended')")
    assert tab.text("#state") == "finished"
    assert tab.value("document.querySelector('#banner').hidden")
    assert tab.value("document.title").startswith("finished · round 200")


def test_a_node_that_was_told_to_leave_has_left(tab: Tab, tmp_path: Path) -> None:
    node = busy()
    node.now = replace(node.now, state="leaving")
    with served(node, tmp_path) as page:
        tab.go(page.url)
        tab.until("document.querySelector('#note h2').innerText === 'Leaving'")
    tab.until("document.querySelector('#banner').innerText.startsWith('This node left at ')")
    assert tab.text("#state") == "left"
    assert tab.value("document.querySelector('#note').hidden")


def test_before_the_first_word_of_the_node_it_says_that_it_connects(tab: Tab, tmp_path: Path) -> None:
    with served(bare(), tmp_path) as page:
        tab.call("Fetch.enable", patterns=[{"urlPattern": "*/api/live"}])
        tab.go(page.url)
        shown = "[...document.querySelectorAll('main > *')].filter((one) => one.checkVisibility()).map((one) => one.id)"
        assert tab.value(shown) == ["note"]
        assert tab.text("#note h2") == "Connecting"
        tab.call("Fetch.disable")


def test_one_page_too_many_says_so_until_another_is_closed(
    tab: Tab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full, served(busy(), tmp_path) as page:
        full.setattr(server, "MAX_LISTENERS", 0)
        tab.go(page.url)
        tab.until("document.querySelector('#banner').innerText.includes('too many pages of it are open')")
        full.undo()
        tab.until(f"({FILLED}).rows === 8")
        assert tab.value("document.querySelector('#banner').hidden")


def test_it_comes_back_with_the_node(tab: Tab, tmp_path: Path) -> None:
    node, port = busy(), quiet_port()
    with served(node, tmp_path, port) as page:
        tab.go(page.url)
        tab.until(f"({FILLED}).rows === 8")
    tab.until("!document.querySelector('#banner').hidden")
    assert tab.value(FILLED)["rows"] == 8
    fresh = bare()
    fresh.now = replace(BARE, round=7)
    with served(fresh, tmp_path, port):
        tab.until("document.querySelector('#banner').hidden")
        tab.until(f"({FILLED}).rows === 1")
        assert tab.value(FILLED)["curves"] == [], "nothing of the life before"
    assert {line.partition(":")[0] for line in tab.complaints} <= {"network"}


def test_a_wrong_token_is_refused(tab: Tab, tmp_path: Path) -> None:
    node = busy()
    with served(node, tmp_path) as page:
        tab.go(f"{page.url}#token={43 * 'x'}")
        tab.until("document.querySelector('#acts').checkVisibility()")
        leave = "document.querySelector('#leave')"
        twice = f"{leave}.click(); const asks = {leave}.innerText; {leave}.click(); asks"  # it asks for 5 s only
        assert tab.value(twice) == "Really leave?"
        tab.until("document.querySelector('#banner').innerText.startsWith('this needs the token')")
        assert node.done == []
        node.now = replace(node.now, eval_loss=1.2345)
        tab.until("document.querySelector('#figures').innerText.includes('1.23')")
        assert tab.text("#banner").startswith("this needs the token"), "it stays while the node goes on"


def test_nothing_that_a_peer_sends_becomes_markup(tab: Tab, tmp_path: Path) -> None:
    evil = "<img src=/nowhere onerror=alert(1)><script>alert(2)</script>"
    node = busy()
    node.others = PeersView(tuple(replace(row, state=evil, run=evil, via=evil, name=evil) for row in node.others.peers))
    node.past = HistoryView(said=(Said(time.time(), "info", evil),), names={BARE.peer_id: evil})
    sample = SampleView(1, evil, evil)
    node.now = replace(
        node.now, sample=sample, run=evil, waiting_for=evil, health=(Health(evil, evil, evil),), last_error=evil
    )
    with served(node, tmp_path) as page:
        tab.go(page.url)
        tab.until(f"({FILLED}).rows === 8")
        assert evil in tab.text("#log")
        assert tab.value("document.querySelectorAll('main img, body script').length") == 0
        assert f"{page.url}nowhere" not in tab.asked
        assert tab.complaints == []
