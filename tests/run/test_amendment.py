"""What a run's author changes later: signed, numbered, kept beside the manifest, and never another run."""

from pathlib import Path

import pytest
from admissions import AUTHOR, GUEST, STRANGER
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from noloco_node.errors import Incompatible, NolocoError, NotAdmitted
from noloco_node.run import amendment, manifest, signed_file
from noloco_node.run.amendment import Amendment, SignedAmendment
from noloco_node.run.schema import Manifest

RUN = Manifest(name="tiny", rounds=100)
LATER = Amendment(run=RUN.run_id, version=3, rounds=200, swaps_per_round="auto", revoked=(GUEST.peer_id,))
SIGNED = amendment.sign(LATER, AUTHOR)


def verified(document: bytes, signature: bytes) -> Amendment:
    return amendment.verify(SignedAmendment(document, signature), RUN.run_id, AUTHOR.peer_id)


def test_what_was_signed_is_read_back() -> None:
    assert verified(SIGNED.document, SIGNED.signature) == LATER
    assert LATER.words() == "amended (3): 200 rounds, swaps auto, 1 taken out"
    assert Amendment(run=RUN.run_id, version=1, ended=True).words() == "amended (1): ended"


@given(st.data())
def test_any_bit_flipped_is_refused(data: st.DataObject) -> None:
    whole = bytearray(SIGNED.document + SIGNED.signature)
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    cut = len(SIGNED.document)
    with pytest.raises(NotAdmitted):
        verified(bytes(whole[:cut]), bytes(whole[cut:]))


@given(st.binary(max_size=300), st.binary(max_size=80))
def test_garbage_is_refused(document: bytes, signature: bytes) -> None:
    with pytest.raises(NotAdmitted):
        verified(document, signature)


@pytest.mark.parametrize("signer", [GUEST, STRANGER])
def test_nobody_but_the_author_amends_a_run(signer) -> None:
    with pytest.raises(NotAdmitted):
        verified(SIGNED.document, amendment.sign(LATER, signer).signature)


@pytest.mark.parametrize(
    "document",
    [
        b"[" * 20_000,
        b"{}",
        b'{"run":"%s","version":"1"}' % RUN.run_id.encode(),
        LATER.canonical().replace(b'"version":3', b'"version":3,"what":1'),
        LATER.canonical().replace(b":", b": "),
    ],
)
def test_what_its_author_signed_but_nobody_can_read_is_not_a_peers_fault(document: bytes) -> None:
    signature = AUTHOR.sign(b"noloco amendment v1\n" + document)
    with pytest.raises(Incompatible):
        verified(document, signature)


@pytest.mark.parametrize("later", [b"", b'"later":1,'])
def test_of_the_authors_other_run_it_is_none_even_where_nobody_can_read_it(later: bytes) -> None:
    """Every node checks what it passes on, so whoever sends it lies."""
    document = Amendment(run="ab" * 32, version=1).canonical().replace(b"{", b"{" + later)
    with pytest.raises(NotAdmitted):
        verified(document, AUTHOR.sign(b"noloco amendment v1\n" + document))


def test_a_manifests_signature_is_none_of_an_amendment() -> None:
    with pytest.raises(NotAdmitted):
        verified(LATER.canonical(), AUTHOR.sign(b"noloco manifest v1\n" + LATER.canonical()))


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 0},
        {"version": True},
        {"rounds": 0},
        {"swaps_per_round": 17},
        {"swaps_per_round": True},
        {"revoked": ("somebody",)},
        {"revoked": (GUEST.peer_id, GUEST.peer_id)},
    ],
)
def test_a_wrong_value_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Amendment.model_validate({"run": RUN.run_id, "version": 1, **wrong})


def test_the_run_stays_the_same_run_and_its_rounds_never_become_fewer() -> None:
    amended = amendment.apply(RUN, LATER)
    assert (amended.rounds, amended.outer.swaps_per_round) == (200, "auto")
    assert (amended.run_id, amended.label) == (RUN.run_id, RUN.label)
    assert amendment.apply(RUN, Amendment(run=RUN.run_id, version=1, rounds=50)).rounds == 100
    blocking = Manifest(name="tiny", outer={"overlap": "blocking"})
    later = Amendment(run=blocking.run_id, version=1, swaps_per_round=4)
    assert amendment.apply(blocking, later).outer.swaps_per_round == 1


# ---- in the home -----------------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    signed_file.keep(tmp_path, manifest.sign(RUN, AUTHOR))
    return tmp_path


def test_it_is_kept_beside_the_manifest_and_counts_with_it(folder: Path) -> None:
    assert signed_file.read(folder).run.rounds == 100 and not signed_file.read(folder).is_over(99)
    amendment.write(folder, SIGNED)
    found = signed_file.read(folder)
    assert found.amendment == LATER and found.run.rounds == 200 and not found.is_over(100) and found.is_over(200)
    ended = Amendment(run=RUN.run_id, version=4, ended=True)
    amendment.write(folder, amendment.sign(ended, AUTHOR))
    assert signed_file.read(folder).is_over(7)


def test_a_stage_that_ended_with_fewer_rounds_knows_that_its_run_is_over(folder: Path) -> None:
    signed_file.keep_end(folder, RUN.rounds)
    assert signed_file.read(folder).is_over(97)
    amendment.write(folder, SIGNED)
    assert not signed_file.read(folder).is_over(97), "its author gave it more"
    (folder / "ended.json").write_text("[")
    assert not signed_file.read(folder).is_over(97) and (folder / "ended.json.damaged").exists()


@pytest.mark.parametrize("text", ["", "{", "{}", '{"amendment": "{}", "signature": "00"}', '{"amendment": 1}'])
def test_a_damaged_or_forged_file_is_set_aside(folder: Path, text: str) -> None:
    path = folder / amendment.NAME
    path.write_text(text)
    assert signed_file.read(folder).amendment is None
    assert path.with_name("amendment.json.damaged").read_text() == text and not path.exists()


def test_one_of_a_newer_version_stays_for_it(folder: Path) -> None:
    """A node that is of an older version for a while loses nothing."""
    document = LATER.canonical().replace(b"{", b'{"later":1,')
    amendment.write(folder, SignedAmendment(document, AUTHOR.sign(b"noloco amendment v1\n" + document)))
    before = (folder / amendment.NAME).read_bytes()
    assert signed_file.read(folder).amendment is None and signed_file.read(folder).run == RUN
    with pytest.raises(Incompatible, match="update noloco-node"):
        amendment.read(folder, RUN.run_id, AUTHOR.peer_id)
    assert [path.name for path in folder.iterdir() if "amendment" in path.name] == [amendment.NAME]
    assert (folder / amendment.NAME).read_bytes() == before


@given(st.binary(max_size=400))
def test_only_our_own_errors_come_out(document: bytes) -> None:
    try:
        verified(document, AUTHOR.sign(b"noloco amendment v1\n" + document))
    except NolocoError:
        pass
    else:
        pytest.fail("no such bytes are an amendment of this run")
