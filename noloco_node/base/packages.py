"""How a package that is missing is installed: by its own name, since noloco-node itself is on no index."""

from importlib.metadata import PackageNotFoundError, requires


def pip_line(extra: str) -> str:
    """The command that installs what an extra of this package brings, as it is to be typed."""
    try:
        found = [line.partition(";") for line in requires("noloco-node") or ()]
    except PackageNotFoundError:  # run from its sources
        found = []
    names = [f"'{name.strip()}'" for name, _, when in found if f'extra == "{extra}"' in when.replace("'", '"')]
    return f"`pip install {' '.join(names)}`" if names else f"`pip install '.[{extra}]'` in its source folder"
