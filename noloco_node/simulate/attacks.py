"""What attackers do in a simulated swarm: the last replicas of it, from the first round to the last.

An attacker trains, and takes the correction that an honest replica in its place would get, so it always knows what the
swarm knows. It knows its victim's u and movement too, before the swap: more than any real one. What it offers instead
of its u, or does, is the attack; the README has the table. The swap itself is a node's: an honest replica codes, checks
and bounds as it does with anybody.

Modelled, not run, is how replicas meet: core/round.py has calls, appointments and clocks, here a round is a random
matching. With the defences, whom a replica lets be its partner is decided by a node's ledger and shares
(core/standing.py), and a held swap lasts as long as a node would wait; without them it lasts MAX_LAG rounds.
"""

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from noloco_node.core.codecs.codec import CodecStats, Conversation, Payload, Received
from noloco_node.core.round import MAX_LAG
from noloco_node.simulate.baselines import Pairs, matching
from noloco_node.simulate.defences import Guard
from noloco_node.simulate.settings import Settings

SCALE = 10
NAN = 0x7FC07FC0
"""In fp32, and twice in bf16."""
NAN_TAIL = 4096
"""Bytes at the end of the first payload: in lattice codes the elements sent in full, the only place for a NaN."""


class Attackers:
    def __init__(self, settings: Settings, sizes: Sequence[int]) -> None:
        self.attack = settings.attack
        self._honest = settings.honest
        self._replicas = settings.replicas
        self._bounded = settings.defences
        self._chance = torch.Generator().manual_seed(settings.seed)
        self._sizes = sizes
        self._first: dict[int, Tensor] = {}
        """The u of each attacker's first swap."""
        self._aim: Tensor | None = None
        """The other model of `collude`."""
        self._held: dict[int, int] = {}
        """Rounds that an honest replica is still held, after this one."""

    def __contains__(self, row: int) -> bool:
        return row >= self._honest

    def pairs(self, chance: random.Random, met: frozenset[frozenset[int]], guards: Mapping[int, Guard]) -> Pairs:
        """Who swaps with whom in this round; `met`: those who did lately."""

        def allowed(i: int, j: int) -> bool:
            return all(row not in guards or guards[row].allows(other) for row, other in ((i, j), (j, i)))

        taken = self._taken(allowed) if self.attack == "capture" else []
        gone = {victim for _, victim in taken} | self._held.keys()
        attacking = range(self._honest, self._replicas if self.attack != "capture" else self._honest)
        free = [row for row in [*range(self._honest), *attacking] if row not in gone]
        known = frozenset(frozenset(map(free.index, pair)) for pair in met if pair <= set(free))
        drawn: Pairs = [(free[i], free[j]) for i, j in matching(len(free), chance, known)]
        if not all(allowed(*pair) for pair in drawn):
            drawn = _first_allowed(chance.sample(free, len(free)), allowed)
        return self._unheld(drawn, guards) if self.attack == "hold" else [*taken, *drawn]

    def _taken(self, allowed: Callable[[int, int], bool]) -> Pairs:
        """Every victim that lets one of the attackers in."""
        by = {v: [a for a in range(self._honest, self._replicas) if allowed(a, v)] for v in range(self._honest)}
        return [(attackers[0], victim) for victim, attackers in by.items() if attackers]

    def _unheld(self, pairs: Pairs, guards: Mapping[int, Guard]) -> Pairs:
        """Those pairs that swap. An honest replica that meets an attacker is held from now on."""
        self._held = {row: rounds - 1 for row, rounds in self._held.items() if rounds > 1}
        swapping = []
        for i, j in pairs:
            victim, other = sorted((i, j))
            if other not in self:
                swapping.append((i, j))
            elif victim not in self:
                rounds = guards[victim].held(other) if victim in guards else MAX_LAG
                if rounds > 1:
                    self._held[victim] = rounds - 1
        return swapping

    def offered(self, u: Tensor, row: int, partner: int, reach: float) -> Tensor:
        """What a replica offers its partner, whose bounds let a correction of length `reach` pass as it is."""
        mine, theirs = u[row], u[partner]
        if row in self:
            first = self._first.setdefault(row, mine.clone())
            match self.attack:
                case "scale":
                    mine = SCALE * mine
                case "sign-flip":
                    mine = -mine
                case "noise":
                    noise = torch.randn(mine.shape, generator=self._chance)
                    mine = noise * (mine.norm() / noise.norm())
                case "stale":
                    mine = first
                case "creep":
                    mine = theirs + _of_length(first - theirs, 2 * reach)
                case "collude" if self._bounded:
                    away = self._other_model(mine) - theirs
                    mine = theirs + _of_length(away, min(2 * reach, float(away.norm())))
                case "collude":
                    mine = self._other_model(mine)
                case "capture":
                    mine = theirs
        return mine

    def _other_model(self, like: Tensor) -> Tensor:
        """Weights of the right size that have learned nothing, the same for all attackers."""
        if self._aim is None:
            parts = torch.split(like, list(self._sizes))
            self._aim = torch.cat([part[torch.randperm(len(part), generator=self._chance)] for part in parts])
        return self._aim

    def converse(self, conversation: Conversation) -> Conversation:
        """An attacker's side of a swap."""
        return _NotANumber(conversation) if self.attack == "nan" else conversation


def _of_length(x: Tensor, length: float) -> Tensor:
    return x * (length / max(float(x.norm()), 1e-30))


def _first_allowed(order: Sequence[int], allowed: Callable[[int, int], bool]) -> Pairs:
    """Each in turn with the first after it that both let be."""
    pairs, left = [], list(order)
    while left:
        one = left.pop(0)
        other = next((row for row in left if allowed(one, row)), None)
        if other is not None:
            left.remove(other)
            pairs.append((one, other))
    return pairs


class _NotANumber:
    """Sends NaN in a tenth of what it can of its first payload."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    @property
    def stats(self) -> CodecStats:
        return self._conversation.stats

    def open(self) -> bytes:
        payload = self._conversation.open()
        tail = min(NAN_TAIL, len(payload) // 4 * 4)
        words = np.frombuffer(payload, "<u4", tail // 4, len(payload) - tail).copy()
        words[::10] = NAN
        return payload[: len(payload) - tail] + words.tobytes()

    def receive(self, payload: Payload) -> Received:
        return self._conversation.receive(payload)

    def learn(self) -> None:
        """Nothing: the partner refuses."""
