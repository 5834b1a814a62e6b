"""Well-known networks in plain PyTorch, as their papers and usual implementations have them: nothing is downloaded."""
