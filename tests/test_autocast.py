"""Autocast's policy against PyTorch's own: real autocast on fake CUDA tensors, which runs forward without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.zoo import operators
from tests.kernels import autocast, autocast_region, cuda_semantics

aten = torch.ops.aten
LOWER = (torch.float16, torch.bfloat16)
Make = Callable[..., Tensor]


class Maker:
    """Makes tensors on one device, their dtypes taken in turn from `dtypes` (the last one for all that follow)."""

    def __init__(self, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
        self.device, self.dtypes, self.made = device, dtypes, 0

    def __call__(self, *shape: int) -> Tensor:
        dtype = self.dtypes[min(self.made, len(self.dtypes) - 1)]
        self.made += 1
        return torch.empty(shape, dtype=dtype, device=self.device)

    def index(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)


def unary(name: str) -> Callable[[Maker], Any]:
    return lambda t: getattr(aten, name).default(t(2, 3))


def pair(name: str) -> Callable[[Maker], Any]:
    return lambda t: getattr(aten, name).default(t(4, 3), t(4, 3))


UNARY = "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan softplus nuclear_norm pdist"
PAIRS = """hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss soft_margin_loss dist cdist
    atan2 cross binary_cross_entropy binary_cross_entropy_with_logits"""
SAMPLES: dict[str, Callable[[Maker], Any]] = {
    "_convolution": lambda t: aten._convolution.default(
        t(1, 2, 5, 5), t(3, 2, 3, 3), t(3), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True, True
    ),
    "_convolution.deprecated": lambda t: aten._convolution.deprecated(
        t(1, 2, 5, 5), t(3, 2, 3, 3), t(3), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True
    ),
    "conv1d": lambda t: aten.conv1d.default(t(1, 2, 5), t(3, 2, 3), t(3)),
    "conv2d": lambda t: aten.conv2d.default(t(1, 2, 5, 5), t(3, 2, 3, 3), t(3)),
    "conv3d": lambda t: aten.conv3d.default(t(1, 2, 5, 5, 5), t(3, 2, 3, 3, 3)),
    "conv_tbc": lambda t: aten.conv_tbc.default(t(5, 2, 4), t(3, 4, 6), t(6)),
    "conv_transpose1d": lambda t: aten.conv_transpose1d.default(t(1, 2, 5), t(2, 3, 3), t(3)),
    "conv_transpose2d.input": lambda t: aten.conv_transpose2d.input(t(1, 2, 5, 5), t(2, 3, 3, 3), t(3)),
    "conv_transpose3d.input": lambda t: aten.conv_transpose3d.input(t(1, 2, 5, 5, 5), t(2, 3, 3, 3, 3)),
    "convolution": lambda t: aten.convolution.default(
        t(1, 2, 5, 5), t(3, 2, 3, 3), t(3), [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    ),
    "prelu": lambda t: aten.prelu.default(t(2, 3), t(3)),
    "addmm": lambda t: aten.addmm.default(t(4), t(2, 3), t(3, 4)),
    "addmv": lambda t: aten.addmv.default(t(2), t(2, 3), t(3)),
    "addr": lambda t: aten.addr.default(t(2, 3), t(2), t(3)),
    "matmul": lambda t: aten.matmul.default(t(2, 2, 3), t(3, 4)),
    "einsum": lambda t: aten.einsum.default("ij,jk->ik", [t(2, 3), t(3, 4)]),
    "mm": lambda t: aten.mm.default(t(2, 3), t(3, 4)),
    "mv": lambda t: aten.mv.default(t(2, 3), t(3)),
    "linalg_vecdot": lambda t: aten.linalg_vecdot.default(t(2, 3), t(2, 3)),
    "linalg_matrix_sqrth": lambda t: aten.linalg_matrix_sqrth.default(t(3, 3)),
    "linear": lambda t: aten.linear.default(t(2, 3), t(4, 3), t(4)),
    "addbmm": lambda t: aten.addbmm.default(t(2, 4), t(5, 2, 3), t(5, 3, 4)),
    "baddbmm": lambda t: aten.baddbmm.default(t(5, 2, 4), t(5, 2, 3), t(5, 3, 4)),
    "bmm": lambda t: aten.bmm.default(t(5, 2, 3), t(5, 3, 4)),
    "chain_matmul": lambda t: aten.chain_matmul.default([t(2, 3), t(3, 4), t(4, 5)]),
    "linalg_multi_dot": lambda t: aten.linalg_multi_dot.default([t(2, 3), t(3, 4), t(4, 5)]),
    "lstm_cell": lambda t: aten.lstm_cell.default(t(2, 3), [t(2, 4), t(2, 4)], t(16, 3), t(16, 4), t(16), t(16)),
    "gru_cell": lambda t: aten.gru_cell.default(t(2, 3), t(2, 4), t(12, 3), t(12, 4), t(12), t(12)),
    "_thnn_fused_lstm_cell": lambda t: aten._thnn_fused_lstm_cell.default(t(2, 16), t(2, 16), t(2, 4), t(16), t(16)),
    "rnn_tanh_cell": lambda t: aten.rnn_tanh_cell.default(t(2, 3), t(2, 4), t(4, 3), t(4, 4), t(4), t(4)),
    "rnn_relu_cell": lambda t: aten.rnn_relu_cell.default(t(2, 3), t(2, 4), t(4, 3), t(4, 4), t(4), t(4)),
    "_scaled_dot_product_flash_attention": lambda t: aten._scaled_dot_product_flash_attention.default(
        t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8)
    )[:2],
    "scaled_dot_product_attention": lambda t: aten.scaled_dot_product_attention.default(
        t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8), t(4, 4)
    ),
    **{name: unary(name) for name in UNARY.split()},
    "pow.Tensor_Scalar": lambda t: aten.pow.Tensor_Scalar(t(2, 3), 2),
    "pow.Tensor_Tensor": lambda t: aten.pow.Tensor_Tensor(t(2, 3), t(2, 3)),
    "pow.Scalar": lambda t: aten.pow.Scalar(2, t(2, 3)),
    "layer_norm": lambda t: aten.layer_norm.default(t(2, 3), [3], t(3), t(3)),
    "native_layer_norm": lambda t: aten.native_layer_norm.default(t(2, 3), [3], t(3), t(3), 1e-5),
    "rms_norm": lambda t: aten.rms_norm.default(t(2, 3), [3], t(3)),
    "group_norm": lambda t: aten.group_norm.default(t(2, 4, 3), 2, t(4), t(4)),
    "frobenius_norm.dim": lambda t: aten.frobenius_norm.dim(t(2, 3), [0, 1]),
    "nuclear_norm.dim": lambda t: aten.nuclear_norm.dim(t(2, 3), [0, 1]),
    "cosine_similarity": lambda t: aten.cosine_similarity.default(t(2, 3), t(2, 3)),
    "poisson_nll_loss": lambda t: aten.poisson_nll_loss.default(t(2, 3), t(2, 3), True, True, 1e-8, 1),
    "cosine_embedding_loss": lambda t: aten.cosine_embedding_loss.default(t(2, 3), t(2, 3), t(2)),
    "nll_loss": lambda t: aten.nll_loss.default(t(2, 3), t.index(2), t(3)),
    "nll_loss2d": lambda t: aten.nll_loss2d.default(t(2, 3, 4, 4), t.index(2, 4, 4), t(3)),
    **{name: pair(name) for name in PAIRS.split()},
    "margin_ranking_loss": lambda t: aten.margin_ranking_loss.default(t(4), t(4), t(4)),
    "multilabel_margin_loss": lambda t: aten.multilabel_margin_loss.default(t(2, 3), t.index(2, 3)),
    "triplet_margin_loss": lambda t: aten.triplet_margin_loss.default(t(2, 3), t(2, 3), t(2, 3)),
    "multi_margin_loss": lambda t: aten.multi_margin_loss.default(t(2, 3), t.index(2)),
    "renorm": lambda t: aten.renorm.default(t(2, 3), 2, 0, 1),
    "logsumexp": lambda t: aten.logsumexp.default(t(2, 3), [1]),
    **{
        f"{prefix}upsample_{kind}{n}d": (
            lambda t, name=f"{prefix}upsample_{kind}{n}d", n=n: getattr(aten, name).default(t(1, 2, *[4] * n), [8] * n)
        )
        for prefix, kind in (("", "nearest"), ("_", "nearest_exact"))
        for n in (1, 2, 3)
    },
    "upsample_linear1d": lambda t: aten.upsample_linear1d.default(t(1, 2, 4), [8], False),
    "upsample_bilinear2d": lambda t: aten.upsample_bilinear2d.default(t(1, 2, 4, 4), [8, 8], False),
    "_upsample_bilinear2d_aa": lambda t: aten._upsample_bilinear2d_aa.default(t(1, 2, 4, 4), [8, 8], False),
    "upsample_trilinear3d": lambda t: aten.upsample_trilinear3d.default(t(1, 2, 4, 4, 4), [8, 8, 8], False),
    "upsample_bicubic2d": lambda t: aten.upsample_bicubic2d.default(t(1, 2, 4, 4), [8, 8], False),
    "_upsample_bicubic2d_aa": lambda t: aten._upsample_bicubic2d_aa.default(t(1, 2, 4, 4), [8, 8], False),
    "prod": unary("prod"),
    "prod.dim_int": lambda t: aten.prod.dim_int(t(2, 3), 1),
    "softmax.int": lambda t: aten.softmax.int(t(2, 3), 1),
    "log_softmax.int": lambda t: aten.log_softmax.int(t(2, 3), 1),
    "cumprod": lambda t: aten.cumprod.default(t(2, 3), 1),
    "cumsum": lambda t: aten.cumsum.default(t(2, 3), 1),
    "linalg_vector_norm": lambda t: aten.linalg_vector_norm.default(t(2, 3), 2),
    "linalg_matrix_norm": lambda t: aten.linalg_matrix_norm.default(t(2, 3), 1),
    "linalg_matrix_norm.str_ord": lambda t: aten.linalg_matrix_norm.str_ord(t(2, 3)),
    "sum": unary("sum"),
    "sum.dim_IntList": lambda t: aten.sum.dim_IntList(t(2, 3), [1], True),
    "norm.Scalar": lambda t: aten.norm.Scalar(t(2, 3)),
    "norm.ScalarOpt_dim": lambda t: aten.norm.ScalarOpt_dim(t(2, 3), 2, [1]),
    "addcdiv": lambda t: aten.addcdiv.default(t(2, 3), t(2, 3), t(2, 3)),
    "addcmul": lambda t: aten.addcmul.default(t(2, 3), t(2, 3), t(2, 3)),
    "bilinear": lambda t: aten.bilinear.default(t(2, 3), t(2, 4), t(5, 3, 4), t(5)),
    "dot": lambda t: aten.dot.default(t(3), t(3)),
    "vdot": lambda t: aten.vdot.default(t(3), t(3)),
    "grid_sampler": lambda t: aten.grid_sampler.default(t(1, 2, 4, 4), t(1, 3, 3, 2), 0, 0, False),
    "index_put": lambda t: aten.index_put.default(t(4, 3), [t.index(2)], t(2, 3)),
    "tensordot": lambda t: aten.tensordot.default(t(2, 3), t(3, 4), [1], [0]),
    "scatter_add": lambda t: aten.scatter_add.default(t(4, 3), 0, t.index(2, 3), t(2, 3)),
}
UNSAMPLED = {
    "cudnn_convolution": "has no kernel for meta tensors",
    "cudnn_convolution_transpose": "has no kernel for meta tensors",
    "_thnn_fused_gru_cell": "has no kernel for meta tensors",
    "_cudnn_rnn": "needs a flat weight buffer: see test_rnn_semantics",
}
# 2.11 has these; named dimensions are for real tensors only.
NAMED = """cumprod.dimname cumsum.dimname log_softmax.Dimname norm.names_ScalarOpt_dim prod.dim_Dimname softmax.Dimname
    sum.dim_DimnameList"""
UNSAMPLED |= dict.fromkeys(NAMED.split(), "names a dimension")
NO_ORACLE = {"gru_cell": "is a fused kernel on CUDA, without a rule for fake tensors"}
if torch.version.cuda is None:
    NO_ORACLE["grid_sampler"] = "asks cuDNN for the device, which a CPU build lacks"
COMPOSITES: dict[str, Callable[[Maker], Any]] = {
    "cross_entropy": lambda t: F.cross_entropy(t(4, 3), t.index(4)),
    "cross_entropy with probabilities": lambda t: F.cross_entropy(t(4, 3), t(4, 3), label_smoothing=0.1),
    "einsum": lambda t: torch.einsum("bhid,bhjd->bhij", t(1, 2, 3, 4), t(1, 2, 3, 4)),
    "multi_head_attention": lambda t: F.multi_head_attention_forward(
        *(t(5, 2, 8) for _ in range(3)), 8, 2, t(24, 8), t(24), None, None, False, 0.0, t(8, 8), t(8)
    ),
    "lstm_cell": lambda t: torch.lstm_cell(t(2, 3), (t(2, 4), t(2, 4)), t(16, 3), t(16, 4), t(16), t(16)),
    "group_norm": lambda t: F.group_norm(t(2, 4, 3), 2, t(4), t(4)),
    "layer_norm": lambda t: F.layer_norm(t(2, 3), [3], t(3), t(3)),
    "rms_norm": lambda t: F.rms_norm(t(2, 3), [3], t(3)),
    "batch_norm": lambda t: F.batch_norm(t(2, 3, 4), None, None, training=True),
    "gelu of linear": lambda t: F.gelu(F.linear(t(2, 3), t(4, 3))),
    "bce with logits": lambda t: F.binary_cross_entropy_with_logits(t(2, 3), t(2, 3)),
    "ctc-like log_softmax": lambda t: F.nll_loss(F.log_softmax(t(4, 3), -1), t.index(4)),
    "interpolate": lambda t: F.interpolate(t(1, 2, 4, 4), scale_factor=2, mode="bilinear"),
    "softmax with dtype": lambda t: torch.softmax(t(2, 3), -1, dtype=torch.float64),
    "sum with dtype": lambda t: torch.sum(t(2, 3), dtype=torch.float64),
    "norm": lambda t: t(2, 3).norm(),
    "matmul operator": lambda t: t(2, 3) @ t(3, 4),
    "cat": lambda t: torch.cat([t(2, 3), t(2, 3)]),
    "add": lambda t: t(2, 3) + t(2, 3),
    "triplet": lambda t: F.triplet_margin_loss(t(2, 3), t(2, 3), t(2, 3)),
    "cosine": lambda t: F.cosine_similarity(t(2, 3), t(2, 3)),
    "cdist": lambda t: torch.cdist(t(2, 3), t(4, 3)),
    "embedding": lambda t: F.embedding(t.index(2, 3), t(5, 4)),
    "conv padded by name": lambda t: F.conv2d(t(1, 2, 5, 5), t(3, 2, 3, 3), t(3), padding="same"),
}


@pytest.fixture(scope="module")
def fake_cuda() -> Iterator[Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def dtypes_of(result: Any) -> tuple[str, ...]:
    tensors = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(str(t.dtype) for t in tensors if isinstance(t, Tensor))


def outcome(sample: Callable[[Maker], Any], maker: Maker) -> tuple[str, ...]:
    """The dtypes of what `sample` returns, or that it raises."""
    try:
        return dtypes_of(sample(maker))
    except (RuntimeError, NotImplementedError, ValueError):
        return ("raises",)


@contextlib.contextmanager
def real_autocast(dtype: torch.dtype) -> Iterator[None]:
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def refused_on_cuda_only(name: str, theirs: tuple[str, ...]) -> bool:
    """A row-wise norm of two dtypes: CUDA's kernel refuses it, `meta` tensors and fake ones before 2.14 let it pass."""
    return theirs == ("raises",) and name in ("layer_norm", "native_layer_norm")


