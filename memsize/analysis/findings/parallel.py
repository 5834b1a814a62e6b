"""Rules about models that are wrapped for several GPUs: what each GPU has of the figures, and what comes on top."""

from __future__ import annotations

from collections.abc import Iterator

from memsize.analysis.findings.evidence import Evidence
from memsize.records.finding import Finding
from memsize.units import Bytes


def data_parallel(evidence: Evidence) -> Iterator[Finding]:
    """`nn.DataParallel`: activations are split over the GPUs, and parameters are copied to each."""
    paths = tuple(layer.path for layer in evidence.given.layers if layer.type == "DataParallel")
    if not paths:
        return
    held = [t for t in evidence.given.tensors if t.kind in ("parameter", "buffer") and _is_inside(t.name, paths)]
    copied = sum(tensor.bytes for tensor in held)
    yield Finding(
        "data-parallel-replicas",
        copied,
        paths,
        "The figures are those of one GPU. On n GPUs DataParallel gives each 1/n of the batch, and so of {saved} kept "
        "for backward; every GPU but the first holds a copy of the {copied} of parameters and buffers during each "
        "forward and backward; the first alone holds the whole input and output, the summed gradients and the "
        "optimizer's state.",
        {"saved": Bytes(evidence.stored.saved_bytes), "copied": Bytes(copied)},
    )


def _is_inside(name: str, paths: tuple[str, ...]) -> bool:
    return any(not path or name.startswith(f"{path}.") for path in paths)


def distributed(evidence: Evidence) -> Iterator[Finding]:
    """`DistributedDataParallel`: each process has all of it, and buckets for its gradients."""
    if evidence.buckets is None:
        return
    size, views = evidence.buckets
    on_top = (
        "its gradients lie in {size} of buckets that are never freed"
        if views
        else "buckets of {size} stand beside the gradients (gradient_as_bucket_view=True puts the gradients into them)"
    )
    yield Finding(
        "gradient-buckets",
        size,
        (),
        "The figures are those of one process of DistributedDataParallel with its own batch: " + on_top + ".",
        {"size": Bytes(size)},
    )
