"""What a browser and Prometheus see of a node, over plain HTTP. It reads views and knows no part of a node."""
