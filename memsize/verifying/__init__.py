"""Predicted beside measured: the same step run for real on a GPU, what it took there, and where the two differ.

measurement   the frozen record of one real run, and its JSON
prediction    what memsize says of the same run, in the same terms
alignment     two logs of allocations laid side by side
comparison    figures beside each other: the value that a reader gets

gauge, history, marking, realized, running    the measuring itself; only these name torch
"""
