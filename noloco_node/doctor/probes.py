"""Facts about this machine that decide whether a node can run on it. Nothing is judged or changed here."""

import os
import resource

from noloco_node.base.addresses import Address
from noloco_node.doctor.verdicts import Place, Torch
from noloco_node.errors import NolocoError
from noloco_node.host import memory
from noloco_node.host.config import MOMENTS
from noloco_node.host.home import Home
from noloco_node.transport.probe import check_port


def torch(device: str, threads: int | None) -> Torch:
    """Takes seconds. Raises UsageError if torch does not find the device, and other errors if torch is broken."""
    import torch as library

    from noloco_node.core.device import choose_devices, multiplies_bf16
    from noloco_node.core.kernels import for_device
    from noloco_node.training import memory_budget

    chosen = choose_devices(device)[0]
    gpu, bf16 = chosen.type == "cuda", multiplies_bf16(chosen)
    free = library.cuda.mem_get_info(chosen)[0] if gpu else None
    most = [memory_budget.most_parameters(free, memory.free_bytes(), moments, bf16=bf16) for moments in MOMENTS]
    return Torch(
        version=library.__version__,
        device=str(chosen),
        name=library.cuda.get_device_name(chosen) if gpu else None,
        free_bytes=free,
        threads=threads or library.get_num_threads(),
        kernels=for_device(chosen.type).NAME,
        parameters=most[0],
        parameters_8bit=most[1] if gpu else None,
        amx=bf16 and not gpu,
    )


def descriptors() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def port(listen: Address) -> NolocoError | None:
    """Why a node cannot listen there; None if it can."""
    try:
        check_port(listen)
    except NolocoError as error:
        return error
    return None


def place(home: Home) -> Place:
    found = next(above for above in (home.root, *home.root.parents) if above.exists())
    state = found.stat()
    return Place(
        root=str(home.root),
        exists=home.root.is_dir(),
        ours=state.st_uid == os.getuid(),
        writable=found.is_dir() and os.access(found, os.W_OK | os.X_OK),
        mode=state.st_mode & 0o777,
        socket_bytes=len(os.fsencode(home.socket)),
    )
