"""Training scripts that others wrote, run unchanged by `memsize run`."""
