"""This machine: its settings, its state directory, its memory, and the limits that its owner sets."""
