"""Other nodes: their signed presence records in the DHT, how many there are, and which runs they know."""