def patterns(lower: torch.dtype) -> list[tuple[torch.dtype, ...]]:
    other = LOWER[1 - LOWER.index(lower)]
    full, double = torch.float32, torch.float64
    return [(full,), (lower,), (full, lower), (lower, full), (double,), (double, full), (full, double), (other,)]


def both(fake: Any, sample: Callable[[Maker], Any], lower: torch.dtype) -> Iterator[tuple[Any, Any, Any]]:
    """For each of `patterns`: its dtypes, what PyTorch makes of `sample` with them, and what memsize does."""
    with torch.no_grad():
        with fake, real_autocast(lower):
            theirs = [outcome(sample, Maker("cuda", dtypes)) for dtypes in patterns(lower)]
        with cuda_semantics(), autocast_region(lower):
            ours = [outcome(sample, Maker("meta", dtypes)) for dtypes in patterns(lower)]
    yield from zip(patterns(lower), theirs, ours, strict=True)


def wrapped_here() -> list[str]:
    return sorted(name.removeprefix("aten::") for name in autocast.wrapped_operators() if name.startswith("aten::"))


@pytest.mark.thorough
@pytest.mark.parametrize("lower", LOWER, ids=str)
@pytest.mark.parametrize("name", wrapped_here())
def test_operator_casts_as_in_pytorch(fake_cuda: Any, name: str, lower: torch.dtype) -> None:
    if name in UNSAMPLED or name in NO_ORACLE:
        pytest.skip(f"{name} {UNSAMPLED.get(name) or NO_ORACLE[name]}")
    for dtypes, theirs, ours in both(fake_cuda, SAMPLES[name], lower):
        assert ours == theirs or refused_on_cuda_only(name, theirs), dtypes


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # rms_norm, which 2.11 does not cast
@pytest.mark.parametrize("lower", LOWER, ids=str)
@pytest.mark.parametrize("name", COMPOSITES)
def test_composite_casts_as_in_pytorch(fake_cuda: Any, name: str, lower: torch.dtype) -> None:
    for dtypes, theirs, ours in both(fake_cuda, COMPOSITES[name], lower):
        assert ours == theirs or refused_on_cuda_only(name, theirs), dtypes


