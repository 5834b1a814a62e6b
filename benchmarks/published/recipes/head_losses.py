"""Gemma 2's head and loss, as the benchmark of Cut Cross-Entropy measured them: what a forward, a backward, or both add
to the peak over what was there before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

import memsize
from benchmarks.published.rows import Row

TOKENS, VOCABULARY, WIDTH, CAP = 8192, 256_000, 2304, 30.0
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def predict(row: Row) -> int:
    """The second of two measurements; the first one compiled."""
    with memsize.virtual_gpu(row.source.gpu, stack=row.source.stack):
        torch.set_float32_matmul_precision("high")
        states, head = (
            torch.randn(size, WIDTH, dtype=torch.bfloat16, device="cuda").requires_grad_()
            for size in (TOKENS, VOCABULARY)
        )
        targets = torch.randint(VOCABULARY, (TOKENS,), device="cuda")
        loss = _METHODS[row.values["method"]]()
        for _ in range(2):
            states.grad = head.grad = None
            added = _added(row.values["of"], partial(loss, states, head, targets))
    torch.compiler.reset()
    return added


def _added(of: str, run: Callable[[], Tensor]) -> int:
    before = _restarted()
    loss = run()
    if of == "backward":
        before = _restarted()
    if of != "forward":
        loss.backward()
    return torch.cuda.max_memory_allocated() - before


def _restarted() -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


def _uncompiled() -> Loss:
    return partial(_loss, _capped)


def _compiled() -> Loss:
    torch._dynamo.reset()
    return torch.compile(partial(_loss, torch.compile(_capped, fullgraph=True)), fullgraph=True)


def _cut() -> Loss:
    from cut_cross_entropy import linear_cross_entropy

    return partial(linear_cross_entropy, softcap=CAP)


def _capped(logits: Tensor) -> Tensor:
    return torch.tanh(logits / CAP) * CAP


def _loss(capped: Callable[[Tensor], Tensor], states: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    logits = capped(states @ head.T)
    return functional.cross_entropy(logits.float(), targets)


_METHODS: Final[dict[str, Callable[[], Loss]]] = {"baseline": _uncompiled, "torch.compile": _compiled, "cce": _cut}
