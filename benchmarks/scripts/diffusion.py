"""Scripts that train diffusion models. Pipelines of full size are configs without weights, which memsize makes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from benchmarks.scripts import data
from benchmarks.scripts.data import Maker
from benchmarks.scripts.recipe import Recipe

_PICTURES = data.pictures("images/train/a", count=16)
_LORA = ("diffusers", "accelerate", "peft")


def _stable_diffusion_3(folder: str) -> Maker:
    """A small pipeline of three text encoders and a transformer."""

    def make(here: Path) -> None:
        from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
        from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

        heads = {"num_attention_heads": 4}
        clip = CLIPTextConfig(
            vocab_size=1000, hidden_size=64, intermediate_size=256, num_hidden_layers=2, projection_dim=64, **heads
        )
        width = {"joint_attention_dim": 128, "caption_projection_dim": 128, "pooled_projection_dim": 128}
        parts = {
            "transformer": SD3Transformer2DModel(sample_size=32, num_layers=2, attention_head_dim=32, **heads, **width),
            "vae": AutoencoderKL(
                block_out_channels=(64, 128),
                latent_channels=16,
                down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2,
                shift_factor=0.0,
                use_quant_conv=False,
                use_post_quant_conv=False,
            ),
            "text_encoder": CLIPTextModelWithProjection(clip),
            "text_encoder_2": CLIPTextModelWithProjection(clip),
            "text_encoder_3": T5EncoderModel(
                T5Config(vocab_size=1000, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4)
            ),
            "scheduler": FlowMatchEulerDiscreteScheduler(),
        }
        for name, part in parts.items():
            part.save_pretrained(here / folder / name)
        for name in ("tokenizer", "tokenizer_2"):
            data.clip_tokenizer(here / folder / name)
        data.t5_tokenizer(here / folder / "tokenizer_3")

    return make


def _preset(folder: str, id: str) -> Maker:
    """The configs of a pipeline whose sizes are published, with small tokenizers and no weights."""

    def make(here: Path) -> None:
        from memsize.loading.presets import presets

        preset = presets()[id]
        data.file(f"{folder}/model_index.json", json.dumps(dict(preset.config)))(here)
        for part, config in preset.parts.items():
            name = "scheduler_config" if part == "scheduler" else "config"
            architecture = {"architectures": preset.config[part][1:]}
            data.file(f"{folder}/{part}/{name}.json", json.dumps({**architecture, **config}))(here)
        tokenizers = {"CLIPTokenizer": data.clip_tokenizer, "T5TokenizerFast": data.t5_tokenizer}
        for part, value in preset.config.items():
            if part.startswith("tokenizer"):
                tokenizers[value[1]](here / folder / part)

    return make


def _clip_tokenizers(*folders: str) -> Maker:
    def make(here: Path) -> None:
        for folder in folders:
            data.clip_tokenizer(here / folder)

    return make


def _photos(here: Path) -> None:
    """Pictures with a caption each, in a folder whose name says how often each is shown."""
    data.pictures("photos/10_dog", count=8, size=(1024, 1024))(here)
    for number in range(8):
        (here / f"photos/10_dog/{number}.txt").write_text("the of and to")


def _flux_files(here: Path) -> None:
    """FLUX.1-dev in four files of zeros, under the names that sd-scripts' own models have, and its tokenizers."""
    import sentencepiece
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    from memsize.loading.presets import presets
    from memsize.virtual.hub_weights import file_tensors, write_weights

    sys.path.insert(0, str(here))
    flux_models = importlib.import_module("library.flux_models")

    sizes, parts = flux_models.configs["dev"], presets()["black-forest-labs/FLUX.1-dev"].parts
    clip, t5 = (
        {key: value for key, value in parts[part].items() if not key.startswith("_")}
        for part in ("text_encoder", "text_encoder_2")
    )
    with torch.device("meta"):
        built = {
            "flux1-dev": (flux_models.Flux(sizes.params), torch.bfloat16),
            "ae": (flux_models.AutoEncoder(sizes.ae_params), torch.float32),
            "clip_l": (CLIPTextModel(CLIPTextConfig(**clip)), torch.float16),
            "t5xxl": (T5EncoderModel(T5Config(**t5)), torch.float16),
        }
        (here / "models").mkdir()
        for name, (model, dtype) in built.items():
            write_weights(here / f"models/{name}.safetensors", file_tensors(model, dtype))
    data.clip_tokenizer(here / "openai/clip-vit-large-patch14")
    data.file("google/t5-v1_1-xxl/tokenizer_config.json", '{"tokenizer_class": "T5Tokenizer"}')(here)
    data.file("words.txt", "\n".join([" ".join(data.WORDS)] * 50))(here)
    sentencepiece.SentencePieceTrainer.train(
        input=str(here / "words.txt"),
        model_prefix=str(here / "google/t5-v1_1-xxl/spiece"),
        vocab_size=60,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
    )


def _cogvideox(folder: str) -> Maker:
    """CogVideoX-2b: a transformer of 30 blocks and an autoencoder of clips, whose other sizes are their defaults.

    Source: the tables of CogVideo's README; the defaults of diffusers' classes, which are those of this model.
    """

    def make(here: Path) -> None:
        from memsize.loading.presets import presets

        configs = {
            "transformer": {"_class_name": "CogVideoXTransformer3DModel"},
            "vae": {"_class_name": "AutoencoderKLCogVideoX"},
            "text_encoder": presets()["black-forest-labs/FLUX.1-dev"].parts["text_encoder_2"],  # T5's largest
        }
        for part, config in configs.items():
            data.file(f"{folder}/{part}/config.json", json.dumps(dict(config)))(here)
        scheduler = {"_class_name": "CogVideoXDPMScheduler"}
        data.file(f"{folder}/scheduler/scheduler_config.json", json.dumps(scheduler))(here)
        data.t5_tokenizer(here / folder / "tokenizer")

    return make


