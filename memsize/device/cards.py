"""The one table of GPUs: how much memory a process really gets, which is less than what is printed on the box.

`bytes` is what `torch.cuda.mem_get_info` calls total, on Linux. It moves by a hundred MiB with the driver and with ECC;
the table takes the smaller figure where several were reported. Most are known to the hundredth of a GiB, from PyTorch's
own out-of-memory messages.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Final

from memsize.errors import InputError

_GiB: Final = 1 << 30
_MESSAGES: Final = "PyTorch's out-of-memory messages in public repositories"


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU. `capability` is its compute capability, `bytes` its total for CUDA, `source` where that is from."""

    name: str
    capability: tuple[int, int]
    bytes: int
    source: str
    aliases: tuple[str, ...] = ()


def _gib(amount: float) -> int:
    return round(amount * _GiB)


_TABLE = (
    Card("Tesla V100 16GB", (7, 0), _gib(15.77), "meta-llama/llama#918", ("v100", "v100-16gb")),
    Card("Tesla V100 32GB", (7, 0), _gib(31.74), "liucongg/ChatGLM-Finetuning#73", ("v100-32gb",)),
    Card("Tesla T4", (7, 5), _gib(14.56), "Zheng-Chong/CatVTON#133; 14.75 with older drivers", ("t4",)),
    Card("GeForce RTX 2080 Ti", (7, 5), _gib(10.73), "Morizeyao/GPT2-Chinese#104", ("rtx2080ti", "2080ti")),
    Card("A100 40GB", (8, 0), 42_298_834_944, "bottlerocket-os/bottlerocket#3873", ("a100", "a100-40gb")),
    Card("A100 80GB", (8, 0), _gib(79.15), "vllm-project/vllm#4408; 79.25 in wbfwonderful/Vad-R1#11", ("a100-80gb",)),
    Card("A30", (8, 0), _gib(23.53), "google/RB-Modulation#5"),
    Card("A10", (8, 6), _gib(21.99), "zai-org/CogVLM#236"),
    Card("A10G", (8, 6), _gib(22.06), _MESSAGES),
    Card("GeForce RTX 3060 12GB", (8, 6), _gib(11.76), "TencentARC/PhotoMaker#47", ("rtx3060", "3060")),
    Card("GeForce RTX 3070", (8, 6), _gib(7.78), "akshitac8/OW-DETR#46", ("rtx3070", "3070")),
    Card("GeForce RTX 3080 10GB", (8, 6), _gib(9.78), "zai-org/CogVideo#34", ("rtx3080", "3080")),
    Card("GeForce RTX 3090", (8, 6), _gib(23.70), "GaoLii/DSP#10", ("rtx3090", "3090")),
    Card("RTX A2000 12GB", (8, 6), _gib(11.53), "vllm-project/vllm#12030", ("a2000",)),
    Card("RTX A4000", (8, 6), _gib(15.61), "DengKaiCQ/VGGT-Long#6", ("a4000",)),
    Card("RTX A6000", (8, 6), _gib(47.40), f"{_MESSAGES}: 47.40 to 47.54", ("a6000",)),
    Card("L4", (8, 9), _gib(22.03), _MESSAGES),
    Card("L40", (8, 9), _gib(44.40), "QwenLM/Qwen3-VL#2097"),
    Card("L40S", (8, 9), _gib(44.40), "as the L40; 44.52 in vllm-project/vllm-omni#807"),
    Card("RTX 6000 Ada", (8, 9), _gib(44.43), "DINGYANB/MTVCrafter#21, ECC on; 47.37 with ECC off", ("6000ada",)),
    Card("GeForce RTX 4060", (8, 9), _gib(7.75), "ESRSchao/EdgeRegNet#2", ("rtx4060", "4060")),
    Card("GeForce RTX 4090", (8, 9), _gib(23.61), "pinokiofactory/flux-webui#11", ("rtx4090", "4090")),
    Card("H100 80GB", (9, 0), _gib(79.11), "vllm-project/vllm#27508", ("h100", "h100-80gb")),
    Card("H100 NVL", (9, 0), _gib(93.00), "ali-vilab/VACE#56", ("h100-94gb",)),
    Card("H200", (9, 0), _gib(139.72), f"{_MESSAGES}: 139.72 to 139.81", ("h200-141gb",)),
    Card("B200", (10, 0), _gib(178.35), "pytorch/ao#4002"),
    Card("B300", (10, 3), _gib(267.7), "sgl-project/sglang#25225"),
    Card("GeForce RTX 5090", (12, 0), _gib(31.36), "TrajectoryCrafter/TrajectoryCrafter#20", ("rtx5090", "5090")),
)


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce|tesla", "", name.lower())


DEFAULT: Final = "A100 40GB"
"""The card that is meant where none is named: its generation decides kernels and workspaces."""

CARDS: dict[str, Card] = {card.name: card for card in _TABLE}
_BY_KEY: Final = {_key(name): card for card in _TABLE for name in (card.name, *card.aliases)}


def card(name: str) -> Card:
    """The card that `name` means, without regard to case, spaces or the maker: ``a100``, ``RTX 4090``, ``h100-80gb``.

    Raises `InputError` with the nearest names when there is none.
    """
    key = _key(name)
    if key in _BY_KEY:
        return _BY_KEY[key]
    near = dict.fromkeys(_BY_KEY[match].name for match in difflib.get_close_matches(key, _BY_KEY, n=4, cutoff=0.5))
    hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(CARDS)}"
    raise InputError(f"no GPU {name!r} in the table: {hint}")
