"""What `doctor` looks at: probes find the facts of this machine, verdicts judge them, run_checks asks in order."""
