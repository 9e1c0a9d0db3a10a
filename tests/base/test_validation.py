"""Text of others in sentences and on terminals."""

from noloco_node.base.validation import in_one_line, printable


def test_text_of_others_cannot_command_a_terminal() -> None:
    assert printable("a\tb\nü \x1b]0;x\x07\x1b[2J\r\x9b") == "a\tb\nü \ufffd]0;x\ufffd\ufffd[2J\ufffd\ufffd"


def test_what_a_library_repeats_of_a_file_is_nothing_that_a_terminal_obeys() -> None:
    """It is shown in `status`, too, as by pyarrow: `Couldn't deserialize thrift: don't know what type: \x1b`."""
    assert in_one_line(OSError("no type:\n\x1b[2J\x0f\udcff")) == "no type: \ufffd[2J\ufffd\ufffd"
    assert in_one_line(OSError()) == "OSError"
