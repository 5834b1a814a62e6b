"""Scripts that torchrun starts, one process for each GPU, mixtures of experts among them, and scripts whose layers are
kernels of Triton.
"""

from __future__ import annotations

import importlib
import subprocess
import sysconfig
from pathlib import Path

from benchmarks.scripts import data
from benchmarks.scripts.recipe import Recipe

_TITAN = "-m torchtitan.train --module {} --config {}"
TITAN = _TITAN.format("llama3", "llama3_debugmodel")
C4 = data.rows("tests/assets/c4_test/data.json", 2000, text=data.sentence, timestamp="2019-04-25T12:57:54Z", url="u")
_TENSOR_PARALLEL = "distributed/tensor_parallelism"

_DEEPSEEK = _TITAN.format("deepseek_v3", "deepseek_v3_debugmodel")


def _dataset_helpers(here: Path) -> None:
    """Megatron's index builder, compiled as its Makefile does; a script that runs may not write there."""
    folder, suffix = here / "megatron/core/datasets", sysconfig.get_config_var("EXT_SUFFIX")
    includes = [f"-I{sysconfig.get_path('include')}", f"-I{importlib.import_module('pybind11').get_include()}"]
    command = ["g++", "-O3", "-shared", "-std=c++17", "-fPIC", *includes, "helpers.cpp", "-o", f"helpers_cpp{suffix}"]
    subprocess.run(command, cwd=folder, check=True)


RECIPES = (
    *(
        Recipe(
            f"torchtitan {name}",
            "pytorch/torchtitan@81e4c0a",
            ".",
            " ".join((start, *(f"--parallelism.{degree}" for degree in degrees))),
            (C4,),
            needs=("datasets", "torchdata", "spmd_types", "triton", "tyro"),
            environment={"PYTHONPATH": "."},
            options="--gpus 8 --gpu h100",
        )
        for name, start, degrees in (
            ("fsdp", TITAN, ()),
            ("fsdp tp", TITAN, ("data_parallel_shard_degree 4", "tensor_parallel_degree 2")),
            ("fsdp pp", TITAN, ("data_parallel_shard_degree 4", "pipeline_parallel_degree 2")),
            ("deepseek_v3 ep", _DEEPSEEK, ("expert_parallel_degree 4",)),
            ("qwen3 moe ep", _TITAN.format("qwen3", "qwen3_moe_debug"), ("expert_parallel_degree 8",)),
            ("llama4 ep", _TITAN.format("llama4", "llama4_debugmodel"), ("expert_parallel_degree 4",)),
        )
    ),
    Recipe(  # examples/mixtral with four layers, on one node
        "megatron mixtral",
        "NVIDIA/Megatron-LM@125629923c",
        ".",
        "pretrain_gpt.py --use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 "
        "--num-layers 4 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 "
        "--attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu "
        "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion "
        "--rotary-base 1000000 --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
        "--moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather "
        "--overlap-grad-reduce --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --split 99990,8,2 "
        "--micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --train-iters 3 --bf16 --expert-model-parallel-size 8 "
        "--use-distributed-optimizer --log-interval 1 --eval-interval 1000 --eval-iters 0",
        (_dataset_helpers,),
        needs=("pybind11",),
        environment={"PYTHONPATH": "."},
        options="--gpus 8 --gpu h100",
    ),
    *(
        Recipe(f"examples/{folder} {file}", "pytorch/examples", folder, f"{file}.py", options=f"--gpus {gpus}")
        for folder, file, gpus in (
            ("distributed/FSDP2", "example", 2),
            (_TENSOR_PARALLEL, "tensor_parallel_example", 4),
            (_TENSOR_PARALLEL, "sequence_parallel_example", 4),
            (_TENSOR_PARALLEL, "fsdp_tp_example", 8),
        )
    ),
    Recipe(
        "lightning autoencoder ddp",
        "Lightning-AI/pytorch-lightning",
        "examples",
        "pytorch/basics/autoencoder.py --trainer.max_epochs=1 --trainer.strategy=ddp",
        (data.digits("Datasets/MNIST", 60000), data.digits("data/MNIST", 60000)),
        needs=("lightning", "torchvision", "jsonargparse"),
        options="--gpus 2",
    ),
    Recipe(
        "detr",
        "facebookresearch/detr",
        ".",
        "main.py --coco_path coco --batch_size 2 --num_workers 2",
        (data.coco("coco"),),
        needs=("torchvision", "pycocotools", "scipy"),
        options="--gpu v100",
    ),
    Recipe(
        "flash-linear-attention kda",
        "fla-org/flash-linear-attention",
        ".",
        "benchmarks/benchmark_training_throughput.py --name kda --num_hidden_layers 2 --batch_size 4 --seq_len 2048",
        needs=("transformers", "accelerate", "triton"),
        environment={"PYTHONPATH": "."},
        options="--gpu h100",
    ),
    Recipe(
        "unsloth lora",
        "unslothai/unsloth",
        ".",
        "unsloth-cli.py --model_name llama --dataset alpaca --max_seq_length 512 --max_steps 3",
        (
            data.preset("meta-llama/Llama-3.2-1B", "llama"),
            data.tokenizer("llama", chat=True),
            data.rows("alpaca/train.json", instruction=data.sentence, input="", output=data.sentence),
        ),
        needs=("unsloth", "unsloth_zoo", "trl", "peft", "datasets", "triton"),
    ),
)
