"""A run: what is trained and how. Its schema, its signed manifest, and the file that its author writes."""
