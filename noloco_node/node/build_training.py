"""Sets up a node's training thread: the run's model and data, the device and memory that the volunteer allows, and the
checkpoint to resume from. node/trainer.py begins the training and reads what the thread posts.
"""

import logging
from collections.abc import Callable

from noloco_node.checkpoints.checkpoint import Checkpoint
from noloco_node.checkpoints.keeper import CheckpointKeeper
from noloco_node.core.codecs import codec, rehearse
from noloco_node.data import token_cache
from noloco_node.data.sources import Sources
from noloco_node.host.config import NodeConfig
from noloco_node.run.schema import Manifest
from noloco_node.training.replica import Replica
from noloco_node.training.thread import Message, TrainingThread

log = logging.getLogger(__name__)


def start(  # noqa: PLR0913, PLR0917
    run: Manifest,
    config: NodeConfig,
    peer_id: str,
    sources: Sources,
    keeper: CheckpointKeeper,
    post: Callable[[Message], None],
) -> TrainingThread:
    """Returns at once; model, data and checkpoint are loaded on that thread."""
    layout = b""

    def build() -> Replica:
        nonlocal layout
        inner = Replica.build(
            run,
            peer_id,
            device=config.device,
            threads=config.threads,
            memory_fraction=config.gpu_memory_fraction,
            micro_batch=config.micro_batch,
            compiled=config.compile,
            sources=sources,
        )
        token_cache.prune(sources.cache)  # never the one of this run, which has just been used
        layout = inner.layout
        found = keeper.resume(layout)
        rehearse(run.outer.codec)
        if found:
            inner.load(found)
            log.info("going on from the checkpoint of round %d", inner.round)
        return inner

    def last_good() -> Checkpoint | None:
        return keeper.last_good(layout)

    thread = TrainingThread(
        build,
        codec(run.outer.codec),
        post,
        rounds=run.rounds,
        blocking=run.outer.overlap == "blocking",
        last_good=last_good,
    )
    thread.start()
    return thread
