"""`doctor`: probes.py finds facts, verdicts.py judges them, run_checks.py runs both; bug_report.py packs logs."""
