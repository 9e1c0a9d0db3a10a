"""Used by every other folder: identities, addresses, names, events, states, units, small state files."""
