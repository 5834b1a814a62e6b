"""Guards of a program: the files that were there before, the network, and the processes that it starts."""
