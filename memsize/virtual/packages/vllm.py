"""vLLM inside the process that trains: its share of the GPU, sleep levels, and tokens of the length that is asked for.

The server takes `gpu_memory_utilization` of the GPU: its weights in 16 bits, and the rest as KV cache, of which a step
uses a part for its activations. Asleep it holds neither on the GPU.

Source: vLLM 0.9 to 0.30, `entrypoints/llm.py`, `v1/worker/gpu_worker.py` (`determine_available_memory`, `sleep`,
`wake_up`). Known limit: the text of completions is empty, and every token is 0.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import nn

_SHARE: Final = 0.9
"""The server's default."""
_BYTES: Final = 2
_TAGS: Final = ("weights", "kv_cache")


class SamplingParams:
    """The options of a generation."""

    def __init__(self, n: int = 1, max_tokens: int | None = 16, logprobs: int | None = None, **options: Any) -> None:
        self.n, self.max_tokens, self.logprobs = n, max_tokens or 16, logprobs
        vars(self).update(options)


class LLM(nn.Module):
    """A server of the model whose config `model` names."""

    weights: nn.Parameter | None
    kv_cache: torch.Tensor | None

    def __init__(
        self, model: str, *, gpu_memory_utilization: float = _SHARE, tensor_parallel_size: int = 1, **options: Any
    ) -> None:
        super().__init__()
        share = int(gpu_memory_utilization * torch.cuda.get_device_properties(0).total_memory)
        weights = _parameters_of(model, bool(options.get("trust_remote_code"))) * _BYTES // tensor_parallel_size
        if weights >= share:
            raise ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`")
        self._sizes = dict(zip(_TAGS, (weights, share - weights), strict=True))
        loading = SimpleNamespace(load_weights=lambda weights: {name for name, _ in weights})
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=loading))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
        self.wake_up()

    def sleep(self, level: int = 1) -> None:
        """Free the weights and the cache, which are in a pool of their own: nothing else gets their segments."""
        self.weights = self.kv_cache = None
        torch.cuda.empty_cache()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take them again, or those of some `tags`."""
        for tag in tags or _TAGS:
            if getattr(self, tag, None) is None:
                memory = torch.empty(self._sizes[tag], dtype=torch.uint8, device="cuda")
                if tag == "weights":
                    self.weights = nn.Parameter(memory, requires_grad=False)
                else:
                    self.kv_cache = nn.Buffer(memory)

    def reset_prefix_cache(self) -> bool:
        """Forget the prompts."""
        return True

    def generate(self, prompts: Any, sampling_params: Any = None, **_: Any) -> list[SimpleNamespace]:
        """Answer each prompt with as many tokens as `max_tokens` says."""
        params = sampling_params or SamplingParams()
        prompts = [prompts] if isinstance(prompts, (str, dict)) else prompts
        tokens = [0] * params.max_tokens
        scores = None if params.logprobs is None else [{0: SimpleNamespace(logprob=-1.0, rank=1)} for _ in tokens]
        completion = SimpleNamespace(token_ids=tokens, text="", logprobs=scores, finish_reason="length", index=0)
        return [
            SimpleNamespace(prompt=prompt, prompt_token_ids=_ids(prompt), outputs=[completion] * params.n)
            for prompt in prompts
        ]


def _ids(prompt: Any) -> list[int]:
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt_token_ids") or prompt.get("prompt", "")
    return [0] * len(prompt.split()) if isinstance(prompt, str) else list(prompt)


def _parameters_of(model: str, trusts: bool) -> int:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, trust_remote_code=trusts)
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make(config, trust_remote_code=trusts).parameters())


NAMES: Final[dict[str, Any]] = {"LLM": LLM, "SamplingParams": SamplingParams}
MODULES: Final[dict[str, dict[str, Any]]] = {"vllm": {"__version__": "0.30.0", **NAMES}}
