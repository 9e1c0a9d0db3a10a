"""The p2pd process: how it is started, asked and stopped, and how its sockets are removed."""
