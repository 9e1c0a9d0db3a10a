"""Outer rounds between two nodes: calls, appointments, and the swap of a vector fragment by fragment."""
