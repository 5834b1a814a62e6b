"""A memory snapshot of a real GPU explained: `reading` its file, the `history` of its blocks, what `stacks` tell of
them, and the `explanation` that they add up to.
"""
