"""1.1 G parameters: two phases of 50 steps, a swap with a partner in the same process, and a checkpoint meanwhile.

The training thread, its codec thread and streams are a node's. The partner is an offer of its own, of a vector beside
ours, with a codec thread of its own: the GPU codes both sides, more than a node's does, and all fragments come at once,
as over a link without limit. The first phase, which finds the micro-batch, is not judged.
"""

import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from checks.models import replica as small_replica
from checks.models import small_run
from checks.place import Mark, Place, Row, Seen
from checks.threads import DEADLINE_S, Posts, answer, swap

from noloco_node.core.codecs.by_name import codec
from noloco_node.core.codecs.codec import BLOCK
from noloco_node.run.schema import DataSpec, InnerSpec, Manifest, ModelSpec
from noloco_node.training import model
from noloco_node.training.build import build_replica
from noloco_node.training.mailbox import Command, Correct, Finished, Judged, PhaseEnded, Ready
from noloco_node.training.offer import CodecThread, Offer
from noloco_node.training.replica import Replica
from noloco_node.training.thread import FRAGMENT_ELEMENTS, TrainingThread

BUSY, ROUND_S, CHECKPOINT_S, PLAN = 0.99, 0.3, 1.5, 0.10
PHASES, STEPS, BATCH, LENGTH = 2, 50, 65_536, 1024
NOISE = 0.1
"""The partner's distance from us, in what our blocks moved at most: a third of two replicas that trained apart."""


def phases_with_a_partner(place: Place) -> Seen:
    node = _Node(place)
    phases: list[PhaseEnded] = []
    swaps: list[dict[str, Any]] = []
    checkpoint: dict[str, Any] = {}
    try:
        ready = node.until(Ready, 150)
        node.thread.begin(PHASES)
        for round_ in range(1, PHASES + 1):
            ended = node.until(PhaseEnded, place.left_s)
            phases.append(replace(ended, offer=None))  # nobody else holds u
            if round_ == PHASES or place.left_s < 1.3 * ended.seconds:
                break  # what is seen so far is better than nothing
            swaps.append(node.swap(round_, ended.offer))
            del ended
            if round_ == PHASES - 1:
                node.peak_bytes = torch.cuda.max_memory_allocated(place.device) if place.on_gpu else 0
                checkpoint = node.checkpoint()
        if len(phases) == PHASES:
            node.until(Finished, DEADLINE_S)
        return _told(place, node, ready, phases, swaps, checkpoint)
    finally:
        node.close()


