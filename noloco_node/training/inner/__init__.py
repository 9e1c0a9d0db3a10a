"""The inner steps of a replica: loss and gradient of a batch, AdamW, and the learning rate."""
