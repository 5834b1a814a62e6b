"""cuDNN's own choice of plans, asked on any machine: its heuristics take the description of a GPU instead of a GPU.

PyTorch takes the first plan of `CUDNN_HEUR_MODE_INSTANT` that runs, then those of `CUDNN_HEUR_MODE_FALLBACK`, and
allocates the plan's workspace for the time of the call (aten/src/ATen/native/cudnn/Conv_v8.cpp). Which plans those are
is a pure function of the convolution, of cuDNN's release, and of the GPU's compute capability: over 150 convolutions of
23 networks on four generations, other figures for memory, shared memory, caches, clocks and the tensors' alignment
moved the first plan's workspace in 30 of 36,000 answers; the number of multiprocessors moves it on Turing alone.

Limits: cuDNN 9.11 or newer here, older ones in `memsize.kernels.cudnn.handle`. From 9.5 to 9.11 the lists lack plans
whose kernels are only made ready beside a driver. What follows them mostly takes as much: of 700 convolutions on an
A100, the first workspaces of 9.11 and 9.12 differ by more than 2 % of the tensors in 2 %.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from math import prod
from typing import Final, Literal, NamedTuple, Protocol, get_args

from memsize.errors import InputError
from memsize.kernels.cudnn.backend import Attribute, Backend, CudnnError, Descriptors, Handle, Kind, Type
from memsize.kernels.strides import permuted
from memsize.units import dotted_cudnn

Operation = Literal["forward", "data", "filter"]
"""The forward, the gradient of its input, and that of its weights. A transposed convolution's forward is ``"data"``."""

WIDTHS: Final = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of a number, for the dtypes that PyTorch gives to cuDNN's convolutions."""

_FORMATS: Final = ("row-major", "channels-last")

OLDEST: Final = 91_100
"""9.11.0, the release since which cuDNN reads the description of a device."""

_TYPES: Final = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
"""`cudnnDataType_t`."""
_OPERATIONS: Final = {"forward": (Kind.FORWARD, 700), "data": (Kind.DATA, 706), "filter": (Kind.FILTER, 712)}
"""The descriptor of an operation, and the first of its six attributes: alpha, beta, the convolution, w, x and y."""
_INSTANT, _FALLBACK = 0, 2
_CROSS_CORRELATION: Final = 1
_TENSOR_CORE, _DOWN_CONVERTED, _NONDETERMINISTIC = 0, 1, 4
"""`cudnnBackendNumericalNote_t`, as far as PyTorch looks at it."""
_FEW: Final = 8
_NOTES: Final = 16
_ALIGNMENT: Final = 16
_MULTIPROCESSORS: Final = {(7, 0): 80, (7, 5): 40, (8, 0): 108, (8, 6): 84, (8, 9): 128, (9, 0): 132}
"""The number on the most common card of each compute capability: V100, T4, A100, A10, L40S, H100."""


class Convolution(NamedTuple):
    """A convolution as cuDNN is asked about it: one of three operations, and the tensors involved.

    `x`, `w` and `y` are the shapes of input, weight and output of the forward, whichever of them is computed. All of
    them are of one dtype and one format. `deterministic` and `tf32` are PyTorch's settings
    (`torch.backends.cudnn`), which rule some of cuDNN's plans out.
    """

    operation: Operation
    dtype: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    channels_last: bool = False
    deterministic: bool = False
    tf32: bool = True

    @property
    def operands(self) -> int:
        """The bytes of the three tensors together."""
        return WIDTHS[self.dtype] * (prod(self.x) + prod(self.w) + prod(self.y))

    @property
    def groups(self) -> int:
        """The number of groups into which the channels are divided."""
        return self.x[1] // self.w[1]

    def __str__(self) -> str:
        shapes = (self.x, self.w, self.y, self.padding, self.stride, self.dilation)
        flags = [name for name in ("deterministic", "tf32") if getattr(self, name)]
        numbers = (",".join(map(str, shape)) for shape in shapes)
        return " ".join((self.operation, self.dtype, _FORMATS[self.channels_last], *numbers, *flags))

    @classmethod
    def parse(cls, text: str) -> Convolution:
        """The convolution that `str` wrote; raises `InputError` for anything else."""
        words = text.split()
        try:
            operation, dtype, layout, *rest = words
            x, w, y, padding, stride, dilation = (tuple(map(int, word.split(","))) for word in rest[:6])
            last = bool(_FORMATS.index(layout))
        except ValueError as error:
            raise InputError(f"not a convolution: {text!r}") from error
        flags = frozenset(rest[6:])
        if operation not in get_args(Operation) or dtype not in WIDTHS or not flags <= {"deterministic", "tf32"}:
            raise InputError(f"not a convolution: {text!r}")
        settings = last, "deterministic" in flags, "tf32" in flags
        return cls(operation, dtype, x, w, y, padding, stride, dilation, *settings)  # type: ignore[arg-type]


