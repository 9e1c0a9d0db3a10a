"""What travels between nodes: messages, fragments, generated code."""
