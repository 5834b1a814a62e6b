"""FLUX.1-dev of diffusers in bfloat16, and with the weights of its transformer and of T5 quantized.

In bfloat16 and with Quanto, whose weights are quantized on the CPU, the components are built and then moved to the GPU.
bitsandbytes' and torchao's are loaded by `from_pretrained`, which puts them on the GPU one by one: transformers has
reserved a part of T5's bytes there before (`caching_allocator_warmup`). In which order the two are loaded depends on
Python's hashes of their names. An image of 1024 × 1024 is then made as the page's script makes it, in two steps
instead of fifty, which are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import nn

import memsize
from benchmarks.published.rows import Row

TEXT: Final = 512
STEPS: Final = 2
_T5_NAME, _TRANSFORMER = "text_encoder_2", "transformer"
_LOADED: Final = ("bnb-4bit", "bnb-8bit", "int4", "int8", "float8")
_T5: Final = {
    "vocab_size": 32128, "d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24,
    "feed_forward_proj": "gated-gelu", "is_gated_act": True, "dense_act_fn": "gelu_new",
}  # fmt: skip
_CLIP: Final = {
    "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12,
    "max_position_embeddings": 77, "projection_dim": 768,
}  # fmt: skip
_VAE: Final = {
    "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16, "sample_size": 1024,
    "scaling_factor": 0.3611, "shift_factor": 0.1159, "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip


def predict(row: Row) -> tuple[int, int, int]:
    """The bytes reserved after loading, or at most, with T5 loaded first; the least and the most of both orders."""
    weights, after = row.values["weights"], row.values["after"]
    orders = ((_T5_NAME, _TRANSFORMER), (_TRANSFORMER, _T5_NAME))[: 2 if weights in _LOADED else 1]
    figures = [_measured(row.source.gpu, row.source.stack, weights, order)[after] for order in orders]
    return figures[0], min(figures), max(figures)


@cache
def _measured(gpu: str, stack: str, weights: str, order: tuple[str, ...]) -> dict[str, int]:
    with memsize.virtual_gpu(gpu, stack=stack), torch.no_grad():
        pipeline = _loaded(weights, order) if weights in _LOADED else _moved(weights)
        loaded = torch.cuda.max_memory_reserved()
        _image(pipeline)
        return {"loading": loaded, "image": torch.cuda.max_memory_reserved()}


def _moved(weights: str) -> Any:
    """The pipeline, moved to the GPU as a whole."""
    return _pipeline(_on_cpu("vae", "text_encoder", _T5_NAME, _TRANSFORMER, weights=weights)).to("cuda")


def _loaded(weights: str, order: tuple[str, ...]) -> Any:
    """The pipeline with the quantized components that `from_pretrained` makes, in this order."""
    components = _on_cpu("vae", "text_encoder")
    for name in order:
        with TemporaryDirectory() as folder:
            components[name] = _from_pretrained(name, Path(folder), weights)
    return _pipeline(components).to("cuda")


def _from_pretrained(name: str, folder: Path, weights: str) -> Any:
    """A component from its config: its weights are stood in for. torchao's are loaded with `device_map="balanced"`."""
    import diffusers
    import transformers

    library = diffusers if name == _TRANSFORMER else transformers
    options: dict[str, Any] = {"torch_dtype": torch.bfloat16}
    if weights.startswith("bnb"):
        bits = {"load_in_8bit": True} if weights == "bnb-8bit" else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        options["quantization_config"] = library.BitsAndBytesConfig(**bits, bnb_4bit_compute_dtype=torch.bfloat16)
    else:
        options["quantization_config"] = library.TorchAoConfig(_torchao_config(weights, name))
        options["device_map"] = {"": 0}
    if name == _TRANSFORMER:
        with torch.device("meta"):
            diffusers.FluxTransformer2DModel(guidance_embeds=True).save_config(folder)
        return diffusers.FluxTransformer2DModel.from_pretrained(folder, **options)
    transformers.T5Config(**_T5, torch_dtype=torch.bfloat16).save_pretrained(folder)
    return transformers.T5EncoderModel.from_pretrained(folder, **options)


