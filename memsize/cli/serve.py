"""`memsize serve`: what a paged server such as vLLM holds, and how many requests it serves at once."""

from __future__ import annotations

from memsize.cli.command import answer, command
from memsize.cli.output import Destination
from memsize.spec.requests import ServeRequest


@command(
    ServeRequest,
    short_help="Show how many tokens and requests a paged server has room for.",
    epilog="""\b
    Examples:
      memsize serve hf:config.json --gpu h100 --max-model-len 8192
      memsize serve hf:config.json --gpu h100 --tensor-parallel-size 2 -s bf16,fp8-weight,int4-weight
      memsize serve hf:config.json --gpu l4 --gpu-memory-utilization 0.95 --kv-cache-dtype fp8
    """,
)
def serve(request: ServeRequest, output: Destination) -> None:
    """Show what a paged server such as vLLM holds on a GPU: weights, its largest step, and the blocks of its KV cache.

    TARGET is a language model of transformers: hf:NAME, or path.py:Name as for memsize report.
    """
    answer(output, "serving", request.model.model, lambda api, progress: api.serve(request, progress=progress))
