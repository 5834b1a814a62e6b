"""The largest step of a server.

The step is what vLLM runs to find out how much memory is left for the cache (`profile_run` of its model runners): a
forward, without a cache, of all the tokens that a step may have; the head on one row of each sequence; and a sampling
by top-k and top-p. That sorts the logits (`vllm/model_executor/layers/sampler.py` in V0, `vllm/v1/sample/ops/
topk_topp_sampler.py` in V1), or searches for thresholds (`topk_topp_triton.py`, FlashInfer's
`top_k_top_p_sampling_from_logits`), which makes two copies of them; Triton's kernel has a row of logits for each
multiprocessor besides. The second model runner makes one copy (`vllm/v1/worker/gpu/sample/sampler.py`).

The forward is transformers' own, but for what vLLM has one kernel for: a norm makes nothing beside its result
(`vllm/model_executor/layers/layernorm.py`), the gate of an MLP is one product with what it is multiplied by
(`vllm/model_executor/models/llama.py`), and experts have two or three buffers, of the tokens times the experts of each
(`fused_experts_impl` in `vllm/model_executor/layers/fused_moe/fused_moe.py`), while the result of experts that all
tokens share waits (`DeepseekV2MoE` in `vllm/model_executor/models/deepseek_v2.py`). Later they are two parts of one
workspace, which stays (`workspace_shapes` of `TritonExperts`, `WorkspaceManager` in `vllm/v1/worker/workspace.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import add
from typing import Any

import torch
from torch import nn

from memsize.errors import InputError
from memsize.known_values.values import set_filled
from memsize.model.input_tensors import ModelInputs
from memsize.records.trace import Trace
from memsize.spec.model_request import Call
from memsize.spec.server_rules import Rules, Sampler
from memsize.torch_internals.pytree import tensors_in
from memsize.tracing.run import Run, Setup
from memsize.workloads import Inference, Proof, Workload

_GATED = ("gate_proj", "up_proj", "down_proj")
_MARLIN_ROWS = 1024
"""The rows that Marlin sums in float32 at most (`determine_reduce_max_m`)."""
_TILE = 64 * 256
"""The sums in float32 that Marlin keeps for each multiprocessor (`max_c_tmp_size` in csrc/quantization/marlin)."""
_SEARCHED = 8
"""The rows of logits from which Triton's kernel searches them; fewer are sorted (`apply_top_k_top_p`)."""
_CHUNK = 32_768
"""The tokens that experts take at a time (`VLLM_FUSED_MOE_CHUNK_SIZE`)."""
_TOKEN = 3
"""A token of a text: none that models give a meaning of its own."""


@dataclass(frozen=True, slots=True)
class ProfileRun(Workload):
    """One step without a cache, by the `rules` of a release: the last tokens of `seqs` texts (of 0: no head) are
    sampled; `tp` cards share the vocabulary, of so many multiprocessors. Images that are among the inputs are read too
    where it runs `with_images`. The products with NVFP4 weights are in `fp4` where the GPU has such. Where Inductor
    times its kernels it has a buffer of `flushed` bytes beside each. `aux_states` of the layers stay for a draft. Where
    it `rejects` drafted tokens, one of each sequence is (`_dummy_sampler_run` in vLLM's v1/worker/gpu_model_runner.py).
    """

    rules: Rules
    seqs: int
    tp: int
    processors: int
    with_images: bool = False
    fp4: bool = False
    flushed: int = 0
    aux_states: int = 0
    rejects: bool = False

    @property
    def proof(self) -> Proof:
        return Inference().proof

    def summed(self, states: torch.Tensor) -> torch.Tensor:
        """The sum of what the cards computed of a layer: another tensor, where the server makes one."""
        return torch.empty_like(states) if self.tp > 1 and self.rules.sums_beside else states

    def computed(self, states: torch.Tensor, width: int) -> torch.Tensor:
        """The result of a kernel that Inductor made, `width` numbers for each token."""
        result = states.new_empty(*states.shape[:-1], width)
        if self.flushed:
            states.new_empty(self.flushed, dtype=torch.uint8)
        return result

    def run(self, setup: Setup) -> Trace:
        body, head = text_model(setup.model, setup.name)
        args, kwargs = setup.call
        run = Run(setup)
        names = {id(module): name for name, module in setup.model.named_modules()}
        root = names[id(body)]
        quantized = {
            name.removesuffix(".weight").removeprefix(f"{root}."): size for name, size in setup.precision.sizes.items()
        }
        _fuse(body, self, quantized, str(text_config(setup.model).model_type))
        _keep_states(body)
        with run.recording(), torch.no_grad(), setup.precision.autocast():
            tokens = kwargs["input_ids"] if "input_ids" in kwargs else next(iter(tensors_in(args)))
            model: Any = setup.model
            shape = *tokens.shape, text_config(model).hidden_size
            aux = [torch.empty(shape, dtype=model.dtype, device=tokens.device) for _ in range(self.aux_states)]
            hidden = body(**(kwargs if self.with_images else {"input_ids": tokens}), use_cache=False).last_hidden_state
            if not self.seqs:
                run.result = hidden
                return run.trace()
            aux.clear()
            last = hidden[: self.seqs, -1].contiguous()
            states = torch.rand_like(last) if self.rules.randomizes else last
            width = getattr(head, "weight", states).dtype
            logits = head(states.to(width) if width.is_floating_point else states)  # Mamba's residuals are in float32
            if self.tp > 1:
                logits = torch.cat([logits] * self.tp, dim=-1)
            run.result = _sampled(logits, self.rules.sampler, self.processors)
            if self.rejects:
                drafted = torch.cat([logits, logits])
                states = drafted[: len(logits)].float()
                run.result = _sampled(states.clone(), self.rules.sampler, self.processors)
                del drafted, states
        return run.trace()


