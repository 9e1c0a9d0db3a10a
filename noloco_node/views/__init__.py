"""What a node shows to its user: frozen dataclasses, and the same as JSON."""
