"""Start a program that may change files in some folders only, by Linux's Landlock.

It runs as a file of its own, ``python -I -S landlock.py [--offline] [--any-file] FOLDER … -- PROGRAM ARGUMENT …``, and
becomes the program: it needs the standard library alone and starts in some 15 ms. Landlock needs no rights and cannot
be lifted again, also not by the processes that the program starts. Reading, and making folders and empty files, is
allowed everywhere; modes and times are not among what Landlock knows. Where the system has none (before Linux 5.13,
other systems) nothing is held back.

Sources: Linux, include/uapi/linux/landlock.h and Documentation/userspace-api/landlock.rst.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls, which all architectures share."""
_VERSION = 1
_PATH_BENEATH = 1
_NO_NEW_PRIVS = 38
_CONNECT_TCP = 1 << 1
_WRITE_FILE, _REMOVE_DIR, _REMOVE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 4, 1 << 5, 1 << 13, 1 << 14


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64), ("handled_access_net", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def _system_call(number: int, *args: object) -> int:
    return int(ctypes.CDLL(None).syscall(number, *args))


def version() -> int:
    """Return the version of Landlock that the system has, 0 for none."""
    if sys.platform != "linux":
        return 0
    return max(0, _system_call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION)))


def restrict(folders: Iterable[str] | None, offline: bool) -> None:
    """Let this process and its children change files in `folders` alone (None: any), and be `offline` (Linux 6.7)."""
    present = version()
    if not present:
        return
    rights = _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE
    rights |= (_REFER if present >= 2 else 0) | (_TRUNCATE if present >= 3 else 0)
    rights = 0 if folders is None else rights
    connections = _CONNECT_TCP if offline and present >= 4 else 0
    if not (rights or connections):
        return
    ruleset = _Ruleset(rights, connections)
    size = ctypes.c_size_t(ctypes.sizeof(ruleset))
    descriptor = _system_call(_CREATE_RULESET, ctypes.byref(ruleset), size, ctypes.c_uint32(0))
    if descriptor < 0:
        return
    for folder in () if folders is None else ("/dev", "/proc", *folders):
        if os.path.isdir(folder):
            rule = _PathBeneath(rights, os.open(folder, os.O_PATH | os.O_CLOEXEC))
            _system_call(_ADD_RULE, descriptor, _PATH_BENEATH, ctypes.byref(rule), ctypes.c_uint32(0))
            os.close(rule.parent_fd)
    ctypes.CDLL(None).prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    _system_call(_RESTRICT_SELF, descriptor, ctypes.c_uint32(0))
    os.close(descriptor)


if __name__ == "__main__":
    end = sys.argv.index("--")
    limits = sys.argv[1:end]
    folders = [limit for limit in limits if not limit.startswith("--")]
    restrict(None if "--any-file" in limits else folders, "--offline" in limits)
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and the program would, too
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    program, *arguments = sys.argv[end + 1 :]
    os.execv(program, arguments)
