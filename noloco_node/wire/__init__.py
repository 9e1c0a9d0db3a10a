"""What travels between nodes: messages, the format of a state transfer, generated code."""
