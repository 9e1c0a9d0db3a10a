"""Loops that people have, as processes of their own: they swap, end, leave, come back and fail as nodes do."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from functools import partial

import pytest
import torch
from ports import quiet_port
from real_nodes import QUICK, ROOT, Node, RealNodes, until

pytestmark = pytest.mark.timeout(300)

NODE = [sys.executable, "-m", "noloco_node"]
STEPS = 20
"""Of a phase."""
LOOP = [sys.executable, str(ROOT / "tests" / "helpers" / "own_loop.py")]
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"))


@pytest.fixture
def real_nodes() -> Iterator[RealNodes]:
    with RealNodes() as group:
        group.program = LOOP
        yield group
        for node in group.nodes:
            if "torch.distributed.run" in node.process.args and node.process.poll() is None:
                os.killpg(node.process.pid, signal.SIGKILL)  # torchrun's processes outlive it


def run_of(group: RealNodes, outer: Mapping[str, str] = QUICK) -> str:
    return str(group.tables(model={"task": "mine"}, inner={"steps": STEPS, "batch_tokens": 16}, outer=outer))


def island_of(processes: int) -> list[str]:
    flags = ["--nproc-per-node", str(processes), "--master-port", str(quiet_port())]
    return [sys.executable, "-m", "torch.distributed.run", *flags, LOOP[1]]


def end(group: RealNodes, author: Node) -> None:
    """As the run's author ends it, from another terminal."""
    group.program = NODE
    done = author.run("run", "amend", "test", "--end-now")
    assert done.returncode == 0, done.stderr
    group.program = LOOP


def figures(node: Node) -> tuple[float, float]:
    """Held-out losses at its begin and at its end."""
    first, last = (until(partial(node.printed, rf"{word} at ([0-9.]+)"), word) for word in ("begins", "ends"))
    return float(first), float(last)


def test_two_loops_train_one_run_to_its_end(real_nodes: RealNodes) -> None:
    author = real_nodes.node("author", "start", run_of(real_nodes, outer={}))
    invitation = author.invitation()
    until(lambda: author.round() >= 2, "two rounds")
    real_nodes.environ |= {"LOOP_SEES": "3", "LOOP_JUDGES": "no"}
    other = real_nodes.node("other", *invitation)
    assert other.received_state() >= 2
    until(lambda: other.committed() >= 3 and author.committed() >= 3, "swaps between them")
    assert other.ask("status")["eval_loss"] is None, "without an evaluation its swaps are not judged"
    real_nodes.program = NODE
    stranger = real_nodes.node("stranger", *invitation)
    assert stranger.ended() == 12, "the run's script is not here"
    assert stranger.printed(r"(trains the task mine, which is not installed here .*)")
    real_nodes.program = LOOP
    view = author.ask("status")
    assert 0 < view["loss"] < view["loss_first"] and view["eval_loss"] < view["eval_loss_first"]
    assert view["learning_rate"] == 1e-3

    def all_counted() -> bool:
        """Tokens are counted when a phase has ended, steps at once."""
        now = author.ask("status")
        return now["tokens"] == now["step"] // STEPS * STEPS * 16

    until(all_counted, "tokens of each step")
    end(real_nodes, author)
    for node in (author, other):
        assert node.ended() == 0, node.log.read_text()[-2000:]
        assert node.printed("over: (True)")
        assert node.printed("to take the model out: (`model.safetensors` in the newest folder there)")
    (untrained, last), (first, _) = figures(author), figures(other)
    assert last < untrained and first < untrained, "the other one began where the author was"
    del real_nodes.environ["LOOP_JUDGES"]
    again = real_nodes.node("author", "start", str(real_nodes.root / "run.toml"))
    assert again.ended() == 1, "a loop that would make its first step with new weights"
    assert again.printed(r"(is over: \d+ rounds)") and again.printed("(NolocoError: the node has ended before a first)")


