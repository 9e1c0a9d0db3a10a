"""What happened on a node: figures, curves, files, exporters and health lines. It changes nothing."""
