"""Ports that stay free until a test uses them."""

import socket
from random import SystemRandom

_random = SystemRandom()  # other processes of the suite choose, too


def quiet_port(in_a_row: int = 1) -> int:
    """The first of so many ports that nobody has, for TCP and UDP. They are below those that the kernel gives to who
    wants any, and to connections: one of those may be another test's before it is used."""
    while True:
        first = _random.randrange(10_000, 32_000)
        try:
            for port in range(first, first + in_a_row):
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                    with socket.socket(type=kind) as trial:
                        trial.bind(("", port))
        except OSError:
            continue
        return first
