"""The scripts of libraries and of their examples, and after them those of the other modules."""

from __future__ import annotations

from benchmarks.scripts import compiled, data, diffusion, fine_tuning, further, research, several_gpus
from benchmarks.scripts.data import Maker
from benchmarks.scripts.recipe import Recipe

_EXAMPLES = "pytorch/examples"
_VISION = ("torchvision",)
_MNIST = data.digits("../data/MNIST")
_FOLDERS = data.pictures(*(f"images/{part}/{kind}" for part in ("train", "val") for kind in "abcdef"), count=16)

_NUMBERS = "".join(f"{number}\n" for number in range(64))
_MRPC = (
    data.model("bert-base-cased", "AutoModelForSequenceClassification", "bert", num_hidden_layers=2),
    data.tokenizer("bert-base-cased"),
    *(
        data.rows(f"{folder}/{part}.jsonl", sentence1=data.sentence, sentence2=data.sentence, label=data.label, idx=0)
        for folder in ("nyu-mll/glue", "glue")
        for part in ("train", "validation")
    ),
    *(data.file(f"{folder}/README.md", data.MRPC) for folder in ("nyu-mll/glue", "glue")),
    data.file("glue/glue.py", data.METRIC),
)


def _example(folder: str, command: str, *makers: Maker, needs: tuple[str, ...] = _VISION) -> Recipe:
    return Recipe(f"examples/{folder}", _EXAMPLES, folder, command, makers, needs)


