"""What is run: inference, training, the user's own loop."""
