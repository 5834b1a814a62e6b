"""What was asked, parsed once into values."""
