"""The zoo: every model that a library has, through memsize by its name, in inference and in a training step.

A library's file yields each `Case`, a worker process makes the `trial` of it, the runner gathers each `Outcome` in the
results file, and `table` makes a page of them.
"""
