"""What a node's log leaves out."""

import logging
from pathlib import Path

from noloco_node.cli import log_setup
from noloco_node.host.home import Home


def test_a_caller_that_was_killed_leaves_no_traceback_of_grpc_in_the_log(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    with log_setup.written(home, "info", "text"):
        for text in ("ExecuteBatchError raised in core by servicer method [/x/Swap]", "something else"):
            logging.getLogger("grpc._cython.cygrpc").error(text)
    assert "something else" in home.log.read_text()
    assert "ExecuteBatchError" not in home.log.read_text()
