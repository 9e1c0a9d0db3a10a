"""The local control service: what a node's own user can ask and order, over a unix socket."""
