"""What travels between nodes: messages, generated code."""
