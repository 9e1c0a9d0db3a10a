"""`python -m noloco_node` is `noloco-node`."""

from noloco_node.cli import program

program()
