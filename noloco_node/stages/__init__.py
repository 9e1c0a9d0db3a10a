"""A model larger than a box: a node holds one stage of it, and micro-batches go from stage to stage."""
