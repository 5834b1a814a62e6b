"""Ways to need less memory, each tried by running the model with it."""
