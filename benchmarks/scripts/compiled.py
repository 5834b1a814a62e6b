"""Scripts that compile their model, and, where a flag turns it off, the same without."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from benchmarks.scripts import data
from benchmarks.scripts.data import Maker
from benchmarks.scripts.recipe import Recipe

_WORDS = ("the", "of", "model", "memory", "tensor", "step", "layer", "token")


def llama(folder: str, pieces: int = 32_000) -> Maker:
    """A checkpoint of gpt-fast's model of the folder's name, and a tokenizer of so many pieces."""

    def make(here: Path) -> None:
        import sentencepiece
        import torch

        target = here / folder
        target.mkdir(parents=True)
        specification = importlib.util.spec_from_file_location("gpt_fast", here / "model.py")
        assert specification is not None and specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        torch.save({"model": module.Transformer.from_name(target.name).state_dict()}, target / "model.pth")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([" ".join(_WORDS)] * 100),
            model_prefix=str(target / "tokenizer"),
            vocab_size=pieces,
            model_type="bpe",
            user_defined_symbols=[f"<{number}>" for number in range(pieces - 50)],
            hard_vocab_limit=False,
            minloglevel=2,
        )

    return make


_STORIES = "checkpoints/stories15M"
_GENERATE = f"generate.py --checkpoint_path {_STORIES}/model.pth --prompt 128 --max_new_tokens 16 --num_samples 1"
_FOLDERS = data.pictures(*(f"images/{part}/{kind}" for part in ("train", "val") for kind in "abcdef"), count=16)

RECIPES = (
    Recipe(
        "timm train compiled",
        "huggingface/pytorch-image-models",
        ".",
        "train.py --data-dir images --model resnet26d --num-classes 6 --batch-size 16 --amp --workers 2 --torchcompile",
        (_FOLDERS,),
        needs=("timm", "torchvision"),
    ),
    *(
        Recipe(name, "meta-pytorch/gpt-fast", ".", command, (llama(_STORIES),), needs=("sentencepiece", "tiktoken"))
        for name, command in (("gpt-fast", _GENERATE), ("gpt-fast compiled", f"{_GENERATE} --compile"))
    ),
)
