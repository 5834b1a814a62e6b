"""vLLM inside the process that trains: its share of the GPU, sleep levels, and tokens of the length that is asked for.

The server takes `gpu_memory_utilization` of the GPU: its weights in 16 bits, and the rest as KV cache, of which a step
uses a part for its activations. Asleep it holds neither on the GPU.

Source: vLLM 0.9 to 0.30, `entrypoints/llm.py`, `v1/worker/gpu_worker.py` (`determine_available_memory`, `sleep`,
`wake_up`). Known limit: the text of completions is empty, and every token is 0.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

from memsize.virtual.packages.server_memory import TAGS, ServerMemory

_SHARE: Final = 0.9
"""The server's default."""


class SamplingParams:
    """The options of a generation."""

    def __init__(self, n: int = 1, max_tokens: int | None = 16, logprobs: int | None = None, **options: Any) -> None:
        self.n, self.max_tokens, self.logprobs = n, max_tokens or 16, logprobs
        vars(self).update(options)


class LLM(ServerMemory):
    """A server of the model whose config `model` names."""

    def __init__(
        self, model: str, *, gpu_memory_utilization: float = _SHARE, tensor_parallel_size: int = 1, **options: Any
    ) -> None:
        super().__init__(model, gpu_memory_utilization, tensor_parallel_size, bool(options.get("trust_remote_code")))
        loading = SimpleNamespace(load_weights=lambda weights: {name for name, _ in weights})
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=loading))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

    def sleep(self, level: int = 1) -> None:
        """Free the weights and the cache."""
        self.release(TAGS)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take them again, or those of some `tags`."""
        self.take(tags or TAGS)

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


NAMES: Final[dict[str, Any]] = {"LLM": LLM, "SamplingParams": SamplingParams}
MODULES: Final[dict[str, dict[str, Any]]] = {"vllm": {"__version__": "0.30.0", **NAMES}}
