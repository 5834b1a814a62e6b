"""The one table of GPUs: how much memory a process really gets, which is less than what is printed on the box.

`bytes` is what `torch.cuda.mem_get_info` calls total, on Linux. It varies by a hundred MiB or two with the driver and
the display; where several figures were reported, the table has the smallest. On cards that do error correction in
software it takes a sixteenth of the memory: the figure is for the more common setting, and `source` names the other
one.

Where a source says that a card was not seen, the figure is that of another card, by the rule that it names.
"""

from __future__ import annotations

import re
from typing import Final

from memsize.errors import InputError, UnknownInputError, nearest, quoted
from memsize.records.gpu import DEFAULT_GPU, Card
from memsize.units import GiB, MiB

_MESSAGES: Final = "PyTorch's out-of-memory messages in public repositories"
_PROPERTIES: Final = "torch.cuda.get_device_properties, as printed in public repositories"
_ULTRALYTICS: Final = "the device line of Ultralytics' programs, in public repositories"
_LLAMA: Final = "the device line of llama.cpp, in public repositories"
_HASHCAT: Final = "the device line of hashcat, in public repositories"
_SMI: Final = "used and free of nvidia-smi together, in public repositories"


def _gib(amount: float) -> int:
    return round(amount * GiB)


def _mib(amount: int) -> int:
    return amount * MiB


def _geforce(
    name: str, capability: tuple[int, int], mib: int, source: str, *, short: str = "", plain: bool = False
) -> Card:
    """A GeForce RTX card by its number. With `plain` the bare number is a name too, where the card comes in several
    sizes.
    """
    spoken = short or name
    names = (spoken, spoken.partition(" ")[0] if plain else "")
    aliases = tuple(alias for number in names if number for alias in (f"rtx{number}", number))
    return Card(f"GeForce RTX {name}", capability, _mib(mib), source, aliases)


_TURING, _AMPERE, _ADA, _BLACKWELL = (7, 5), (8, 6), (8, 9), (12, 0)
_STAND_IN: Final = (8, 0)
"""The compute capability whose kernels are assumed where the platform is not CUDA."""

_GH200: Final = ("gh200", "gh200-480gb")
"""Drivers name it after the size of its CPU's memory."""

_DATACENTER = (
    Card("Tesla P100 16GB", (6, 0), _mib(16_276), f"{_ULTRALYTICS}: 16,276 to 16,281 MiB", ("p100", "p100-16gb")),
    Card("Tesla V100 16GB", (7, 0), _gib(15.77), "meta-llama/llama#918", ("v100", "v100-16gb")),
    Card("Tesla V100 32GB", (7, 0), _gib(31.74), "liucongg/ChatGLM-Finetuning#73", ("v100-32gb",)),
    Card("Tesla T4", _TURING, _gib(14.56), "Zheng-Chong/CatVTON#133; 14.75 with older drivers", ("t4",)),
    Card("A100 40GB", (8, 0), 42_298_834_944, "bottlerocket-os/bottlerocket#3873", ("a100", "a100-40gb")),
    Card("A100 80GB", (8, 0), _gib(79.15), "vllm-project/vllm#4408; 79.25 in wbfwonderful/Vad-R1#11", ("a100-80gb",)),
    Card("A30", (8, 0), _gib(23.53), "google/RB-Modulation#5"),
    Card("A2", _AMPERE, _mib(14_973), "as the A16, which has as much memory; not seen"),
    Card("A10", _AMPERE, _gib(21.99), "zai-org/CogVLM#236"),
    Card("A10G", _AMPERE, _gib(22.06), f"{_MESSAGES}; 22.0 in batteries-included/batteries-included#1663"),
    Card("A16", _AMPERE, _mib(14_973), f"{_SMI}; one of the four GPUs of a board"),
    Card("A40", _AMPERE, _mib(45_416), f"{_PROPERTIES}; 48,688 MiB without error correction"),
    Card("L4", _ADA, _gib(22.03), _MESSAGES),
    Card("L40", _ADA, _gib(44.40), "QwenLM/Qwen3-VL#2097"),
    Card("L40S", _ADA, _gib(44.40), "as the L40; 44.52 in vllm-project/vllm-omni#807"),
    Card("H100 80GB", (9, 0), _gib(79.11), "vllm-project/vllm#27508", ("h100", "h100-80gb")),
    Card("H100 NVL", (9, 0), _gib(93.00), "ali-vilab/VACE#56", ("h100-94gb",)),
    Card("GH200 96GB", (9, 0), _gib(94.50), "94.5 in a public description of a machine; 95.00 by nvidia-smi", _GH200),
    Card("H200", (9, 0), _gib(139.72), f"{_MESSAGES}: 139.72 to 139.81", ("h200-141gb",)),
    Card("B200", (10, 0), _gib(178.35), "pytorch/ao#4002"),
    Card("B300", (10, 3), _gib(267.7), "sgl-project/sglang#25225"),
)