def _torchao_config(weights: str, name: str) -> Any:
    """transformers 4.51 has no name for float8, diffusers 0.34 takes nothing but names."""
    if weights == "float8" and name == _T5_NAME:
        from torchao.quantization import Float8WeightOnlyConfig

        return Float8WeightOnlyConfig()
    return f"{weights}_weight_only"


def _on_cpu(*names: str, weights: str = "bf16") -> dict[str, nn.Module]:
    """Components in bfloat16, or with Quanto's or GGUF's weights, without what it took to make them."""
    from diffusers import AutoencoderKL, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    make: dict[str, Callable[[], nn.Module]] = {
        "vae": lambda: AutoencoderKL(**_VAE),
        "text_encoder": lambda: CLIPTextModel(CLIPTextConfig(**_CLIP)),
        _T5_NAME: lambda: T5EncoderModel(T5Config(**_T5)),
        _TRANSFORMER: lambda: FluxTransformer2DModel(guidance_embeds=True),
    }
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        components = {name: make[name]() for name in names}
    torch.set_default_dtype(torch.float32)
    for name, component in components.items():
        if weights != "bf16" and name in (_T5_NAME, _TRANSFORMER):
            _quantize(component, weights)
        component.eval().to("cpu")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return components


def _pipeline(components: dict[str, nn.Module]) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return FluxPipeline(scheduler=scheduler, tokenizer=None, tokenizer_2=None, **components)


def _quantize(model: Any, weights: str) -> None:
    """All linear layers by Quanto. In int8 and int4, where the page leaves it to the libraries, not T5's `wo`:
    transformers leaves it alone, as it may keep it in float32. Layers of the transformer alone are stored in float8 and
    cast, or as a GGUF file has them.

    T5 is in int8 beside a transformer in int4: the page gives both libraries `weights_dtype`, but transformers calls it
    `weights`, whose default is int8 (`utils/quantization_config.py`, QuantoConfig).
    """
    from optimum.quanto import freeze, qfloat8, qint4, qint8, quantize

    is_transformer = hasattr(model, "enable_layerwise_casting")
    kind, _, dtype = weights.partition("-")
    if kind == "quanto":
        weight = qfloat8 if dtype == "float8" else qint4 if dtype == "int4" and is_transformer else qint8
        quantize(model, weights=weight, exclude=None if dtype == "float8" else "*.wo")
        freeze(model)
    elif kind == "gguf" and is_transformer:
        _store_blocks(model, dtype)
    elif is_transformer:
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)


def _store_blocks(transformer: nn.Module, dtype: str) -> None:
    """Hold the linear layers of the blocks as the page's GGUF file has them. Embedders and the last layer have float32
    or float16 (city96/ComfyUI-GGUF, tools/lcpp.patch), which diffusers reads in bfloat16.
    """
    from diffusers.quantizers.gguf.utils import GGML_QUANT_SIZES, GGUFLinear, GGUFParameter
    from gguf import GGMLQuantizationType

    kind = GGMLQuantizationType[dtype]
    numbers, size = GGML_QUANT_SIZES[kind]
    layers = {name: layer for name, layer in transformer.named_modules() if isinstance(layer, nn.Linear)}
    for name, layer in layers.items():
        if "transformer_blocks." not in name:
            continue
        shape = layer.out_features, layer.in_features // numbers * size
        with torch.device("meta"):
            stored = GGUFLinear(layer.in_features, layer.out_features, True, compute_dtype=torch.bfloat16)
        stored.weight = GGUFParameter(torch.empty(shape, dtype=torch.uint8, device="cuda"), quant_type=kind)
        stored.bias = layer.bias
        transformer.set_submodule(name, stored)


def _image(pipeline: Any) -> None:
    ids = torch.zeros(1, 77, dtype=torch.int64, device="cuda")
    pooled = pipeline.text_encoder(ids, output_hidden_states=False).pooler_output
    ids = torch.zeros(1, TEXT, dtype=torch.int64, device="cuda")
    embeddings = pipeline.text_encoder_2(ids, output_hidden_states=False)[0].to(torch.bfloat16)
    pipeline(
        prompt_embeds=embeddings,
        pooled_prompt_embeds=pooled,
        height=1024,
        width=1024,
        guidance_scale=3.5,
        num_inference_steps=STEPS,
        max_sequence_length=TEXT,
        output_type="pt",
        generator=torch.manual_seed(0),
    )
