"""How one fragment is sent: codecs, and which name stands for which."""