_AS_5060: Final = "16,311 MiB on Windows are 15,825 on Linux for the 16 GB card: 8,151 less as much; not seen on Linux"
_CONSUMER = (
    Card("GeForce GTX 1080 Ti", (6, 1), _mib(11_172), _ULTRALYTICS, ("gtx1080ti", "1080ti")),
    Card("TITAN RTX", _TURING, _mib(24_212), _ULTRALYTICS),
    _geforce("2060", _TURING, 5_918, _ULTRALYTICS),
    _geforce("2060 12GB", _TURING, 11_833, _LLAMA),
    _geforce("2060 SUPER", _TURING, 7_974, _PROPERTIES),
    _geforce("2070", _TURING, 7_949, _PROPERTIES),
    _geforce("2070 SUPER", _TURING, 7_972, _ULTRALYTICS),
    _geforce("2080", _TURING, 7_783, _HASHCAT),
    _geforce("2080 SUPER", _TURING, 7_982, _ULTRALYTICS),
    Card("GeForce RTX 2080 Ti", _TURING, _gib(10.73), "Morizeyao/GPT2-Chinese#104", ("rtx2080ti", "2080ti")),
    _geforce("3050 6GB", _AMPERE, 5_803, _LLAMA),
    _geforce("3050 8GB", _AMPERE, 7_837, _LLAMA, plain=True),
    _geforce("3050 Laptop 4GB", _AMPERE, 3_902, _ULTRALYTICS, short="3050 Laptop"),
    Card("GeForce RTX 3060 12GB", _AMPERE, _gib(11.76), "TencentARC/PhotoMaker#47", ("rtx3060", "3060", "3060-12gb")),
    _geforce("3060 Ti", _AMPERE, 7_833, _ULTRALYTICS),
    _geforce("3070", _AMPERE, 7_819, f"{_LLAMA}; 7,967 in akshitac8/OW-DETR#46"),
    _geforce("3070 Ti", _AMPERE, 7_840, _LLAMA),
    _geforce("3070 Ti Laptop", _AMPERE, 7_850, _LLAMA),
    _geforce("3080 10GB", _AMPERE, 10_002, f"{_ULTRALYTICS}; 10,015 in zai-org/CogVideo#34", plain=True),
    _geforce("3080 12GB", _AMPERE, 12_117, _ULTRALYTICS),
    _geforce("3080 Ti", _AMPERE, 11_910, _ULTRALYTICS),
    _geforce("3090", _AMPERE, 24_123, f"{_LLAMA}; 24,269 in GaoLii/DSP#10"),
    _geforce("3090 Ti", _AMPERE, 24_110, _ULTRALYTICS),
    Card("GeForce RTX 4060", _ADA, _gib(7.75), "ESRSchao/EdgeRegNet#2", ("rtx4060", "4060")),
    _geforce("4060 Laptop", _ADA, 7_806, _ULTRALYTICS),
    _geforce("4060 Ti 8GB", _ADA, 7_806, _ULTRALYTICS, short="4060 Ti"),
    _geforce("4060 Ti 16GB", _ADA, 15_944, _LLAMA),
    _geforce("4070", _ADA, 11_866, _LLAMA),
    _geforce("4070 SUPER", _ADA, 11_866, "as the RTX 4070, which has as much memory; not seen on Linux"),
    _geforce("4070 Laptop", _ADA, 7_806, _ULTRALYTICS),
    _geforce("4070 Ti", _ADA, 12_007, _ULTRALYTICS),
    _geforce("4070 Ti SUPER", _ADA, 15_934, _PROPERTIES),
    _geforce("4080", _ADA, 15_945, _HASHCAT),
    _geforce("4080 SUPER", _ADA, 15_944, _ULTRALYTICS),
    Card("GeForce RTX 4090", _ADA, _gib(23.61), "pinokiofactory/flux-webui#11", ("rtx4090", "4090")),
    _geforce("5060", _BLACKWELL, 7_665, _AS_5060),
    _geforce("5060 Ti 8GB", _BLACKWELL, 7_665, _AS_5060),
    _geforce("5060 Ti 16GB", _BLACKWELL, 15_825, f"{_LLAMA}; 15,848 by Ultralytics' programs", short="5060 Ti"),
    _geforce("5070", _BLACKWELL, 11_755, _HASHCAT),
    _geforce("5070 Ti", _BLACKWELL, 15_808, _LLAMA),
    _geforce("5080", _BLACKWELL, 15_840, _ULTRALYTICS),
    _geforce("5090", _BLACKWELL, 32_109, f"{_LLAMA}; 31.36 GiB in TrajectoryCrafter/TrajectoryCrafter#20"),
)

