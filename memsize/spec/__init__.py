"""Requests as values, parsed once."""
