"""The project's own ground truth: declared workloads, run for real on a GPU, beside what is predicted of them.

suite     the one table of workloads
outcomes  what one of them came to, and the file of a GPU and stack
figures   how good the predictions are, and how good they are to be
table     the same as docs/accuracy.md shows it
lanes     the processes that measure
"""
