"""What a node says of itself to its user, as frozen dataclasses, and the same as JSON."""
