"""Models that change what is not theirs: settings of the process, globals, their own attributes, random numbers."""

from __future__ import annotations

import gc
import locale
import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint


class Fuse:
    """Raises `error` when it is touched for the `at`-th time."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.at = self.count = 0

    def set(self, error: BaseException | None, at: int) -> None:
        self.error, self.at, self.count = error, at, 0

    def touch(self) -> None:
        self.count += 1
        if self.error is not None and self.count == self.at:
            raise self.error


fuse = Fuse()


def touch() -> None:
    """A function without a state of its own, so that copies of a model share it."""
    fuse.touch()


class Fused(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        touch()
        result = self.inner(*args, **kwargs)
        touch()
        return result


class Settings(nn.Linear):
    """Sets all that a program may set."""

    def forward(self, x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_num_threads(3)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.autograd.set_detect_anomaly(True)
        torch.set_float32_matmul_precision("high")
        torch.set_printoptions(precision=2)
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32
        torch.backends.mkldnn.enabled = False
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.mha.set_fastpath_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_cache_enabled(False)
        touch()
        return super().forward(x)


class Python(nn.Linear):
    """Sets all that a program may set outside of PyTorch."""

    def forward(self, x: Tensor) -> Tensor:
        warnings.simplefilter("always")
        warnings.showwarning = print
        os.environ["MEMSIZE_TEST_ADDED"] = "1"
        os.environ.pop("HOME", None)
        os.chdir("/")
        sys.path.insert(0, "/nowhere")
        sys.argv = ["train.py", "--epochs", "3"]
        sys.setrecursionlimit(3000)
        sys.excepthook = print
        logging.getLogger().setLevel(logging.DEBUG)
        logging.getLogger().addHandler(logging.NullHandler())
        logging.disable(logging.CRITICAL)
        locale.setlocale(locale.LC_ALL, "C")
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        gc.disable()
        gc.set_threshold(7)
        np.set_printoptions(precision=2)
        np.seterr(all="ignore")
        touch()
        return super().forward(x)


class Hooking(nn.Linear):
    """Hooks that are meant for all modules and all optimizers."""

    def forward(self, x: Tensor) -> Tensor:
        nn.modules.module.register_module_forward_hook(lambda *_: None)
        nn.modules.module.register_module_full_backward_hook(lambda *_: None)
        torch.optim.optimizer.register_optimizer_step_pre_hook(lambda *_: None)
        touch()
        return super().forward(x)


class Seeding(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        touch()
        return super().forward(x + torch.randn_like(x) * random.random() * np.random.rand())


class Counting(nn.Module):
    """Keeps what it sees, in attributes of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.hidden = [nn.Linear(8, 8)]
        self.register_buffer("steps", torch.zeros(1))
        self.count, self.seen, self.last, self.plain = 0, [], {}, torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(x.shape)
        self.last["x"] = x
        self.steps += 1
        self.plain.add_(1)
        with torch.no_grad():
            self.body.weight.mul_(0.9)
            self.body.weight.data.clamp_(-1, 1)
        touch()
        return self.hidden[0](self.body(x)) + self.plain


calls = [0]
cache: dict[str, Tensor] = {}
latest: Tensor | None = None


def remembered(x: Tensor) -> Tensor:
    global latest
    latest = x
    return cache.setdefault("mask", torch.ones_like(x))


class Global(nn.Module):
    """Changes globals of its module and attributes of its class."""

    count = 0
    shapes: list[torch.Size] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        calls[0] += 1
        Global.count += 1
        Global.added = x
        self.shapes.append(x.shape)
        touch()
        return self.body(x) * remembered(x)


def globals_of_modules() -> dict[str, Any]:
    """What `Global` changes."""
    kept = {name: value for name, value in vars(Global).items() if not name.startswith("__")}
    contents = {"shapes": list(Global.shapes), "calls": list(calls), "cache": sorted(cache)}
    return kept | contents | {"latest": id(latest)}


class Regions(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            touch()
            y = super().forward(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            touch()
            z = super().forward(x)
        with torch.inference_mode():
            touch()
        return y + z


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(8, 16, 2, batch_first=True, dropout=0.1)
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        touch()
        output, self.state = self.rnn(x)
        return output


class Checkpointed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        touch()
        return checkpoint(super().forward, x, use_reentrant=False)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        touch()
        return self.attention(x, x, x)[0]


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), Fused(nn.BatchNorm1d(8)), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    model[1].eval()
    model[2].weight.grad = torch.ones_like(model[2].weight)
    return model


def hooked() -> nn.Module:
    model = Fused(nn.Linear(8, 8))
    model.inner.register_forward_hook(lambda *_: touch())
    model.inner.register_full_backward_hook(lambda *_: None)
    model.inner.weight.register_hook(lambda gradient: gradient)
    return model


def tied() -> nn.Module:
    embed, head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
    head.weight = embed.weight
    return nn.Sequential(embed, Fused(head))


def pruned() -> nn.Module:
    layer = nn.Linear(8, 8)
    prune.l1_unstructured(layer, "weight", 0.5)
    return Fused(layer)


def quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8), Fused(nn.ReLU())))


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | str]] = {
    "settings": (lambda: Settings(8, 8), (8,)),
    "python": (lambda: Python(8, 8), (8,)),
    "hooks of all": (lambda: Hooking(8, 8), (8,)),
    "seeding": (lambda: Seeding(8, 8), (8,)),
    "counting": (Counting, (8,)),
    "global": (Global, (8,)),
    "regions": (lambda: Regions(8, 8), (8,)),
    "lstm": (lambda: Recurrent(nn.LSTM), (5, 8)),
    "gru": (lambda: Recurrent(nn.GRU), (5, 8)),
    "checkpointed": (lambda: Checkpointed(8, 8), (8,)),
    "attention": (Attending, (5, 16)),
    "encoder": (lambda: Fused(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)).eval(), (5, 16)),
    "convolutions": (lambda: nn.Sequential(Fused(nn.Conv2d(4, 4, 3)), nn.BatchNorm2d(4), nn.Dropout()), (4, 8, 8)),
    "lazy": (lambda: Fused(nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d())), (7,)),
    "frozen": (frozen, (8,)),
    "hooked": (hooked, (8,)),
    "tied": (tied, "5:int64"),
    "pruned": (pruned, (8,)),
    "half": (lambda: Fused(nn.Linear(8, 8)).half(), (8,)),
    "mixed": (lambda: nn.Sequential(nn.Linear(8, 8).double(), Fused(nn.Linear(8, 8))), (8,)),
    "quantized": (quantized, (8,)),
    "spectral norm": (lambda: Fused(nn.utils.spectral_norm(nn.Linear(8, 8))), (8,)),
    "weight norm": (lambda: Fused(parametrizations.weight_norm(nn.Linear(8, 8))), (8,)),
    "parallel": (lambda: nn.DataParallel(Fused(nn.Linear(8, 8))), (8,)),
    "scripted": (scripted, (8,)),
    "wrong shapes": (lambda: nn.Sequential(nn.Linear(8, 8), Fused(nn.Linear(9, 9))), (8,)),
}
"""Each with the size of its input."""
