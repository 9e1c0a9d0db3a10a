"""Each module is the program of one process: a system that is measured beside ours, or ours."""
