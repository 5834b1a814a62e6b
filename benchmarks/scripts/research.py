"""The scripts of published papers and of single authors, beside those of the libraries in `recipes`."""

from __future__ import annotations

from benchmarks.scripts import data, research_data
from benchmarks.scripts.recipe import Recipe

IMAGES = data.pictures("images/a", "images/b", count=64, size=(256, 256), name="{}.png")
_HERE = {"PYTHONPATH": "."}
_X_TRANSFORMERS = ("einx", "loguru", "torch_einops_utils", "tqdm")

RECIPES = (
    Recipe(
        "x-transformers enwik8",
        "lucidrains/x-transformers",
        ".",
        "train_enwik8.py --generate_length=32",
        (research_data.compressed("data/enwik8.gz", 95_000_000),),
        (*_X_TRANSFORMERS, "fire", "wandb", "accelerate"),
    ),
    Recipe("x-transformers copy", "lucidrains/x-transformers", ".", "train_copy.py", needs=_X_TRANSFORMERS),
    Recipe("x-transformers parity", "lucidrains/x-transformers", ".", "train_parity.py", needs=_X_TRANSFORMERS),
    Recipe(
        "DiT",
        "facebookresearch/DiT",
        ".",
        "train.py --data-path images --model DiT-B/2 --global-batch-size 16 --num-workers 2",
        (IMAGES, research_data.autoencoder("stabilityai/sd-vae-ft-ema")),
        ("timm", "torchvision", "diffusers"),
    ),
    Recipe(
        "dino",
        "facebookresearch/dino",
        ".",
        "main_dino.py --data_path images --batch_size_per_gpu 16 --num_workers 2 --output_dir .",
        (IMAGES,),
        ("torchvision",),
    ),
    Recipe(
        "dinov3 vitl",
        "facebookresearch/dinov3",
        ".",
        "dinov3/train/train.py --config-file dinov3/configs/train/vitl_im1k_lin834.yaml --output-dir out "
        "train.dataset_path=ImageNet:split=TRAIN:root=root:extra=extra train.num_workers=2",
        (research_data.imagenet,),
        ("omegaconf", "submitit", "termcolor", "torchmetrics", "torchvision"),
        _HERE,
        "--gpus 32 --gpu h100",
    ),
    Recipe(
        "pointnet classification",
        "fxia22/pointnet.pytorch",
        ".",
        "utils/train_classification.py --dataset shapes --workers 2",
        (research_data.shapes("shapes"),),
        ("plyfile", "tqdm"),
        _HERE,
    ),
    Recipe(
        "pointnet segmentation",
        "fxia22/pointnet.pytorch",
        ".",
        "utils/train_segmentation.py --dataset shapes --workers 2",
        (research_data.shapes("shapes"),),
        ("plyfile", "tqdm"),
        _HERE,
    ),
    Recipe(
        "nerf-pytorch",
        "yenchenlin/nerf-pytorch",
        ".",
        "run_nerf.py --config configs/lego.txt",
        (research_data.views("data/nerf_synthetic/lego"),),
        ("imageio", "cv2", "configargparse", "matplotlib", "tqdm"),
    ),
    Recipe(
        "guided-diffusion",
        "openai/guided-diffusion",
        ".",
        "scripts/image_train.py --data_dir images --image_size 64 --batch_size 16 --num_channels 128 --use_fp16 True",
        (IMAGES,),
        ("mpi4py", "blobfile"),
        {**_HERE, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    ),
    Recipe(
        "stylegan2-ada",
        "NVlabs/stylegan2-ada-pytorch",
        ".",
        "train.py --outdir out --data images --gpus 1 --metrics none --workers 2",
        (IMAGES,),
        ("click", "requests", "scipy"),
    ),
    Recipe(
        "yolov5",
        "ultralytics/yolov5",
        ".",
        "train.py --data boxes.yaml --weights= --cfg models/yolov5s.yaml --epochs 1 --img 320 --batch-size 8 "
        "--workers 2 --noplots",
        (data.boxes("boxes"), data.file("Arial.ttf", "")),
        ("ultralytics", "pandas", "seaborn", "thop"),
        {"YOLO_AUTOINSTALL": "false"},
    ),
    Recipe(
        "open_clip",
        "mlfoundations/open_clip",
        ".",
        "-m open_clip_train.main --dataset-type synthetic --train-num-samples 256 --model RN50 --batch-size 32 "
        "--precision amp --workers 2",
        needs=("ftfy", "regex", "timm", "torchvision", "webdataset"),
        environment={"PYTHONPATH": "src"},
    ),
    Recipe(
        "LoRA gpt2_ft",
        "microsoft/LoRA",
        ".",
        "examples/NLG/src/gpt2_ft.py --train_data train.jsonl --valid_data train.jsonl --lora_dim 4 --lora_dropout 0.1 "
        "--platform local --label_smooth 0.1 --work_dir out --max_epoch 1",
        (data.rows("train.jsonl", context=research_data.numbers, completion=research_data.numbers),),
        environment={**_HERE, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"},
    ),
    *(
        Recipe(f"cleanrl {name}", "vwxyzjn/cleanrl", ".", f"cleanrl/{command}", needs=needs, environment=_HERE)
        for name, command, needs in (
            ("dqn", "dqn.py --learning-starts 200", ("gymnasium", "tyro", "tensorboard")),
            (
                "td3",
                "td3_continuous_action.py --env-id Pendulum-v1 --learning-starts 200",
                ("gymnasium", "tyro", "tensorboard"),
            ),
        )
    ),
    Recipe(
        "nanochat",
        "karpathy/nanochat",
        ".",
        "-m scripts.base_train --depth=12 --eval-every=-1 --core-metric-every=-1",
        (research_data.nanochat("base"),),
        ("rustbpe", "tiktoken", "wandb", "kernels"),
        {**_HERE, "NANOCHAT_BASE_DIR": "base"},
        "--gpu h100",
    ),
)
