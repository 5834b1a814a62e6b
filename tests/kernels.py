"""What kernels take, as tests ask for it: by an op and its arguments."""

from __future__ import annotations

from typing import Any

from memsize.cuda import autocast as autocast, encoder as encoder
from memsize.cuda.attention_backend import Attention as Attention, choose_backend as choose_backend
from memsize.cuda.autocast import autocast_region as autocast_region
from memsize.cuda.cuda_semantics import cuda_semantics as cuda_semantics
from memsize.cuda.kernel_choice import takes_cudnn as takes_cudnn
from memsize.kernels import (
    convolution as convolution,
    kernel_copies as kernel_copies,
    registry as registry,
    rules,
    strides as strides,
    windows as windows,
)
from memsize.kernels.attention import (
    UNCOMPILED_FLEX as UNCOMPILED_FLEX,
    accumulators as accumulators,
    flex_gradients as flex_gradients,
    flex_outputs as flex_outputs,
)
from memsize.kernels.convolution_workspaces import ConvolutionWorkspaces as ConvolutionWorkspaces
from memsize.kernels.cudnn.backend import CudnnError as CudnnError
from memsize.kernels.cudnn.plans import (
    OLDEST as OLDEST,
    Convolution as Convolution,
    Library as Library,
    Plan as Plan,
    Plans as Plans,
    estimate as estimate,
)
from memsize.kernels.matmul import CUBLAS as CUBLAS, CUBLASLT as CUBLASLT, takes_cublaslt as takes_cublaslt
from memsize.kernels.reduction_scratch import scratch
from memsize.kernels.registry import (
    REDUCTIONS,
    SPARSE_RULES as SPARSE_RULES,
    SPARSE_TABLE as SPARSE_TABLE,
    TABLE as TABLE,
    TEMPORARIES,
    Temporary,
    sparse_rule as sparse_rule,
)
from memsize.kernels.rnn import (
    Batch as Batch,
    Net as Net,
    reserve_bytes as reserve_bytes,
    weight_elements as weight_elements,
)
from memsize.kernels.semantics import current as current
from memsize.kernels.strides import permuted as permuted
from memsize.records.gpu import Multiprocessors
from memsize.torch_internals.meta import KEY as KEY, MetaMemo as MetaMemo, suspended as suspended
from memsize.torch_internals.sparse_tensors import (
    in_coordinates as in_coordinates,
    zeros_in_coordinates as zeros_in_coordinates,
)


def kernel_temporaries(op: Any, args: Any) -> list[Temporary]:
    """Return the allocations alive at the peak of the kernel of `op`, besides its arguments and results."""
    rules()
    return list(TEMPORARIES[op](*args)) if op in TEMPORARIES else []


def kernel_scratch(gpu: tuple[int, int], op: Any, *args: Any) -> list[int]:
    """The bytes that a reduction takes besides its result, on a GPU of so many multiprocessors and threads of each."""
    return [temporary.bytes for temporary in scratch(REDUCTIONS[op](*args), Multiprocessors(*gpu))]