class Plan(NamedTuple):
    """One way to compute a convolution: the bytes of its workspace, and what cuDNN notes of its numbers."""

    workspace: int
    notes: frozenset[int]


class Library:
    """One libcudnn. Raises OSError where it cannot be loaded, `CudnnError` where it is older than `OLDEST`."""

    def __init__(self, path: str) -> None:
        self._backend = Backend(path)
        self.version = self._backend.version
        if self.version < OLDEST:
            raise CudnnError(
                f"cuDNN {dotted_cudnn(self.version)} is older than 9.11, the first that reads the description of a GPU"
            )
        self._devices: dict[tuple[int, int], Handle] = {}
        self._plan_of: dict[tuple[Convolution, tuple[int, int]], Plan | None] = {}
        self._devices_alive = Descriptors(self._backend)

    def __str__(self) -> str:
        return dotted_cudnn(self.version)

    def plan(self, convolution: Convolution, capability: tuple[int, int]) -> Plan | None:
        """The plan that PyTorch would run, None without one. Raises `CudnnError` for a GPU that cuDNN does not know."""
        question = convolution, capability
        if question not in self._plan_of:
            # To read all of a list takes most of the time, and one of the first is nearly always allowed.
            few = self._plans(convolution, capability, _INSTANT, most=_FEW)
            self._plan_of[question] = next(iter(few or self.plans(convolution, capability)), None)
        return self._plan_of[question]

    def plans(self, convolution: Convolution, capability: tuple[int, int]) -> tuple[Plan, ...]:
        """All plans that PyTorch would try, in its order: what its benchmark measures."""
        return tuple(
            plan for mode in (_INSTANT, _FALLBACK) for plan in self._plans(convolution, capability, mode, most=None)
        )

    def _plans(self, convolution: Convolution, capability: tuple[int, int], mode: int, most: int | None) -> list[Plan]:
        """Return the allowed plans among the first `most` of one list of the heuristics."""
        device = self._device(capability)
        with Descriptors(self._backend) as descriptors:
            configs = configs_of(descriptors, graph_of(descriptors, convolution), device, mode, most)
            plans = [_plan(descriptors, config) for config in configs]
        return [plan for plan in plans if is_allowed(plan, convolution)]

    def _device(self, capability: tuple[int, int]) -> Handle:
        if capability not in self._devices:
            if _device_version(capability) > self._backend.newest:
                raise CudnnError(f"cuDNN {self} does not know compute capability {capability[0]}.{capability[1]}")
            text = json.dumps(device_properties(capability)).encode()
            attribute = (Attribute.DEVICE_JSON, Type.CHAR, text)
            self._devices[capability] = self._devices_alive.make(Kind.DEVICE, attribute)
        return self._devices[capability]