_WORKSTATION = (
    Card("Quadro RTX 5000", _TURING, _mib(15_927), _LLAMA),
    Card("Quadro RTX 8000", _TURING, _mib(48_380), f"{_ULTRALYTICS}; 47.46 GiB in Victarry/stable-dreambooth#8"),
    Card("RTX A2000 6GB", _AMPERE, _mib(5_803), "as the RTX 3050 6GB, which has as much memory; not seen"),
    Card("RTX A2000 12GB", _AMPERE, _gib(11.53), "vllm-project/vllm#12030", ("a2000",)),
    Card("RTX A4000", _AMPERE, _gib(15.61), "DengKaiCQ/VGGT-Long#6", ("a4000",)),
    Card("RTX A4500", _AMPERE, _gib(19.60), f"{_MESSAGES}; 18.34 with error correction", ("a4500",)),
    Card("RTX A5000", _AMPERE, _mib(24_114), f"{_PROPERTIES}; 22,721 MiB with error correction", ("a5000",)),
    Card("RTX A5500", _AMPERE, _mib(24_090), _ULTRALYTICS, ("a5500",)),
    Card("RTX A6000", _AMPERE, _gib(47.40), f"{_MESSAGES}: 47.40 to 47.54", ("a6000",)),
    Card("RTX 2000 Ada", _ADA, _mib(15_944), "as the RTX 4060 Ti 16GB, which has as much; not seen", ("2000ada",)),
    Card("RTX 4000 Ada", _ADA, _mib(20_055), f"{_ULTRALYTICS}, of the SFF card", ("4000ada",)),
    Card("RTX 4500 Ada", _ADA, _mib(24_087), _SMI, ("4500ada",)),
    Card("RTX 5000 Ada", _ADA, _mib(32_232), _SMI, ("5000ada",)),
    Card("RTX 6000 Ada", _ADA, _gib(44.43), "DINGYANB/MTVCrafter#21; 47.36 without error correction", ("6000ada",)),
    Card("RTX PRO 6000 Blackwell", _BLACKWELL, _mib(97_247), _LLAMA, ("rtxpro6000", "pro6000")),
)

_INSTINCT = (
    Card("Instinct MI210", _STAND_IN, _mib(65_520), _PROPERTIES, ("mi210",), "ROCm"),
    Card(
        "Instinct MI250X", _STAND_IN, _mib(65_520), f"{_PROPERTIES}; one of its two GPUs", ("mi250x", "mi250"), "ROCm"
    ),
    Card("Instinct MI300X", _STAND_IN, _mib(196_592), _PROPERTIES, ("mi300x",), "ROCm"),
)

_APPLE_SEEN: Final = {
    8: "pytorch/pytorch#105839, where 1.7 times it is allowed",
    16: _LLAMA,
    24: _LLAMA,
    32: _LLAMA,
    36: _LLAMA,
    48: _LLAMA,
    64: "BoBo0037/bobo-fun#8, where 1.7 times it is allowed",
    128: _LLAMA,
}
"""Sizes of unified memory whose `recommendedMaxWorkingSetSize` was reported, and where."""
_APPLE_LAST_TWO_THIRDS: Final = 32


def _apple(gib: int) -> Card:
    """A Mac: Metal's `recommendedMaxWorkingSetSize`, two thirds of up to 32 GB of memory, three quarters of more.

    PyTorch lets a process have 1.7 times that before it raises, but beyond it macOS begins to swap.
    """
    count = gib * GiB * 2 // 3 if gib <= _APPLE_LAST_TWO_THIRDS else gib * GiB * 3 // 4
    rule = "two thirds" if gib <= _APPLE_LAST_TWO_THIRDS else "three quarters"
    source = f"Metal's recommendedMaxWorkingSetSize is {rule} of the memory; "
    seen = _APPLE_SEEN.get(gib)
    return Card(f"Apple {gib}GB", _STAND_IN, count, source + (seen or "not seen for this size"), platform="MPS")


_MACS = tuple(map(_apple, (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)))
_TABLE = (*_DATACENTER, *_CONSUMER, *_WORKSTATION, *_INSTINCT, *_MACS)

LOCAL_SUFFIX: Final = " (local)"
"""Follows the name of a GPU of this machine."""
_LEFT_OUT: Final = re.compile(r"nvidia|geforce|tesla|amd|generation|(?<=laptop)gpu|sxm\d?|pcie|hbm\d?e?|[^a-z0-9]")
"""What drivers write into a name and people omit."""
_MAC: Final = re.compile(
    r"^(?:apple|mac(?:book)?(?:pro|air|mini|studio)?|mps)?(?:m\d(?:pro|max|ultra)?)?(?=\d*(?:gb)?$)"
)


