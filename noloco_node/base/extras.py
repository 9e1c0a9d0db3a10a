"""How a package is installed that this one needs only for some things: a line that works as it is typed."""

import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires

DISTRIBUTION = "noloco-node"


def pip_install(wanted: str) -> str:
    """`/home/me/.venv/bin/python -m pip install 'matplotlib>=3.9'`, for an extra of pyproject.toml or the name of one
    of its packages. It names this Python: a bare `pip` may be another's."""
    try:
        listed = [line.partition(";") for line in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:  # run from its sources
        listed = []
    of = re.compile(re.escape(wanted) + r"(?![\w.-])")
    found = [package.strip() for package, _, marker in listed if f'"{wanted}"' in marker or of.match(package)]
    return shlex.join([sys.executable, "-m", "pip", "install", *(found or [wanted])])
