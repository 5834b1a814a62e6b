"""Synthetic data that single scripts read: point clouds, views of a scene, an archive of text."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path
from random import Random

import numpy

from benchmarks.scripts import data
from benchmarks.scripts.data import Maker


def compressed(name: str, count: int) -> Maker:
    """So many bytes of nothing, as gzip packs them."""

    def make(here: Path) -> None:
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wb", compresslevel=1) as target:
            target.write(bytes(count))

    return make


def numbers(random: Random) -> list[int]:
    """A column of `rows`: token numbers."""
    return [random.randint(0, 50000) for _ in range(random.randint(10, 60))]


def page(random: Random) -> str:
    """Eighty sentences, more than fit into the samples of a training on answers."""
    return " ".join(data.sentence(random) for _ in range(80))


def autoencoder(folder: str) -> Maker:
    """The autoencoder of Stable Diffusion with random weights, as diffusers reads it."""

    def make(here: Path) -> None:
        from diffusers import AutoencoderKL

        AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            latent_channels=4,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
        ).save_pretrained(here / folder)

    return make


def shapes(folder: str, count: int = 64) -> Maker:
    """Clouds of 2,600 points with a label each, as ShapeNet's parts are kept."""

    def make(here: Path) -> None:
        random = numpy.random.default_rng(0)
        kinds = {"Airplane": "02691156", "Chair": "03001627"}
        home = here / folder
        listed = [f"shape_data/{kind}/{number}" for kind in kinds.values() for number in range(count)]
        for kind in kinds.values():
            for part in ("points", "points_label"):
                (home / kind / part).mkdir(parents=True)
            for number in range(count):
                numpy.savetxt(home / kind / "points" / f"{number}.pts", random.random((2600, 3)), "%.4f")
                numpy.savetxt(home / kind / "points_label" / f"{number}.seg", random.integers(1, 5, 2600), "%d")
        (home / "train_test_split").mkdir()
        for part in ("train", "val", "test"):
            (home / f"train_test_split/shuffled_{part}_file_list.json").write_text(json.dumps(listed))
        (home / "synsetoffset2category.txt").write_text("".join(f"{name}\t{kind}\n" for name, kind in kinds.items()))

    return make


def views(folder: str, count: int = 8, size: int = 200) -> Maker:
    """Pictures of a scene with the camera's place of each, as NeRF's synthetic scenes are kept."""

    def make(here: Path) -> None:
        from PIL import Image

        random = numpy.random.default_rng(0)
        for part in ("train", "val", "test"):
            (here / folder / part).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (size, size, 4), dtype=numpy.uint8)
                Image.fromarray(pixels).save(here / folder / part / f"r_{number}.png")
            pose = numpy.eye(4).tolist()
            frames = [{"file_path": f"./{part}/r_{number}", "transform_matrix": pose} for number in range(count)]
            content = {"camera_angle_x": 0.69, "frames": frames}
            (here / folder / f"transforms_{part}.json").write_text(json.dumps(content))

    return make


def nanochat(folder: str, pieces: int = 32_768) -> Maker:
    """Two files of documents, and a tokenizer of so many pieces: the bytes, and pairs of them."""

    def make(here: Path) -> None:
        import tiktoken
        import torch

        special = ("bos", "user_start", "user_end", "assistant_start", "assistant_end", "python_start", "python_end")
        special += ("output_start", "output_end")
        count = pieces - len(special)
        merged = [bytes([byte]) for byte in range(256)]
        merged += [bytes(divmod(pair, 256)) for pair in range(count - 256)]
        encoding = tiktoken.Encoding(
            "bytes",
            pat_str=r"\S+|\s+",
            mergeable_ranks={piece: rank for rank, piece in enumerate(merged)},
            special_tokens={f"<|{name}|>": count + number for number, name in enumerate(special)},
        )
        data.pickled(f"{folder}/tokenizer/tokenizer.pkl", encoding)(here)
        torch.save(torch.ones(pieces, dtype=torch.int32), here / folder / "tokenizer" / "token_bytes.pt")
        for number in range(2):
            data.rows(f"{folder}/base_data_climbmix/shard_0000{number}.parquet", 4000, text=data.sentence)(here)

    return make


def litgpt(folder: str, name: str) -> Maker:
    """A checkpoint of LitGPT's model `name` in its own format: zeros, one stored number for each tensor."""

    def make(here: Path) -> None:
        import torch
        import yaml
        from litgpt import GPT, Config

        config = Config.from_name(name)
        with torch.device("meta"):
            built = GPT(config)
        zero = torch.zeros((), dtype=torch.bfloat16)
        (here / folder).mkdir(parents=True)
        weights = {key: zero.expand(tensor.shape) for key, tensor in built.state_dict().items()}
        torch.save(weights, here / folder / "lit_model.pth")
        (here / folder / "model_config.yaml").write_text(yaml.dump(asdict(config)))

    return make


def episodes(folder: str, count: int = 2, frames: int = 60) -> Maker:
    """Recordings of a robot with two arms and one camera, as LeRobot keeps them."""

    def make(here: Path) -> None:
        from lerobot.datasets.lerobot_dataset import LeRobotDataset

        random = numpy.random.default_rng(0)
        camera = {"dtype": "image", "shape": (480, 640, 3), "names": ["height", "width", "channel"]}
        joints = {"dtype": "float32", "shape": (14,), "names": [f"joint{number}" for number in range(14)]}
        features = {"observation.images.top": camera, "observation.state": joints, "action": joints}
        recorded = LeRobotDataset.create("me/aloha", 50, features, root=here / folder, use_videos=False)
        for _ in range(count):
            for _ in range(frames):
                frame = {
                    "observation.images.top": random.integers(0, 256, (480, 640, 3), dtype=numpy.uint8),
                    "observation.state": random.random(14, dtype=numpy.float32),
                    "action": random.random(14, dtype=numpy.float32),
                }
                recorded.add_frame({**frame, "task": "the of and"})
            recorded.save_episode()
        recorded.finalize()

    return make


def imagenet(here: Path) -> None:
    """DINOv3's index of as many images as ImageNet has, all of them the same file."""
    import numpy as np

    kind = np.dtype([("actual_index", "<u4"), ("class_index", "<u4"), ("class_id", "U9"), ("class_name", "U5")])
    entries = np.zeros(1_281_167, kind)
    entries["class_id"], entries["class_name"] = "n01440764", "tench"
    (here / "extra").mkdir()
    np.save(here / "extra/entries-TRAIN.npy", entries)
    for column in ("id", "name"):
        np.save(here / f"extra/class-{column}s-TRAIN.npy", entries[f"class_{column}"][:1])
    data.pictures("root/train/n01440764", count=1, name="n01440764_{}.JPEG")(here)
