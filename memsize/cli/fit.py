"""`memsize fit`: the largest batch that fits, and what would make a larger one fit."""

from __future__ import annotations

from dataclasses import replace

from memsize.cli.command import answer, command, jobs_option, parts_shown
from memsize.cli.output import Destination
from memsize.spec.requests import FitRequest, FitScriptRequest


@command(
    FitRequest,
    also=(jobs_option,),
    epilog="""\b
    Examples:
      memsize fit model.py:Net --input 3,224,224 --train adamw --gpu t4
      memsize fit model.py:Net --input 3,224,224 --train adamw --gpu t4,a100,h100
      memsize fit model.py:Net --input 3,224,224 --train adamw --gpu t4 --batch-size 256
      memsize fit hf:config.json --seq-len 2048 --train adamw --gpu h100 --parallel fsdp --gpus 1..64
      memsize fit nets:gpt --input input_ids=512:int64 --vary seq_len --batch-size 8 --budget 24GB
      memsize fit hf:config.json --vary context --max-new-tokens 512 --batch-size 8 --gpu h100
    """,
)
def fit(request: FitRequest, output: Destination, jobs: int | None) -> None:
    """Find the largest batch of TARGET that fits on a GPU, scenario by scenario.

    The answer and the next larger batch are both run. TARGET is path.py:Name, package.module:name or a library's model
    such as hf:llama, as for memsize report. The caching allocator gets the GPU's memory minus the CUDA context and the
    margin.
    """
    answer(
        output,
        "fit",
        request.model.model,
        ask=lambda api, progress: api.fit(request, **parts_shown(progress, output)),
        jobs=jobs,
    )


@command(
    FitScriptRequest,
    context_settings={"allow_interspersed_args": False},
    epilog="""\b
    Examples:
      memsize fit-script --gpu t4 --vary-argument batch-size train.py --batch-size 8
      memsize fit-script --gpu t4,a100 --vary-argument train.batch_size train.py train.batch_size=8

    \b
    Options of memsize come before the script, the script's own after it.
    """,
)
def fit_script(request: FitScriptRequest, output: Destination) -> None:
    """Find the largest value of an argument of SCRIPT with which it fits on a GPU.

    SCRIPT is run as by memsize run, with one value after another.
    """
    arguments = tuple(request.arguments)
    if arguments[:1] == ("--",):  # `fit-script … SCRIPT -- ARGUMENTS`
        request = replace(request, arguments=arguments[1:])
    answer(
        output,
        "fit",
        request.script,
        ask=lambda api, progress: api.fit_script(request, **parts_shown(progress, output)),
    )
