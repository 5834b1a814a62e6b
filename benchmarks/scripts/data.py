"""Synthetic data in the forms that training scripts read: random, small, and of the shapes of the real sets.

Each maker writes below the folder that a script is started in.
"""

from __future__ import annotations

import json
import pickle
import struct
import tarfile
import tempfile
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy

Maker = Callable[[Path], None]

MRPC = """---
configs:
- config_name: mrpc
  data_files:
  - split: train
    path: train.jsonl
  - split: validation
    path: validation.jsonl
---
"""
"""Describes a folder of `rows` as the data set of pairs of sentences that scripts load by name."""

METRIC = """
import datasets
import evaluate


class Metric(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(a == b for a, b in zip(predictions, references)) / len(references)}
"""
"""A metric of evaluate: scripts load theirs from a hub."""

WORDS = tuple(
    "O God, O God! the of and to in a is that for it as was with be by on not he his but at are this have".split()
)


def digits(folder: str, count: int = 4096) -> Maker:
    """Images of 28 × 28 with ten labels, as torchvision keeps MNIST and its like under `folder`."""

    def make(here: Path) -> None:
        raw = here / folder / "raw"
        raw.mkdir(parents=True, exist_ok=True)
        random = numpy.random.default_rng(0)
        for part, size in (("train", count), ("t10k", count // 4)):
            images = random.integers(0, 256, (size, 28, 28), dtype=numpy.uint8)
            labels = random.integers(0, 10, size, dtype=numpy.uint8)
            (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, *images.shape) + images.tobytes())
            (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, size) + labels.tobytes())

    return make


def text(*files: str, lines: int = 2000) -> Maker:
    """Lines of common words."""

    def make(here: Path) -> None:
        random = Random(0)
        for name in files:
            _write(here / name, "".join(f" {' '.join(random.choices(WORDS, k=20))} \n" for _ in range(lines)))

    return make


def tokens(*files: str, vocabulary: int = 50304, count: int = 2**20) -> Maker:
    """Token numbers of 16 bits, one after the other."""

    def make(here: Path) -> None:
        random = numpy.random.default_rng(0)
        for name in files:
            _write(here / name, random.integers(0, vocabulary, count, dtype=numpy.uint16).tobytes())

    return make


