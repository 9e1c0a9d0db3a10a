"""What a terminal shows: status, peers, a local swarm's board. It reads views and knows nothing of a node's inside."""