RECIPES = (
    _example("mnist", "main.py", _MNIST),
    _example("mnist_rnn", "main.py --accel", _MNIST),
    _example("mnist_forward_forward", "main.py --train_size 4096 --test_size 1024", data.digits("data/MNIST")),
    _example("dcgan", "main.py --dataset fake --accel"),
    _example("vae", "main.py", _MNIST),
    _example("imagenet", "main.py --dummy --arch resnet50 --batch-size 64 --workers 2"),
    _example(
        "word_language_model",
        "main.py --accel --model Transformer --use-optimizer",
        data.text(*(f"data/wikitext-2/{part}.txt" for part in ("train", "valid", "test"))),
        needs=(),
    ),
    _example("siamese_network", "main.py", _MNIST),
    _example("gcn", "main.py --epochs 3", data.cora_at_its_address, needs=()),
    _example("gat", "main.py --epochs 3", data.cora, needs=()),
    _example(
        "super_resolution",
        "main.py --upscale_factor 3 --batchSize 4 --accel",
        data.pictures("dataset/BSDS300/images/train", "dataset/BSDS300/images/test", count=16, size=(321, 481)),
    ),
    Recipe(
        "examples/time_sequence_prediction",
        _EXAMPLES,
        "time_sequence_prediction",
        "train.py --steps 1",
        (data.waves,),
        ("matplotlib",),
        {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
    ),
    _example("reinforcement_learning", "reinforce.py", needs=("gymnasium",)),
    _example("distributed/ddp-tutorial-series", "single_gpu.py 1 1", needs=()),
    Recipe(
        "nanoGPT",
        "karpathy/nanoGPT",
        ".",
        "train.py --eval_iters=2",
        (data.tokens("data/openwebtext/train.bin", "data/openwebtext/val.bin"),),
    ),
    Recipe(
        "nanoGPT char",
        "karpathy/nanoGPT",
        ".",
        "train.py config/train_shakespeare_char.py --eval_iters=2",
        (
            data.tokens("data/shakespeare_char/train.bin", "data/shakespeare_char/val.bin", vocabulary=65),
            data.pickled("data/shakespeare_char/meta.pkl", {"vocab_size": 65, "itos": {}, "stoi": {}}),
        ),
    ),
    Recipe(
        "minGPT chargpt",
        "karpathy/minGPT",
        ".",
        "projects/chargpt/chargpt.py",
        (data.text("input.txt"),),
        environment={"PYTHONPATH": "."},
    ),
    Recipe("minGPT adder", "karpathy/minGPT", ".", "projects/adder/adder.py", environment={"PYTHONPATH": "."}),
    Recipe("makemore", "karpathy/makemore", ".", "makemore.py --device cuda", needs=("tensorboard",)),
    Recipe(
        "llama2.c",
        "karpathy/llama2.c",
        ".",
        "train.py --batch_size=16 --eval_iters=2",
        (data.tokens("data/TinyStories_all_data/0.bin", "data/TinyStories_all_data/1.bin", vocabulary=32000),),
        needs=("sentencepiece",),
    ),
    Recipe(
        "timm train",
        "huggingface/pytorch-image-models",
        ".",
        "train.py --data-dir images --model resnet26d --num-classes 6 --batch-size 16 --amp --workers 2",
        (_FOLDERS,),
        needs=("timm", "torchvision"),
    ),
    Recipe(
        "torchvision classification",
        "pytorch/vision",
        "references/classification",
        "train.py --data-path images --model resnet18 --batch-size 16 --workers 2 --output-dir out --amp",
        (_FOLDERS,),
        needs=_VISION,
    ),
    Recipe(
        "torchvision detection",
        "pytorch/vision",
        "references/detection",
        "train.py --data-path coco --model fasterrcnn_resnet50_fpn --batch-size 2 --workers 2",
        (data.coco("coco"),),
        needs=("torchvision", "pycocotools"),
    ),
    Recipe(
        "torchvision segmentation",
        "pytorch/vision",
        "references/segmentation",
        "train.py --data-path . --dataset voc --model fcn_resnet50 --batch-size 4 --workers 2 --output-dir out",
        (
            data.pictures("VOCdevkit/VOC2012/JPEGImages"),
            data.masks("VOCdevkit/VOC2012/SegmentationClass", classes=21),
            data.file("VOCdevkit/VOC2012/ImageSets/Segmentation/train.txt", _NUMBERS),
            data.file("VOCdevkit/VOC2012/ImageSets/Segmentation/val.txt", _NUMBERS),
        ),
        needs=("torchvision", "pycocotools"),
    ),
    Recipe(
        "accelerate nlp_example",
        "huggingface/accelerate",
        "examples",
        "nlp_example.py --mixed_precision bf16",
        _MRPC,
        needs=("accelerate", "transformers", "datasets", "evaluate"),
    ),
    Recipe(
        "accelerate memory",
        "huggingface/accelerate",
        "examples",
        "by_feature/memory.py --mixed_precision fp16",
        _MRPC,
        needs=("accelerate", "transformers", "datasets", "evaluate"),
        options="--gpu t4",
    ),
    Recipe(
        "transformers run_clm",
        "huggingface/transformers",
        "examples/pytorch/language-modeling",
        "run_clm.py --model_type gpt2 --config_name gpt2 --tokenizer_name words --train_file train.txt --do_train "
        "--output_dir out --per_device_train_batch_size 2 --block_size 256 --bf16 --gradient_checkpointing",
        (data.config("gpt2", "gpt2", vocab_size=50257), data.tokenizer("words"), data.text("train.txt")),
        needs=("transformers", "datasets", "evaluate"),
    ),
    Recipe(
        "transformers run_mlm",
        "huggingface/transformers",
        "examples/pytorch/language-modeling",
        "run_mlm.py --model_type bert --config_name bert --tokenizer_name words --train_file train.txt "
        "--do_train --output_dir out --per_device_train_batch_size 8 --max_seq_length 128",
        (data.config("bert", "bert"), data.tokenizer("words"), data.text("train.txt")),
        needs=("transformers", "datasets", "evaluate"),
    ),
    Recipe(
        "transformers run_glue",
        "huggingface/transformers",
        "examples/pytorch/text-classification",
        "run_glue.py --model_name_or_path bert --train_file train.json --validation_file train.json --do_train "
        "--output_dir out --per_device_train_batch_size 8 --max_seq_length 128 --fp16",
        (
            data.model("bert", "AutoModelForSequenceClassification", "bert"),
            data.tokenizer("bert"),
            data.rows("train.json", sentence1=data.sentence, sentence2=data.sentence, label=data.label),
            data.file("accuracy/accuracy.py", data.METRIC),
        ),
        needs=("transformers", "datasets", "evaluate", "sklearn"),
    ),
    Recipe(
        "transformers run_image_classification",
        "huggingface/transformers",
        "examples/pytorch/image-classification",
        "run_image_classification.py --model_name_or_path vit --train_dir images/train --validation_dir images/val "
        "--do_train --output_dir out --per_device_train_batch_size 8 --remove_unused_columns False "
        "--label_column_name label --ignore_mismatched_sizes True",
        (
            _FOLDERS,
            data.model("vit", "AutoModelForImageClassification", "vit"),
            data.image_processor("vit"),
            data.file("accuracy/accuracy.py", data.METRIC),
        ),
        needs=("transformers", "datasets", "evaluate", "torchvision"),
    ),
    Recipe(
        "lightning autoencoder",
        "Lightning-AI/pytorch-lightning",
        "examples",
        "pytorch/basics/autoencoder.py --trainer.max_epochs=1",
        (data.digits("Datasets/MNIST", 60000), data.digits("data/MNIST", 60000)),
        needs=("lightning", "torchvision", "jsonargparse"),
    ),
    Recipe(
        "lightning transformer",
        "Lightning-AI/pytorch-lightning",
        "examples",
        "pytorch/basics/transformer.py",
        (data.text("data/wikitext-2.txt", lines=20000),),
        needs=("lightning",),
    ),
    Recipe(
        "lightning gan",
        "Lightning-AI/pytorch-lightning",
        "examples",
        "pytorch/domain_templates/generative_adversarial_net.py",
        (data.digits("data/MNIST", 60000),),
        needs=("lightning", "torchvision"),
    ),
    Recipe(
        "lightning fabric",
        "Lightning-AI/pytorch-lightning",
        "examples",
        "fabric/image_classifier/train_fabric.py",
        (data.digits("../Datasets/MNIST"),),
        needs=("lightning", "torchvision"),
    ),
    Recipe(
        "ultralytics yolo",
        "ultralytics",
        "",
        "{bin}/yolo train model=yolov8n.yaml data=boxes.yaml epochs=1 imgsz=320 batch=8 workers=2 plots=False",
        (data.boxes("boxes"),),
        needs=("ultralytics",),
    ),
    Recipe(
        "Pytorch-UNet",
        "milesial/Pytorch-UNet",
        ".",
        "train.py --amp --batch-size 2",
        (data.pictures("data/imgs", count=40, name="{}.png"), data.masks("data/masks", count=40)),
    ),
    Recipe(
        "PyTorch-GAN wgan_gp",
        "eriklindernoren/PyTorch-GAN",
        "implementations/wgan_gp",
        "wgan_gp.py --n_cpu 2",
        (data.digits("../../data/mnist/MNIST"),),
        needs=_VISION,
    ),
    Recipe(
        "PyTorch-GAN acgan",
        "eriklindernoren/PyTorch-GAN",
        "implementations/acgan",
        "acgan.py --n_cpu 2",
        (data.digits("../../data/mnist/MNIST"),),
        needs=_VISION,
    ),
    Recipe(
        "mmsegmentation pspnet",
        "open-mmlab/mmsegmentation",
        ".",
        "tools/train.py configs/pspnet/pspnet_r50-d8_4xb2-40k_cityscapes-512x1024.py --amp "
        "--cfg-options model.pretrained=None",
        tuple(
            maker
            for part in ("train", "val")
            for maker in (
                data.pictures(
                    f"data/cityscapes/leftImg8bit/{part}", count=8, size=(1024, 2048), name="{}_leftImg8bit.png"
                ),
                data.masks(
                    f"data/cityscapes/gtFine/{part}",
                    count=8,
                    size=(1024, 2048),
                    classes=19,
                    name="{}_gtFine_labelTrainIds.png",
                ),
            )
        ),
        needs=("mmseg", "mmcv", "mmengine"),
    ),
    Recipe(
        "pytorch nested tensors",
        "pytorch/tutorials",
        "intermediate_source",
        "transformer_building_blocks.py",
    ),
    Recipe("cleanrl ppo", "vwxyzjn/cleanrl", ".", "cleanrl/ppo.py", needs=("gymnasium", "tyro", "tensorboard")),
    Recipe(
        "cleanrl sac",
        "vwxyzjn/cleanrl",
        ".",
        "cleanrl/sac_continuous_action.py --env-id Pendulum-v1 --learning-starts 100",
        needs=("gymnasium", "tyro", "tensorboard", "stable_baselines3"),
    ),
    Recipe(
        "pytorch_geometric gcn",
        "pyg-team/pytorch_geometric",
        "examples",
        "gcn.py --epochs 3",
        (data.planetoid("../data/Planetoid/Cora/raw"),),
        needs=("torch_geometric", "scipy"),
    ),
    Recipe(
        "pytorch_geometric gat",
        "pyg-team/pytorch_geometric",
        "examples",
        "gat.py --epochs 3",
        (data.planetoid("../data/Planetoid/Cora/raw"),),
        needs=("torch_geometric", "scipy"),
    ),
    *fine_tuning.RECIPES,
    *diffusion.RECIPES,
    *research.RECIPES,
    *compiled.RECIPES,
    *several_gpus.RECIPES,
    *further.RECIPES,
)
