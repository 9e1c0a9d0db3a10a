"""What people look at. Everything here reads views (control/views.py) and knows nothing of a node's inside."""
