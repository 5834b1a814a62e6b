"""Commands that draw one answer as it is: those of a checkpoint, a comparison, a snapshot, a search, a sweep …"""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from memsize.cli.click_options import Count, is_given
from memsize.cli.command import (
    WITH_CALLS,
    WITH_PARQUET,
    WITH_SNAPSHOT,
    answer,
    asking,
    command,
    depth_option,
    followed,
    is_saved,
    jobs_option,
    parts_shown,
    refuse_options,
)
from memsize.cli.output import Destination
from memsize.cli.working import interrupts_raised, working
from memsize.errors import InputError, OutputError
from memsize.loading.target import is_checkpoint, parse_revision, parse_target
from memsize.records.run_file import is_run_file
from memsize.spec.file_requests import CheckpointRequest, ExplainRequest, FitScriptRequest, SweepRequest
from memsize.spec.requests import (
    DiffRequest,
    FitRequest,
    GenerateRequest,
    LayoutRequest,
    ServeRequest,
    TimelineRequest,
    VerifyRequest,
)
from memsize.version import VERSION

_DEPTH = click.Option(
    ["--depth"],
    type=Count(min=0),
    metavar="N",
    help="Show modules down to this depth within each part. [default: a readable number of rows]",
)


@command(
    CheckpointRequest,
    also=(_DEPTH,),
    epilog="""\b
    Examples:
      memsize checkpoint last.ckpt
      memsize checkpoint model.safetensors.index.json --depth 3
      memsize checkpoint llama-Q4_K_M.gguf --units GiB
      memsize checkpoint last.ckpt --against model.py:Net --arg width=64
      memsize checkpoint last.ckpt -o last.html
    """,
)
def checkpoint(request: CheckpointRequest, output: Destination, depth: int | None) -> None:
    """Show what takes up the space in FILE: parts, dtypes, modules, and every byte outside the tensors.

    FILE is a file written by torch.save (.pt, .pth, .bin, .ckpt), a safetensors or GGUF file, an index.json of several
    files, or a folder with one of these. Only headers are read, and nothing that a pickle names is run.
    """
    answer(output, "checkpoint", request.path, ask=lambda api, _: api.checkpoint(request), depth=depth)


@command(
    DiffRequest,
    also=(jobs_option,),
    shows_saved=False,
    epilog="""\b
    Examples:
      memsize diff HEAD~1:model.py:Net model.py:Net --input 3,224,224
      memsize diff main:model.py:Net model.py:Net --input 3,224,224 --train adamw --gpu t4 -o comment.md
      memsize diff old.py:Net new.py:Net --input 3,224,224 --scenario fp32,amp-bf16
      memsize diff before.memsize after.memsize
      memsize diff epoch1.ckpt epoch2.ckpt
    """,
)
def diff(request: DiffRequest, output: Destination, jobs: int | None) -> None:
    """Show what changed from BEFORE to AFTER: layers, bytes by role and scenario, the peak and the findings.

    Each is a target of memsize report, such as model.py:Net, a target at a git revision, such as HEAD~1:model.py:Net, a
    saved run, or a checkpoint. A revision is checked out beside your files, which stay as they are. The options are
    those of memsize report and apply to both.
    """
    if not any([_is_run(request.before), _is_run(request.after)]):
        refuse_options(f"{request.before} and {request.after} are files")
    answer(output, "comparison", None, asking("diff", request), jobs=1 if request.execute else jobs)


def _is_run(side: str) -> bool:
    """Whether a side is a model that has to be run; raises `TargetError` for a text that is no target."""
    if is_run_file(side) or is_checkpoint(side):
        return False
    if parse_revision(side) is None:
        parse_target(side)
    return True


@command(
    ExplainRequest,
    formats=WITH_CALLS,
    epilog="""\b
    Examples:
      memsize explain train.log
      python train.py 2>&1 | memsize explain -
      memsize explain snapshot.pickle
      memsize explain oom.pickle --against run.memsize
      memsize explain after.pickle --against before.pickle
      memsize explain snapshot.pickle -o snapshot.html

    \b
    To record a snapshot:
      torch.cuda.memory._record_memory_history(max_entries=100000)
      ... your program ...
      torch.cuda.memory._dump_snapshot("snapshot.pickle")
    """,
)
def explain(request: ExplainRequest, output: Destination) -> None:
    """Show what FILE says about a real GPU that ran out of memory.

    A text with PyTorch's error, such as a log (- reads stdin; the message itself will do too), says what the GPU held
    and what would have helped. A snapshot by torch.cuda.memory._dump_snapshot also says what was alive, what it was
    for, and which lines made it. Nothing in the file is run.
    """
    answer(output, "explanation", request.snapshot, ask=lambda api, _: api.explain(request))


