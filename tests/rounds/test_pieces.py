"""Large frames in pieces: put together they are the frame, and no partner can make this node hold more."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_clock import run_virtual

from noloco_node.errors import PeerMisbehaved
from noloco_node.rounds.link import Link
from noloco_node.rounds.pieces import LARGE_PIECE_BYTES, PIECE_BYTES, QUICK_S, Assembly, cut
from noloco_node.wire import messages as wire


@given(st.integers(0, 5 * LARGE_PIECE_BYTES), st.sampled_from([PIECE_BYTES, LARGE_PIECE_BYTES]))
def test_a_frame_cut_into_pieces_is_restored(size: int, most: int) -> None:
    frame = wire.Fragment(3, b"\x07" * size)
    assembly, pieces = Assembly(), list(cut(wire.to_bytes(frame), most))
    *early, last = [assembly.add(piece) for piece in pieces]
    assert last == frame
    assert set(early) <= {None}
    assert max(len(piece) for piece in pieces) <= most + 64


@pytest.mark.parametrize(("seconds", "largest"), [(9.9, LARGE_PIECE_BYTES), (10.1, PIECE_BYTES)])
def test_a_link_that_is_quick_on_average_sends_whole_fragments(seconds: float, largest: int) -> None:
    async def main() -> list[int]:
        link = Link()
        link.begin_swap(as_caller=False)
        await asyncio.sleep(seconds)
        link.received_bytes = int(10 * LARGE_PIECE_BYTES / QUICK_S)
        link.send(wire.Fragment(3, bytes(largest)))
        link.close()
        return [len(piece) async for piece in link.outgoing()]

    sizes = run_virtual(main())
    assert len(sizes) == 2 and largest < max(sizes) < largest + 64


@pytest.mark.parametrize(
    "pieces",
    [
        [wire.Piece(b"", True)],
        [wire.Piece(b"\xff" * 100, False)],
        [wire.Piece(wire.to_bytes(wire.Piece(b"abc", True)), False)],
        [wire.Piece(b"x" * (4 << 20), True)] * 5,
    ],
)
def test_malformed_pieces_are_misbehaviour(pieces: list[wire.Piece]) -> None:
    assembly = Assembly()
    with pytest.raises(PeerMisbehaved, match=r"bad_piece|empty_frame"):
        for piece in pieces:
            assembly.add(wire.to_bytes(piece))
