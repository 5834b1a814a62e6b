"""Frozen records of measurements and conclusions. Nothing here needs torch."""
