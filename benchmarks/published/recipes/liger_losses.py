"""The losses that Liger-Kernel is compared with, some of them with the head that makes their logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

Loss = Callable[[], Tensor]
HIDDEN: Final = 4096
VOCABULARY: Final = 128_256
IGNORED: Final = -100


def cross_entropy(config: Mapping[str, int]) -> Loss:
    """Of 16,384 tokens."""
    logits = torch.randn(16_384, config["V"], requires_grad=True, device="cuda")
    targets = torch.randint(config["V"], (16_384, 1), device="cuda").squeeze(1)
    criterion = nn.CrossEntropyLoss()
    return lambda: criterion(logits, targets)


def jsd(config: Mapping[str, int]) -> Loss:
    """Jensen-Shannon divergence of 8,192 tokens, `batchmean`."""
    student = torch.randn(8192, config["V"], requires_grad=True, device="cuda").log_softmax(dim=-1)
    teacher = torch.randn(8192, config["V"], device="cuda").log_softmax(dim=-1)
    return lambda: _divergence(student, teacher, torch.float32)


def _divergence(log_q: Tensor, log_p: Tensor, dtype: torch.dtype) -> Tensor:
    criterion = nn.KLDivLoss(reduction="batchmean", log_target=True)
    log_p, log_q = log_p.to(torch.float), log_q.to(torch.float)
    log_p, log_q = log_p.view(-1, log_p.size(-1)), log_q.view(-1, log_q.size(-1))
    mean = torch.lerp(torch.exp(log_p), torch.exp(log_q), 0.5)
    loss = 0.5 * criterion(torch.log(mean), log_p) + (1 - 0.5) * criterion(torch.log(mean), log_q)
    return loss.to(dtype)  # type: ignore[no-any-return]


def jsd_of_tokens(config: Mapping[str, int]) -> Loss:
    """The same as a later release has it: summed by token, then averaged."""
    student = torch.randn(config["BT"], VOCABULARY, requires_grad=True, device="cuda").log_softmax(dim=-1)
    teacher = torch.randn(config["BT"], VOCABULARY, device="cuda").log_softmax(dim=-1)
    return lambda: _summed_divergence(student, teacher)


def _summed_divergence(log_q: Tensor, log_p: Tensor) -> Tensor:
    criterion = nn.KLDivLoss(reduction="none", log_target=True)
    log_p, log_q = log_p.to(torch.float), log_q.to(torch.float)
    mean = torch.lerp(torch.exp(log_q), torch.exp(log_p), 0.5)
    loss = 0.5 * criterion(torch.log(mean), log_p).sum(dim=-1) + (1 - 0.5) * criterion(torch.log(mean), log_q).sum(
        dim=-1
    )
    loss = (loss / log_q.shape[0]).sum()
    return loss.to(torch.float)


def jsd_head(config: Mapping[str, int]) -> Loss:
    """Student's and teacher's heads and the divergence, in bfloat16; Liger's heads share the weights."""
    shape = {"device": "cuda", "dtype": torch.bfloat16}
    heads = [nn.Linear(HIDDEN, VOCABULARY, bias=False, **shape) for _ in range(2)]  # type: ignore[arg-type]
    student = torch.rand(config["BT"], HIDDEN, requires_grad=True, **shape)  # type: ignore[call-overload]
    teacher = torch.rand(config["BT"], HIDDEN, **shape)  # type: ignore[call-overload]

    def loss() -> Tensor:
        logits, teachers = heads[0](student), heads[1](teacher)
        log_q = torch.log_softmax(logits / 1.0, dim=-1)
        log_p = torch.log_softmax(teachers / 1.0, dim=-1)
        return _divergence(log_q, log_p, torch.bfloat16)

    return loss


def total_variation(config: Mapping[str, int]) -> Loss:
    """Half of the absolute differences, by row."""
    student = torch.randn(16_384, config["V"], requires_grad=True, device="cuda").softmax(dim=-1)
    teacher = torch.randn(16_384, config["V"], device="cuda").softmax(dim=-1)

    def loss() -> Tensor:
        distance = torch.abs(student - teacher) / 2.0
        return torch.sum(distance) / student.size(0)

    return loss