@command(
    GenerateRequest,
    also=(jobs_option,),
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
    Of a pipeline, diffusers:NAME, the phases are shown: text encoding, denoising, decoding.
    """
    answer(output, "generation", request.model.model, asking("generate", request), jobs=jobs)


@command(
    LayoutRequest,
    also=(depth_option,),
    epilog="""\b
    Examples:
      memsize layout model.py:Net --input 3,224,224
      memsize layout timm:convnext_tiny --batch-size 32 --scenario amp-bf16
      memsize layout torchvision:r3d_18 -o layout.html
    """,
)
def layout(request: LayoutRequest, output: Destination, depth: int | None) -> None:
    """Show which operations of TARGET lose channels last, and what is copied only to rearrange it.

    TARGET is path.py:Name, package.module:name or a library's model, as for memsize report. It is run twice: as it is,
    and with the weights and inputs that are images (4-D) or volumes (5-D) in channels last.
    """
    answer(output, "layout", request.model.model, asking("layout", request), depth=depth)


@command(
    ServeRequest,
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
    answer(output, "serving", request.model.model, asking("serve", request))


@command(
    VerifyRequest,
    epilog="""\b
    Examples:
      memsize verify model.py:Net --input 3,224,224 --train adamw
      memsize verify model.py:Net --input 3,224,224 --train adamw --scenario amp-bf16 --save h100.memsize
      memsize verify model.py:Net --input 3,224,224 --train adamw --scenario amp-bf16 --against h100.memsize
    """,
)
def verify(request: VerifyRequest, output: Destination) -> None:
    """Predict a step of TARGET, run it on this machine's GPU, and compare the two.

    TARGET is path.py:Name, package.module:name or a library's model, as for memsize report. With --train, training
    steps are run; without, one inference. If prediction and measurement differ, the first operations whose allocations
    differ are listed. Convolutional networks are run a second time with cudnn.benchmark.
    """
    made_by = {"command": shlex.join(["memsize", *sys.argv[1:]]), "version": VERSION}
    answer(
        output,
        "verification",
        request.model.model,
        ask=lambda api, progress: replace(api.verify(request, progress=progress), **made_by),
    )


@command(
    TimelineRequest,
    formats=WITH_SNAPSHOT,
    epilog="""\b
    Examples:
      memsize timeline model.py:Net --input 3,224,224 --train adamw
      memsize timeline model.py:Net --input 3,224,224 --train adamw --scenario amp-bf16 -o step.html
      memsize timeline hf:config.json --seq-len 2048 --train adamw --parallel fsdp=8 --gpu h100
      memsize timeline model.py:Net --input 3,224,224 --train sgd -o step.pickle

    \b
    A .pickle is a PyTorch memory snapshot, which https://pytorch.org/memory_viz displays.
    """,
)
def timeline(request: TimelineRequest, output: Destination) -> None:
    """Show the live memory of TARGET over its training steps, by role; without --train, over one inference.

    TARGET is path.py:Name, package.module:name or a library's model, as for memsize report.
    """
    # What the user's model prints goes to stderr: stdout holds the timeline and nothing else.
    with working() as progress:
        from memsize import api
        from memsize.analysis.step import load_step
        from memsize.analysis.timeline import pickled
        from memsize.device.allocator_config import AllocatorConfig

        allocator = request.gpu.allocator
        if saved := is_saved(request.model.model, "scenario", "allocator"):
            step = load_step(str(request.model.model), request.scenario if is_given("scenario") else None)
            step = replace(step, config=AllocatorConfig.of(allocator)) if allocator else step
        else:
            step = api.step_trace(request, progress=progress)
        output.keep(step)
        progress("writing the timeline")
        if output.format == "snapshot":
            content: Any = pickled(step.trace, step.config)
        else:
            content = output.drawn(step.as_timeline())
    output.write(content if saved else followed(content, output))


@command(
    SweepRequest,
    formats=WITH_PARQUET,
    epilog="""\b
    Examples:
      memsize sweep sweep.toml
      memsize sweep sweep.toml -o sweep.csv
      memsize sweep sweep.toml --backend dask --scheduler tcp://10.0.0.1:8786

    \b
    A sweep.toml:
      target = ["timm:resnet*", "torchvision:vgg16"]
      train = "adamw"
      batch_size = [8, 32, 128]
      gpu = ["t4", "a100"]
    """,
)
def sweep(request: SweepRequest, output: Destination) -> None:
    """Run every cell of a grid: models and patterns of models, scenarios, batch sizes, GPUs.

    FILE is a TOML file whose keys are those of memsize check. Finished cells are kept in a results file, so that an
    interrupted sweep continues where it stopped.
    """
    file = Path(str(request.grid))
    if file.is_dir():
        raise InputError(f"{file} is a folder: name the TOML file of the sweep")
    # What the user's models print goes to stderr: stdout holds the answer and nothing else.
    with output.shown_if_interrupted(), working() as progress, interrupts_raised():
        from memsize import api
        from memsize.analysis.step import load_kind

        if is_saved(file):
            table = load_kind(file, "sweep")
        elif file.suffix == ".jsonl" and not request.results:
            raise OutputError(f"{file} holds results: name the TOML file of the sweep")
        else:
            results = request.results or file.with_suffix(".jsonl")
            table = api.sweep(replace(request, results=results), progress=progress)
        progress("writing the answer")
        output.keep(table)
        content = table.parquet() if output.format == "parquet" else output.drawn(table)
    output.write(content)


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
