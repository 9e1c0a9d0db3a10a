"""A round as a line of text: the same figures in the log, in `top` and on the board of `swarm`."""

from collections.abc import Iterator

from noloco_node.base.peer_names import name_of
from noloco_node.base.reasons import in_words
from noloco_node.base.units import loss, of, rate, share, size, small, span
from noloco_node.views.history import Piece, Point
from noloco_node.views.status import StatusView


def round_line(ended: Piece, phase: Point | None, steps_target: int | None, left_s: float | None) -> str:
    """`round 41 with calm-otter: step 2050 of 5000, loss 1.873, …, 1 h 4 min left; swap 3.1 s, sent 12.6 MB, …`.

    `phase`: the inner phase of that round, as a swap may end when later ones have ended too."""
    whom = partner_or_reason(ended)
    whom = f"with {whom}" if ended.kind == "swap" else f"solo ({whom})"
    trained = [f"step {of(phase.step, steps_target)}"] if phase else []
    trained.append(f"loss {loss(phase.loss if phase else None)}")
    if phase:
        trained += [*figures(phase), *([f"memory {size(phase.memory)}"] if phase.memory is not None else [])]
    if left_s:
        trained.append(f"{span(left_s)} left")
    swap = f"; swap {span(ended.ended - ended.began)}, sent {size(ended.sent)}, received {size(ended.received)}"
    return f"round {ended.round} {whom}: {', '.join(trained)}{swap if ended.kind == 'swap' else ''}"


def partner_or_reason(piece: Piece) -> str:
    """The partner of a swap, or the reason of anything else, with the partner if there was one."""
    partner = name_of(piece.partner) if piece.partner else ""
    if piece.kind == "swap":
        return partner
    reason = in_words(piece.reason or "alone")
    return f"{reason}, {partner}" if partner else reason


def figures(phase: Point | StatusView) -> Iterator[str]:
    """Those of a complete inner phase that are known."""
    if phase.learning_rate is not None:
        yield f"lr {small(phase.learning_rate)}"
    if phase.gradient_norm is not None:
        yield f"grad norm {phase.gradient_norm:.2f}"
    if phase.tokens_per_s is not None:
        yield f"{rate(phase.tokens_per_s)} tokens/s"
    if phase.mfu is not None:
        yield f"MFU {share(phase.mfu)}"