def test_a_loop_that_is_interrupted_saves_and_goes_on_later(real_nodes: RealNodes) -> None:
    run = run_of(real_nodes)
    node = real_nodes.node("author", "start", run)
    until(lambda: node.round() >= 3, "three rounds")
    os.kill(node.process.pid, signal.SIGINT)
    assert node.ended() != 0
    assert "KeyboardInterrupt" in node.log.read_text(), "as any script says it"
    reached = node.events("PhaseDone")[-1]["round"]
    real_nodes.environ["LOOP_STEPS"] = "15"
    again = real_nodes.node("author", "join")
    assert again.ended() == 0, again.log.read_text()[-2000:]
    assert again.printed(rf"going on with \S+.*, round ({reached}) of")
    assert again.printed(r"with (4) moments")
    assert again.printed("over: (False)"), "it left after its 15 steps"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_loop_that_is_terminated_has_saved_and_left(real_nodes: RealNodes, number: signal.Signals) -> None:
    """As by a service manager, a container, or a terminal that is closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup would hand it on as ignored
    node = real_nodes.node("author", "start", run_of(real_nodes))
    signal.signal(signal.SIGHUP, before)
    until(lambda: node.round() >= 2, "two rounds")
    for _ in range(2 if number is signal.SIGHUP else 1):  # a terminal may send it twice
        node.process.send_signal(number)
    assert node.ended() == 128 + number
    reached = node.events("PhaseDone")[-1]["round"]
    assert node.printed(rf"its checkpoint of round ({reached}) ")


def test_a_loop_that_ends_without_leaving_has_saved(real_nodes: RealNodes) -> None:
    real_nodes.environ |= {"LOOP_LEAVES": "no", "LOOP_STEPS": "45", "LOOP_OPTIMIZER": "SGD"}
    node = real_nodes.node("author", "start", run_of(real_nodes))
    assert node.ended() == 0, node.log.read_text()[-2000:]
    assert node.printed(r"(left test-\S+ at round 2 of)") and node.printed("(its checkpoint of round 2)")


def test_a_loop_can_be_paused_and_told_to_leave_from_outside(real_nodes: RealNodes) -> None:
    """A data loader's workers are not in the node's way: torch takes SIGCHLD for them, so the node hears of its own
    processes' ends in another way."""
    real_nodes.environ["LOOP_LOADS"] = "yes"
    node = real_nodes.node("author", "start", run_of(real_nodes))
    until(lambda: node.round() >= 1, "a round")
    node.tell("pause")
    until(lambda: node.ask("status").get("state") == "paused", "the pause")
    step = node.ask("status")["step"]
    node.tell("resume")
    until(lambda: node.ask("status").get("step", 0) > step, "further steps")
    (daemon,) = [int(words.split()[0]) for words in real_nodes.left_over() if "p2pd -listen" in words]
    os.kill(daemon, signal.SIGKILL)
    until(lambda: node.ask("status").get("network_restarts") == 1, "another network daemon")
    node.tell("leave")
    assert node.ended() == 0, node.log.read_text()[-2000:]
    assert node.printed("over: (True)")


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=ON_GPU)])
def test_adapters_of_a_frozen_model_are_all_that_is_sent(real_nodes: RealNodes, device: str) -> None:
    """Each process imports transformers and peft. test_hugging_face.py has such a model in the tests' own process."""
    real_nodes.environ |= {"LOOP_DEVICE": device, "LOOP_ADAPTS": "yes"}
    author = real_nodes.node("author", "start", run_of(real_nodes))
    until(lambda: author.round() >= 2, "two rounds")
    real_nodes.environ |= {"LOOP_SEES": "3", "LOOP_JUDGES": "no"}
    other = real_nodes.node("other", *author.invitation())
    until(lambda: other.committed() >= 2 and author.committed() >= 2, "swaps")
    assert other.ask("status")["eval_loss"] is None, "without an evaluation its swaps are not judged"
    assert author.ask("status")["eval_loss"] is not None
    assert author.ask("status")["parameters"] == 4 * (32 + 64) + 4 * (64 + 8)
    end(real_nodes, author)
    for node in (author, other):
        assert node.ended() == 0, node.log.read_text()[-2000:]
    (untrained, last), (first, _) = figures(author), figures(other)
    assert last < untrained and first < untrained


@pytest.mark.parametrize(
    ("processes", "device"),
    [(2, "cpu"), pytest.param(1, "cuda", marks=ON_GPU), pytest.param(2, "cuda", marks=ON_GPU)],
    ids=["cpu", "nccl", "one GPU for two"],
)
def test_processes_of_an_island_are_one_node(real_nodes: RealNodes, processes: int, device: str) -> None:
    real_nodes.environ["LOOP_DEVICE"] = device
    run = run_of(real_nodes)
    real_nodes.program = island_of(processes)
    island = real_nodes.node("island", "start", run)
    real_nodes.program = LOOP
    other = real_nodes.node("other", *island.invitation())
    until(lambda: other.committed() >= 2 and island.committed() >= 2, "swaps with it")
    assert len([words for words in real_nodes.left_over() if "p2pd -listen" in words]) == 2, (
        "one network daemon for each node"
    )
    end(real_nodes, island)
    for node in (island, other):
        assert node.ended() == 0, node.log.read_text()[-2000:]
    have = [island.printed(rf"rank {rank} has (.*) and 4 moments") for rank in range(processes)]
    assert have[0] is not None and len(set(have)) == 1
    untrained, last = figures(island)
    assert last < untrained


def failed_island(group: RealNodes, **environ: str) -> Node:
    """Of two processes that torchrun does not end: each ends by itself. Returns the first."""
    group.environ |= environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(quiet_port())}
    run, processes = run_of(group), []
    for rank in range(2):
        group.environ["RANK"] = str(rank)
        processes.append(group.node(f"process-{rank}", "start", run))
    assert [process.ended() for process in processes] == [1, 1], group.last_lines()
    return processes[0]


def test_an_island_ends_where_a_step_of_its_first_process_fails(real_nodes: RealNodes) -> None:
    """And not when a collective operation of the others has waited long enough."""
    island = failed_island(real_nodes, LOOP_FAILS="30")
    assert island.printed("(the island ends: MemoryError: as a step may raise it)")
    assert island.printed("(its checkpoint of round 1)")


def test_an_island_whose_node_fails_ends_in_all_its_processes(real_nodes: RealNodes) -> None:
    island = failed_island(real_nodes, LOOP_JUDGES="badly")
    assert island.printed("(the island ends: ZeroDivisionError: division by zero)")
