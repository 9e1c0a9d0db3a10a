"""What a browser and Prometheus see of a node, over plain HTTP. It reads views and knows nothing of a node's inside."""
