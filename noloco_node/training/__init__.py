"""One replica: its model, its data, its inner steps, and the threads that own them."""
