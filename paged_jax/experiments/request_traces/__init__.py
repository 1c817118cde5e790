"""Real request traces, one file per format, and the workload that is made of them."""
