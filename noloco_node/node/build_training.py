"""Sets up a node's training thread: the run's model and data, the device and memory that the volunteer allows, and the
checkpoint to resume from. node/trainer.py begins the training and reads what the thread posts.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from noloco_node.checkpoints import saved_state
from noloco_node.checkpoints.checkpoint import Use, any_values
from noloco_node.checkpoints.keeper import CheckpointKeeper
from noloco_node.checkpoints.saved_state import Expected
from noloco_node.core.codecs.by_name import codec, rehearse
from noloco_node.core.state import State
from noloco_node.data import token_cache, tokens
from noloco_node.data.corpus import without_text
from noloco_node.data.sources import Sources
from noloco_node.host.config import NodeConfig
from noloco_node.run import first_weights
from noloco_node.run.schema import MAX_ROUNDS, Manifest
from noloco_node.stages.part import Position
from noloco_node.stages.passes import alone
from noloco_node.training.build import build_replica
from noloco_node.training.mailbox import Message
from noloco_node.training.replica import MAX_SKIPPED, WARM_UP_STEPS, Replica
from noloco_node.training.task import Task
from noloco_node.training.thread import TrainingThread

_MANY = 1 << 53

log = logging.getLogger(__name__)


def start(  # noqa: PLR0913, PLR0917
    run: Manifest,
    config: NodeConfig,
    peer_id: str,
    sources: Sources,
    keeper: CheckpointKeeper,
    post: Callable[[Message], None],
    part: Callable[[Task], Task] | None = None,
    *,
    reads: bool = True,
    weights: Path | None = None,
    brought: Task | None = None,
) -> TrainingThread:
    """Returns at once; model, data and checkpoint are loaded on that thread. `part`: what this node trains of the run's
    task; `reads`: whether it needs the run's data for that; `weights`: the folder of those that the run begins with,
    for a node that may begin it. `brought`: the run's task, where a loop brings it."""

    def build_and_resume() -> Replica:
        wanted = thread.require_wanted
        inner = build(run, config, peer_id, sources, part, reads=reads, brought=brought, require_wanted=wanted)
        inner.spill_folder = keeper.folder
        with _closed_if_it_fails(inner):
            if keeper.resume(inner.layout, using(run, inner, inner.load), inner.parameters):
                log.info("going on from the checkpoint of round %d", inner.round)
            elif run.model.weights and weights:
                log.info("beginning with the weights in %s", weights)
                inner.begin_with(first_weights.check(weights, run.model.weights))
        return inner

    def last_good(replica: Replica) -> State | None:
        return keeper.last_good(replica.layout, using(run, replica, require_good), replica.parameters)

    thread = TrainingThread(
        build_and_resume,
        codec(run.outer.codec),
        post,
        rounds=run.rounds,
        blocking=run.outer.overlap == "blocking",
        last_good=last_good,
    )
    thread.start()
    return thread


def build(  # noqa: PLR0913
    run: Manifest,
    config: NodeConfig,
    peer_id: str,
    sources: Sources,
    part: Callable[[Task], Task] | None = None,
    *,
    reads: bool = True,
    brought: Task | None = None,
    require_wanted: Callable[[], None] = lambda: None,
) -> Replica:
    """The run's replica as this machine trains it, and tried out: whatever is wrong with the run or with this machine
    (data, tokenizer, model, sequence length, device, memory) is found here, for a node and for `check`.
    `require_wanted`: called between data, model and trial; it may raise."""
    if part is None and run.stages is not None:
        part = alone(run, Position((config.stage or 1) - 1, run.stages.count))

    def to_train(whole: Task) -> Task:
        require_wanted()
        return part(whole) if part else whole

    sequence_length = run.data.sequence_length
    replica = build_replica(
        run,
        peer_id,
        device=config.device,
        threads=config.threads,
        memory_fraction=config.gpu_memory_fraction,
        micro_batch=config.micro_batch,
        moments=config.moments,
        compiled=config.compile,
        checkpoint_activations=config.checkpoint_activations,
        sources=sources,
        corpus=None if reads else without_text(tokens.load(run.data.tokenizer, sources.tokenizer), sequence_length),
        part=to_train,
        brought=brought,
    )
    with _closed_if_it_fails(replica):
        require_wanted()
        token_cache.prune(sources.cache)  # never the one of this run, which has just been used
        rehearse(run.outer.codec, replica.phi.device)
        # others have to do with the losses of a stage
        replica.try_out(losses=run.model.task is not None and brought is None and part is None)
    return replica


@contextmanager
def _closed_if_it_fails(replica: Replica) -> Iterator[None]:
    """Where a loop brings its model, torch would hold the replica, by the loop's optimizers."""
    try:
        yield
    except BaseException:
        replica.close()
        raise


def require_good(found: State) -> None:
    """For a roll-back: what breaks the weights now may be in a checkpoint whose last steps were skipped."""
    if found.inner["skipped_in_row"]:
        raise ValueError("its last steps had no finite loss")


def using(run: Manifest, replica: Replica, load: Use = any_values) -> Use:
    """Checks that this replica could have written a checkpoint, then loads it."""
    steps = run.inner.steps or _MANY
    counters = {
        "phase_step": steps + 10 * MAX_SKIPPED,  # a phase in which every step is skipped goes on beyond its end
        "taken": _MANY,
        "skipped": _MANY,
        "skipped_in_row": MAX_SKIPPED - 1,
        "warm_up_left": WARM_UP_STEPS,
    }
    expected = Expected(replica.shapes, run.outer.keep_norm, MAX_ROUNDS, counters)  # its author may give it more

    def use(found: State) -> None:
        saved_state.check(found, expected)
        load(found)

    return use
