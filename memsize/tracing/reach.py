"""Which parameters a gradient can reach from a model's outputs."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def parameters_reached(outputs: Iterable[torch.Tensor]) -> set[int]:
    """The ids of the leaf tensors at the far end of the outputs' autograd graph."""
    todo = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    found = {id(tensor) for tensor in outputs if tensor.is_leaf and tensor.requires_grad}
    seen = set(todo)
    while todo:
        node = todo.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return found
