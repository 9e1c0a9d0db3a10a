"""What a node has seen of its partners itself, in the views: in the rows of `peers`, and as a health line."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from noloco_node.base.peer_names import name_of
from noloco_node.base.reasons import in_words
from noloco_node.base.units import count
from noloco_node.core.standing import Standing
from noloco_node.views.peers import GONE, PeerRow
from noloco_node.views.status import Health

MANY = 3
"""From this many quarantined peers on `status` warns; or from half of the peers seen on, which is soon reached in a
small swarm."""
NAMED = 3
"""Peers that the warning names: `peers` lists all."""
GONE_ROWS = 32
"""Those with the longest quarantines: identities cost nothing, and each row is part of every view of the peers."""

_REMEDY = (
    "for what it saw of them itself, this node neither calls nor accepts them until that is over; if these are most "
    "peers, this node may be the odd one: compare the losses in `noloco-node peers`"
)


def quarantined(standings: Mapping[str, Standing]) -> dict[str, Standing]:
    """The longest one first."""
    lasting = [(peer, standing) for peer, standing in standings.items() if standing.quarantined_s > 0]
    return dict(sorted(lasting, key=lambda item: -item[1].quarantined_s))


def fill(rows: Collection[PeerRow], standings: Mapping[str, Standing]) -> Iterator[PeerRow]:
    """The rows with what this node has seen of each; and rows for peers that have gone while in quarantine, GONE_ROWS
    at most."""
    for row in rows:
        yield _filled(row, standings.get(row.peer_id, Standing()))
    listed = {row.peer_id for row in rows}
    gone = [item for item in quarantined(standings).items() if item[0] not in listed]
    for peer, standing in gone[:GONE_ROWS]:
        yield _filled(PeerRow(peer_id=peer, name=name_of(peer), state=GONE, round=0, lag=0), standing)


def health(standings: Mapping[str, Standing], seen: int) -> tuple[Health, ...]:
    """`seen`: how many peers have a presence record."""
    found = quarantined(standings)
    if not found or len(found) < min(MANY, seen / 2):
        return ()
    named = [f"{name_of(peer)} ({in_words(standing.why)})" for peer, standing in list(found.items())[:NAMED]]
    more = [count(len(found) - NAMED, "other")] if len(found) > NAMED else []
    text = f"{count(len(found), 'peer')} in quarantine, {', '.join([*named, *more])}"
    return (Health("warning", text, _REMEDY),)


def _filled(row: PeerRow, standing: Standing) -> PeerRow:
    return replace(
        row,
        taken_back=standing.taken_back,
        refused=standing.refused,
        failed=standing.failed,
        quarantined_s=standing.quarantined_s,
        quarantined_why=standing.why if standing.quarantined_s > 0 else "",
    )
