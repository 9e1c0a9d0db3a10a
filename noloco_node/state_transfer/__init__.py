"""The live state of a peer: fetched by nodes that join or have fallen behind, and collected for an export."""
