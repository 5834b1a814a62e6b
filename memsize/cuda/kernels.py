"""What CUDA's kernels do, looked up by op: the facts of all families.

A family is a module of this package: attention, convolution, norms and so on. It says which kernel runs, with a
function on the dispatch key (`kernels()`), and what that kernel does to memory (`registry`). A new family is imported
here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from memsize.cuda import (
    activations,
    attention,
    attention_memory,
    autocast,
    convolution,
    dropout,
    encoder,
    foreach,
    indexing,
    losses,
    matmul,
    norms,
    rnn,
    softmax,
    sparse,
)
from memsize.cuda.registry import COPIES, TEMPORARIES, Copies, Temporary
from memsize.model.tensor_storage import dtype_name
from memsize.torch_internals.dispatch_key import Kernel

NOT_ON_KEY = (attention_memory, convolution, losses, matmul, foreach, sparse)
"""Families with nothing on the dispatch key: kernels of libraries, of losses, for lists of tensors and for sparse ones,
and attention's memory.
"""


def kernels() -> Mapping[str, Kernel]:
    """Every function on the dispatch key, by the operator's name.

    Where autocast wraps an operator, its casts come first; attention does both itself.
    """
    families = (activations, dropout, norms, indexing, rnn, softmax)
    decided = {name: kernel for family in families for name, kernel in family.kernels().items()}
    return {**decided, **autocast.kernels(decided), **attention.kernels(), **encoder.kernels()}


def kernel_temporaries(func: Any, args: Any) -> Iterator[Temporary]:
    """What the kernel of `func` holds at its own peak, besides its arguments and results."""
    found = TEMPORARIES.get(func)
    return iter(()) if found is None else found(*args)


def kernel_copies(func: Any, args: Any, kwargs: Any) -> Copies:
    """The arguments that the kernel of `func` copies first, and the memory format of the copies."""
    found = COPIES.get(func)
    return iter(()) if found is None else found(args, kwargs)


def refuse_mixed(func: Any, operands: Sequence[Any]) -> None:
    """Raise the RuntimeError that the op's CUDA kernel raises when the dtypes of its `operands` differ.

    Without this check, a model of which only a part was cast would seem to run.
    """
    dtypes = [operand.dtype for operand in operands if isinstance(operand, torch.Tensor)]
    if any(dtype is not dtypes[0] for dtype in dtypes):
        names = " and ".join(dict.fromkeys(map(dtype_name, dtypes)))
        raise RuntimeError(f"{func._overloadpacket.__name__}: its operands must have the same dtype, but got {names}")
