"""gRPC between peers: over libp2p, or in memory."""
