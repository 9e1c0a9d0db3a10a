"""noloco-node: volunteers on ordinary internet links train one model together (see README.md beside this file)."""

from noloco_node import version

__version__ = version.VERSION
