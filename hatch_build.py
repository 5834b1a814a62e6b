"""Compiles the allocator's replay where there is a C++ compiler: when memsize is installed from its sources, or by
`python hatch_build.py` in the working folder. memsize does without, and then takes longer on deep models.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent / "memsize/device/libreplay.cpp"
LIBRARY = SOURCE.with_suffix(".so")
FLAGS = ["-std=c++17", "-O2", "-shared", "-fPIC"]


def compile_replay() -> str:
    """Compile the library, and return why that was not possible; empty if it was. MEMSIZE_PURE=1 leaves it out."""
    LIBRARY.unlink(missing_ok=True)
    if os.environ.get("MEMSIZE_PURE") or sys.platform == "win32":
        return "left out"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    try:
        subprocess.run([*compiler, *FLAGS, "-o", LIBRARY, SOURCE], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        return str(error.stderr)
    except OSError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(compile_replay() or None)

from hatchling.builders.hooks.plugin.interface import BuildHookInterface  # noqa: E402


class CompiledHook(BuildHookInterface):
    """hatchling's hook: the wheel is one for this platform if it has the library, and for all others without."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if reason := compile_replay():
            self.app.display_warning(f"memsize is installed without its compiled code: {reason}")
        elif version != "editable":
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data.update(pure_python=False, tag=f"py3-none-{platform}")
            build_data["artifacts"].append(str(LIBRARY.relative_to(self.root)))
