"""What fits a GPU: the largest size, what binds it, and what would make more fit."""