def device_properties(capability: tuple[int, int]) -> dict[str, object]:
    """A description of a GPU of this compute capability; apart from its multiprocessors, any other figures would do."""
    major, minor = capability
    return {
        "cudaDeviceId": 0, "deviceName": f"compute capability {major}.{minor}",
        "deviceVer": _device_version(capability), "driverVer": 13_000, "isTccDriver": 0, "l2CacheSize": 50 << 20,
        "maxBlockSize": [1024, 1024, 64], "maxCtasPerSM": 32, "maxGridSize": [2_147_483_647, 65_535, 65_535],
        "maxRegistersPerSM": 65_536, "maxSharedMemoryPerBlock": 49_152, "maxSharedMemoryPerBlockOptin": 101_376,
        "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "memClockRateKHz": 2_619_000,
        "multiProcessorCount": _MULTIPROCESSORS.get(capability, 132), "pciDeviceId": 0, "regsPerBlock": 65_536,
        "reservedSharedMemoryPerBlock": 1024, "smClockRateKHz": 1_980_000, "smCountOrigin": 0, "supportCoopLaunch": 1,
        "totalGlobalMem": 80 << 30, "warpSize": 32,
    }  # fmt: skip


def _device_version(capability: tuple[int, int]) -> int:
    """A compute capability as cuDNN counts: 860 for 8.6."""
    return 100 * capability[0] + 10 * capability[1]


def graph_of(descriptors: Descriptors, convolution: Convolution, *more: tuple[int, Type, list[int]]) -> Handle:
    """The graph of one convolution; `more` are other attributes of it."""
    kind, first = _OPERATIONS[convolution.operation]
    compute = "float64" if convolution.dtype == "float64" else "float32"
    rank = len(convolution.stride)
    geometry = descriptors.make(
        Kind.CONVOLUTION,
        (Attribute.COMPUTE_TYPE, Type.DATA_TYPE, [_TYPES[compute]]),
        (Attribute.CONVOLUTION_MODE, Type.CONVOLUTION_MODE, [_CROSS_CORRELATION]),
        (Attribute.DILATIONS, Type.INT64, convolution.dilation),
        (Attribute.STRIDES, Type.INT64, convolution.stride),
        (Attribute.PRE_PADDINGS, Type.INT64, convolution.padding),
        (Attribute.POST_PADDINGS, Type.INT64, convolution.padding),
        (Attribute.SPATIAL_DIMENSIONS, Type.INT64, [rank]),
    )
    w, x, y = (_tensor(descriptors, name, getattr(convolution, name), convolution) for name in "wxy")
    scale = Type.DOUBLE if compute == "float64" else Type.FLOAT
    operation = descriptors.make(
        kind,
        (first, scale, [1.0]),
        (first + 1, scale, [0.0]),
        *((first + 2 + offset, Type.DESCRIPTOR, [handle]) for offset, handle in enumerate((geometry, w, x, y))),
    )
    return descriptors.make(Kind.GRAPH, *more, (Attribute.GRAPH_OPERATIONS, Type.DESCRIPTOR, [operation]))


def _tensor(descriptors: Descriptors, name: str, shape: tuple[int, ...], convolution: Convolution) -> Handle:
    # Of the format, for dimensions of size one too (Conv_v8.cpp, `fixSizeOneDimStride`).
    row_major = range(len(shape))[::-1]
    order = (1, *row_major[:-2], 0) if convolution.channels_last else row_major
    return descriptors.make(
        Kind.TENSOR,
        (Attribute.TENSOR_TYPE, Type.DATA_TYPE, [_TYPES[convolution.dtype]]),
        (Attribute.TENSOR_SHAPE, Type.INT64, shape),
        (Attribute.TENSOR_STRIDES, Type.INT64, permuted(shape, order)),
        (Attribute.TENSOR_NAME, Type.INT64, [ord(name)]),
        (Attribute.TENSOR_ALIGNMENT, Type.INT64, [_ALIGNMENT]),
    )


