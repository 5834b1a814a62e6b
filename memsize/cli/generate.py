"""`memsize generate`: what prefill, decode and the KV cache of a language model hold."""

from __future__ import annotations

from memsize.cli.command import answer, command, jobs_option
from memsize.cli.output import Destination
from memsize.spec.requests import GenerateRequest


@command(
    GenerateRequest,
    also=(jobs_option,),
    short_help="Show what prefill, decode and the KV cache hold.",
    epilog="""\b
    Examples:
      memsize generate hf:config.json --prompt 8192 --max-new-tokens 512 --gpu h100
      memsize generate hf:config.json --prompt 2048,8192,32768 --batch-size 1,8,32 -s bf16,int4-weight
      memsize generate hf:config.json --cache-implementation static -o generate.html
    """,
)
def generate(request: GenerateRequest, output: Destination, jobs: int | None) -> None:
    """Show what TARGET holds while it generates tokens: reading the prompt, each step after it, and the KV cache.

    TARGET is a model with a generate method: hf:NAME, or path.py:Name as for memsize report. Its own generate runs.
    """
    answer(
        output,
        "generation",
        request.model.model,
        lambda api, progress: api.generate(request, progress=progress),
        jobs=jobs,
    )
