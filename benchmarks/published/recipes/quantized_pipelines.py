"""FLUX.1-dev of diffusers in bfloat16, and with the weights of its transformer and of T5 quantized.

The components are built as their configurations have them, quantized and moved to the GPU; an image of 1024 × 1024 is
then made as the page's script makes it, in two steps instead of fifty, which are alike. torchao quantizes on the CPU,
bitsandbytes weight by weight on the GPU, while the models are loaded.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from torch import nn

import memsize
from benchmarks.published.recipes.run import without_torchao
from benchmarks.published.rows import Row

TEXT: Final = 512
STEPS: Final = 2
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


def predict(row: Row) -> int:
    """What is reserved after loading, or at most, in bytes."""
    weights = row.values["weights"]
    return _measured(row.source.gpu, row.source.stack, weights)[row.values["after"]]


@cache
def _measured(gpu: str, stack: str, weights: str) -> dict[str, int]:
    with memsize.virtual_gpu(gpu, stack=stack), torch.no_grad():
        pipeline = _pipeline(weights)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if weights.startswith("bnb"):
            pipeline.text_encoder_2.to("cuda")
            pipeline.transformer.to("cuda")
        pipeline.to("cuda")
        loaded = torch.cuda.max_memory_reserved()
        _image(pipeline)
        return {"loading": loaded, "image": torch.cuda.max_memory_reserved()}


def _pipeline(weights: str) -> Any:
    with without_torchao():
        from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        components: dict[str, nn.Module] = {
            "vae": AutoencoderKL(**_VAE),
            "text_encoder": CLIPTextModel(CLIPTextConfig(**_CLIP)),
            "text_encoder_2": T5EncoderModel(T5Config(**_T5)),
            "transformer": FluxTransformer2DModel(guidance_embeds=True),
        }
    torch.set_default_dtype(torch.float32)
    quantized = ("text_encoder_2", "transformer") if weights != "bf16" else ()
    for name in () if weights.startswith("bnb") else quantized:
        _quantize(components[name], weights)
    for component in components.values():
        component.eval().to("cpu")
    for name in quantized if weights.startswith("bnb") else ():
        _convert(components[name], weights)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return FluxPipeline(scheduler=scheduler, tokenizer=None, tokenizer_2=None, **components)


def _quantize(model: nn.Module, weights: str) -> None:
    """All linear layers but T5's `wo`, which transformers leaves alone, as it may keep it in float32."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    quantize_(
        model,
        Int8WeightOnlyConfig() if weights == "int8" else Float8WeightOnlyConfig(),
        lambda module, name: isinstance(module, nn.Linear) and not name.endswith(".wo"),
    )


def _convert(model: nn.Module, weights: str) -> None:
    """bitsandbytes' linear layers, whose weights are quantized on their way to the GPU; `wo` is in float32."""
    import bitsandbytes as bnb

    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        if name.endswith(".wo"):
            module.float()
            continue
        sizes, bias = (module.in_features, module.out_features), module.bias is not None
        layer: Any
        if weights == "bnb-4bit":
            layer = bnb.nn.Linear4bit(*sizes, bias, torch.bfloat16, quant_type="nf4", device="meta")
            layer.weight = bnb.nn.Params4bit(
                module.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=False
            )
        else:
            layer = bnb.nn.Linear8bitLt(*sizes, bias, has_fp16_weights=False, threshold=6.0, device="meta")
            layer.weight = bnb.nn.Int8Params(module.weight.data, requires_grad=False, has_fp16_weights=False)
        layer.bias = module.bias
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer.eval())


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
