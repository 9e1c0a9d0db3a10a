"""Figures of a status view in words, the same in `status` and in `top`."""

from collections.abc import Iterator
from dataclasses import replace

from noloco_node.base.reasons import in_words
from noloco_node.base.units import share, size, span
from noloco_node.views.status import Phase, StageView, StatusView

_SHORTEST_SHOWN_S = 10.0
_SMALLEST_SHOWN = 0.0005  # rounds to a tenth of a per cent


def left(phase: Phase | None) -> str:
    """`46%, 1 min 10 s left`; empty for a phase of a few seconds."""
    if phase is None or phase.left_s is None or phase.left_s < _SHORTEST_SHOWN_S * (1 - phase.part):
        return ""
    return f"{share(phase.part)}, {span(phase.left_s)} left"


def so_far(view: StatusView) -> StatusView:
    """With the loss and the rate of the first phase, while no phase is complete."""
    if view.loss is not None or view.phase is None:
        return view
    return replace(view, loss=view.phase.loss, tokens_per_s=view.phase.tokens_per_s)


def memory(view: StatusView) -> Iterator[str]:
    """`812 MB of 8.3 GB`; where there is a GPU, two of them."""
    here, on_gpu = view.memory, view.memory.device is not None
    if here.device is not None:
        yield f"{_of(here.device, here.device_limit)} on the GPU"
    if here.host is not None:
        yield _of(here.host, here.host_limit) + (" beside it" if on_gpu else "")


def gpu(view: StatusView) -> Iterator[str]:
    """`412 W`, `97% utilised`; nothing where the driver does not say."""
    if view.gpu.watts is not None:
        yield f"{view.gpu.watts:.0f} W"
    if view.gpu.utilization is not None:
        yield f"{share(view.gpu.utilization)} utilised"


def traffic(view: StatusView) -> tuple[str, str, bool]:
    """Sent, received, and whether they are today's: they are if there is a daily limit, else of the time since the
    start."""
    if view.today is None or (view.today.sent_limit, view.today.received_limit) == (None, None):
        return f"sent {size(view.bytes.sent)}", f"received {size(view.bytes.received)}", False
    sent, received = _of(view.today.sent, view.today.sent_limit), _of(view.today.received, view.today.received_limit)
    return f"sent {sent}", f"received {received}", True


def reasons(view: StatusView) -> Iterator[str]:
    """`12 no partner`: of the solo rounds, the most frequent first."""
    for reason, number in sorted(view.rounds.by_reason.items(), key=lambda item: -item[1]):
        yield f"{number} {in_words(reason)}"


def besides_steps(view: StatusView) -> Iterator[str]:
    """The shares of the training time that were not spent on steps, the largest first."""
    spent = {account: s for account, s in view.time_s.items() if account != "paused"}
    total = sum(spent.values())
    for s, account in sorted(((s, account) for account, s in spent.items() if account != "step"), reverse=True):
        if s > _SMALLEST_SHOWN * total:
            yield f"{account} {share(s / total, 1)}"


def _of(used: int, limit: int | None) -> str:
    return size(used) + (f" of {size(limit)}" if limit is not None else "")


def micro_batches(view: StageView) -> Iterator[str]:
    """How many a second, and those that wait: at the next stage, and here for the stage before."""
    if view.micro_batches_per_s is not None:
        yield f"{view.micro_batches_per_s:.1f} micro-batches/s"
    if view.most_under_way:
        yield f"{view.under_way} of {view.most_under_way} under way"
    if view.number > 1:
        yield f"{view.queued} queued"
