"""Scripts that torchrun starts, one process for each GPU, and scripts whose layers are kernels of Triton."""

from __future__ import annotations

from benchmarks.scripts import data
from benchmarks.scripts.recipe import Recipe

TITAN = "-m torchtitan.train --module llama3 --config llama3_debugmodel"
C4 = data.rows("tests/assets/c4_test/data.json", 2000, text=data.sentence, timestamp="2019-04-25T12:57:54Z", url="u")
_TENSOR_PARALLEL = "distributed/tensor_parallelism"

RECIPES = (
    *(
        Recipe(
            f"torchtitan {name}",
            "pytorch/torchtitan@81e4c0a",
            ".",
            " ".join((TITAN, *(f"--parallelism.{degree}" for degree in degrees))),
            (C4,),
            needs=("datasets", "torchdata", "spmd_types", "triton", "tyro"),
            environment={"PYTHONPATH": "."},
            options="--gpus 8 --gpu h100",
        )
        for name, degrees in (
            ("fsdp", ()),
            ("fsdp tp", ("data_parallel_shard_degree 4", "tensor_parallel_degree 2")),
            ("fsdp pp", ("data_parallel_shard_degree 4", "pipeline_parallel_degree 2")),
        )
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