def _key(name: str) -> str:
    key = _LEFT_OUT.sub("", re.sub(r"\s", "", name.lower()))
    mac = _MAC.match(key)
    return f"apple{key[mac.end() :]}" if mac and mac[0] else key


_SIZE: Final = re.compile(r"\d+(?:\.\d+)?[kmgt]i?b")

CARDS: dict[str, Card] = {card.name: card for card in _TABLE}
_BY_KEY: Final = {_key(name): card for card in _TABLE for name in (card.name, *card.aliases)}


_PROCESSORS: Final[dict[str, int]] = {
    name: count
    for count, names in {
        10: "A2|A16",
        16: "GeForce RTX 3050 Laptop 4GB",
        18: "GeForce RTX 3050 6GB",
        20: "GeForce RTX 3050 8GB",
        22: "RTX 2000 Ada",
        24: "GeForce RTX 4060|GeForce RTX 4060 Laptop",
        26: "RTX A2000 6GB|RTX A2000 12GB",
        28: "GeForce GTX 1080 Ti|GeForce RTX 3060 12GB",
        30: "GeForce RTX 2060|GeForce RTX 5060",
        34: "GeForce RTX 2060 12GB|GeForce RTX 2060 SUPER|GeForce RTX 4060 Ti 8GB|GeForce RTX 4060 Ti 16GB",
        36: "GeForce RTX 2070|GeForce RTX 4070 Laptop|GeForce RTX 5060 Ti 8GB|GeForce RTX 5060 Ti 16GB",
        38: "GeForce RTX 3060 Ti",
        40: "Tesla T4|GeForce RTX 2070 SUPER",
        46: "GeForce RTX 2080|GeForce RTX 3070|GeForce RTX 3070 Ti Laptop|GeForce RTX 4070",
        48: "GeForce RTX 2080 SUPER|GeForce RTX 3070 Ti|GeForce RTX 5070|Quadro RTX 5000|RTX A4000|RTX 4000 Ada",
        56: "Tesla P100 16GB|A30|GeForce RTX 4070 SUPER|RTX A4500",
        58: "L4",
        60: "GeForce RTX 4070 Ti|RTX 4500 Ada",
        64: "RTX A5000",
        66: "GeForce RTX 4070 Ti SUPER",
        68: "GeForce RTX 2080 Ti|GeForce RTX 3080 10GB",
        70: "GeForce RTX 3080 12GB|GeForce RTX 5070 Ti",
        72: "A10|TITAN RTX|Quadro RTX 8000",
        76: "GeForce RTX 4080",
        80: "Tesla V100 16GB|Tesla V100 32GB|A10G|GeForce RTX 3080 Ti|GeForce RTX 4080 SUPER|RTX A5500",
        82: "GeForce RTX 3090",
        84: "A40|GeForce RTX 3090 Ti|GeForce RTX 5080|RTX A6000",
        100: "RTX 5000 Ada",
        108: "A100 40GB|A100 80GB",
        128: "GeForce RTX 4090",
        132: "H100 80GB|H100 NVL|GH200 96GB|H200",
        142: "L40|L40S|RTX 6000 Ada",
        148: "B200",
        160: "B300",
        170: "GeForce RTX 5090",
        188: "RTX PRO 6000 Blackwell",
    }.items()
    for name in names.split("|")
}
"""Multiprocessors, from NVIDIA's data sheets; an H100 for PCI Express has 114."""


def processors(where: Card) -> tuple[int, int]:
    """The least and the most multiprocessors of a card: where it isn't in the table, those of its generation, and where
    that isn't CUDA's, those of the card whose kernels stand in.
    """
    same = _BY_KEY.get(_key(where.name.removesuffix(LOCAL_SUFFIX)), where) if where.platform == "CUDA" else None
    count = _PROCESSORS.get(same.name if same else DEFAULT_GPU)
    if count is not None:
        return count, count
    generation = [n for name, n in _PROCESSORS.items() if CARDS[name].capability[0] == where.capability[0]]
    return min(generation, default=min(_PROCESSORS.values())), max(generation, default=max(_PROCESSORS.values()))


def card(name: str) -> Card:
    """The card that `name` means, without regard to case, spaces or the maker: ``a100``, ``RTX 4090``, ``M2 Max 64GB``.

    Raises `InputError` with the nearest names when there is none.
    """
    key = _key(name)
    if key in _BY_KEY:
        return _BY_KEY[key]
    if _SIZE.fullmatch(key):
        raise InputError(
            f"{quoted(name)} is a size, not a GPU: name one of those that memsize gpus lists, or give fit a --budget"
        )
    near = nearest(key, {key: gpu.name for key, gpu in _BY_KEY.items()}, most=4)
    raise UnknownInputError("GPU", name, CARDS, near=near, problem=f"no GPU {quoted(name)} in the table")
