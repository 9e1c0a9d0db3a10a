"""Measure this machine: the codecs and the training loop."""
