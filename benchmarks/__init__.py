"""How fast memsize is beside the tools that answer a similar question, in the same run: `python -m benchmarks`."""
