"""What to run. A workload is a value that turns a setup into the trace of its run; a new one is a new module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from memsize.records.trace import Trace
    from memsize.tracing.run import Setup


class Workload(Protocol):
    """Something to run with a model: one forward, some training steps, the user's own loop."""

    def run(self, setup: Setup) -> Trace:
        """The trace of the workload on `setup`, whose model it may change.

        Raises `ForwardError` when the model's own code fails; its `trace` holds the layers that ran.
        """
        ...