# -- preferences -------------------------------------------------------------------------------------------------------


def preference(config: Mapping[str, int], alignment: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """A head with the loss of chosen and rejected answers, one half of the batch each; beside it Liger's own head."""
    shape = {"device": "cuda", "dtype": torch.bfloat16}
    heads = [nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    batch, length = config["B"], config["T"]
    hidden = torch.randn(batch, length, HIDDEN, requires_grad=True, **shape)  # type: ignore[call-overload]
    targets = torch.randint(VOCABULARY, (batch, length), dtype=torch.long, device="cuda")

    def loss() -> Tensor:
        logps, _, likelihood = _by_sequence(hidden, heads[0].weight, targets)
        losses = alignment(logps[: batch // 2], logps[batch // 2 :])
        return likelihood - losses.mean()

    return loss


def _by_sequence(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean log-probabilities by sequence, the logits, and the loss of the chosen half."""
    chosen = hidden.shape[0] // 2
    outputs = hidden @ weight.t()
    logits = outputs.float()
    likelihood = nn.CrossEntropyLoss(ignore_index=IGNORED)(
        logits[:chosen].view(-1, logits.shape[-1]), targets[:chosen].view(-1)
    )
    mask = targets != IGNORED
    labels = torch.where(targets == IGNORED, 0, targets)
    by_token = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (by_token * mask).sum(-1) / mask.sum(-1), logits, likelihood


def odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    """ORPO's term."""
    odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return 0.1 * functional.logsigmoid(odds)


def margin(chosen: Tensor, rejected: Tensor) -> Tensor:
    """SimPO's term."""
    logits = (chosen - rejected) - 0.5 / 0.1
    return functional.logsigmoid(0.1 * logits) * 1.0 + functional.logsigmoid(-0.1 * logits) * 0.0


# -- GRPO --------------------------------------------------------------------------------------------------------------


def group_relative(config: Mapping[str, int], *, by_sequence: bool) -> Loss:
    """GRPO's loss with a reference head; beside them Liger's two heads."""
    heads = [nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    batch, length = config["B"], 1024
    shape = {"device": "cuda", "dtype": torch.bfloat16}
    hidden = torch.randn(batch, length, HIDDEN, requires_grad=True, **shape)  # type: ignore[call-overload]
    ids = torch.randint(0, VOCABULARY, (batch, length), dtype=torch.long, device="cuda")
    mask = torch.ones(batch, length, device="cuda")
    advantages = torch.randn(batch, **shape)  # type: ignore[call-overload]
    reference = torch.randn(batch, length, HIDDEN, **shape)  # type: ignore[call-overload]

    def loss() -> Tensor:
        return _grpo(hidden, heads, ids, mask, advantages, reference, by_sequence=by_sequence)[0]

    return loss


def _grpo(
    hidden: Tensor,
    heads: list[nn.Linear],
    ids: Tensor,
    mask: Tensor,
    advantages: Tensor,
    reference: Tensor,
    *,
    by_sequence: bool,
) -> tuple[Tensor, list[Tensor]]:
    logits = hidden @ heads[0].weight.t()
    log_probs = functional.log_softmax(logits.float(), dim=-1)
    logps = log_probs.gather(dim=-1, index=ids.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        ref_logits = reference @ heads[1].weight.t()
        ref_log_probs = functional.log_softmax(ref_logits.float(), dim=-1)
        ref_logps = ref_log_probs.gather(dim=-1, index=ids.unsqueeze(-1)).squeeze(-1)
    ratio = logps - logps.detach()
    if by_sequence:
        ratio = ((ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    weight = torch.exp(ratio)
    clipped = torch.clamp(weight, 0.8, 1.2)
    by_token = -torch.min(weight * advantages.unsqueeze(1), clipped * advantages.unsqueeze(1))
    divergence = torch.exp(ref_logps - logps) - (ref_logps - logps) - 1.0
    by_token = by_token + 0.1 * divergence
    loss = (by_token * mask).sum() / torch.clamp(mask.sum(), min=1.0)
    return loss, [(divergence * mask).sum() / torch.clamp(mask.sum(), min=1.0)]
