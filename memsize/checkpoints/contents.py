"""The frozen record of a checkpoint: its bytes, storages and tensors, their sums, and its match with a model; dtypes.

Only readers make `Contents`. Sizes are exact integers in bytes. Nothing here needs torch or knows how it was read or
will be shown. Every text that comes out of a file is made printable before it gets in here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, get_args

from memsize.records.schema import Index, Size
from memsize.records.trace import TensorSpec

Use = Literal["tensors", "padding", "metadata", "pickle", "headers", "other", "unclaimed"]
"""The uses of a file's bytes: tensor data; alignment; metadata such as a tokenizer; pickled objects; headers and zip
records; other records (the code of a scripted model); bytes unknown to the format."""

USES: tuple[Use, ...] = get_args(Use)

PartKind = Literal["model", "EMA", "optimizer", "scheduler", "other"]
"""The kinds of parts of a training checkpoint."""

KINDS: tuple[PartKind, ...] = get_args(PartKind)

Problem = Literal["missing", "unexpected", "wrong shape", "wrong dtype"]

PROBLEMS: tuple[Problem, ...] = ("missing", "wrong shape", "wrong dtype", "unexpected")
"""The most serious first."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint. `uses` has the bytes of each of `USES`, in that order: they add up to `size`."""

    name: str
    format: str
    size: Size
    uses: tuple[int, ...]
    tensors: Size

    def validate(self) -> None:
        """Raise ValueError unless it has bytes for each use."""
        if len(self.uses) != len(USES):
            raise ValueError(f"{len(self.uses)} uses of a file's bytes, not {len(USES)}")

    def bytes_for(self, use: Use) -> int:
        """The bytes of the file that are for `use`."""
        return self.uses[USES.index(use)]


@dataclass(frozen=True, slots=True)
class Storage:
    """One block of tensor data: `bytes` in memory, `file_bytes` in the file (fewer when compressed).

    `file` indexes `Contents.files`. `offset` is where its data starts in it, None where that is not one place.
    `unneeded` are bytes of it that no tensor covers: they are saved because a tensor is a view of a larger one.
    """

    name: str
    file: Annotated[int, Index("files")]
    offset: int | None
    bytes: Size
    file_bytes: Size
    unneeded: Size = 0


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor, or one piece of a tensor that is kept in several; `wrapper` is the class of that tensor.

    `bytes` are those that no earlier tensor owns: 0 when `shared_with` names the tensor that owns them all. `unneeded`
    are the bytes of its storage that no tensor covers, counted with the first tensor of the storage. `storage` indexes
    `Contents.storages`, None for a tensor without data (a meta tensor). `keys` are those of the dictionaries and lists
    down to it; joined by dots they are its `name`.
    """

    name: str
    keys: tuple[str, ...]
    spec: TensorSpec
    elements: Size
    storage: Annotated[int, Index("storages")] | None
    bytes: Size
    unneeded: Size = 0
    shared_with: str | None = None
    wrapper: str | None = None
    trainable: bool | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A container that is recognised by its entries, such as an optimizer's ``state`` and ``param_groups``."""

    keys: tuple[str, ...]
    kind: PartKind


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything that one checkpoint holds, whether it is one file or several.

    `values` are the plain values beside the tensors (an epoch, a file's own metadata) as texts. `classes` are the
    names of the classes and functions that a pickle mentions beyond what ``weights_only`` allows. `module` is the class
    of a model that was pickled whole. `missing` names the
    tensors that an index promises and no file has.
    """

    path: str
    format: str
    files: tuple[FileRecord, ...]
    storages: tuple[Storage, ...]
    tensors: tuple[Tensor, ...]
    values: tuple[tuple[str, str], ...] = ()
    marks: tuple[Mark, ...] = ()
    classes: tuple[str, ...] = ()
    module: str | None = None
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def compressed(self) -> int:
        """The bytes that compression saves: those of the data in memory minus those in the files."""
        return sum(storage.bytes - storage.file_bytes for storage in self.storages)


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a checkpoint that a tensor belongs to: its kind, and how many of the tensor's keys name the part."""

    kind: PartKind
    root: int


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors taken together: a part, a dtype, a module. `bytes` is the size of their data, shared bytes once, and
    `unneeded` the bytes saved along with them that no tensor covers. A module's name begins with `root`, the keys of
    its part.
    """

    kind: PartKind
    name: str
    tensors: Size
    elements: Size
    bytes: Size
    unneeded: Size
    dtypes: tuple[str, ...]
    root: str = ""


class View(NamedTuple):
    """Modules to list: down to `depth` below their part (None: tensors), `folded` if only numbers in names differ."""

    depth: int | None = None
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that differs from the model's; `file` and `model` are the two specs."""

    name: str
    problem: Problem
    file: TensorSpec | None
    model: TensorSpec | None
    bytes: Size


@dataclass(frozen=True, slots=True)
class Match:
    """A comparison of a file with a model. `key` is the file's key of the compared weights.

    `dropped`, `added` and `wrappers` are the change of names under which they match: a prefix dropped, one added, and
    steps left out. `left_out` are tied tensors that the file leaves out, as safetensors does.
    """

    model: str
    matching: int
    differences: tuple[Difference, ...]
    key: str = ""
    dropped: str = ""
    added: str = ""
    wrappers: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def count(self, problem: Problem) -> int:
        """How many tensors have that problem."""
        return sum(difference.problem == problem for difference in self.differences)


BITS: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "quint8", "qint8"), 8),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 16),
    **dict.fromkeys(("uint32", "int32", "qint32", "float32", "complex32", "bcomplex32"), 32),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 64),
    "complex128": 128,
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 8),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), 8),
    **dict.fromkeys(("bits8", "bits1x8", "bits2x4", "bits4x2"), 8),
    "bits16": 16,
    "float4_e2m1fn_x2": 8,
    "quint4x2": 4,
    "quint2x4": 2,
}
"""Bits that an element takes, by torch's name of the dtype. torch keeps its sub-byte integers in a byte each."""

