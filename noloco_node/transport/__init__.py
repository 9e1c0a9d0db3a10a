"""gRPC between peers, over libp2p; whether and where peers can call this node."""
