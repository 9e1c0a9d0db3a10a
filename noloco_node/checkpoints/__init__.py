"""Checkpoints: a node's whole state on disk, when it is written, and what `status` says of it."""
