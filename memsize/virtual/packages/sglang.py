"""SGLang beside the training: the share of its weights and KV cache, and tokens of the length that is asked for.

Its scheduler is a process of its own on the same GPU. Its memory is counted here as if it were in this process, since
the GPU has to hold both.

Source: SGLang 0.5.9, `srt/entrypoints/engine.py` (`Engine`), `srt/server_args.py` (`mem_fraction_static`), and its
guide to reinforcement learning. Known limits: the text of answers is empty, and every token is 0; activations and CUDA
graphs of the server, which lie outside its share, are not counted.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from memsize.records.gpu import Card
from memsize.spec.server_rules import Setting
from memsize.spec.servers import rules_of
from memsize.virtual.packages.server_memory import TAGS, ServerMemory

_TOKENS: Final = 128
"""New tokens where the options of a generation do not say."""


class Engine(ServerMemory):
    """A server of the model whose config `model_path` names."""

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
        """End the server."""
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
    """The newest release's share of this GPU."""
    gpu = torch.cuda.get_device_properties(0)
    card = Card(gpu.name, (gpu.major, gpu.minor), gpu.total_memory, "the simulated GPU")
    return rules_of("sglang").choose(card, Setting(0, gpus)).utilization


MODULES: Final[dict[str, dict[str, Any]]] = {
    "sglang": {"__version__": "0.5.9", "Engine": Engine},
    "sglang.srt": {},
    "sglang.srt.entrypoints": {},
    "sglang.srt.entrypoints.engine": {"Engine": Engine},
}