def configs_of(
    descriptors: Descriptors, graph: Handle, device: Handle | None, mode: int, most: int | None
) -> list[Handle]:
    """Return the engine configurations that the heuristics of `mode` offer, the best first, no more than `most`."""
    heuristics = descriptors.make(
        Kind.HEURISTICS,
        (Attribute.HEURISTICS_GRAPH, Type.DESCRIPTOR, [graph]),
        (Attribute.HEURISTICS_MODE, Type.HEURISTICS_MODE, [mode]),
        *([] if device is None else [(Attribute.HEURISTICS_DEVICE, Type.DESCRIPTOR, [device])]),
    )
    count = descriptors.count(heuristics, Attribute.HEURISTICS_RESULTS, Type.DESCRIPTOR)
    configs = [descriptors.empty(Kind.ENGINE_CONFIG) for _ in range(count if most is None else min(count, most))]
    array = (Handle * len(configs))(*configs)
    return (
        configs[: descriptors.read(heuristics, Attribute.HEURISTICS_RESULTS, Type.DESCRIPTOR, array)] if configs else []
    )


def _plan(descriptors: Descriptors, config: Handle) -> Plan:
    workspace = (ctypes.c_int64 * 1)()
    descriptors.read(config, Attribute.CONFIG_WORKSPACE, Type.INT64, workspace)
    return Plan(int(workspace[0]), notes_of(descriptors, config))


def notes_of(descriptors: Descriptors, config: Handle) -> frozenset[int]:
    """Return cuDNN's notes on the numbers of a configuration's engine."""
    engine = (Handle * 1)(descriptors.empty(Kind.ENGINE))
    descriptors.read(config, Attribute.CONFIG_ENGINE, Type.DESCRIPTOR, engine)
    notes = (ctypes.c_int * _NOTES)()
    written = descriptors.read(Handle(engine[0]), Attribute.ENGINE_NOTES, Type.NOTE, notes)
    return frozenset(notes[:written])


def is_allowed(plan: Plan, convolution: Convolution) -> bool:
    """Whether PyTorch would try the plan (Conv_v8.cpp, `filterEngineConfigs`)."""
    refused = {_DOWN_CONVERTED}
    if convolution.deterministic:
        refused.add(_NONDETERMINISTIC)
    if convolution.dtype == "float32" and not convolution.tf32:
        refused.add(_TENSOR_CORE)
    return plan.notes.isdisjoint(refused)


# -- workspaces --------------------------------------------------------------------------------------------------------

_FEW_CHANNELS: Final = 4
"""Up to this many input channels, plans read an image in the format that it has."""


class PlanSource(Protocol):
    """A source of plans: `Library`, or the same in another process."""

    def plan(self, convolution: Convolution, capability: tuple[int, int]) -> Plan | None: ...
    def plans(self, convolution: Convolution, capability: tuple[int, int]) -> tuple[Plan, ...]: ...


