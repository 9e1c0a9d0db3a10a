"""`python -m noloco_node` is `noloco-node`."""

import sys

from noloco_node.cli import main

sys.exit(main())
