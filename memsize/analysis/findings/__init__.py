"""Rules from numbers to causes: why memory did, or did not, shrink."""
