"""Processes, threads and the code that runs in them: whose turn it is, workers, forked ranks, Ctrl-C, user frames."""
