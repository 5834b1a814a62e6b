"""The network while a program runs with ``--offline``: connections to other machines are refused.

Python announces them to audit hooks, as it does files (`file_guard`). This machine's own addresses and sockets of files
stay open: launchers and data loaders use them. Hugging Face's libraries are switched to what they have on disk, which
they look for at once then.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any, Final

from memsize.processes.patches import environment
from memsize.processes.simulation import Guard, install_guard, open_simulation

_EVENTS: Final = {"socket.connect": 1, "socket.getaddrinfo": 0, "socket.gethostbyname": 0, "socket.sendto": 1}
"""Events that reach another machine: the place of its address among their arguments."""
_VARIABLES: Final = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


class NetworkGuard(Guard):
    """Refuses connections to other machines."""

    events = _EVENTS

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """While open, the program has no network."""
        install_guard(NetworkGuard)
        with open_simulation() as simulation, simulation.with_part(NetworkGuard, self), environment(_VARIABLES):
            yield

    def check(self, event: str, args: tuple[Any, ...]) -> None:
        """Raise ConnectionRefusedError where an operation reaches another machine."""
        address = args[_EVENTS[event]]
        if isinstance(address, (bytes, str)) and os.fsdecode(address).startswith(("/", "\0")):
            return  # a socket that is a file
        host = address[0] if isinstance(address, tuple) else address
        name = host.decode() if isinstance(host, bytes) else host
        if name and not _is_own(name):
            raise ConnectionRefusedError(111, f"memsize run --offline connects to no other machine: {name}")


def _is_own(host: Any) -> bool:
    if not isinstance(host, str) or host in ("localhost", "0.0.0.0", "::", platform.node()):
        return True
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
