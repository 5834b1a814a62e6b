"""Find the largest size that fits a GPU, the limit at the next size, and remedies."""
