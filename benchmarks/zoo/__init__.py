"""The zoo: every model that a library has, through memsize by its name, in inference and in a training step.

A library's file yields each `Case`, processes that joblib starts make the `trial` of it, each `Outcome` goes
to the results file, and `table` makes a page of them.
"""
