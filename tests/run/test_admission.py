"""A token lets one peer into one run until a time, and any bit of it that is changed makes it worthless."""

from dataclasses import replace

import pytest
from admissions import AT, AUTHOR, GUEST, RULE, RUN, STRANGER, TOKEN
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.base.addresses import Address
from noloco_node.errors import UsageError
from noloco_node.run import admission, invitation
from noloco_node.run.admission import EXPIRED, NOT_ADMITTED, REVOKED, TOKEN_BYTES
from noloco_node.run.invitation import Invitation
from noloco_node.run.schema import Manifest


def test_who_may_take_part_and_until_when() -> None:
    assert RULE.refusal(GUEST.peer_id, TOKEN, AT - 1) is None
    assert RULE.refusal(GUEST.peer_id, TOKEN, AT) == EXPIRED
    assert RULE.refusal(GUEST.peer_id, b"", AT - 1) == NOT_ADMITTED
    assert RULE.refusal(STRANGER.peer_id, TOKEN, AT - 1) == NOT_ADMITTED, "it shows another peer's token"
    assert RULE.refusal(AUTHOR.peer_id, b"", AT - 1) is None


def test_a_token_of_another_run_or_signed_by_another_is_worth_nothing() -> None:
    other = admission.rule(RUN.model_copy(update={"seed": 2}), AUTHOR.peer_id)
    assert other.refusal(GUEST.peer_id, TOKEN, AT - 1) == NOT_ADMITTED
    own = admission.sign(RUN.run_id, GUEST.peer_id, AT, GUEST)
    assert RULE.refusal(GUEST.peer_id, own, AT - 1) == NOT_ADMITTED


def test_who_was_taken_out_is_refused_in_an_open_run_too() -> None:
    for run in (RUN, Manifest(name="open")):
        rule = admission.rule(run, AUTHOR.peer_id, [GUEST.peer_id])
        assert rule.refusal(GUEST.peer_id, TOKEN, AT - 1) == REVOKED
    assert rule.refusal(STRANGER.peer_id, b"", AT - 1) is None


@given(st.integers(0, 8 * TOKEN_BYTES - 1))
def test_any_bit_flipped_is_refused(bit: int) -> None:
    flipped = bytearray(TOKEN)
    flipped[bit // 8] ^= 1 << bit % 8
    assert RULE.refusal(GUEST.peer_id, bytes(flipped), AT - 1) == NOT_ADMITTED


@given(st.binary(max_size=200))
def test_garbage_is_refused(token: bytes) -> None:
    assert RULE.refusal(GUEST.peer_id, token, AT - 1) == NOT_ADMITTED


@pytest.mark.parametrize(
    ("why", "token", "says"),
    [
        (NOT_ADMITTED, b"", "only those"),
        (NOT_ADMITTED, TOKEN, "not for this node"),
        (EXPIRED, TOKEN, "expired at"),
        (REVOKED, TOKEN, "taken this node"),
    ],
)
def test_the_refused_reads_why_and_what_to_send_to_the_author(why: str, token: bytes, says: str) -> None:
    sentence = RULE.sentence(why, STRANGER.peer_id, token)
    assert says in sentence and STRANGER.peer_id in sentence
    assert why == REVOKED or "noloco-node invite" in sentence


def test_an_open_run_is_the_same_run_as_before_and_a_closed_one_another() -> None:
    assert b"membership" not in Manifest(name="closed").canonical()
    assert b'"membership":"invite"' in RUN.canonical()


# ---- as words --------------------------------------------------------------------------------------------------------
PLACE = Address("ip4", "192.0.2.1", 4001, AUTHOR.peer_id)


@pytest.mark.parametrize("place", [PLACE, replace(PLACE, peer=STRANGER.peer_id)])
def test_an_invitation_carries_the_token(place: Address) -> None:
    word = invitation.write(Invitation((place,), RUN.run_id, AUTHOR.peer_id, TOKEN))
    read = invitation.read(word)
    assert read.token == TOKEN and read.addresses == (place,) and RUN.run_id.startswith(read.run)
    assert len(word) <= 230


@given(st.data())
def test_a_token_alone_is_read_back_and_a_damaged_one_is_noticed(data: st.DataObject) -> None:
    word = invitation.token_word(TOKEN)
    assert invitation.read_token(f" {word[:20]}\n{word[20:]}") == TOKEN
    at = data.draw(st.integers(0, len(word) - 1))
    other = data.draw(st.sampled_from("123abcXYZ0-"))
    damaged = word[:at] + other + word[at + 1 :]
    if damaged != word:
        with pytest.raises(UsageError, match="copy it again"):
            invitation.read_token(damaged)
