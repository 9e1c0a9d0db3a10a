"""The local control service: what a node tells its own user over a unix socket, and nobody else."""