class _Node(Posts):
    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place
        self.run = _run(place)
        self.steps: list[tuple[Mark, Mark]] = []
        self.replica: Replica | None = None
        self.peak_bytes = 0
        """Of the GPU, before a checkpoint's copies take what is free."""
        fragment = 1024 if place.quick else FRAGMENT_ELEMENTS
        self._partner = CodecThread(codec("lattice:3"), _drop, fragment)
        self.thread = TrainingThread(
            self._build,
            codec("lattice:3"),
            self.put,
            rounds=self.run.rounds,
            blocking=place.quick,  # tiny phases would be over before a swap is
            fragment_elements=fragment,
        )
        self.thread.start()

    def _build(self) -> Replica:
        place = self._place
        if place.quick:
            inner = small_replica(place, self.run)
        else:
            inner = build_replica(self.run, "visit", device=str(place.device))
        self.replica = inner
        step = inner.step

        def timed() -> float:
            began = place.mark()
            loss = step()
            self.steps.append((began, place.mark()))
            return loss

        inner.step = timed  # type: ignore[method-assign]
        return inner

    def swap(self, round_: int, offer: Offer | None) -> dict[str, Any]:
        assert offer is not None, "the boundary made no offer"
        began = time.perf_counter()
        answer(offer.stats())  # behind what the codec thread does first
        theirs = self._beside(offer)
        ready_s = time.perf_counter() - began
        self.thread.swapping(True)
        for _ in swap(offer, theirs, bytes([round_] * 16)):
            pass
        coded_s = time.perf_counter() - began - ready_s
        self.thread.swapping(False)
        stats = answer(offer.stats())
        judged = self.until(Judged, DEADLINE_S)
        self.thread.round_over(round_)
        return {
            "partner_s": ready_s,
            "swap_s": coded_s,
            "judged_s": time.perf_counter() - began - ready_s - coded_s,
            "verdict": str(judged.verdict),
            "sent_bytes_per_parameter": stats.sent_bytes / len(offer._u),
            "resent": stats.missed_share,
            "relative_error": stats.relative_error,
        }

    def _beside(self, offer: Offer) -> Offer:
        """A partner's offer of the same round."""
        u, device = offer._u.clone(), self._place.device
        moved = offer._moved.to(device)
        for start in range(0, len(u), 1 << 24):
            part = u[start : start + (1 << 24)]
            blocks = moved[start // BLOCK : -(-(start + len(part)) // BLOCK)]
            noise = torch.randn(len(blocks), BLOCK, device=u.device) * (NOISE * blocks[:, None]).to(u.device)
            part.add_(noise.view(-1)[: len(part)])
        squares = (moved / 3).square() * BLOCK
        return Offer(self._partner, offer.round, u, (moved, squares), device)

    def checkpoint(self) -> dict[str, Any]:
        """As a node takes one: copied while training goes on, then written."""
        before = answer(self.thread.so_far())[1]
        began, steps = time.perf_counter(), len(self.steps)
        state = self.thread.state().result(timeout=120)
        copied_s = time.perf_counter() - began
        after = answer(self.thread.so_far())[1]
        found: dict[str, Any] = {
            "copied_s": copied_s,
            "steps_meanwhile": len(self.steps) - steps,
            "training_s": after.accounts["checkpoint"] - before.accounts["checkpoint"],
            "from_step": steps,
        }
        return {**found, **self._write(state)}

    def _write(self, state: Any) -> dict[str, Any]:
        from noloco_node.base import atomic_files
        from noloco_node.checkpoints import checkpoint

        size = 20 * sum(weight.numel() for weight in state.weights.values())
        with tempfile.TemporaryDirectory() as folder:
            free = atomic_files.free_bytes(Path(folder))
            if free is not None and free < 1.2 * size:
                return {"written": f"no: {size} bytes, and {free} are free in {folder}"}
            began, steps = time.perf_counter(), len(self.steps)
            done: Future[Path] = Future()
            assert self.replica is not None

            def write() -> None:
                try:
                    done.set_result(checkpoint.save(Path(folder), state, self.run.run_id, bytes(32)))
                except Exception as error:  # noqa: BLE001
                    done.set_exception(error)

            threading.Thread(target=write, name="checkpoint").start()
            done.result(timeout=max(20.0, self._place.left_s - 10))
            return {
                "written_s": time.perf_counter() - began,
                "bytes": size,
                "steps_while_written": len(self.steps) - steps,
            }

    def close(self) -> None:
        self.thread.stop(DEADLINE_S)
        self._partner.close()


def _drop(command: Command) -> None:
    """The partner's own corrections: it trains nothing."""
    if isinstance(command, Correct):
        command.added.set_result(None)


def _run(place: Place) -> Manifest:
    if place.quick:
        return small_run(place, steps=8, rounds=20)
    config = {**model.PRESETS["1b"], "vocab_size": 32_000}
    return Manifest(
        name="visit",
        rounds=100,
        model=ModelSpec(architecture="LlamaConfig", config=config),
        data=DataSpec(sequence_length=LENGTH),
        inner=InnerSpec(steps=STEPS, batch_tokens=BATCH),
    )


# ---- what is told ----------------------------------------------------------------------------------------------------
def _told(  # noqa: PLR0917
    place: Place, node: _Node, ready: Any, phases: list[Any], swaps: list[Any], checkpoint: dict[str, Any]
) -> Seen:
    place.synchronize()
    assert node.replica is not None
    inner, steps = node.replica, node.run.inner.steps or 1
    taken = [began.until(ended) for began, ended in node.steps]
    usual_s = median(taken[steps:] or taken)
    rows: list[Row] = []
    facts: dict[str, Any] = {
        "parameters": ready.parameters,
        "micro_batch": inner.micro_batch,
        "steps_s": [round(s, 5) for s in taken],
        "phases": [_phase(ended) for ended in phases],
        "swaps": swaps,
        "checkpoint": checkpoint,
    }
    if len(phases) >= 2:
        first, last = phases[0].spent, phases[-1].spent
        rounds = len(phases) - 1
        clock_s = last.clock_s - first.clock_s
        busy = (last.trained_s - first.trained_s) / clock_s
        accounts = {name: (last.accounts[name] - first.accounts[name]) / rounds for name in last.accounts}
        whole_s = node.steps[steps][0].until(node.steps[steps * len(phases) - 1][1])
        between_s = whole_s - sum(taken[steps : steps * len(phases)])
        more_s = sum(s - usual_s for s in taken[steps : steps * len(phases)])
        facts |= {"accounts_a_round_s": accounts, "usual_step_s": usual_s}
        facts |= {"between_steps_s": between_s, "longer_steps_s": more_s, "whole_s": whole_s}
        name = f"1b ({ready.parameters / 1e9:.2f} G)"
        rounds_s = accounts["boundary"] + accounts["apply"]
        rows += [
            place.figure(f"{name}: busy, by CUDA events", f">= {BUSY:.0%}", f"{busy:.2%}", busy >= BUSY),
            place.figure(
                f"{name}: boundary and corrections a round, s", f"<= {ROUND_S}", f"{rounds_s:.3f}", rounds_s <= ROUND_S
            ),
            place.figure(
                f"{name}: beside its steps a round takes, s (evaluation and verdict {accounts['evaluate']:.3f})",
                "-",
                f"{between_s / rounds:.3f} between steps, {more_s / rounds:+.3f} within",
                True,
            ),
        ]
        mfu = phases[-1].done.mfu
        rows.append(place.figure(f"{name}: MFU, not compiled", "-", "not known" if mfu is None else f"{mfu:.3f}", True))
    if checkpoint:
        at = checkpoint["from_step"]
        longer_s = sum(s - usual_s for s in taken[at : at + checkpoint["steps_meanwhile"] + 1])
        checkpoint["longer_steps_s"] = longer_s
        cost_s = max(0.0, longer_s)  # what the training thread waits for lies within a step
        rows.append(
            place.figure(
                "1b: a checkpoint takes from training, s",
                f"<= {CHECKPOINT_S}",
                f"{cost_s:.3f} (copied in {checkpoint['copied_s']:.1f} s)",
                cost_s <= CHECKPOINT_S,
            )
        )
    rows += _planned(place, inner, node.peak_bytes, facts)
    return Seen(rows, facts)


def _phase(ended: Any) -> dict[str, Any]:
    done = ended.done
    return {
        "seconds": ended.seconds,
        "loss": done.loss,
        "stall_ms": done.stall_ms,
        "tokens_per_s": done.tokens_per_s,
        "mfu": done.mfu,
        "device_bytes": done.device_bytes,
        "host_bytes": done.host_bytes,
        "closed": ended.closed,
        "gpu_s": ended.spent.gpu_s,
        "accounts": dict(ended.spent.accounts),
    }


def _planned(place: Place, inner: Replica, peak_bytes: int, facts: dict[str, Any]) -> list[Row]:
    plan = inner.memory_plan()
    facts["plan"] = {
        "device": {item.what: item.bytes for item in plan.device},
        "host": {item.what: item.bytes for item in plan.host},
    }
    if not place.on_gpu:
        return []
    # the partner's vector and what it keeps lie on the same GPU, and are in no plan
    partner = 4 * inner.parameters
    allocated = (peak_bytes or torch.cuda.max_memory_allocated(place.device)) - partner
    facts |= {"allocated_bytes": allocated, "partner_bytes": partner}
    facts["reserved_bytes"] = torch.cuda.max_memory_reserved(place.device)
    off = allocated / plan.device_bytes - 1
    said = f"{allocated / 1e9:.2f} GB of {plan.device_bytes / 1e9:.2f} ({off:+.1%})"
    return [place.figure("1b: GPU memory beside its plan", f"within {PLAN:.0%}", said, abs(off) <= PLAN)]


CHECKS = (phases_with_a_partner,)
