"""Fuzzing: checkpoints, options and models made to break memsize, each run in a process of its own under limits.

`python -m benchmarks.fuzz --seconds 60`. A trial fails where the command ends otherwise than with an answer or one line
of refusal, takes too long or too much memory, touches a file that it was not told to, starts a program, opens a
connection, or shows what a terminal would obey.
"""
