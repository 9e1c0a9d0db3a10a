"""What a terminal shows: status, peers, a local swarm's board. It reads views and knows no part of a node."""
