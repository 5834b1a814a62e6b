"""Scripts of 2025 and 2026 that were tried after those of the other modules."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.scripts import data, fine_tuning, research, research_data, several_gpus
from benchmarks.scripts.data import Maker
from benchmarks.scripts.recipe import Recipe

_NAMED = data.pictures("images", count=64, name="dog_{}.jpg")
_HERE = {"PYTHONPATH": "."}
_CORA = data.planetoid("../data/Planetoid/Cora/raw")
_GYM = ("gymnasium", "tyro", "tensorboard")


def _ijepa(here: Path) -> None:
    """The repository's settings with the folders of the data and of the results, which it leaves open."""
    text = (here / "configs/in1k_vith14_ep300.yaml").read_text()
    for before, after in (
        ("$replace_this_with_absolute_path_to_your_datasets_directory", str(here)),
        ("$replace_this_with_path_for_experiment_logs/vith14.224-bs.2048-ep.300/", str(here)),
        ("imagenet_full_size/061417/", "images/"),
        ("batch_size: 128", "batch_size: 16"),
        ("num_workers: 10", "num_workers: 2"),
    ):
        text = text.replace(before, after)
    (here / "configs/mine.yaml").write_text(text)


def _picotron(here: Path) -> None:
    """Its template for two ranks of each kind of parallelism, with a model beside it."""
    settings = json.loads((here / "template/base_config.json").read_text())
    settings["distributed"] |= {"tp_size": 2, "pp_size": 2, "dp_size": 2}
    settings["model"]["name"] = "llama"
    settings["training"] |= {"micro_batch_size": 4, "gradient_accumulation_steps": 4, "num_samples": 20000}
    settings["dataset"]["name"] = "stories"
    settings["environment"]["HF_TOKEN"] = "none"
    (here / "settings.json").write_text(json.dumps(settings))


def _minimind(here: Path) -> None:
    """Its tokenizer, where its scripts look for it from their own folder."""
    shutil.copytree(here / "model", here.parent / "model")


_RF_DETR = """from rfdetr import RFDETRMedium

model = RFDETRMedium(pretrain_weights=None)

model.train(
    dataset_dir="dataset",
    epochs=100,
    batch_size=4,
    grad_accum_steps=4,
    lr=1e-4,
    output_dir="output",
)
"""
"""The program of its pages on training, without the weights that it downloads."""
_PICOTRON = {"hidden_size": 960, "intermediate_size": 2560, "num_attention_heads": 16, "num_key_value_heads": 4}
_PICOTRON |= {"num_hidden_layers": 16, "vocab_size": 49152, "tie_word_embeddings": False}


def _preferences(**columns: Any) -> Maker:
    return data.rows("pairs/train.json", **columns)


