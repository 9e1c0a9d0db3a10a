"""Training data: where it comes from, tokens, and the order in which a replica reads them."""
