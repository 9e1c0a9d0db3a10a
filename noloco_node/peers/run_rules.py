"""What the author of this node's run says of it: the manifest, the newest amendment, and so who may take part.

Each presence record states the version that its node knows. A node that sees a newer one asks for it (`Runs.List`),
checks the author's signature, writes it beside the manifest, and states it at once: so a new one goes through a swarm
in a few look-ups. A forged one, an older one, and one of another run change nothing, and count against their sender.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import grpc

from noloco_node.base.latest import Seldom, remember
from noloco_node.errors import Incompatible, NolocoError, NotAdmitted, PeerFault
from noloco_node.peers import run_registry
from noloco_node.run import admission, amendment
from noloco_node.run.amendment import Amendment, SignedAmendment
from noloco_node.run.manifest import Signed, verify
from noloco_node.run.schema import Manifest
from noloco_node.views.status import Health

ASK_AGAIN_S = 10.0
"""When a peer is asked again that did not answer, or did not have what it states."""
MAX_REMEMBERED = 1024
"""Peers that were asked, or refused, lately."""
BAD = "bad_amendment"
"""The code of a peer's fault: its amendment is forged, or older than it says."""

log = logging.getLogger(__name__)


class RunRules:
    def __init__(self, folder: Path, signed: Signed) -> None:
        """`folder`: of the run, in this node's home."""
        self.signed = signed
        self.amended: SignedAmendment | None = None
        self.unreadable: str | None = None
        """Why an amendment that its author signed is not followed."""
        self._folder = folder
        self._manifest = verify(signed)
        self._newest: Amendment | None = None
        self._read_at = -1
        self._keeps = True
        """Whether the amendment in the folder may be replaced: not where a newer version of the program wrote it."""
        self._asked: dict[str, float] = {}
        self._misses: dict[str, int] = {}
        """How often, in a row, a peer that states a version did not know the run, or has what cannot be read here."""
        self._refused: dict[tuple[str, str], None] = {}
        self._says = Seldom()
        self._rule = admission.rule(self._manifest, signed.author)
        self.reread()

    @property
    def run(self) -> Manifest:
        """As it was amended."""
        return amendment.apply(self._manifest, self._newest)

    @property
    def version(self) -> int:
        return self._newest.version if self._newest else 0

    @property
    def ended(self) -> bool:
        return self._newest is not None and self._newest.ended

    @property
    def words(self) -> str | None:
        return self._newest.words() if self._newest else None

    def health(self) -> tuple[Health, ...]:
        if self.unreadable is None:
            return ()
        return (Health("warning", f"run: {self.unreadable}", "update noloco-node, if there is a newer version"),)

    # ---- who may take part ----
    def refuses(self, peer: str, token: bytes) -> str | None:
        """See run/admission.py. The first time, the log says it."""
        why = self._rule.refusal(peer, token, time.time())
        if why and (peer, why) not in self._refused:
            remember(self._refused, (peer, why), None, MAX_REMEMBERED)
            level = logging.INFO if self._says() else logging.DEBUG  # anybody may come under any number of ids
            log.log(level, "%s may not take part in %s and is refused: %s", peer, self._rule.label, why)
        return why

    def require(self, own: str, token: bytes) -> None:
        """Raises NotAdmitted where this node itself may not take part."""
        if why := self._rule.refusal(own, token, time.time()):
            raise NotAdmitted(self._rule.sentence(why, own, token))

    # ---- amendments ----
    def reread(self) -> bool:
        """Take what the author's command, or this node itself, has written. Whether that is newer."""
        path = self._folder / amendment.NAME
        written_at = path.stat().st_mtime_ns if path.exists() else -1
        if written_at == self._read_at:
            return False
        self._read_at = written_at
        try:
            found = amendment.read(self._folder, self._manifest.run_id, self.signed.author)
        except Incompatible as error:
            self._keeps = False
            self._cannot_read(error)
            return False
        self._keeps = True
        return found is not None and self._follow(*found)

    def take(self, found: SignedAmendment) -> bool:
        """Whether it is newer, and followed from now on. Raises NotAdmitted, Incompatible."""
        newer = amendment.verify(found, self._manifest.run_id, self.signed.author)
        if newer.version <= self.version:
            if newer.version == self.version and newer != self._newest:
                log.warning("its author amended it in two homes; others follow the other one, %s", newer.words())
            return False
        try:
            if self._keeps:
                amendment.write(self._folder, found)
        except NolocoError as error:
            log.warning("an amendment of the run is followed, but not kept: %s", error)
        return self._follow(found, newer)

    async def learn(
        self,
        channel: Callable[[str], grpc.aio.Channel],
        stated: Mapping[str, int],
        choose: Callable[[Collection[str]], Collection[str]],
        blame: Callable[[str, str], None],
    ) -> bool:
        """Ask some peers for what they know; whether one knows a newer amendment. `stated`: their versions; `choose`:
        whom to ask of those that are worth it; `blame` gets who does not have what it states, and a code."""
        now, before = asyncio.get_running_loop().time(), self.version
        due = [peer for peer in stated if self._asked.get(peer, now) <= now]
        asked = list(choose(due))
        for peer in asked:
            wait_s = ASK_AGAIN_S * 2 ** min(self._misses.get(peer, 0), 10)
            remember(self._asked, peer, now + wait_s, MAX_REMEMBERED)
        answers = await asyncio.gather(
            *(run_registry.ask(channel(p), self.signed) for p in asked), return_exceptions=True
        )
        for peer, answer in zip(asked, answers, strict=True):
            if isinstance(answer, PeerFault):
                log.debug("%s does not say how the run was amended: %s", peer, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                self._take_from(peer, answer, stated[peer], blame)
        return self.version > before

    def _take_from(
        self, peer: str, known: Iterable[run_registry.KnownRun], stated: int, blame: Callable[[str, str], None]
    ) -> None:
        found = [run.amendment for run in known]
        try:
            for each in filter(None, found):
                self.take(each)
        except NotAdmitted:
            blame(peer, BAD)
        except Incompatible as error:
            self._cannot_read(error)
            self._missed(peer)
        else:
            if not found:  # it has just been started again, and does not know the run yet
                self._missed(peer)
                return
            self._misses.pop(peer, None)
            if stated > self.version:
                blame(peer, BAD)
            else:
                self._asked.pop(peer, None)

    def _cannot_read(self, error: Incompatible) -> None:
        if self.unreadable is None:
            log.warning("%s", error)
        self.unreadable = str(error)

    def _missed(self, peer: str) -> None:
        remember(self._misses, peer, self._misses.get(peer, 0) + 1, MAX_REMEMBERED)

    def _follow(self, signed: SignedAmendment, newer: Amendment) -> bool:
        if newer.version <= self.version:
            return False
        self.amended, self._newest, self.unreadable = signed, newer, None
        self._rule = admission.rule(self._manifest, self.signed.author, newer.revoked)
        log.info("%s is %s", self._rule.label, newer.words())
        return True