@pytest.mark.parametrize("lower", LOWER, ids=str)
def test_operators_without_an_oracle(lower: torch.dtype) -> None:
    """By the table in autocast_mode.h: `grid_sampler` promotes, `gru_cell` takes the lower precision."""
    full, mixed = (torch.float32,), (lower, torch.float32)
    with cuda_semantics(), autocast_region(lower):
        assert outcome(SAMPLES["grid_sampler"], Maker("meta", mixed)) == ("torch.float32",)
        assert outcome(SAMPLES["grid_sampler"], Maker("meta", (lower,))) == (str(lower),)
        assert outcome(SAMPLES["gru_cell"], Maker("meta", full)) == (str(lower),)


@pytest.mark.parametrize(("release", "dtype"), [((2, 11), "torch.bfloat16"), ((2, 12), "torch.float32")])
def test_rms_norm_is_cast_from_pytorch_2_12_on(release: tuple[int, int], dtype: str) -> None:
    """In 2.11's autocast_mode.h `rms_norm` is in no list; without one it keeps its input's dtype."""
    if "aten::rms_norm" not in autocast.wrapped_operators():
        pytest.skip("the installed PyTorch does not cast it in any release")
    with cuda_semantics(release=release), autocast_region(torch.bfloat16):
        assert outcome(SAMPLES["rms_norm"], Maker("meta", (torch.bfloat16,))) == (dtype,)


