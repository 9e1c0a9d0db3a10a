"""Runs the checks, from the nearest to the furthest: this machine, the node on it, the swarm.

A node that runs here reports what it knows of the network. Without one, a temporary p2pd is started at the
address where the node would listen, and the bootstrap nodes are asked how they see this machine.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from noloco_node.base import atomic_files
from noloco_node.base.addresses import ANY_LOCAL_PORT
from noloco_node.base.validation import in_one_line
from noloco_node.control import socket_client
from noloco_node.doctor import gpu_verdicts, probes, verdicts
from noloco_node.doctor.verdicts import Finding
from noloco_node.errors import NolocoError, NoNodeRunning
from noloco_node.host import memory
from noloco_node.host.config import NodeConfig
from noloco_node.host.home import Home
from noloco_node.peers.rows import verified
from noloco_node.transport.probe import reach
from noloco_node.transport.reachability import OFF
from noloco_node.transport.self_view import ClockSkew
from noloco_node.views.status import StatusView

_VISIT_S = 90.0


@dataclass(frozen=True, slots=True)
class _Swarm:
    failure: str | None = None
    runs: tuple[str, ...] | None = None
    verdict: str | None = None
    skew: ClockSkew | None = None


async def examine(settings: NodeConfig) -> AsyncIterator[Finding]:
    home = Home(settings.home)
    yield verdicts.memory(memory.free_bytes())
    yield verdicts.disk(atomic_files.free_bytes(home.root), str(home.root))
    yield verdicts.home(probes.place(home))
    yield verdicts.descriptors(probes.descriptors())
    yield _device(settings)  # from here on it takes seconds
    for finding in _gpu(settings):
        yield finding
    node, trouble = await _node(home)
    running = node is not None or trouble is not None
    port = None if running else probes.port(settings.listen)
    yield verdicts.port(settings.listen, port, running)
    for finding in verdicts.node(node, trouble):
        yield finding
    swarm = await _visit(settings, as_a_node=not running and port is None)
    yield verdicts.bootstrap(settings.bootstrap, swarm.failure, swarm.runs)
    asked = swarm.runs is not None or node is not None
    yield verdicts.reachable(node.reachable if node else swarm.verdict, asked)
    yield verdicts.clock(_skew(node) or swarm.skew)


def _device(settings: NodeConfig) -> Finding:
    try:
        return verdicts.device(probes.torch(settings.device, settings.threads))
    except NolocoError as error:
        return Finding("torch", verdicts.ERROR, *verdicts.halves(str(error)))
    except (ImportError, OSError) as error:
        remedy = "install this package again in a fresh environment"
        return Finding("torch", verdicts.ERROR, f"torch cannot be used ({in_one_line(error)})", remedy)
    except RuntimeError as error:  # CUDA's: the card is full, or another program's alone
        remedy = "end other programs that use the GPU, or train with --device cpu"
        return Finding("torch", verdicts.ERROR, f"the GPU cannot be used ({in_one_line(error)})", remedy)


def _gpu(settings: NodeConfig) -> list[Finding]:
    try:
        from noloco_node.doctor import gpu_probes

        found = gpu_probes.look(settings.device)
    except (ImportError, OSError, RuntimeError):  # torch or the card cannot be used, as `_device` has said
        return []
    return [] if found is None else list(gpu_verdicts.judge(found))


def _skew(node: StatusView | None) -> ClockSkew | None:
    return ClockSkew(node.skew_s, node.skew_witnesses) if node and node.skew_s is not None else None


async def _node(home: Home) -> tuple[StatusView | None, str | None]:
    """The status of the node that runs here, or why it does not answer."""
    try:
        return await socket_client.ask(home, socket_client.ControlClient.status), None
    except NoNodeRunning as error:
        return None, str(error) if home.holder() is not None else None
    except NolocoError as error:
        return None, str(error)


async def _visit(settings: NodeConfig, *, as_a_node: bool) -> _Swarm:
    """`as_a_node`: listen where the node would, to see whether others can connect to it there."""
    if not settings.bootstrap:
        return _Swarm()
    listen, relay = (settings.listen, settings.relay) if as_a_node else (ANY_LOCAL_PORT, OFF)
    try:
        await reach(settings.bootstrap)
        from noloco_node.peers import visitor

        async with asyncio.timeout(_VISIT_S), visitor.visiting(settings.bootstrap, listen, relay) as guest:
            runs = tuple(verified(signed).label for signed in await guest.runs())
            return _Swarm(None, runs, guest.transport.reachable, guest.transport.skew)
    except TimeoutError:
        return _Swarm(f"no answer within {_VISIT_S:.0f} s. Is this machine very busy?")
    except NolocoError as error:
        return _Swarm(str(error).removeprefix("cannot reach the swarm: ").rstrip("."))
