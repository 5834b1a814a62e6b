"""A memory snapshot of a real GPU explained: its file, the `history` of its blocks, and the `explanation` of both."""