def shards(*files: str, count: int = 2**20, document: int = 400) -> Maker:
    """Token numbers after a header of 256 integers, as llm.c and modded-nanogpt have them; GPT-2's end of text, 50256,
    begins a document of about so many tokens.
    """

    def make(here: Path) -> None:
        random = numpy.random.default_rng(0)
        header = numpy.zeros(256, numpy.int32)
        header[:3] = 20240520, 1, count
        for name in files:
            numbers = random.integers(0, 50256, count, dtype=numpy.uint16)
            starts = random.integers(document // 2, 3 * document // 2, count // document).cumsum()
            numbers[[0, *starts[starts < count]]] = 50256
            _write(here / name, header.tobytes() + numbers.tobytes())

    return make


def rows(file: str, count: int = 400, **columns: Any) -> Maker:
    """A file of JSON Lines or Parquet; a column is a value, or a function of a generator that makes one."""

    def make(here: Path) -> None:
        random = Random(0)
        records = [
            {name: column(random) if callable(column) else column for name, column in columns.items()}
            for _ in range(count)
        ]
        if file.endswith(".parquet"):
            from pyarrow import Table, parquet

            (here / file).parent.mkdir(parents=True, exist_ok=True)
            parquet.write_table(Table.from_pylist(records), here / file)
            return
        _write(here / file, "".join(f"{json.dumps(row)}\n" for row in records))

    return make


def sentence(random: Random) -> str:
    """A column of `rows`: some words."""
    return " ".join(random.choices(WORDS, k=random.randint(8, 30)))


def chat(random: Random) -> list[dict[str, str]]:
    """A column of `rows`: a question and its answer."""
    return [{"role": role, "content": sentence(random)} for role in ("user", "assistant")]


def dialogue(random: Random) -> list[dict[str, str]]:
    """A column of `rows`: a question, as a prompt of a chat."""
    return [{"role": "user", "content": sentence(random)}]


def question(random: Random) -> dict[str, str]:
    """A column of `rows`: a question and its answer, by name."""
    return {name: sentence(random) for name in ("question", "answer")}


def share(random: Random) -> float:
    """A column of `rows`: a number from 0 to 1."""
    return random.random()


def label(random: Random) -> int:
    """A column of `rows`: one of two classes."""
    return random.randint(0, 1)


def pictures(*folders: str, count: int = 64, size: tuple[int, int] = (256, 320), name: str = "{}.jpg") -> Maker:
    """Noise as images; `name` has a place for their number."""

    def make(here: Path) -> None:
        from PIL import Image

        random = numpy.random.default_rng(0)
        for folder in folders:
            (here / folder).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                Image.fromarray(random.integers(0, 256, (*size, 3), dtype=numpy.uint8)).save(
                    here / folder / name.format(number)
                )

    return make


def masks(
    folder: str, count: int = 64, size: tuple[int, int] = (256, 320), classes: int = 2, name: str = "{}.png"
) -> Maker:
    """Images of one channel whose values are classes."""

    def make(here: Path) -> None:
        from PIL import Image

        random = numpy.random.default_rng(0)
        (here / folder).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            image = Image.fromarray(random.integers(0, classes, size, dtype=numpy.uint8))
            image.putpalette([value for value in range(256) for _ in range(3)])
            image.save(here / folder / name.format(number))

    return make


def file(name: str, content: str) -> Maker:
    """A file with this text."""

    def make(here: Path) -> None:
        _write(here / name, content)

    return make


def cora(here: Path) -> None:
    """A citation graph of the size of Cora: 2,708 papers, 1,433 words, 5,429 citations, seven classes."""
    random = numpy.random.default_rng(0)
    words, classes = random.random((2708, 1433)) < 0.013, random.integers(0, 7, 2708)
    papers = (
        f"{number}\t" + "\t".join(map(str, present.astype(int))) + f"\tclass{kind}\n"
        for number, (present, kind) in enumerate(zip(words, classes, strict=True))
    )
    _write(here / "cora/cora.content", "".join(papers))
    pairs = random.permutation(2708 * 2708)[:5429]
    _write(here / "cora/cora.cites", "".join(f"{pair // 2708}\t{pair % 2708}\n" for pair in pairs))


def cora_at_its_address(here: Path) -> None:
    """The same as the archive that a program downloads: a `requests` beside it answers every address with that."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(here / "cora.tgz", "w:gz") as archive:
        cora(Path(folder))
        archive.add(Path(folder) / "cora", "cora")
    _write(here / "requests.py", _REQUESTS)


_REQUESTS = """
from contextlib import contextmanager
from types import SimpleNamespace

@contextmanager
def get(url, **options):
    with open("cora.tgz", "rb") as file:
        yield SimpleNamespace(raw=file)
"""


def waves(here: Path) -> None:
    """Sine waves of different phases, as a file of `torch.save`."""
    import torch

    starts = numpy.random.default_rng(0).integers(-80, 80, (20, 1))
    with open(here / "traindata.pt", "wb") as target:
        torch.save(numpy.sin((numpy.arange(100) + starts) / 20.0), target)


def coco(
    folder: str,
    size: tuple[int, int] = (480, 640),
    count: int = 16,
    parts: tuple[str, ...] = ("train2017", "val2017"),
    described: str = "annotations/instances_{}.json",
) -> Maker:
    """Pictures with four boxes and their polygons each, as COCO of 2017 has them; `described` is the file of a part."""

    def make(here: Path) -> None:
        random = Random(0)
        for part in parts:
            names = [f"{number:012d}.jpg" for number in range(count)]
            pictures(f"{folder}/{part}", count=count, size=size, name="{:012d}.jpg")(here)
            images = [
                {"id": number, "file_name": name, "height": size[0], "width": size[1]}
                for number, name in enumerate(names)
            ]
            objects = [_object(random, number, slot) for number in range(count) for slot in range(4)]
            kinds = [{"id": number, "name": f"kind{number}", "supercategory": "all"} for number in range(1, 91)]
            content = {"images": images, "annotations": objects, "categories": kinds, "info": {}, "licenses": []}
            _write(here / folder / described.format(part), json.dumps(content))

    return make


def _object(random: Random, image: int, slot: int) -> dict[str, Any]:
    left, top, width, height = random.randint(0, 300), random.randint(0, 200), random.randint(40, 300), 200
    right, bottom = left + width, top + height
    return {
        "id": image * 100 + slot,
        "image_id": image,
        "category_id": random.randint(1, 90),
        "bbox": [left, top, width, height],
        "area": width * height,
        "iscrowd": 0,
        "segmentation": [[left, top, right, top, right, bottom, left, bottom]],
    }


def tokenizer(folder: str, chat: bool = False) -> Maker:
    """A word tokenizer of transformers, which splits at spaces."""

    def make(here: Path) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        tokenizer = Tokenizer(
            models.WordLevel({word: at for at, word in enumerate((*special, *WORDS))}, unk_token="[UNK]")
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="[CLS]", eos_token="[SEP]", **names)
        if chat:
            fast.chat_template = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
        fast.save_pretrained(here / folder)

    return make


def config(folder: str, kind: str, **values: Any) -> Maker:
    """The configuration of a model of transformers, without weights."""

    def make(here: Path) -> None:
        from transformers import AutoConfig

        AutoConfig.for_model(kind, **values).save_pretrained(here / folder)

    return make


def preset(id: str, folder: str = "") -> Maker:
    """The configuration of a model of the Hub whose sizes memsize has, in a folder of its name, without weights."""

    def make(here: Path) -> None:
        from memsize.loading.presets import presets

        file(f"{folder or id}/config.json", json.dumps(dict(presets()[id].config)))(here)

    return make


def zeros(folder: str) -> Maker:
    """Zeros for the weights that the configuration in a folder describes, in bfloat16: holes of a file."""

    def make(here: Path) -> None:
        import torch
        import transformers

        from memsize.virtual.hub_weights import file_tensors, write_shards

        configuration = transformers.AutoConfig.from_pretrained(here / folder)
        with torch.device("meta"):
            built = transformers.AutoModelForCausalLM.from_config(configuration)
        write_shards(here / folder, "model.safetensors", file_tensors(built, torch.bfloat16))

    return make


def byte_tokenizer(name: str) -> Maker:
    """A tokenizer of bytes, as tiktoken reads that of Llama 3."""
    return file(name, "".join(f"{b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)))


def model(folder: str, auto: str, kind: str, **values: Any) -> Maker:
    """A model of transformers with random weights, saved as `from_pretrained` reads it."""

    def make(here: Path) -> None:
        import transformers

        built = transformers.AutoConfig.for_model(kind, **values)
        getattr(transformers, auto).from_config(built).save_pretrained(here / folder)

    return make


def image_processor(folder: str) -> Maker:
    """What transformers does to images before a vision transformer sees them."""

    def make(here: Path) -> None:
        from transformers import ViTImageProcessor

        ViTImageProcessor().save_pretrained(here / folder)

    return make


def stable_diffusion(folder: str) -> Maker:
    """A small text-to-image pipeline of diffusers with random weights."""

    def make(here: Path) -> None:
        from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
        from transformers import CLIPTextConfig, CLIPTextModel

        widths, text_width = (64, 128), 128
        unet = UNet2DConditionModel(
            block_out_channels=widths,
            layers_per_block=1,
            cross_attention_dim=text_width,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        )
        vae = AutoencoderKL(
            block_out_channels=widths,
            latent_channels=4,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        )
        text = CLIPTextModel(
            CLIPTextConfig(vocab_size=1000, hidden_size=text_width, intermediate_size=512, num_hidden_layers=2)
        )
        parts = {"unet": unet, "vae": vae, "text_encoder": text, "scheduler": DDPMScheduler()}
        for name, part in parts.items():
            part.save_pretrained(here / folder / name)
        clip_tokenizer(here / folder / "tokenizer")

    return make


_CLIP = {"model_max_length": 77, "tokenizer_class": "CLIPTokenizer"}


def clip_tokenizer(folder: Path) -> None:
    """Write a tokenizer of letters as CLIP's is stored."""
    special = ("<|startoftext|>", "<|endoftext|>")
    letters = [chr(code) for code in range(33, 127)]
    tokens = [*special, *letters, *(f"{letter}</w>" for letter in letters)]
    _write(folder / "vocab.json", json.dumps({token: at for at, token in enumerate(tokens)}))
    _write(folder / "merges.txt", "#version: 0.2\n")
    names = {"bos_token": special[0], "eos_token": special[1], "unk_token": special[1], "pad_token": special[1]}
    _write(folder / "tokenizer_config.json", json.dumps({**names, **_CLIP}))


def t5_tokenizer(folder: Path) -> None:
    """Write a tokenizer of words as T5's is stored."""
    from transformers import T5TokenizerFast

    pieces = dict.fromkeys(("<pad>", "</s>", "<unk>", *(f"▁{word}" for word in WORDS)))
    T5TokenizerFast(vocab=[(piece, 0.0) for piece in pieces]).save_pretrained(folder)


def clips(folder: str, count: int = 4, frames: int = 49, size: tuple[int, int] = (480, 720)) -> Maker:
    """Noise as videos, with lists of their names and of their prompts."""

    def make(here: Path) -> None:
        import cv2

        random, height, width = numpy.random.default_rng(0), *size
        names = [f"{number}.mp4" for number in range(count)]
        (here / folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            video = cv2.VideoWriter(str(here / folder / name), cv2.VideoWriter.fourcc(*"mp4v"), 8, (width, height))
            for _ in range(frames):
                video.write(random.integers(0, 256, (height, width, 3), dtype=numpy.uint8))
            video.release()
        words = Random(0)
        _write(here / folder / "videos.txt", "".join(f"{name}\n" for name in names))
        _write(here / folder / "prompts.txt", "".join(f"{sentence(words)}\n" for _ in names))

    return make


def captions(folder: str, count: int) -> Maker:
    """A sentence for each of so many pictures, as an image folder of datasets has them."""

    def make(here: Path) -> None:
        random = Random(0)
        lines = ({"file_name": f"{number}.jpg", "text": sentence(random)} for number in range(count))
        _write(here / folder / "metadata.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))

    return make


def boxes(folder: str, count: int = 32) -> Maker:
    """Pictures with two boxes each, as YOLO reads them, described by `folder`.yaml."""

    def make(here: Path) -> None:
        pictures(f"{folder}/images", count=count)(here)
        for number in range(count):
            _write(here / folder / f"labels/{number}.txt", "0 0.5 0.5 0.3 0.3\n1 0.3 0.3 0.2 0.2\n")
        where = here / folder
        _write(here / f"{folder}.yaml", f"path: {where}\ntrain: images\nval: images\nnames: [first, second]\n")

    return make


def planetoid(folder: str) -> Maker:
    """A citation graph of the size of Cora, as the pickles that torch_geometric reads."""

    def make(here: Path) -> None:
        from scipy.sparse import csr_matrix

        random = numpy.random.default_rng(0)
        words = (random.random((2708, 1433)) < 0.013).astype(numpy.float32)
        classes = numpy.eye(7, dtype=numpy.int32)[random.integers(0, 7, 2708)]
        graph = {number: random.integers(0, 2708, 4).tolist() for number in range(2708)}
        parts = {"": slice(0, 140), "t": slice(1708, 2708), "all": slice(0, 1708)}
        for name, part in parts.items():
            _write(here / folder / f"ind.cora.{name}x", pickle.dumps(csr_matrix(words[part])))
            _write(here / folder / f"ind.cora.{name}y", pickle.dumps(classes[part]))
        _write(here / folder / "ind.cora.graph", pickle.dumps(graph))
        _write(here / folder / "ind.cora.test.index", "".join(f"{number}\n" for number in range(1708, 2708)))

    return make


def pickled(name: str, value: Any) -> Maker:
    """`value` as Python's pickle."""

    def make(here: Path) -> None:
        _write(here / name, pickle.dumps(value))

    return make


def _write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
