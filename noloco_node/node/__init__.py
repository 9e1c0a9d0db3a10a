"""A running node. This folder builds every part and connects them; no other folder knows all the parts."""
