"""Names of peers for people, who cannot tell two peer ids apart in a table.

A name is derived from the id, so it is the same on every node. It is not unique (16384 names), so programs never
identify a peer by it.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from hashlib import sha256

from noloco_node.base.validation import listed
from noloco_node.errors import NotReached, UsageError

_LEAST_LETTERS = 4
"""Of an id, to name a peer by them."""
_SHOWN = 5

_FIRST = """
able agile airy amber ample apt arid azure bare bold brave breezy brief bright brisk bronze calm candid chief chilly
civil clean clear clever cool copper coral cosmic cozy crisp curly daring deep deft dense dewy dry dusky eager early
earnest easy even fair fancy fast fine firm fleet fond frank free fresh frosty full gentle giant glad golden good
grand green happy hardy hazy hearty honest humble icy ideal ivory jade jolly jovial keen kind large late level light
limber lively lone loyal lucid lucky lunar major mellow merry mild misty modest narrow neat nimble noble olive opal
open patient plain polite prime proud quick quiet rapid ready rosy royal rustic sage sandy serene sharp silent silver
sleek smooth snowy solar solid spry steady swift tidy vivid
""".split()  # noqa: SIM905 (128 quoted words on 128 lines read worse)

_SECOND = """
adder alpaca ant auk badger bat bear beaver bee beetle bison boar bobcat bream bunting buzzard camel carp cat cicada
clam cobra cod condor coot cougar cow coyote crab crane cricket crow cuckoo curlew deer dingo dolphin dove dragon duck
eagle eel egret eider elk emu ermine falcon ferret finch fox frog gannet gecko gibbon goat goose grebe grouse gull
hare hawk hedgehog heron hippo hornet horse hyena ibex ibis iguana impala jackal jaguar jay kestrel kite kiwi koala
lark lemming lemur leopard linnet lion lizard llama lobster lynx macaw magpie marmot marten mink mole moose moth mouse
newt ocelot octopus orca osprey otter owl oyster panda panther parrot pelican perch pigeon pike plover puffin puma
quail rabbit raven robin rook salmon seal shrike skua sparrow stork swan
""".split()  # noqa: SIM905 (128 quoted words on 128 lines read worse)


def name_of(peer_id: str) -> str:
    """Two words, the same on every node: `brisk-heron`."""
    digest = sha256(peer_id.encode()).digest()
    return f"{_FIRST[digest[0] % len(_FIRST)]}-{_SECOND[digest[1] % len(_SECOND)]}"


def find(word: str, peer_ids: Iterable[str]) -> str:
    """The one peer with this name or a name that begins so, or with this beginning or end of its id. Raises UsageError
    for several, NotReached for none, with similar names."""
    known = sorted(set(peer_ids))
    if word in known:
        return word
    named = [peer for peer in known if name_of(peer) == word.lower()]
    found = named or [peer for peer in known if _is_part(word, peer)]
    if len(found) == 1:
        return found[0]
    if found:
        several = ", ".join(f"{name_of(peer)} ({peer})" for peer in found[:_SHOWN])
        raise UsageError(f"{word!r} may be any of {len(found)} peers: name one by its id, {several}")
    if not known:
        raise NotReached(f"no other peer is known yet, so nobody is called {word!r}: try again in a moment")
    close = get_close_matches(word.lower(), map(name_of, known), n=3)
    likely = f"did you mean {listed(close)}?" if close else "see `noloco-node peers` for those who are there"
    raise NotReached(f"no peer is called {word!r}, {likely}")


def _is_part(word: str, peer_id: str) -> bool:
    of_id = len(word) >= _LEAST_LETTERS and (peer_id.startswith(word) or peer_id.endswith(word))
    return of_id or word == short_id(peer_id) or (word != "" and name_of(peer_id).startswith(word.lower()))


def short_id(peer_id: str) -> str:
    """`12D3KooW…QmZT`: the beginning says what it is, the end tells it apart."""
    return peer_id if len(peer_id) <= 13 else f"{peer_id[:8]}…{peer_id[-4:]}"
