"""vLLM and SGLang beside the training: the share of their weights and KV cache, sleep, and tokens of the length that is
asked for.

A server takes a share of the GPU: its weights in 16 bits, and the rest as KV cache, of which a step uses a part for its
activations. Asleep it holds neither on the GPU. SGLang's scheduler is a process of its own on the same GPU: its memory
is counted here as if it were in this process, since the GPU has to hold both.

Source: vLLM 0.9 to 0.30, `entrypoints/llm.py`, `v1/worker/gpu_worker.py` (`determine_available_memory`, `sleep`,
`wake_up`); SGLang 0.5.9, `srt/entrypoints/engine.py` (`Engine`), `srt/server_args.py` (`mem_fraction_static`), and its
guide to reinforcement learning. Known limits: the text of answers is empty, and every token is 0; activations and CUDA
graphs of SGLang, which lie outside its share, are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import nn

from memsize.records.gpu import Card
from memsize.spec.server_rules import Setting
from memsize.spec.servers import rules_of

TAGS: Final = ("weights", "kv_cache")
"""The parts of a server's memory, by the names that servers have for them."""
_BYTES: Final = 2


class ServerMemory(nn.Module):
    """The weights and the KV cache of the model whose config `model` names, in a `share` of the GPU.

    Raises ValueError where the share is too small for the weights.
    """

    weights: nn.Parameter | None
    kv_cache: torch.Tensor | None

    def __init__(self, model: str, share: float, gpus: int, trusts: bool) -> None:
        super().__init__()
        size = int(share * torch.cuda.get_device_properties(0).total_memory)
        weights = _parameters_of(model, trusts) * _BYTES // gpus
        if weights >= size:
            raise ValueError(
                f"the server's share of the GPU, {share:g}, has no room for the KV cache: the weights of {model} take "
                f"{weights / size:.2f} of it"
            )
        self._sizes = dict(zip(TAGS, (weights, size - weights), strict=True))
        self.take(TAGS)

    def release(self, tags: Iterable[str]) -> None:
        """Free some parts. They are in pools of their own: nothing else gets their segments."""
        for tag in tags:
            if tag == "weights":
                self.weights = None
            else:
                self.kv_cache = None
        torch.cuda.empty_cache()

    def take(self, tags: Iterable[str]) -> None:
        """Take those that are free again."""
        for tag in tags:
            if getattr(self, tag, None) is None:
                memory = torch.empty(self._sizes[tag], dtype=torch.uint8, device="cuda")
                if tag == "weights":
                    self.weights = nn.Parameter(memory, requires_grad=False)
                else:
                    self.kv_cache = nn.Buffer(memory)


def _parameters_of(model: str, trusts: bool) -> int:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, trust_remote_code=trusts)
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make(config, trust_remote_code=trusts).parameters())


# -- vLLM -----

_SHARE: Final = 0.9
"""vLLM's default."""


class SamplingParams:
    def __init__(self, n: int = 1, max_tokens: int | None = 16, logprobs: int | None = None, **options: Any) -> None:
        self.n, self.max_tokens, self.logprobs = n, max_tokens or 16, logprobs
        vars(self).update(options)


class LLM(ServerMemory):
    """vLLM's server of the model whose config `model` names."""

    def __init__(
        self, model: str, *, gpu_memory_utilization: float = _SHARE, tensor_parallel_size: int = 1, **options: Any
    ) -> None:
        super().__init__(model, gpu_memory_utilization, tensor_parallel_size, bool(options.get("trust_remote_code")))
        loading = SimpleNamespace(load_weights=lambda weights: {name for name, _ in weights})
        worker: Any = SimpleNamespace(model_runner=SimpleNamespace(model=loading))
        worker.worker = worker  # the executor's wrapper of a worker has the worker's own names too
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


# -- SGLang ----

_TOKENS: Final = 128
"""SGLang's new tokens where the options of a generation do not say."""


class Engine(ServerMemory):
    """SGLang's server of the model whose config `model_path` names."""

    def __init__(
        self, model_path: str, *, mem_fraction_static: float | None = None, tp_size: int = 1, **options: Any
    ) -> None:
        share = _default_share(tp_size) if mem_fraction_static is None else mem_fraction_static
        super().__init__(model_path, share, tp_size, bool(options.get("trust_remote_code")))
        self._releases = bool(options.get("enable_memory_saver"))

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Free the weights and the cache, or those of some `tags`, where `enable_memory_saver` lets it."""
        if self._releases:
            self.release(tags or TAGS)

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Take them again."""
        self.take(tags or TAGS)

    def update_weights_from_tensor(self, named_tensors: Any, *_: Any, **__: Any) -> tuple[bool, str]:
        """Write new values to the weights."""
        return True, ""

    def flush_cache(self) -> None:
        """Forget the prompts."""

    def shutdown(self) -> None:
        self.release(TAGS)

    def generate(
        self, prompt: Any = None, sampling_params: Any = None, input_ids: Any = None, **_: Any
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Answer each prompt, with the options for all or for each of them."""
        prompts = input_ids if prompt is None else prompt
        is_one = isinstance(prompts, str) or not isinstance(prompts[0], (str, list))
        prompts = [prompts] if is_one else prompts
        options = sampling_params if isinstance(sampling_params, list) else [sampling_params or {}] * len(prompts)
        pairs = zip(prompts, options, strict=True)
        answers = [_answer(text, chosen) for text, chosen in pairs for _ in range(chosen.get("n", 1))]
        return answers[0] if is_one and len(answers) == 1 else answers

    async def async_generate(self, *args: Any, **options: Any) -> dict[str, Any] | list[dict[str, Any]]:
        """`generate` for those who wait for it."""
        return self.generate(*args, **options)


def _answer(prompt: Any, options: dict[str, Any]) -> dict[str, Any]:
    tokens = [0] * options.get("max_new_tokens", _TOKENS)
    length = len(prompt.split() if isinstance(prompt, str) else prompt)
    about = {"prompt_tokens": length, "completion_tokens": len(tokens), "finish_reason": {"type": "length"}}
    about["output_token_logprobs"] = [(-1.0, token, None) for token in tokens]
    return {"text": "", "output_ids": tokens, "meta_info": about}


def _default_share(gpus: int) -> float:
    """SGLang's share of this GPU."""
    gpu = torch.cuda.get_device_properties(0)
    card = Card(gpu.name, (gpu.major, gpu.minor), gpu.total_memory, "the simulated GPU")
    return rules_of("sglang=0.5.9").choose(card, Setting(0, gpus)).utilization


MODULES: Final[dict[str, dict[str, Any]]] = {
    "vllm": {"__version__": "0.30.0", "LLM": LLM, "SamplingParams": SamplingParams},
    "sglang": {"__version__": "0.5.9", "Engine": Engine},
    "sglang.srt": {},
    "sglang.srt.entrypoints": {},
    "sglang.srt.entrypoints.engine": {"Engine": Engine},
}
