"""vLLM's asynchronous engine, as a program starts it in a process or an actor: its share of the GPU, and its worker.

Other modules and names of vLLM can be imported too, since many programs never use them: a placeholder stands for each.

Source: vLLM 0.11 to 0.30, `v1/engine/async_llm.py`, `v1/worker/worker_base.py` (`worker_extension_cls`),
`entrypoints/cli/serve.py`, `utils/argparse_utils.py`. Known limits: those of `inference_servers`; nothing answers HTTP.
"""

from __future__ import annotations

import asyncio
import importlib
from argparse import Namespace
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, Final, Literal

import torch

from memsize.virtual.packages.inference_servers import LLM, TAGS, SamplingParams, ServerMemory

_LORA_RANKS = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]


class Placeholder:
    """A class of vLLM that is not simulated: it holds the names that it is made with."""

    def __init__(self, *_: Any, **values: Any) -> None:
        vars(self).update(values)


def placeholder(name: str) -> type[Placeholder]:
    """The class that stands for a name of vLLM."""
    return type(name, (Placeholder,), {})


class FlexibleArgumentParser:
    """Reads options of any name."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def add_subparsers(self, **_: Any) -> FlexibleArgumentParser:
        return self

    def add_parser(self, *_: Any, **__: Any) -> FlexibleArgumentParser:
        return self

    def set_defaults(self, **_: Any) -> FlexibleArgumentParser:
        return self

    def parse_args(self, args: list[str]) -> Namespace:
        """Parse a command, a model, and options with a value, several or none."""
        command, model, *rest = args
        options: dict[str, str | bool] = {}
        name = ""
        for word in rest:
            if word.startswith("--"):
                name = word[2:].replace("-", "_")
                options[name] = True
            else:
                options[name] = word
        return Namespace(subparser=command, model_tag=model, **options)


class _Serve:
    """The command `vllm serve`."""

    name = "serve"

    def subparser_init(self, subparsers: FlexibleArgumentParser) -> FlexibleArgumentParser:
        return subparsers

    def validate(self, args: Namespace) -> None: ...

    def cmd(self, args: Namespace) -> None: ...


class AsyncEngineArgs(Placeholder):
    enable_log_requests = disable_log_stats = False

    @classmethod
    def from_cli_args(cls, args: Namespace) -> AsyncEngineArgs:
        return cls(**vars(args))

    def create_engine_config(self, usage_context: Any = None, **_: Any) -> SimpleNamespace:
        """Return the config of an engine with these options."""
        return SimpleNamespace(options=vars(self), parallel_config=SimpleNamespace(), quant_config=None)


class _Worker:
    """The worker of one GPU, to which a program may add methods of its own."""

    local_rank = rank = 0

    def __init__(self, memory: ServerMemory) -> None:
        self.memory = memory
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.adapters: set[int] = set()
        model = SimpleNamespace(load_weights=lambda weights: {name for name, _ in weights}, compute_logits=None)
        self.model_runner = SimpleNamespace(model=model, vllm_config=SimpleNamespace(quant_config=None))

    def sleep(self, level: int = 1) -> None:
        self.memory.release(TAGS)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.memory.take(tags or TAGS)

    def add_lora(self, lora_request: Any) -> bool:
        self.adapters.add(lora_request.lora_int_id)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        self.adapters.discard(lora_id)
        return True


class AsyncLLM(LLM):
    """vLLM's engine of coroutines."""

    def __init__(self, vllm_config: Any = None, **_: Any) -> None:
        options = dict(vllm_config.options)
        share, gpus = float(options.get("gpu_memory_utilization", 0.9)), int(options.get("tensor_parallel_size", 1))
        super().__init__(
            options["model"],
            gpu_memory_utilization=share,
            tensor_parallel_size=gpus,
            trust_remote_code=options.get("trust_remote_code", False),
        )
        path, extension = [*str(options.get("worker_extension_cls") or ".").rsplit(".", 1)]
        bases = (getattr(importlib.import_module(path), extension), _Worker) if path else (_Worker,)
        # An extension's `__new__` is left out: it may change the process, which is the worker's own in vLLM.
        self.worker: Any = object.__new__(type("Worker", bases, {}))
        _Worker.__init__(self.worker, self)

    @classmethod
    def from_vllm_config(cls, vllm_config: Any, usage_context: Any = None, **_: Any) -> AsyncLLM:
        return cls(vllm_config)

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs, **_: Any) -> AsyncLLM:
        return cls(engine_args.create_engine_config())

    async def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        """Call a method of the worker, or a function with it."""
        function = getattr(self.worker, method) if isinstance(method, str) else method
        own = () if isinstance(method, str) else (self.worker,)
        return [await asyncio.to_thread(function, *own, *args, **(kwargs or {}))]

    async def generate(  # type: ignore[override]
        self, prompt: Any, sampling_params: Any = None, request_id: str = "", **_: Any
    ) -> AsyncIterator[SimpleNamespace]:
        """Yield the whole answer."""
        for answer in super().generate([prompt], sampling_params):
            yield answer

    async def list_loras(self) -> set[int]:
        return {*self.worker.adapters}

    async def add_lora(self, lora_request: Any) -> bool:
        return bool(self.worker.add_lora(lora_request))

    async def remove_lora(self, lora_id: int) -> bool:
        return bool(self.worker.remove_lora(lora_id))

    async def sleep(self, level: int = 1) -> None:  # type: ignore[override]
        """Free the weights and the cache."""
        super().sleep(level)

    async def wake_up(self, tags: list[str] | None = None) -> None:  # type: ignore[override]
        """Take them again."""
        super().wake_up(tags)

    async def reset_prefix_cache(self, *_: Any) -> bool:  # type: ignore[override]
        """Forget the prompts."""
        return True

    async def _nothing(self, *_: Any, **__: Any) -> None: ...

    reset_mm_cache = wait_for_requests_to_drain = start_profile = stop_profile = abort = _nothing

    def shutdown(self) -> None:
        self.release(TAGS)


class _App:
    """An application of ASGI that answers nothing."""

    def __init__(self) -> None:
        self.state = SimpleNamespace()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...


async def _init_app_state(*_: Any) -> None: ...


MODULES: Final[dict[str, dict[str, Any]]] = {
    "vllm.sampling_params": {"SamplingParams": SamplingParams},
    "vllm.engine.arg_utils": {"AsyncEngineArgs": AsyncEngineArgs, "EngineArgs": AsyncEngineArgs},
    "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
    "vllm.entrypoints.llm": {"LLM": LLM},
    "vllm.entrypoints.cli.serve": {"cmd_init": lambda: [_Serve()], "run_headless": lambda args: None},
    "vllm.entrypoints.openai.api_server": {"build_app": lambda *_: _App(), "init_app_state": _init_app_state},
    "vllm.inputs": {"TokensPrompt": dict},
    "vllm.config.lora": {"MaxLoRARanks": _LORA_RANKS},
    "vllm.platforms": {
        "current_platform": SimpleNamespace(device_type="cuda", get_device_uuid=lambda device: f"GPU-{device}")
    },
    "vllm.usage.usage_lib": {"UsageContext": SimpleNamespace(OPENAI_API_SERVER="openai", LLM_CLASS="llm")},
    "vllm.utils": {"FlexibleArgumentParser": FlexibleArgumentParser},
    "vllm.utils.argparse_utils": {"FlexibleArgumentParser": FlexibleArgumentParser},
}