ALIASES = {
    "half": "float16", "float": "float32", "double": "float64", "short": "int16", "int": "int32", "long": "int64",
    "chalf": "complex32", "cfloat": "complex64", "cdouble": "complex128",
}  # fmt: skip

STORAGES: dict[str, str] = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64", "QInt8Storage": "qint8", "QUInt8Storage": "quint8", "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4", "UntypedStorage": "uint8",
}  # fmt: skip
"""The dtype of torch's storage classes (`torch.storage._dtype_to_storage_type_map`)."""

SAFETENSORS: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 8), "F4": ("float4_e2m1fn", 4), "F6_E2M3": ("float6_e2m3fn", 6), "F6_E3M2": ("float6_e3m2fn", 6),
    "U8": ("uint8", 8), "I8": ("int8", 8), "F8_E5M2": ("float8_e5m2", 8), "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8), "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8), "F8_E8M0": ("float8_e8m0fnu", 8),
    "I16": ("int16", 16), "U16": ("uint16", 16), "F16": ("float16", 16), "BF16": ("bfloat16", 16), "I32": ("int32", 32),
    "U32": ("uint32", 32), "F32": ("float32", 32), "C64": ("complex64", 64), "F64": ("float64", 64),
    "I64": ("int64", 64), "U64": ("uint64", 64),
}  # fmt: skip
"""safetensors' names: torch's name, and bits per element."""


class Block(NamedTuple):
    """`bytes` hold `elements`: 18 bytes for 32 elements of Q4_0."""

    name: str
    elements: int
    bytes: int


_GGML = """
0 float32 1 4       1 float16 1 2       2 Q4_0 32 18        3 Q4_1 32 20        4 Q4_2 16 10        5 Q4_3 16 12
6 Q5_0 32 22        7 Q5_1 32 24        8 Q8_0 32 34        9 Q8_1 32 40        10 Q2_K 256 84      11 Q3_K 256 110
12 Q4_K 256 144     13 Q5_K 256 176     14 Q6_K 256 210     15 Q8_K 256 292     16 IQ2_XXS 256 66   17 IQ2_XS 256 74
18 IQ3_XXS 256 98   19 IQ1_S 256 50     20 IQ4_NL 32 18     21 IQ3_S 256 110    22 IQ2_S 256 82     23 IQ4_XS 256 136
24 int8 1 1         25 int16 1 2        26 int32 1 4        27 int64 1 8        28 float64 1 8      29 IQ1_M 256 56
30 bfloat16 1 2     31 Q4_0_4_4 32 18   32 Q4_0_4_8 32 18   33 Q4_0_8_8 32 18   34 TQ1_0 256 54     35 TQ2_0 256 66
36 IQ4_NL_4_4 32 18 37 IQ4_NL_4_8 32 18 38 IQ4_NL_8_8 32 18 39 MXFP4 32 17      40 NVFP4 64 36      41 Q1_0 128 18
"""
_FIELDS = _GGML.split()

GGML: dict[int, Block] = {
    int(number): Block(name, int(elements), int(size))
    for number, name, elements, size in zip(*(_FIELDS[start::4] for start in range(4)), strict=True)
}
"""ggml's types by number (ggml.h `enum ggml_type` and ggml.c `type_traits`), with those it has since removed."""


def torch_dtype(name: str) -> str | None:
    """The full name of the dtype ``torch.<name>``; None if there is none."""
    name = ALIASES.get(name, name)
    return name if name in BITS else None


def is_float(dtype: str) -> bool:
    """Whether a dtype is a plain floating one, which a cast can halve."""
    return dtype in ("float16", "bfloat16", "float32", "float64")
