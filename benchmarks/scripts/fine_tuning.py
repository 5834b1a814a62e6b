"""Scripts that fine-tune: adapters, quantized bases, preferences and rewards, diffusion, float8."""

from __future__ import annotations

from pathlib import Path

from benchmarks.scripts import data
from benchmarks.scripts.data import Maker
from benchmarks.scripts.recipe import Recipe

_LLAMA = (
    data.model(
        "llama",
        "AutoModelForCausalLM",
        "llama",
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        vocab_size=32000,
    ),
    data.tokenizer("llama", chat=True),
)
_CHATS = (data.rows("chats/train.json", messages=data.chat), data.rows("chats/test.json", messages=data.chat))
_PICTURES = data.pictures("images/train/a", count=16)
_REWARD = """
def length(completions, **_):
    return [float(len(completion)) for completion in completions]
"""


def _stable_diffusion_3(folder: str) -> Maker:
    """A small pipeline of three text encoders and a transformer."""

    def make(here: Path) -> None:
        from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
        from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel, T5TokenizerFast

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
        pieces = dict.fromkeys(("<pad>", "</s>", "<unk>", *(f"▁{word}" for word in data.WORDS)))
        T5TokenizerFast(vocab=[(piece, 0.0) for piece in pieces]).save_pretrained(here / folder / "tokenizer_3")

    return make


RECIPES = (
    Recipe(
        "peft olora_finetuning",
        "huggingface/peft",
        "examples/olora_finetuning",
        "olora_finetuning.py --base_model llama --data_path alpaca --batch_size 4 --device_map cuda",
        (*_LLAMA, data.rows("alpaca/train.json", instruction=data.sentence, input="", output=data.sentence)),
        needs=("peft", "transformers", "datasets"),
    ),
    Recipe(
        "peft sft",
        "huggingface/peft",
        "examples/sft",
        "train.py --model_name_or_path llama --dataset_name chats --splits train,test --max_length 256 "
        "--per_device_train_batch_size 4 --bf16 True --output_dir out --use_peft_lora True --lora_r 8 "
        "--lora_target_modules all-linear --gradient_checkpointing True --eval_strategy no",
        (*_LLAMA, *_CHATS),
        needs=("peft", "trl", "transformers", "datasets"),
    ),
    Recipe(
        "trl sft",
        "huggingface/trl",
        ".",
        "trl/scripts/sft.py --model_name_or_path llama --dataset_name chats --output_dir out "
        "--per_device_train_batch_size 4 --max_length 256",
        (*_LLAMA, *_CHATS),
        needs=("trl", "transformers", "datasets"),
    ),
    Recipe(
        "trl dpo",
        "huggingface/trl",
        ".",
        "trl/scripts/dpo.py --model_name_or_path llama --dataset_name pairs --output_dir out --max_length 256 "
        "--per_device_train_batch_size 2 --use_peft --lora_r 8",
        (*_LLAMA, data.rows("pairs/train.json", prompt=data.sentence, chosen=data.sentence, rejected=data.sentence)),
        needs=("trl", "transformers", "datasets", "peft"),
    ),
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
        "trl sft qlora",
        "huggingface/trl",
        ".",
        "trl/scripts/sft.py --model_name_or_path llama --dataset_name chats --output_dir out --max_length 256 "
        "--per_device_train_batch_size 4 --use_peft --lora_r 16 --load_in_4bit --bf16 True",
        (*_LLAMA, *_CHATS),
        needs=("trl", "transformers", "datasets", "peft", "bitsandbytes"),
    ),
    Recipe(
        "trl grpo colocated",
        "huggingface/trl",
        ".",
        "trl/scripts/grpo.py --model_name_or_path llama --dataset_name prompts --output_dir out "
        "--reward_funcs rewards.length --use_vllm --vllm_mode colocate --vllm_gpu_memory_utilization 0.2 "
        "--per_device_train_batch_size 4 --num_generations 4 --max_completion_length 64 --bf16 True",
        (*_LLAMA, data.rows("prompts/train.json", prompt=data.sentence), data.file("rewards.py", _REWARD)),
        needs=("trl", "transformers", "datasets"),
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
        "transformer_engine mnist",
        "NVIDIA/TransformerEngine",
        "examples/pytorch/mnist",
        "main.py --use-fp8 --epochs 1",
        (data.digits("../data/MNIST"),),
        needs=("torchvision",),
        options="--gpu h100",
    ),
)
