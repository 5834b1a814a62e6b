"""What of a process, and of a model, must be the same before and after memsize ran."""

from __future__ import annotations

import gc
import locale
import logging
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils

from memsize import interrupt as interrupt
from memsize.cli import output as output
from memsize.cli.output import Color as Color, destination as destination
from memsize.cli.working import (
    Progress as Progress,
    Session as Session,
    interrupts_raised as interrupts_raised,
    remaining as remaining,
    stdout_to_stderr as stdout_to_stderr,
)
from memsize.processes import ctrl_c as ctrl_c
from memsize.processes.patches import Patches as Patches, SuspendablePatches as SuspendablePatches
from memsize.processes.rank_processes import RankConnection as RankConnection, connected as connected, opened as opened
from memsize.processes.simulation import current as current, open_simulation as open_simulation, running as running
from memsize.processes.spread import Died as Died, spread as spread
from memsize.processes.workers import Workers as Workers, can_fork as can_fork, side_by_side as side_by_side
from memsize.torch_internals.isolation import isolated as isolated, settings_kept as settings_kept

_PATCHED = (
    *(torch, torch._C._nn, torch._VF, nn.functional, torch.Tensor, torch.UntypedStorage, nn.Module, nn.init),
    *(nn.LSTM, nn.MultiheadAttention, nn.DataParallel, torch.autograd, torch.autograd.graph, torch.cuda, torch.amp),
    *(torch.optim.Optimizer, torch.optim.Adam, torch.optim.SGD, torch_optimizer, _foreach_utils),
    *(torch.utils.checkpoint, torch._ops.OpOverloadPacket, np, random, threading, threading.Thread, warnings, os),
)
"""Modules and classes whose names must mean the same objects."""


def process_state() -> dict[str, Any]:
    """Everything global that can be compared, by what it is called."""
    state = {
        "torch's random numbers": torch.get_rng_state().tolist(),
        "Python's random numbers": random.getstate(),
        "NumPy's random numbers": [str(each) for each in np.random.get_state(legacy=True)],
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "defaults": (torch.get_default_dtype(), str(torch.get_default_device()), torch.get_num_threads()),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "precision": (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32),
        "backends": [
            [getattr(backend, name) for name in ("enabled", "deterministic", "allow_tf32")]
            for backend in (torch.backends.cudnn, torch.backends.mkldnn)
        ],
        "benchmark": torch.backends.cudnn.benchmark,
        "attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.mha.get_fastpath_enabled(),
        ),
        "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "hooks of all modules": {
            name: value if isinstance(value, (bool, type(None))) else list(value)
            for name, value in vars(nn_module).items()
            if name.startswith("_global_")
        },
        "hooks of all optimizers": [
            list(torch_optimizer._global_optimizer_pre_hooks),
            list(torch_optimizer._global_optimizer_post_hooks),
        ],
        "devices of optimizers": [
            torch_optimizer._get_foreach_kernels_supported_devices(),
            torch_optimizer._get_fused_kernels_supported_devices(),
            _foreach_utils._get_foreach_kernels_supported_devices(),
        ],
        "graph executor": torch._C._get_graph_executor_optimize(),
        "print options": (str(torch._tensor_str.PRINT_OPTS), str(np.get_printoptions()), str(np.geterr())),  # type: ignore[attr-defined]
        "patches": {
            f"{getattr(owner, '__name__', owner)}.{name}": id(value)
            for owner in _PATCHED
            for name, value in vars(owner).items()
            if not name.startswith(("__", "_abc"))
            if callable(value) or isinstance(value, str)
        },
        "warnings": ([str(each) for each in warnings.filters], id(warnings.showwarning)),
        "imports": (list(sys.path), list(sys.argv), sorted(map(str, sys.modules))),
        "streams": (id(sys.stdin), id(sys.stdout), id(sys.stderr)),
        "logging": (list(logging.root.handlers), logging.root.level, logging.root.manager.disable),
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "locale": locale.setlocale(locale.LC_ALL),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "collector": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
        "recursion": sys.getrecursionlimit(),
        "tracing": (sys.gettrace(), sys.getprofile()),
        "exceptions": (sys.excepthook, sys.displayhook, threading.excepthook),
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }
    files = Path("/proc/self/fd")
    return state | ({"files": sorted(os.listdir(files))} if files.is_dir() else {})


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What differs, each with both values; of mappings only the entries that do."""
    found: dict[str, Any] = {}
    for name in before.keys() | after.keys():
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            keys = [key for key in old.keys() | new.keys() if old.get(key) != new.get(key)]
            found[name] = {key: (old.get(key), new.get(key)) for key in keys}
        else:
            found[name] = (old, new)
    return found