RECIPES = (
    Recipe(
        "SiT",
        "willisma/SiT",
        ".",
        "train.py --data-path images --model SiT-B/2 --global-batch-size 16 --num-workers 2",
        (research.IMAGES, research_data.autoencoder("stabilityai/sd-vae-ft-ema")),
        ("timm", "torchvision", "diffusers", "torchdiffeq", "wandb"),
        {"ENTITY": "nobody", "PROJECT": "SiT"},
    ),
    Recipe(
        "dlrm",
        "facebookresearch/dlrm",
        ".",
        "dlrm_s_pytorch.py --use-gpu --arch-sparse-feature-size=64 --arch-embedding-size=1000000-500000-100000 "
        "--arch-mlp-bot=13-512-64 --arch-mlp-top=512-256-1 --mini-batch-size=2048 --num-batches=16",
        needs=("sklearn", "tensorboard"),
    ),
    Recipe(
        "accelerate cv_example",
        "huggingface/accelerate",
        "examples",
        "cv_example.py --data_dir images --mixed_precision fp16",
        (_NAMED,),
        needs=("accelerate", "timm", "torchvision"),
    ),
    *(
        Recipe(
            f"pytorch_geometric {name}",
            "pyg-team/pytorch_geometric",
            "examples",
            f"{name}.py{options}",
            (_CORA,),
            needs=("torch_geometric", "scipy"),
        )
        for name, options in (("link_pred", ""), ("autoencoder", " --epochs 3"))
    ),
    *(
        Recipe(
            f"trl {name}",
            "huggingface/trl",
            ".",
            f"trl/scripts/{name}.py --model_name_or_path llama --dataset_name pairs --output_dir out --max_length 256 "
            "--per_device_train_batch_size 4",
            (*fine_tuning.LLAMA, _preferences(**columns)),
            needs=("trl", "transformers", "datasets"),
        )
        for name, columns in (
            ("kto", {"prompt": data.sentence, "completion": data.sentence, "label": lambda r: r.random() < 0.5}),
            ("reward", {"chosen": data.chat, "rejected": data.chat}),
        )
    ),
    *(
        Recipe(f"cleanrl {name}", "vwxyzjn/cleanrl", ".", f"cleanrl/{name}.py{options}", needs=_GYM, environment=_HERE)
        for name, options in (
            ("c51", " --learning-starts 200"),
            ("pqn", ""),
        )
    ),
    Recipe(
        "sentence-transformers stsb",
        "huggingface/sentence-transformers",
        "examples/sentence_transformer/training/sts",
        "training_stsbenchmark.py bert",
        (
            data.model("bert", "AutoModel", "bert"),
            data.tokenizer("bert"),
            *(
                data.rows(
                    f"sentence-transformers/stsb/{part}.jsonl",
                    sentence1=data.sentence,
                    sentence2=data.sentence,
                    score=data.share,
                )
                for part in ("train", "validation", "test")
            ),
        ),
        needs=("sentence_transformers", "datasets", "accelerate"),
    ),
    Recipe(
        "ijepa",
        "facebookresearch/ijepa",
        ".",
        "main.py --fname configs/mine.yaml",
        (data.pictures("images/train/a", "images/train/b", count=64), _ijepa),
        needs=("torchvision", "yaml"),
    ),
    Recipe(
        "picotron dp tp pp",
        "huggingface/picotron",
        ".",
        "train.py --config settings.json",
        (
            data.config("llama", "llama", **_PICOTRON),
            data.tokenizer("llama"),
            data.config("hf_model/llama", "llama", **_PICOTRON),
            data.config("hf_model_safetensors", "llama", **_PICOTRON),
            data.zeros("hf_model_safetensors"),
            data.rows("stories/train.jsonl", 20000, text=data.sentence),
            _picotron,
        ),
        needs=("transformers", "datasets", "wandb"),
        options="--gpus 8 --gpu h100",
    ),
    Recipe(
        "MONAI unet",
        "Project-MONAI/tutorials",
        "3d_segmentation/torch",
        "unet_training_array.py",
        needs=("monai", "nibabel", "tensorboard"),
    ),
    Recipe(
        "MONAI unet 2d",
        "Project-MONAI/tutorials",
        "2d_segmentation/torch",
        "unet_training_dict.py",
        needs=("monai", "tensorboard"),
    ),
    Recipe(
        "lightning fabric tensor_parallel",
        "Lightning-AI/pytorch-lightning",
        "examples/fabric/tensor_parallel",
        "train.py",
        needs=("lightning",),
        options="--gpus 4",
    ),
    Recipe(
        "torchtitan llama3",
        "pytorch/torchtitan",
        ".",
        several_gpus.TITAN,
        (several_gpus.C4,),
        needs=("datasets", "grain", "spmd_types", "triton", "tyro"),
        environment=_HERE,
        options="--gpus 8 --gpu h100",
    ),
    Recipe(
        "torchao nvfp4",
        "pytorch/ao",
        ".",
        "torchao/prototype/moe_training/nvfp4_training/nvfp4_single_gpu_example.py",
        needs=("triton",),
        environment=_HERE,
        options="--gpu b200",
    ),
    Recipe(
        "torchao mxfp8 experts",
        "pytorch/ao",
        ".",
        "torchao/prototype/moe_training/examples/mxfp8_expert_parallel_example.py",
        needs=("triton",),
        environment=_HERE,
        options="--gpus 2 --gpu b200",
    ),
    Recipe(
        "open-r1 sft",
        "huggingface/open-r1",
        ".",
        "src/open_r1/sft.py --model_name_or_path llama --dataset_name chats --output_dir out --max_seq_length 512 "
        "--per_device_train_batch_size 2 --bf16 --gradient_checkpointing --eos_token [SEP]",
        (*fine_tuning.LLAMA, *fine_tuning.CHATS),
        needs=("trl", "transformers", "datasets", "math_verify", "latex2sympy2_extended"),
        environment={"PYTHONPATH": "src"},
        options="--gpu h100",
    ),
    Recipe(  # with GPT-2's two files in TIKTOKEN_CACHE_DIR
        "modded-nanogpt",
        "KellerJordan/modded-nanogpt",
        ".",
        "train_gpt.py",
        (
            data.shards("data/fineweb10B/fineweb_val_000000.bin", count=33_000_000),
            data.shards(*(f"data/fineweb10B/fineweb_train_{n:06}.bin" for n in (1, 2)), count=20_000_000),
        ),
        needs=("kernels", "tiktoken", "triton"),
        options="--gpus 8 --gpu h100",
    ),
    Recipe(
        "llm.c gpt2",
        "karpathy/llm.c",
        ".",
        "train_gpt2.py --input_bin tokens.bin --model d12 --dtype bfloat16 --batch_size 4 --sequence_length 1024 "
        "--total_batch_size 4096 --flash 1",
        (data.shards("tokens.bin"),),
        needs=("tiktoken",),
    ),
    Recipe(  # with transformers 4.57
        "rf-detr medium",
        "roboflow/rf-detr",
        ".",
        "train.py",
        (
            data.file("train.py", _RF_DETR),
            data.coco("dataset", parts=("train", "valid", "test"), described="{}/_annotations.coco.json"),
            data.config("facebook/dinov2-small", "dinov2", hidden_size=384, num_attention_heads=6),
        ),
        needs=("transformers", "pycocotools", "supervision", "peft", "roboflow", "rf100vl"),
        environment=_HERE,
        options="--gpu 4090",
    ),
    Recipe(  # with LeRobot 0.4.4 from the package index, and transformers 4.57
        "lerobot act",
        "huggingface/lerobot",
        "examples",
        "-m lerobot.scripts.lerobot_train --dataset.repo_id=me/aloha --dataset.root=data --policy.push_to_hub=false "
        "--policy.device=cuda --wandb.enable=false --output_dir=out --num_workers=0 --policy.type=act --batch_size=8",
        (research_data.episodes("data"),),
        needs=("lerobot", "datasets", "draccus", "gymnasium"),
        options="--gpu 4090",
    ),
    Recipe(
        "lingua debug",
        "facebookresearch/lingua",
        ".",
        "-m apps.main.train config=apps/main/configs/debug.yaml dump_dir=dump distributed.compile=false",
        (data.rows("data/shuffled/dclm_baseline_1.0/dclm_baseline_1.0.chunk.00.jsonl", 4000, text=research_data.page),),
        needs=("omegaconf", "viztracer", "wandb", "tiktoken", "sentencepiece"),
        environment={**_HERE, "WANDB_MODE": "offline"},
        options="--gpu h100",
    ),
    *(
        Recipe(
            f"minimind {name}",
            "jingyaogong/minimind",
            ".",
            f"trainer/train_{name}.py --from_weight none --data_path data.jsonl --save_dir out",
            (data.rows("data.jsonl", 2000, **columns), _minimind),
            needs=("transformers", "datasets"),
        )
        for name, columns in (
            ("pretrain", {"text": data.sentence}),
            ("full_sft", {"conversations": data.chat}),
            ("dpo", {"chosen": data.chat, "rejected": data.chat}),
            ("lora", {"conversations": data.chat}),
        )
    ),
)
