"""The memory that stands in for a GPU's, where tests look for it."""

from benchmarks.truth.standin import CONTEXT, STACK, StandIn, trace_entry

__all__ = ["CONTEXT", "STACK", "StandIn", "trace_entry"]
