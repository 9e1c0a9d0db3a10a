"""What the driver's library says of a card. The real one is absent where there is no NVIDIA driver, as on the machines
of these tests; a small one with the same functions is compiled and loaded in its place."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from noloco_node.host import nvml
from noloco_node.views.status import GpuView

SOURCE = """
#include <stdio.h>
#include <string.h>
static int cards[2];
int nvmlInit_v2(void) { return INIT; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **card) {
    *card = &cards[1];
    return strcmp(uuid, "GPU-4a5c") ? 6 : 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **card) { *card = &cards[number]; return 0; }
int nvmlDeviceGetPowerUsage(void *card, unsigned *mw) { *mw = 412345; return card == &cards[1] ? POWER : 2; }
int nvmlDeviceGetUtilizationRates(void *card, unsigned *rates) { rates[0] = 97; rates[1] = 40; return 0; }
int nvmlSystemGetDriverVersion(char *to, unsigned room) { snprintf(to, room, "570.86.10"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12080; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetName(void *card, char *to, unsigned room) {
    snprintf(to, room, card == &cards[0] ? "NVIDIA H200" : "NVIDIA L4");
    return 0;
}
"""


@pytest.fixture
def built(tmp_path: Path):
    """Compiles the library; `init` and `power` are what these calls return, 0 for success."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    tries = iter(range(10))

    def build(init: int = 0, power: int = 0) -> str:
        at = tmp_path / f"nvml{next(tries)}.so"
        flags = [f"-DINIT={init}", f"-DPOWER={power}", "-shared", "-fPIC", "-x", "c", "-"]
        subprocess.run([compiler, "-o", at, *flags], input=SOURCE.encode(), check=True)
        return str(at)

    return build


def test_power_and_utilisation_of_the_card_with_this_uuid(built):
    library = built()
    assert nvml.read("4a5c", library) == nvml.read("4a5c", library) == GpuView(412.345, 0.97)


def test_what_a_card_does_not_tell_is_not_known(built):
    assert nvml.read("4a5c", built(power=3)) == GpuView(None, 0.97)


def test_the_driver_and_its_cards(built):
    assert nvml.driver(built()) == nvml.Driver("570.86.10", (12, 8), ("NVIDIA H200", "NVIDIA L4"))


def test_nothing_is_known_without_a_driver_that_works(built):
    assert nvml.read("another", built()) == GpuView()
    for library in (built(init=9), "libnoloco-no-such-library.so"):
        assert nvml.read("4a5c", library) == GpuView() and nvml.driver(library) is None


def test_this_machines_own_driver_where_there_is_one():
    try:
        ctypes.CDLL(nvml.LIBRARY)
    except OSError:
        pytest.skip("needs an NVIDIA driver")
    found = nvml.driver()
    assert found is None or (found.version and found.cuda >= (11, 0))
