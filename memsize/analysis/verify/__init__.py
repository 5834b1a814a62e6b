"""A prediction compared with a real GPU: the same step is run there, measured, and aligned with the prediction."""