class ImageRun(Workload):
    """The encoder of images, as a server runs it before a step. `tokens` and `bytes` are those of the last run's
    result, `pixels` the bytes of its images."""

    def __init__(self) -> None:
        self.tokens = self.bytes = self.pixels = 0

    def run(self, setup: Setup) -> Trace:
        encode = image_encoder(setup.model)
        images = {name: value for name, value in setup.call[1].items() if "pixel" in name or "image" in name}
        self.pixels = sum(tensor.numel() * tensor.itemsize for tensor in tensors_in(images))
        run = Run(setup)
        with run.recording(), torch.no_grad(), setup.precision.autocast():
            run.result = encode(**images)
            # Some return the results of layers too: the embeddings come last, or by this name.
            embeddings = getattr(run.result, "pooler_output", None)
            results = list(tensors_in(run.result if embeddings is None else embeddings))
            self.tokens = sum(result.numel() // result.shape[-1] for result in results)
            self.bytes = sum(result.numel() * result.itemsize for result in results)
        return run.trace()


def image_encoder(model: Any) -> Any:
    """The method by which a model encodes images; None where none can be run by itself."""
    owners: tuple[Any, ...] = (getattr(model, "base_model", None), model)
    return next((owner.get_image_features for owner in owners if hasattr(owner, "get_image_features")), None)


def reads_images(model: Any) -> bool:
    """Whether a model of transformers reads images beside texts."""
    return getattr(getattr(model, "config", None), "vision_config", None) is not None


def encoder_size(model: Any) -> float:
    """Layers × width² of a model's encoder of images, in units of ViT-L's, as SGLang counts them
    (`adjust_mem_fraction_for_vlm`); 0 where it reads none.
    """
    if not reads_images(model):
        return 0
    vision = model.config.vision_config
    return getattr(vision, "num_hidden_layers", 24) * getattr(vision, "hidden_size", 1024) ** 2 / (24 * 1024**2)


def text_config(model: Any) -> Any:
    """The config of a model's language part; the config itself where there are no others."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def text_only(inputs: ModelInputs, length: int) -> ModelInputs:
    """Inputs that have nothing but the tokens of texts of `length`."""

    def make(batch: int) -> Call:
        tokens = inputs.make(batch)[1]["input_ids"]
        texts, mask = (tokens.new_zeros(batch, length) for _ in range(2))
        return (), {"input_ids": set_filled(texts, _TOKEN), "attention_mask": set_filled(mask, 1)}

    return replace(inputs, make=make)


def text_model(model: nn.Module, name: str) -> tuple[Any, nn.Module]:
    """Return a language model without its head, and the head. Raises `InputError` where it has no such parts."""
    body = getattr(model, "base_model", None)
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    if body is None or body is model or not isinstance(outputs, nn.Module):
        raise InputError(f"{name} cannot be served: it takes a body and a head, as in transformers' language models")
    return body, outputs


def _sampled(logits: torch.Tensor, sampler: Sampler, processors: int) -> torch.Tensor:
    rows, tiles = len(logits), None
    if sampler != "sorts":
        logits = logits.float()
    if sampler == "copies":
        return logits.argmax(dim=-1)
    if sampler == "searches in tiles" and rows >= _SEARCHED:
        tiles = logits.new_empty(min(1 << (min(rows, processors) - 1).bit_length(), processors), logits.shape[1])
    elif sampler != "searches":
        ordered, places = logits.sort(dim=-1)
        ordered.masked_fill_(ordered < ordered[:, :1], -torch.inf)
        shares = ordered.softmax(dim=-1)
        ordered.masked_fill_(shares.cumsum(dim=-1) <= 0.01, -torch.inf)
        logits = torch.empty_like(ordered).scatter_(dim=-1, index=places, src=ordered)
    shares = logits.softmax(dim=-1, dtype=torch.float32)
    result = shares.div_(torch.empty_like(shares).exponential_()).argmax(dim=-1)
    del tiles  # a cache has them
    return result


# -- kernels of its own ------------------------------------------------------------------------------------------------


def _fuse(body: nn.Module, run: ProfileRun, packed: Mapping[str, int], model_type: str) -> None:
    """Let the layers of a model take what a server's do. `packed` are the bytes of quantized weights, by path."""
    holds_gate = run.rules.holds_gate(model_type)
    workspace: list[torch.Tensor] = []
    for path, module in body.named_modules():
        experts = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
        if all(isinstance(weight, torch.Tensor) and weight.dim() == 3 for weight in experts):
            layer = body.get_submodule(path.rpartition(".")[0])
            has_shared = any(hasattr(layer, name) for name in ("shared_experts", "shared_expert"))
            # Experts with biases, as in gpt-oss, have Triton kernels that take what they need.
            stays = run.rules.experts == "of the server" and not hasattr(module, "gate_up_proj_bias")
            vars(module)["forward"] = partial(_experts, module, run, has_shared, workspace if stays else None)
        elif type(module).__name__.endswith("RMSNorm"):
            vars(module)["forward"] = partial(_norm, run)
        elif all(hasattr(module, name) for name in ("conv1d", "out_proj")):
            vars(module)["forward"] = partial(_stateful, module, run)
        elif path in packed and isinstance(module, nn.Linear):
            vars(module)["forward"] = partial(_product, module, run, packed[path])
        elif all(isinstance(getattr(module, name, None), nn.Linear) for name in _GATED):
            vars(module)["forward"] = partial(_gated, module, run, packed.get(f"{path}.gate_proj", 0), holds_gate)
    _forget_embeddings(body)


def _forget_embeddings(body: Any) -> None:
    """Free the embeddings once they are scaled or the first layer has read them: a server adds to them in place."""
    parts = (body, getattr(body, "decoder", None))
    lists = (getattr(part, "layers", None) for part in parts)
    layers = next((layers for layers in lists if isinstance(layers, nn.ModuleList)), None)
    embedding = body.get_input_embeddings()
    if not layers or not isinstance(embedding, nn.Module):
        return
    first, embed, results = layers[0].forward, embedding.forward, []

    def embedded(*args: Any, **kwargs: Any) -> Any:
        results.append(embed(*args, **kwargs))
        return results[-1]

    def layer(*args: Any, **kwargs: Any) -> Any:
        read = {tensor.untyped_storage() for tensor in tensors_in(args[:1])}
        for storage in {tensor.untyped_storage() for tensor in results} - read:
            storage.resize_(0)
        results.clear()
        result = first(*args, **kwargs)
        for storage in read - {tensor.untyped_storage() for tensor in tensors_in(result)}:
            storage.resize_(0)
        return result

    vars(embedding)["forward"], vars(layers[0])["forward"] = embedded, layer


def _keep_states(model: nn.Module) -> None:
    """Let image encoders that return states between their layers, as the config lists them, keep what vLLM's keeps
    (`MllamaForConditionalGeneration` in its `model_executor/models/mllama.py`): those states alone, where transformers
    returns all; a stack of them beside the second encoder; the images as the processor makes them, in float32, with a
    copy; and a number, a position and a slot of the cache for each of their tokens (`enc_dec_model_runner.py`).
    """
    for module in model.modules():
        listed = getattr(getattr(module, "config", None), "intermediate_layers_indices", None)
        layers = getattr(module, "layers", None)
        if not listed:
            continue
        if isinstance(layers, nn.ModuleList):
            # Encoders with fewer layers than that return none but the last.
            returned = listed if max(listed) < len(layers) else ()
            for number, layer in enumerate(layers[1:]):
                if number not in returned:
                    vars(layer)["forward"] = partial(_freeing, layer.forward)
        elif isinstance(second := getattr(module, "global_transformer", None), nn.Module):
            vars(second)["forward"] = partial(_beside_stack, second.forward, len(listed))
            vars(module)["forward"] = partial(_beside_inputs, module, module.forward)


def _freeing(forward: Callable[..., Any], *, hidden_states: torch.Tensor, **options: Any) -> Any:
    result = forward(hidden_states, **options)
    hidden_states.untyped_storage().resize_(0)
    return result


def _beside_stack(forward: Callable[..., Any], count: int, states: torch.Tensor, **options: Any) -> Any:
    stack = states.new_empty(*states.shape, count)
    result = forward(states, **options)
    del stack
    return result


def _beside_inputs(
    module: Any, forward: Callable[..., Any], pixel_values: torch.Tensor, *args: Any, **options: Any
) -> Any:
    images = torch.empty_like(pixel_values, dtype=torch.float32)
    tiles = images[..., 0, 0, 0].numel()
    pixel_values.untyped_storage().resize_(0)
    tokens = torch.empty(3, tiles * module.num_patches, dtype=torch.int64, device=images.device)
    result = forward(torch.empty_like(images), *args, **options)
    del tokens
    return result


def _gated(module: Any, run: ProfileRun, packed: int, holds_gate: bool, states: torch.Tensor) -> torch.Tensor:
    inner = module.down_proj.in_features
    both = states.new_empty(*states.shape[:-1], 2 * inner)
    if packed:
        _scratch(run, 2 * packed, states, 2 * inner)
    activated = run.computed(states, inner)
    if not holds_gate:
        del both
    result: torch.Tensor = module.down_proj(activated)
    return run.summed(result)


def _product(module: nn.Linear, run: ProfileRun, packed: int, states: torch.Tensor) -> torch.Tensor:
    result = states.new_empty(*states.shape[:-1], module.out_features)
    _scratch(run, packed, states, module.out_features)
    return result


def _scratch(run: ProfileRun, packed: int, states: torch.Tensor, width: int) -> None:
    """Allocate the scratch memory of a product with weights of so many bytes: the input in as many bits where those
    are eight (`scaled_fp8_quant` and `scaled_int8_quant` in vLLM's `_custom_ops.py`), or in four, with a scale for
    each 16, in tiles of 128 × 4 scales (`scaled_fp4_quant` there); the weight as numbers, of ExLlama (`gptq_gemm` in
    csrc/quantization/gptq/q_gemm.cu) and AWQ (awq.py); or Marlin's copy of its input and its sums in float32
    (csrc/quantization/gptq_marlin/gptq_marlin.cu).
    """
    inputs = states.shape[-1]
    if packed >= inputs * width:
        states.new_empty(states.shape, dtype=torch.uint8)
        return
    if run.fp4:
        rows = states.numel() // inputs
        states.new_empty(rows * inputs // 2 + -(-rows // 128) * 128 * -(-inputs // 64) * 4, dtype=torch.uint8)
        return
    products = run.rules.products
    if products == "unpacks":
        states.new_empty(inputs, width)
        return
    rows = min(-(-states.numel() // inputs // 64) * 64, _MARLIN_ROWS)
    copied = states.new_empty(states.shape) if products == "copies" else None
    size = run.processors * _TILE if products == "tiles" else rows * width
    sums = states.new_empty(size, dtype=torch.float32)
    del copied, sums


def _stateful(module: Any, run: ProfileRun, hidden_states: torch.Tensor, *_: Any, **_options: Any) -> torch.Tensor:
    """A layer with a state as Mamba's, or a gated delta net. Without a cache vLLM leaves out its scan: it multiplies,
    copies the convolution's input twice (`conv_ssm_forward` in layers/mamba/mamba_mixer2.py), or brings it into another
    order (`fix_query_key_value_ordering` in layers/mamba/gdn/qwen_gdn_linear_attn.py), and has a tensor for results.
    """
    children = dict(module.named_children())
    products = [child(hidden_states) for name, child in children.items() if name.startswith("in_proj")]
    results = run.computed(hidden_states, module.out_proj.in_features)
    copies = [run.computed(hidden_states, module.conv1d.in_channels) for _ in range(2 if "in_proj" in children else 1)]
    if "in_proj" in children:
        copies.clear()
    normed = run.computed(results, module.out_proj.in_features) if "norm" in children else results
    del results, products, copies
    result: torch.Tensor = module.out_proj(normed)
    return run.summed(result)


def _norm(run: ProfileRun, states: torch.Tensor, *_: Any, **_options: Any) -> torch.Tensor:
    return run.computed(states, states.shape[-1])


def _experts(
    module: Any,
    run: ProfileRun,
    has_shared: bool,
    workspace: list[torch.Tensor] | None,
    states: torch.Tensor,
    chosen: torch.Tensor,
    *_: Any,
    **_options: Any,
) -> torch.Tensor:
    """The experts' products, in place: one buffer for each, or one for both, and one for the result of the activation,
    beside the result of shared experts; or a part of the workspace for the results and one for the other.
    """
    width = states.shape[-1]
    inner = module.down_proj[0].numel() // width
    shared = torch.empty_like(states) if has_shared else None
    if workspace is not None:
        size = states.numel() // width * chosen.shape[-1] * (max(inner, width) + max(2 * inner, width))
        if not workspace or workspace[0].numel() < size:
            workspace.clear()
            workspace.append(states.new_empty(size))
    else:
        rows = min(states.numel() // width, _CHUNK) * chosen.shape[-1]
        combined = add if run.rules.experts == "of each product" else max
        products = states.new_empty(rows * combined(2 * inner, width))
        activated = states.new_empty(rows, inner)
        del products, activated
    del shared
    return run.summed(states)
