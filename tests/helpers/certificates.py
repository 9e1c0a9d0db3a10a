"""TLS certificates as libp2p's hosts have them, which a peer has signed."""

from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from noloco_node.base.identity import Identity, public_key

_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")


def certificate(peer: Identity, key: ec.EllipticCurvePrivateKey, signed: ec.EllipticCurvePrivateKey) -> bytes:
    """That of `key`, where the peer has signed `signed`: the same one, unless it is a forgery."""
    public = signed.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    proof = peer.sign(b"libp2p-tls-handshake:" + public)
    content = b"\x30\x68\x04\x24\x08\x01\x12\x20" + (public_key(peer.peer_id) or b"") + b"\x04\x40" + proof
    nobody, begins, ends = x509.Name([]), datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)
    builder = x509.CertificateBuilder(nobody, nobody, key.public_key(), 7, begins, ends)
    return (
        builder.add_extension(x509.UnrecognizedExtension(_EXTENSION, content), critical=False)
        .sign(key, SHA256())
        .public_bytes(Encoding.DER)
    )
