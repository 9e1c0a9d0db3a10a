"""noloco-node: volunteers on ordinary internet links train one model together (see README.md beside this file)."""

from noloco_node.version import VERSION as __version__

__all__ = ["__version__"]
