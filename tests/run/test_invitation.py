"""The invitation: what goes in comes out, what was copied wrongly is noticed, and how long it is."""

import string

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.base.addresses import Address
from noloco_node.base.identity import peer_id_of
from noloco_node.errors import UsageError
from noloco_node.run import invitation
from noloco_node.run.invitation import AUTHOR_LETTERS, COMMAND, RUN_DIGITS, Invitation

peers = st.binary(min_size=32, max_size=32).map(peer_id_of)
labels = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=62)
hosts = st.one_of(
    st.tuples(st.just("ip4"), st.ip_addresses(v=4).map(str)),
    st.tuples(st.just("ip6"), st.ip_addresses(v=6).map(str)),
    st.tuples(st.sampled_from(["dns", "dns4", "dns6"]), st.lists(labels, min_size=1, max_size=4).map(".".join)),
)
places = st.builds(lambda host, port, peer: Address(*host, port, peer), hosts, st.integers(0, 65535), peers)
runs = st.binary(min_size=32, max_size=32).map(bytes.hex)


@st.composite
def invitations(draw: st.DrawFn) -> Invitation:
    """Of one node or several, one of which may be the author."""
    there = draw(st.lists(places, min_size=1, max_size=4))
    author = draw(st.one_of(peers, st.sampled_from([place.peer for place in there])))
    if draw(st.booleans()):
        there = [Address(place.kind, place.host, place.port, there[0].peer) for place in there]
    return Invitation(tuple(there), draw(runs), author)


@given(invitations())
def test_what_goes_in_comes_out(meant: Invitation) -> None:
    word = invitation.write(meant)
    read = invitation.read(word)
    assert meant.addresses[: len(read.addresses)] == read.addresses
    assert len(read.run) == RUN_DIGITS and meant.run.startswith(read.run)
    assert len(read.author) >= AUTHOR_LETTERS and meant.author.startswith(read.author)
    assert len(f"{COMMAND} {word}") < 160 or len(read.addresses) == 1


@given(invitations(), st.data())
def test_a_letter_that_is_changed_missing_doubled_or_swapped_is_noticed(meant: Invitation, data: st.DataObject) -> None:
    word = invitation.write(meant)
    at = data.draw(st.integers(0, len(word) - 1))
    other = data.draw(st.sampled_from(string.ascii_letters + string.digits + "-_/."))
    swapped = word[:at] + word[at : at + 2][::-1] + word[at + 2 :]
    changed = word[:at] + other + word[at + 1 :]
    for damaged in (changed, word[:at] + word[at + 1 :], word[:at] + word[at] + word[at:], swapped, word[:at]):
        if damaged != word:
            with pytest.raises(UsageError):
                invitation.read(damaged)


@given(invitations(), st.data())
def test_white_space_in_it_does_not_matter(meant: Invitation, data: st.DataObject) -> None:
    word = invitation.write(meant)
    at = data.draw(st.lists(st.integers(0, len(word)), max_size=4).map(sorted))
    parts = [word[a:b] for a, b in zip([0, *at], [*at, len(word)], strict=True)]
    assert invitation.read(data.draw(st.sampled_from([" ", "\n", "\r\n", "\t  "])).join(parts)) == invitation.read(word)


@given(st.one_of(st.text(), st.binary(max_size=120).map(lambda raw: "nn1" + base58.b58encode_check(raw).decode())))
def test_any_other_text_is_a_mistake_of_the_user(text: str) -> None:
    try:
        found = invitation.read(text)
    except UsageError:
        return
    assert invitation.read(invitation.write(found)) == found, "it is one, by chance"


NODE, OTHER = peer_id_of(bytes(range(32))), peer_id_of(bytes(range(1, 33)))
RUN = 32 * "ab"


@pytest.mark.parametrize(
    ("hosts", "author", "length", "kept"),
    [
        (["/ip4/203.0.113.7"], NODE, 102, 1),
        (["/ip4/203.0.113.7"], OTHER, 125, 1),
        (["/ip4/203.0.113.7", "/ip6/2001:db8::1"], NODE, 128, 2),
        (["/ip4/203.0.113.7", "/ip6/2001:db8::1"], OTHER, 152, 2),
        (["/ip6/2001:db8::1"], OTHER, 142, 1),
        (["/dns4/" + 27 * "a"], OTHER, 158, 1),
    ],
)
def test_the_whole_command_is_shorter_than_160_characters(
    hosts: list[str], author: str, length: int, kept: int
) -> None:
    there = tuple(Address(*host.split("/")[1:], 4001, NODE) for host in hosts)
    word = invitation.write(Invitation(there, RUN, author))
    assert abs(len(f"{COMMAND} {word}") - length) <= 1 and len(f"{COMMAND} {word}") < 160
    assert invitation.read(word).addresses == there[:kept]


def test_what_is_wrong_is_said() -> None:
    there = Address("ip4", "203.0.113.7", 4001, NODE)
    word = invitation.write(Invitation((there,), RUN, NODE))
    for text, says in (
        (word[:-1], "the invitation is damaged: copy it again"),
        (str(there), "give it with --bootstrap"),
        ("somewhere", "is not an invitation"),
        (word.replace("nn1", "nn2"), "update noloco-node"),
    ):
        with pytest.raises(UsageError, match=says):
            invitation.read(text)


def test_a_damaged_one_leaves_nothing_in_memory() -> None:
    """One exception that was raised again and again kept the frames of each time."""
    faults = []
    for _ in range(2):
        with pytest.raises(UsageError) as raised:
            invitation.read("nn1damaged")
        faults.append(raised.value)
    assert faults[0] is not faults[1]
