"""A prediction beside a real GPU: the same step run there, measured and laid side by side."""