class Plans:
    """The workspaces that cuDNN takes on a GPU of compute capability `capability`, one for each convolution met.

    `library` loads the library to ask when the first convolution comes, since loading it takes memory. `recorded` holds
    answers that cuDNN `release` gave earlier, which take precedence. `wanted` is the release of the simulated stack;
    answers of another are estimates. `greedy` answers with the most that PyTorch's benchmark may allocate: the largest
    workspace of all plans that it tries.
    """

    def __init__(
        self,
        capability: tuple[int, int],
        library: Callable[[], PlanSource | None] = lambda: None,
        *,
        recorded: Mapping[Convolution, int] | None = None,
        release: str | None = None,
        wanted: str | None = None,
        greedy: bool = False,
    ) -> None:
        self.capability = capability
        self.greedy = greedy
        self.wanted = wanted
        self.answers: dict[Convolution, int] = dict(recorded or {})
        """Bytes of workspace, by convolution."""
        self.estimated: set[Convolution] = set()
        """The convolutions whose answer is an estimate."""
        self._doubted: set[Convolution] = set()
        self.release = release if recorded else None
        """The cuDNN that answered; None before one did."""
        self._library = library

    def workspace(self, convolution: Convolution) -> int:
        """The bytes that the convolution takes beside its tensors while it runs."""
        size = self.answers.get(convolution)
        if size is None:
            size = self.answers[convolution] = self._ask(convolution, self.greedy)
        return size

    def benchmarked(self, convolution: Convolution) -> int:
        """The bytes that PyTorch's benchmark allocates to try all plans of a convolution."""
        return self._ask(convolution, greedy=True)

    def doubt(self, convolution: Convolution) -> int:
        """How little is sure about the plan of a convolution that was asked for: 0 for nearly sure, then 1 and 2."""
        return doubt(convolution) if convolution in self._doubted else 0

    def source(self, convolutions: Collection[Convolution]) -> str | None:
        """Return the cuDNN release that answered for `convolutions`; None if there are none, or one is an estimate."""
        return self.release if convolutions and self.estimated.isdisjoint(convolutions) else None

    def _ask(self, convolution: Convolution, greedy: bool) -> int:
        library = self._library()
        if library is not None:
            with suppress(CudnnError):  # a GPU newer than the library, say
                if greedy:
                    plans = library.plans(convolution, self.capability)
                else:
                    first = library.plan(convolution, self.capability)
                    plans = (first,) if first else ()
                self.release = self.release or str(library)
                if not is_release(self.release, self.wanted):
                    self.estimated.add(convolution)
                if is_asked_by_handle(self.release):
                    self._doubted.add(convolution)
                return max((plan.workspace for plan in plans), default=0)
        self.estimated.add(convolution)
        return estimate(convolution, self.capability) * (_GREED if greedy else 1)


def is_release(release: str, wanted: str | None) -> bool:
    """Whether two releases choose alike, as far as is known: ``9.1.0`` is ``9.1``. None is any."""
    return wanted is None or release.split(".")[:2] == wanted.split(".")[:2]


def is_asked_by_handle(release: str) -> bool:
    """Whether a release does not read the description of a GPU (`memsize.kernels.cudnn.handle`)."""
    major, minor = map(int, release.split(".")[:2])
    return 10_000 * major + 100 * minor < OLDEST


def doubt(convolution: Convolution) -> int:
    """How little is sure about the plan that a release asked by a handle names: 0 for nearly sure, then 1 and 2.

    Learnt from the first 385 random networks of GPUMemNet (A100, cuDNN 9.1): what `nvidia-smi` shows is within 4 MiB of
    `reserved` and a constant for 95 % of those whose kernels are all larger than a pixel and move by one, and for 57 %
    of the others. What these are off by is whole workspaces, most often that of a 1×1 kernel's gradient.
    """
    is_pointwise, moves = max(convolution.w[2:]) == 1, max(convolution.stride) > 1
    if convolution.operation == "filter" and is_pointwise and not moves:
        return 2
    return int(is_pointwise or moves)


_GREED: Final = 3
"""The largest workspace, as a multiple of the first plan's, where cuDNN cannot be asked: an assumption."""


def estimate(convolution: Convolution, capability: tuple[int, int]) -> int:
    """Roughly what cuDNN takes where it cannot be asked: room for all three tensors in the format of its kernels.

    Kernels for tensor cores work on channels last, and convert row-major tensors to it and back. Kernels without tensor
    cores, depthwise ones and those for an image's few channels work on the tensors as they are. `python -m
    benchmarks.workspaces` says how often that is so.
    """
    if convolution.operation != "filter" and convolution.x[1] <= _FEW_CHANNELS:
        return 0
    if 1 < convolution.groups == convolution.x[1] or convolution.dtype == "float64" or capability < (7, 5):
        return 0
    is_rearranged = not convolution.channels_last
    if convolution.dtype == "float32":
        is_rearranged = capability >= (8, 0) and convolution.tf32 and (is_rearranged or capability[0] in (8, 12))
    return convolution.operands if is_rearranged else 0
