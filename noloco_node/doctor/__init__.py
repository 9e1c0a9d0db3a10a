"""What `doctor` looks at: probes find the facts of this machine, verdicts judge them, examination asks in order."""
