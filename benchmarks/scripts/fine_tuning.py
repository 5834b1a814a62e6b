"""Scripts that fine-tune: adapters, quantized bases, preferences and rewards, float8."""

from __future__ import annotations

from benchmarks.scripts import data, research_data
from benchmarks.scripts.recipe import Recipe

LLAMA = (
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
CHATS = (data.rows("chats/train.json", messages=data.chat), data.rows("chats/test.json", messages=data.chat))
_TORCHTUNE = (
    data.preset("meta-llama/Llama-3.2-1B", "llama"),
    data.zeros("llama"),
    data.byte_tokenizer("llama/tokenizer.model"),
    data.rows("yahma/alpaca-cleaned/train.json", instruction=data.sentence, input="", output=data.sentence),
)
_TORCHTUNE_FOLDERS = "checkpointer.checkpoint_dir=llama tokenizer.path=llama/tokenizer.model output_dir=out"
_LITGPT = "checkpoints/meta-llama/Llama-3.2-1B"
_PICTURES = data.pictures("images/train/a", count=16)
_REWARD = """
def length(completions, **_):
    return [float(len(completion)) for completion in completions]
"""


RECIPES = (
    Recipe(
        "peft olora_finetuning",
        "huggingface/peft",
        "examples/olora_finetuning",
        "olora_finetuning.py --base_model llama --data_path alpaca --batch_size 4 --device_map cuda",
        (*LLAMA, data.rows("alpaca/train.json", instruction=data.sentence, input="", output=data.sentence)),
        needs=("peft", "transformers", "datasets"),
    ),
    Recipe(
        "peft sft",
        "huggingface/peft",
        "examples/sft",
        "train.py --model_name_or_path llama --dataset_name chats --splits train,test --max_length 256 "
        "--per_device_train_batch_size 4 --bf16 True --output_dir out --use_peft_lora True --lora_r 8 "
        "--lora_target_modules all-linear --gradient_checkpointing True --eval_strategy no",
        (*LLAMA, *CHATS),
        needs=("peft", "trl", "transformers", "datasets"),
    ),
    Recipe(
        "trl sft",
        "huggingface/trl",
        ".",
        "trl/scripts/sft.py --model_name_or_path llama --dataset_name chats --output_dir out "
        "--per_device_train_batch_size 4 --max_length 256",
        (*LLAMA, *CHATS),
        needs=("trl", "transformers", "datasets"),
    ),
    Recipe(
        "trl dpo",
        "huggingface/trl",
        ".",
        "trl/scripts/dpo.py --model_name_or_path llama --dataset_name pairs --output_dir out --max_length 256 "
        "--per_device_train_batch_size 2 --use_peft --lora_r 8",
        (*LLAMA, data.rows("pairs/train.json", prompt=data.sentence, chosen=data.sentence, rejected=data.sentence)),
        needs=("trl", "transformers", "datasets", "peft"),
    ),
    Recipe(
        "trl sft qlora",
        "huggingface/trl",
        ".",
        "trl/scripts/sft.py --model_name_or_path llama --dataset_name chats --output_dir out --max_length 256 "
        "--per_device_train_batch_size 4 --use_peft --lora_r 16 --load_in_4bit --bf16 True",
        (*LLAMA, *CHATS),
        needs=("trl", "transformers", "datasets", "peft", "bitsandbytes"),
    ),
    Recipe(
        "trl grpo colocated",
        "huggingface/trl",
        ".",
        "trl/scripts/grpo.py --model_name_or_path llama --dataset_name prompts --output_dir out "
        "--reward_funcs rewards.length --use_vllm --vllm_mode colocate --vllm_gpu_memory_utilization 0.2 "
        "--per_device_train_batch_size 4 --num_generations 4 --max_completion_length 64 --bf16 True",
        (*LLAMA, data.rows("prompts/train.json", prompt=data.sentence), data.file("rewards.py", _REWARD)),
        needs=("trl", "transformers", "datasets"),
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
    Recipe(
        "transformer_engine quantized_model_init",
        "NVIDIA/TransformerEngine",
        "examples/pytorch/quantized_model_init",
        "main.py",
        options="--gpu h100",
    ),
    Recipe(
        "llama-factory lora_sft",
        "hiyouga/LLaMA-Factory",
        ".",
        "src/train.py examples/train_lora/qwen3_lora_sft.yaml gradient_accumulation_steps=1",
        (
            data.preset("Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Instruct-2507"),
            data.tokenizer("Qwen/Qwen3-4B-Instruct-2507", chat=True),
        ),
        needs=("llamafactory", "transformers", "peft", "trl"),
        environment={"DISABLE_VERSION_CHECK": "1"},
    ),
    Recipe(
        "llama-factory qlora_sft",
        "hiyouga/LLaMA-Factory",
        ".",
        "src/train.py examples/train_qlora/qwen3_lora_sft_otfq.yaml gradient_accumulation_steps=1 "
        "preprocessing_num_workers=1 dataloader_num_workers=0",
        (
            data.preset("Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Instruct-2507"),
            data.tokenizer("Qwen/Qwen3-4B-Instruct-2507", chat=True),
        ),
        needs=("llamafactory", "transformers", "peft", "trl", "bitsandbytes"),
        environment={"DISABLE_VERSION_CHECK": "1"},
        options="--gpu 4090",
    ),
    Recipe(
        "axolotl plano",
        "axolotl-ai-cloud/axolotl",
        "examples",
        "-m axolotl.cli.train plano/plano-4b-qlora.yaml",
        (
            data.preset("Qwen/Qwen3-4B", "katanemo/Plano-Orchestrator-4B"),
            data.tokenizer("katanemo/Plano-Orchestrator-4B", chat=True),
            data.rows("fozziethebeat/alpaca_messages_2k_test/train.json", 2000, messages=data.chat),
        ),
        needs=("axolotl", "bitsandbytes", "peft", "trl", "cut_cross_entropy"),
        environment={"AXOLOTL_DO_NOT_TRACK": "1"},
        options="--gpu 4090",
    ),
    Recipe(
        "axolotl qlora",
        "axolotl-ai-cloud/axolotl",
        "examples",
        "-m axolotl.cli.train llama-3/qlora-1b.yml --attn_implementation=sdpa",
        (
            data.preset("meta-llama/Llama-3.2-1B", "NousResearch/Llama-3.2-1B"),
            data.tokenizer("NousResearch/Llama-3.2-1B"),
            data.rows(
                "teknium/GPT4-LLM-Cleaned/train.json", 1600, instruction=data.sentence, input="", output=data.sentence
            ),
        ),
        needs=("axolotl", "bitsandbytes", "peft", "trl"),
        environment={"AXOLOTL_DO_NOT_TRACK": "1"},
    ),
    *(
        Recipe(
            f"torchtune {name}",
            "pytorch/torchtune",
            ".",
            f"recipes/{recipe}_finetune_single_device.py "
            f"--config recipes/configs/llama3_2/1B_{name}_single_device.yaml {_TORCHTUNE_FOLDERS}",
            _TORCHTUNE,
            needs=("torchtune", "torchdata", "tiktoken", "bitsandbytes"),
            options="--gpu 4090",
        )
        for name, recipe in (("lora", "lora"), ("qlora", "lora"), ("full", "full"))
    ),
    Recipe(
        "litgpt lora",
        "Lightning-AI/litgpt",
        ".",
        f"-m litgpt finetune_lora {_LITGPT} --config config_hub/finetune/llama-3.2-1B/lora.yaml --data JSON "
        "--data.json_path rows.jsonl",
        (
            research_data.litgpt(_LITGPT, "Llama-3.2-1B"),
            data.tokenizer(_LITGPT),
            data.rows("rows.jsonl", instruction=data.sentence, input="", output=research_data.page),
        ),
        needs=("litgpt", "lightning", "jsonargparse"),
        options="--gpu a10g",
    ),
    Recipe(
        "sentence-transformers cross_encoder",
        "huggingface/sentence-transformers",
        "examples/cross_encoder/training/sts",
        "training_stsbenchmark.py",
        (
            data.config("distilbert/distilroberta-base", "roberta", num_hidden_layers=6, vocab_size=50265),
            data.tokenizer("distilbert/distilroberta-base"),
            *(
                data.rows(
                    f"sentence-transformers/stsb/{part}.json",
                    sentence1=data.sentence,
                    sentence2=data.sentence,
                    score=data.share,
                )
                for part in ("train", "validation", "test")
            ),
        ),
        needs=("sentence_transformers", "datasets", "scipy", "sklearn"),
    ),
    Recipe(
        "mamba-chat",
        "havenhq/mamba-chat",
        ".",
        "train_mamba.py --batch_size 2",
        (
            data.file("state-spaces/mamba-2.8b/config.json", '{"d_model": 2560, "n_layer": 64, "vocab_size": 50277}'),
            data.tokenizer("EleutherAI/gpt-neox-20b"),
            data.tokenizer("HuggingFaceH4/zephyr-7b-beta", chat=True),
        ),
        needs=("transformers", "mamba_ssm"),
        options="--gpu h100",
    ),
    Recipe(
        "openrlhf sft",
        "OpenRLHF/OpenRLHF",
        ".",
        "-m openrlhf.cli.train_sft --data.max_len 2048 --data.dataset questions --data.input_key question "
        "--data.output_key response --train.batch_size 16 --train.micro_batch_size 2 "
        "--model.model_name_or_path meta-llama/Meta-Llama-3-8B --ckpt.output_dir out --ds.zero_stage 2 "
        "--ds.param_dtype bf16 --ds.attn_implementation flash_attention_2 --adam.lr 5e-6 --ds.packing_samples "
        "--model.gradient_checkpointing_enable --train.max_epochs 1",
        (
            data.preset("meta-llama/Meta-Llama-3-8B"),
            data.tokenizer("meta-llama/Meta-Llama-3-8B"),
            data.rows("questions/train.jsonl", 2000, question=data.sentence, response=data.sentence),
        ),
        needs=("deepspeed", "transformers", "datasets", "peft"),
        options="--gpus 8 --gpu h100",
    ),
    Recipe(  # with transformers before 5 and pandas before 3
        "verl sft_peft",
        "volcengine/verl",
        ".",
        "-m verl.trainer.fsdp_sft_trainer data.train_files=gsm8k.parquet data.val_files=gsm8k.parquet "
        "data.prompt_key=extra_info data.response_key=extra_info optim.lr=1e-4 data.prompt_dict_keys=[question] "
        "+data.response_dict_keys=[answer] data.micro_batch_size_per_gpu=4 "
        "model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct trainer.default_local_dir=out trainer.logger=console "
        "trainer.total_epochs=1 model.lora_rank=32 model.lora_alpha=16 model.target_modules=all-linear",
        (
            data.preset("Qwen/Qwen2.5-0.5B-Instruct"),
            data.tokenizer("Qwen/Qwen2.5-0.5B-Instruct", chat=True),
            data.rows("gsm8k.parquet", 800, extra_info=data.question),
        ),
        needs=("tensordict", "hydra", "ray", "peft", "torchdata"),
        options="--gpus 2 --gpu a100",
    ),
    Recipe(  # with transformers before 5
        "verl grpo",
        "volcengine/verl",
        ".",
        "-m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.val_before_train=False "
        "data.train_files=gsm8k/train.parquet data.val_files=gsm8k/test.parquet data.train_batch_size=16 "
        "data.max_prompt_length=512 data.max_response_length=1024 data.filter_overlong_prompts=True "
        "data.truncation=error data.shuffle=False actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct "
        "actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32 "
        "actor_rollout_ref.actor.optim.lr=3e-6 actor_rollout_ref.model.use_remove_padding=True "
        "actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 "
        "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 "
        "actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 "
        "actor_rollout_ref.model.enable_gradient_checkpointing=True "
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40 "
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.name=vllm "
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5 "
        "actor_rollout_ref.rollout.load_format=safetensors actor_rollout_ref.rollout.layered_summon=True "
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40 "
        "actor_rollout_ref.ref.fsdp_config.param_offload=True algorithm.use_kl_in_reward=False "
        "trainer.critic_warmup=0 trainer.logger=console trainer.n_gpus_per_node=1 trainer.nnodes=1 "
        "trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15",
        (
            data.preset("Qwen/Qwen2.5-0.5B-Instruct"),
            data.tokenizer("Qwen/Qwen2.5-0.5B-Instruct", chat=True),
            *(
                data.rows(
                    f"gsm8k/{part}.parquet",
                    64,
                    data_source="openai/gsm8k",
                    prompt=data.dialogue,
                    ability="math",
                    reward_model={"style": "rule", "ground_truth": "7"},
                    extra_info=data.question,
                )
                for part in ("train", "test")
            ),
        ),
        needs=("tensordict", "hydra", "ray", "peft", "torchdata", "zmq", "uvicorn", "fastapi", "msgspec"),
        options="--gpu h100",
    ),
    Recipe(  # with TRL 0.18 and transformers 4.52, which it asks for
        "open-r1 grpo",
        "huggingface/open-r1",
        ".",
        "src/open_r1/grpo.py --config recipes/Qwen2.5-1.5B-Instruct/grpo/config_demo.yaml --vllm_mode colocate",
        (
            data.preset("Qwen/Qwen2.5-1.5B-Instruct"),
            data.tokenizer("Qwen/Qwen2.5-1.5B-Instruct", chat=True),
            data.rows("open-r1/OpenR1-Math-220k/train.json", problem=data.sentence, solution=data.sentence),
        ),
        needs=("trl", "transformers", "datasets", "math_verify", "latex2sympy2_extended"),
        environment={"PYTHONPATH": "src", "WANDB_MODE": "offline"},
        options="--gpu h100",
    ),
)
