"""What every other folder may use: identities, addresses, names, events, files that are written whole."""
