"""Names for people: peer ids are made for machines, and nobody can tell two of them apart in a table.

A name is derived, not chosen, so every node calls a peer the same. It is not unique (16384 names), so it never
identifies a peer to a program.
"""

from hashlib import sha256

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


def short_id(peer_id: str) -> str:
    """`12D3KooW…QmZT`: the beginning says what it is, the end tells it apart."""
    return peer_id if len(peer_id) <= 13 else f"{peer_id[:8]}…{peer_id[-4:]}"
