"""Text of others in sentences and on terminals."""

from noloco_node.base.validation import printable


def test_text_of_others_cannot_command_a_terminal() -> None:
    assert printable("a\tb\nü \x1b]0;x\x07\x1b[2J\r\x9b") == "a\tb\nü \ufffd]0;x\ufffd\ufffd[2J\ufffd\ufffd"
