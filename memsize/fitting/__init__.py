"""Questions whose answer is a size: what fits, and from where on one way of running is better than another.

Answers are found by measuring, never by extrapolating: what is extrapolated only says where to look.
"""

from __future__ import annotations

from memsize.fitting.crossover import Crossover, find_crossover

__all__ = ["Crossover", "find_crossover"]
