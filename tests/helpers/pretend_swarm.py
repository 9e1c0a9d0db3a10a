"""`noloco-node swarm` over pretend_node.py: the same program, in a second and without a network."""

import sys
from pathlib import Path

from noloco_node.__main__ import program
from noloco_node.node import local_swarm

if __name__ == "__main__":
    local_swarm.COMMAND = (sys.executable, str(Path(__file__).with_name("pretend_node.py")))
    sys.argv.insert(1, "swarm")
    program()
