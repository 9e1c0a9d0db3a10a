"""What this box and this link can do."""
