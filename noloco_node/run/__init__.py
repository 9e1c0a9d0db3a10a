"""A run: what is trained and how. Its schema, its signature, and the file that its author writes."""