RECIPES = (
    Recipe(
        "diffusers unconditional",
        "huggingface/diffusers",
        "examples/unconditional_image_generation",
        "train_unconditional.py --train_data_dir images/train --resolution 64 --train_batch_size 4 --output_dir out "
        "--mixed_precision fp16 --use_ema",
        (_PICTURES,),
        needs=("diffusers", "accelerate", "datasets"),
    ),
    Recipe(
        "diffusers text_to_image_lora",
        "huggingface/diffusers",
        "examples/text_to_image",
        "train_text_to_image_lora.py --pretrained_model_name_or_path sd --train_data_dir captioned --resolution 256 "
        "--train_batch_size 2 --output_dir out --mixed_precision fp16",
        (data.stable_diffusion("sd"), data.pictures("captioned", count=16), data.captions("captioned", count=16)),
        needs=("diffusers", "accelerate", "datasets", "peft"),
    ),
    Recipe(
        "diffusers dreambooth_lora_sd3",
        "huggingface/diffusers",
        "examples/dreambooth",
        "train_dreambooth_lora_sd3.py --pretrained_model_name_or_path sd3 --instance_data_dir photos "
        "--instance_prompt 'the of' --resolution 256 --train_batch_size 1 --output_dir out --mixed_precision fp16 "
        "--max_train_steps 4",
        (_stable_diffusion_3("sd3"), data.pictures("photos", count=8)),
        needs=("diffusers", "accelerate", "peft"),
    ),
    Recipe(
        "diffusers dreambooth_lora_flux",
        "huggingface/diffusers",
        "examples/dreambooth",
        "train_dreambooth_lora_flux.py --pretrained_model_name_or_path flux --instance_data_dir photos "
        "--instance_prompt 'the of' --resolution 512 --train_batch_size 1 --guidance_scale 1 --output_dir out "
        "--mixed_precision bf16 --gradient_checkpointing --max_train_steps 4",
        (_preset("flux", "black-forest-labs/FLUX.1-dev"), data.pictures("photos", count=8)),
        needs=_LORA,
        options="--gpu h100",
    ),
    Recipe(
        "diffusers text_to_image_lora_sdxl",
        "huggingface/diffusers",
        "examples/text_to_image",
        "train_text_to_image_lora_sdxl.py --pretrained_model_name_or_path sdxl --train_data_dir captioned "
        "--resolution 1024 --train_batch_size 1 --mixed_precision fp16 --output_dir out",
        (
            _preset("sdxl", "stabilityai/stable-diffusion-xl-base-1.0"),
            data.pictures("captioned", count=16),
            data.captions("captioned", count=16),
        ),
        needs=(*_LORA, "datasets"),
    ),
    Recipe(  # with the releases that it asks for
        "sd-scripts sdxl_lora",
        "kohya-ss/sd-scripts",
        ".",
        "sdxl_train_network.py --pretrained_model_name_or_path sdxl --train_data_dir photos --output_dir out "
        "--output_name mine --save_model_as safetensors --max_data_loader_n_workers 0 --mixed_precision bf16 "
        "--gradient_checkpointing --cache_latents --cache_text_encoder_outputs --lr_scheduler constant "
        "--max_train_epochs 1 --sdpa --resolution 1024 --network_module networks.lora --network_dim 32 "
        "--network_alpha 16 --learning_rate 1e-4 --optimizer_type AdamW8bit --network_train_unet_only",
        (
            _preset("sdxl", "stabilityai/stable-diffusion-xl-base-1.0"),
            _clip_tokenizers("openai/clip-vit-large-patch14", "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k"),
            _photos,
        ),
        needs=("diffusers", "accelerate", "bitsandbytes", "cv2", "voluptuous"),
        options="--gpu 4090",
    ),
    Recipe(  # with the releases that it asks for
        "sd-scripts flux_lora",
        "kohya-ss/sd-scripts",
        ".",
        "flux_train_network.py --pretrained_model_name_or_path models/flux1-dev.safetensors "
        "--clip_l models/clip_l.safetensors --t5xxl models/t5xxl.safetensors --ae models/ae.safetensors "
        "--train_data_dir photos --output_dir out --output_name mine --save_model_as safetensors "
        "--max_data_loader_n_workers 0 --mixed_precision bf16 --gradient_checkpointing --cache_latents "
        "--cache_text_encoder_outputs --lr_scheduler constant --max_train_epochs 1 --sdpa --resolution 1024 "
        "--network_module networks.lora_flux --network_dim 16 --network_alpha 1 --learning_rate 1e-4 "
        "--optimizer_type AdamW8bit --network_train_unet_only --timestep_sampling sigmoid "
        "--model_prediction_type raw --guidance_scale 1.0 --fp8_base --train_batch_size 1 --blocks_to_swap 16",
        (_photos, _flux_files),
        needs=("diffusers", "accelerate", "bitsandbytes", "cv2", "voluptuous", "sentencepiece"),
        options="--gpu 4090",
    ),
    Recipe(
        "diffusers cogvideox_lora",
        "huggingface/diffusers",
        "examples/cogvideo",
        "train_cogvideox_lora.py --pretrained_model_name_or_path cogvideox --instance_data_root clips "
        "--caption_column prompts.txt --video_column videos.txt --height 480 --width 720 --max_num_frames 49 "
        "--train_batch_size 1 --mixed_precision fp16 --gradient_checkpointing --output_dir out --max_train_steps 4",
        (_cogvideox("cogvideox"), data.clips("clips")),
        needs=(*_LORA, "decord", "cv2"),
        options="--gpu h100",
    ),
)