def test_samples_run() -> None:
    """An oracle that only ever raises proves nothing."""
    with torch.no_grad(), cuda_semantics(), autocast_region(torch.float16):
        names = [name for name in wrapped_here() if name in SAMPLES]
        made = {name: outcome(SAMPLES[name], Maker("meta", (torch.float32,))) for name in names}
    raising = {name for name, dtypes in made.items() if dtypes == ("raises",)}
    # `convolution` has a meta kernel on every version, the older name for it only from 2.12 on.
    assert raising - {"_convolution", "_convolution.deprecated"} == {"binary_cross_entropy"}


def unknown_operators() -> set[str]:
    """Operators that the installed torch wraps and the table lacks: they would run uncast."""
    return {name for name in autocast.wrapped_operators() if name.removeprefix("aten::") not in autocast.POLICIES}


def test_every_wrapped_operator_is_known_and_sampled() -> None:
    assert not unknown_operators()
    assert set(wrapped_here()) <= set(SAMPLES) | set(UNSAMPLED)
    own = {name for name in autocast.kernels() if "::" not in name}
    assert own == set(wrapped_here()) - {"_cudnn_rnn"}  # memsize.cuda.kernel_choice casts for it


class Declared(TorchDispatchMode):
    """Writes down the dtypes that torchvision's operators are given in the end, and returns what they do."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[str, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "torchvision":
            return func(*args, **(kwargs or {}))
        self.given.append(tuple(str(arg.dtype) for arg in args if isinstance(arg, Tensor)))
        pooled = args[0].new_empty(len(args[1]), 3)
        return pooled if func._schema.name.endswith("align") else (pooled, pooled.to(torch.int32))


@pytest.fixture(scope="module")
def torchvisions() -> None:
    """torchvision's operators, wrapped for autocast as it wraps them where it is not installed itself."""
    operators.declare()
    if not torch._C._dispatch_has_kernel("torchvision::roi_align"):
        library = operators.declare_schemas()
        for name in ("roi_align", "roi_pool"):
            library.impl(name, lambda *args: args[0], "AutocastCUDA")  # that there is one is what counts


@pytest.mark.parametrize("lower", LOWER, ids=str)
def test_operators_of_torchvision_compute_in_float32(torchvisions: None, lower: torch.dtype) -> None:
    """torchvision/_autograd_registrations.py: cast to float32, and everything that comes out to the input's dtype."""
    image, boxes = torch.empty(1, 3, 8, 8, dtype=lower, device="meta"), torch.empty(2, 5, device="meta")
    ops = torch.ops.torchvision
    with Declared() as declared, cuda_semantics():
        with autocast_region(lower):
            aligned = ops.roi_align(image, boxes, 1.0, 2, 2, 2, False)
            pooled = ops.roi_pool(image, boxes, 1.0, 2, 2)
        ops.roi_align(image, boxes, 1.0, 2, 2, 2, False)
    cast = ("torch.float32", "torch.float32")
    assert declared.given == [cast, cast, (str(lower), "torch.float32")]
    assert [each.dtype for each in (aligned, *pooled)] == [lower] * 3
    assert not unknown_operators()


def test_table_names_every_operator_once() -> None:
    names = [name for names in autocast._LISTS.values() for name in names.split()]
    assert len(names) == len(set(names)) == len(autocast.POLICIES)
