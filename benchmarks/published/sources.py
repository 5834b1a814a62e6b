"""Where the published figures come from, and what is known and inferred of their settings: one entry for each table.

A row counts only when its setting can be rebuilt. `confidence` follows from what the source states:

- *high*: the script is public, with all its settings, and so is the release it ran;
- *medium*: one thing that moves the figure by a few percent is inferred, and `inferred` says what;
- *low*: more than one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Confidence = Literal["high", "medium", "low"]
Kind = Literal[
    "linear networks",
    "encoders, forward and backward",
    "decoders, forward and backward",
    "transformers, whole steps",
    "transformers, inference",
    "LoRA and adapters",
    "diffusion transformers, adapters",
    "diffusion transformers, forward and backward",
    "diffusion pipelines",
    "vision transformers",
    "convolutional networks",
    "gated MLPs",
    "mixtures of experts",
    "norms and rotary embeddings",
    "losses of language models",
    "compiled code",
    "one rank of several GPUs",
    "servers",
]

MiB: Final = 2**20
MB: Final = 10**6
GB: Final = 10**9
GIB: Final = 2**30
_SDPA: Final = "https://huggingface.co/docs/transformers"
_TRAIN: Final = "https://gist.github.com/fxmarty/7e75cc3942d6974e4849093ebea0a331"
_INFER: Final = "https://gist.github.com/fxmarty/5113e4304fbdd38c9c3702ce44683f6a"
_LITGPT: Final = "https://github.com/Lightning-AI/litgpt/blob/main/tutorials/resource-tables.md"
_RASBT: Final = "https://github.com/rasbt/pytorch-memory-optim/blob/main/logs.md"
_PREFLIGHT: Final = (
    "https://github.com/highwaterlabs/torch-preflight, release 0.4.0, tests/calibration/measured_peaks.json"
)


@dataclass(frozen=True, slots=True)
class Source:
    """A published table.

    `gpu` and `stack` are what it was measured on, as `memsize.trace` takes them, and of a server its release; `unit` is
    the bytes of the published figures' unit; `environment` names the releases in `environments`, None for those that
    are installed here.
    """

    name: str
    kind: Kind
    title: str
    where: str
    gpu: str
    stack: str
    figure: Literal["allocated", "reserved", "device", "cache"]
    unit: int
    confidence: Confidence
    inferred: str
    environment: str | None = None
    script: str = ""


def _table(
    name: str,
    title: str,
    where: str,
    gpu: str,
    stack: str,
    environment: str,
    confidence: Confidence = "high",
    inferred: str = "",
) -> Source:
    """A table of eager beside SDPA attention in half precision, as the documentation of transformers has them."""
    training = "/train" in name
    encodes = name.startswith(("bert", "distilbert", "albert"))
    trained: Kind = "encoders, forward and backward" if encodes else "decoders, forward and backward"
    kind: Kind = trained if training else "transformers, inference"
    script = _TRAIN if training else _INFER
    return Source(name, kind, title, where, gpu, stack, "allocated", MB, confidence, inferred, environment, script)


_OPT: Final = f"{_SDPA}/v4.46.3/en/model_doc/opt, pull request 33298"
_BERT: Final = f"{_SDPA}/v4.48.0/en/model_doc/bert, pull request 28802"
_ALBERT: Final = f"{_SDPA}/v4.46.3/en/model_doc/albert, pull request 32092"
_BIOGPT: Final = f"{_SDPA}/v4.48.0/en/model_doc/biogpt"
_RELEASE: Final = "measured on the pull request; the first release that has it stands in"

_ALL: Final = (
    _table("opt-350m/train", "OPT-350m", _OPT, "L40S", "torch=2.4,cuda=12.4", "transformers-4.46.3", inferred=_RELEASE),
    _table("bert-base/train", "BERT-base, LM head", _BERT, "A100 80GB", "torch=2.2,cuda=12.1", "transformers-4.43.4"),
    _table(
        "gpt2-large/train",
        "GPT-2 large",
        f"{_SDPA}/v4.46.3/en/model_doc/gpt2, pull request 31172",
        "RTX 3080 Ti",
        "torch=2.2,cuda=12.1",
        "transformers-4.43.4",
        inferred=_RELEASE,
    ),
    _table(
        "pythia-410m/train",
        "Pythia-410m (GPT-NeoX)",
        f"{_SDPA}/v4.46.3/en/model_doc/gpt_neox, pull request 31031",
        "RTX 3080 Ti",
        "torch=2.2,cuda=12.1",
        "transformers-4.43.4",
        inferred=_RELEASE,
    ),
    _table("biogpt/train", "BioGPT", _BIOGPT, "RTX 2060 SUPER", "torch=2.3,cuda=12.1", "transformers-4.46.3"),
    _table("biogpt/forward", "BioGPT", _BIOGPT, "RTX 2060 SUPER", "torch=2.3,cuda=12.1", "transformers-4.46.3"),
    _table(
        "distilbert/train",
        "DistilBERT, masked LM",
        f"{_SDPA}/v4.46.3/en/model_doc/distilbert",
        "RTX 2060 SUPER",
        "torch=2.3,cuda=12.1",
        "transformers-4.46.3",
    ),
    _table(
        "albert-base/train",
        "ALBERT-base, classifier",
        _ALBERT,
        "RTX 2060 SUPER",
        "torch=2.3,cuda=12.1",
        "transformers-4.46.3",
        "medium",
        "the head is not stated: that of the pull request's script for inference",
    ),
    _table(
        "albert-base/train-mlm",
        "ALBERT-base, masked LM",
        "https://github.com/huggingface/transformers/pull/32092, first comment",
        "RTX 2060 SUPER",
        "torch=2.3,cuda=12.1",
        "transformers-4.46.3",
    ),
    _table(
        "albert-base/forward",
        "ALBERT-base, classifier",
        _ALBERT,
        "RTX 2060 SUPER",
        "torch=2.3,cuda=12.1",
        "transformers-4.46.3",
    ),
    *(
        Source(
            f"litgpt/{name}",
            kind,
            title,
            _LITGPT,
            "A100 40GB",
            "torch=2.1,cuda=12.1",
            "allocated",
            GB,
            confidence,
            inferred,
            f"litgpt-{commit}",
        )
        for name, kind, title, commit, confidence, inferred in (
            ("lora", "LoRA and adapters", "LoRA of query and value, rank 8", "0cc02afa", "high", ""),
            ("adapter", "LoRA and adapters", "LLaMA-Adapter", "e894d307", "high", ""),
            ("adapter-v2", "LoRA and adapters", "LLaMA-Adapter v2", "e894d307", "high", ""),
            ("generate", "transformers, inference", "50 new tokens", "0cc02afa", "high", ""),
        )
    ),
    Source(
        "vit-l/train",
        "vision transformers",
        "ViT-L/16",
        _RASBT,
        "A100 40GB",
        "torch=2.1,cuda=11.8",
        "reserved",
        GB,
        "medium",
        "the GPU is not named; cuDNN's release is not, nor what it takes",
    ),
    *(
        Source(
            f"preflight/{name}",
            kind,
            "one training step with AdamW under autocast",
            _PREFLIGHT,
            "T4",
            "torch=2.11,cuda=12.8",
            "allocated",
            1,
            confidence,
            inferred,
        )
        for name, kind, confidence, inferred in (
            (
                "transformers",
                "transformers, whole steps",
                "medium",
                "its release of transformers is not stated: 5.5 to 5.23 give the same figures",
            ),
            ("convolutional", "convolutional networks", "high", ""),
        )
    ),
    Source(
        "gpumemnet/convolutional",
        "convolutional networks",
        "random networks, whole trainings with Adam",
        "https://github.com/itu-rad/GPUMemNet, Datasets/CNN",
        "A100 40GB",
        "torch=2.4,cuda=12.1,loading=eager",
        "device",
        MiB,
        "medium",
        "the stack; that the summary is torchsummary's, as in the script's first versions",
        "cudnn-9.1",
        "NeuroNetGen_scripts/CNN/cnn.py",
    ),
    Source(
        "gpumemnet/transformers",
        "transformers, whole steps",
        "random encoders, whole trainings with Adam",
        "https://github.com/itu-rad/GPUMemNet, Datasets/Transformers, rows at eight places of the file",
        "A100 40GB",
        "torch=2.4,cuda=12.1,loading=eager",
        "device",
        MiB,
        "medium",
        "the stack",
        script="NeuroNetGen_scripts/Transformer/transformer.py",
    ),
)

_ISSUES: Final = "https://github.com/vllm-project/vllm/issues"
_PULLS: Final = "https://github.com/vllm-project/vllm/pull"
_SERVERS: Final = tuple(
    Source(
        f"server/{name}", "servers", title, where, gpu, server, "cache", GIB, "medium" if inferred else "high", inferred
    )
    for name, title, where, gpu, server, inferred in (
        (
            "llama-3.1",
            "Llama-3.1-8B",
            f"{_ISSUES}/10517",
            "RTX 3090",
            "vllm=0.6.4",
            "the number of sequences, by the step of chunks: sorting the logits of 256 would take 1.18 GiB",
        ),
        ("a6000", "OPT-125m, Llama-2-7B GPTQ, Zephyr-7B AWQ", f"{_PULLS}/4454", "RTX A6000", "vllm=0.4.1", ""),
        (
            "qwen2.5-72b",
            "Qwen2.5-72B GPTQ",
            f"{_ISSUES}/11230",
            "RTX A6000",
            "vllm=0.6.4",
            "the card is not named, its 47.74 GiB are; other processes are on it",
        ),
        ("llama-3", "Llama-3-8B", f"{_PULLS}/10511", "H100 80GB", "vllm=0.6.6", "logged on the branch that became it"),
        (
            "llama-3.2-vision",
            "Llama-3.2-11B-Vision",
            f"{_PULLS}/12126",
            "H100 80GB",
            "vllm=0.7.0",
            "logged on the branch of a change that 0.7.0 has",
        ),
        (
            "qwen2.5-32b",
            "Qwen2.5-32B, two GPUs",
            f"{_ISSUES}/15815",
            "L40S",
            "vllm=0.7.1",
            "fewer than 256 sequences: the card that alone sorts their logits needs as much as the other",
        ),
        (
            "llama-3.1-v1",
            "Llama-3.1-8B",
            f"{_PULLS}/17122",
            "L40S",
            "vllm=0.8.4",
            "logged on a branch between 0.8.4 and 0.8.5",
        ),
        (
            "phi-4",
            "Phi-4 GPTQ",
            "https://github.com/xinyuwei-david/david-share, Deep-Learning/Phi4",
            "A100 80GB",
            "vllm=0.6.5",
            "the card is not named, its 79.25 GiB are; the release is that of the day",
        ),
        (
            "llama-3.1-a10",
            "Llama-3.1-8B",
            "https://github.com/oracle-samples/oci-data-science-ai-samples, ai-quick-actions/troubleshooting-tips.md",
            "A10",
            "vllm=0.7.1",
            "the release, by the lines of its log; the number of sequences, by the step: sorting the logits of 256 "
            "would take 1.19 GiB",
        ),
        (
            "deepseek-coder-v2",
            "DeepSeek-Coder-V2-Lite, eight GPUs",
            "https://github.com/gonsoomoon-ml, DeepSeek-Coder-V2 with an LMI container on SageMaker",
            "A100 40GB",
            "vllm=0.7.1",
            "",
        ),
        (
            "qwen3-4b-v0",
            "Qwen3-4B, on a card that runs V0",
            "https://github.com/Q07K/langgraph-mcp-example",
            "RTX 2060 12GB",
            "vllm=0.8.5",
            "the release, by the lines of its log",
        ),
        (
            "qwen3-30b-v0",
            "Qwen3-30B-A3B, four GPUs that run V0",
            "https://github.com, a page of 2025-06-03 on Qwen3-30B with vLLM 0.8.5 on four cards of 22 GB (in Chinese)",
            "Quadro RTX 8000",
            "vllm=0.8.5",
            "the card is not named, its 21.66 GiB are, and V0 runs it: an RTX 2080 Ti with other chips",
        ),
        ("qwen3-8b", "Qwen3-8B", "https://github.com/dariustanrd/tokenkaki", "A100 40GB", "vllm=0.9.2", ""),
        ("llama-3.1-a100", "Llama-3.1-8B", "https://github.com/ilseokoh/vllm-gce", "A100 40GB", "vllm=0.15.1", ""),
        (
            "llama-3.1-a100-fp16",
            "Llama-3.1-8B",
            "https://github.com, notes of 2025-08-27 on vLLM 0.10.1.1 in a notebook of Google's cloud",
            "A100 40GB",
            "vllm=0.10.1",
            "the card is not named: its memory, and the 2,048 tokens of a step",
        ),
        (
            "llama-3.1-6000-ada",
            "Llama-3.1-8B",
            "https://github.com, a terminal's text of 2026-02-19 on training Llama-3.1-8B by DPO",
            "RTX 6000 Ada",
            "vllm=0.15.1",
            "",
        ),
        (
            "llama-3.1-a100-first",
            "Llama-3.1-8B, a first start",
            "https://github.com, notes of 2026-10-06 on vLLM 0.31.0 in a container on an A100 80GB",
            "A100 80GB",
            "vllm=0.31.0",
            "",
        ),
        (
            "qwen2.5-7b-first",
            "Qwen2.5-7B, a first start",
            "https://github.com, a script of 2026-09-03 that aborts a request of vLLM 0.22.0, with its log",
            "L40S",
            "vllm=0.22.0",
            "the card is not named: 0.37 GiB of CUDA graphs are 0.83 % of it",
        ),
        (
            "qwq-32b-sglang",
            "QwQ-32B, four GPUs",
            "https://github.com/didier-durand/llms-in-clouds, docs/sglang.md of March 2025",
            "L4",
            "sglang=0.4.3",
            "",
        ),
        *(
            (
                f"qwen3-8b-{name}",
                "Qwen3-8B in eight and four bits",
                "https://github.com/dongjangoon/dongjangoon.github.io, posts on NVFP4 of 2026-06-20",
                "RTX 5070 Ti",
                "vllm=0.23.0",
                "what else is on the card, which Windows uses too",
            )
            for name in ("fp8", "nvfp4")
        ),
        ("qwen3-8b-5090", "Qwen3-8B", "https://github.com/kthxo/distserving", "RTX 5090", "vllm=0.24.0", ""),
        (
            "h100s",
            "31 starts on one, two and four H100s",
            "https://github.com/jgchn/llm-d-planner, accuracy/results/v0.19.0/results_raw.csv",
            "H100 80GB",
            "vllm=0.19.0",
            "the models' configs; that each is a first start; the interval of what lies outside PyTorch was chosen "
            "from these starts",
        ),
        *(
            (
                f"qwen3-14b-{release}",
                "Qwen3-14B",
                "https://github.com/jgchn/llm-d-planner, accuracy/accuracy_report.md",
                "H100 80GB",
                f"vllm={release}.0",
                "",
            )
            for release in ("0.15", "0.17", "0.18")
        ),
        (
            "qwen3-8b-4090",
            "Qwen3-8B",
            "https://github.com/kthxo/distserving",
            "RTX 4090",
            "vllm=0.24.0",
            "the part of the memory: the release's default",
        ),
        (
            "qwen3-8b-4090-steps",
            "Qwen3-8B, steps of two sizes",
            f"{_PULLS}/48322",
            "RTX 4090",
            "vllm=0.24.0",
            "the release, that of the month; tokens of a request",
        ),
        (
            "qwen3-8b-lmcache",
            "Qwen3-8B",
            "https://github.com/LMCache/LMCache/issues/3430",
            "RTX 4090",
            "vllm=0.21.0",
            "the card, by its 23.5 GiB; the release, by the lines of its log",
        ),
        (
            "qwen3-32b-awq",
            "Qwen3-32B AWQ, two GPUs",
            f"{_PULLS}/54479",
            "RTX 4090",
            "vllm=0.28.0",
            "",
        ),
        (
            "qwen2.5-4090",
            "Qwen2.5-0.5B and 7B",
            "https://github.com/hzk-123/llm-infra-learning-lab",
            "RTX 4090",
            "vllm=0.24.0",
            "",
        ),
        (
            "qwen2.5-7b-l4",
            "Qwen2.5-7B in 16, eight and four bits",
            "https://github.com/youwins-lab/Blog, a post of 2026-08-22",
            "L4",
            "vllm=0.27.1",
            "",
        ),
        (
            "llama-3.1-sglang",
            "Llama-3.1-8B",
            "https://github.com/sgl-project/sglang, a notebook of its documentation of January 2025",
            "H100 80GB",
            "sglang=0.4.2",
            "SGLang's release and the card: those of its documentation in that month",
        ),
        (
            "r1-qwen-7b-sglang",
            "DeepSeek-R1-Distill-Qwen-7B",
            "https://github.com/jerryzsj/my-deepseek-r1",
            "RTX 3090",
            "sglang=0.4.2",
            "SGLang's release, that of the month; Windows uses the card too",
        ),
        (
            "qwen3-14b-sglang",
            "Qwen3-14B, four GPUs",
            "https://github.com, a page of 2026-06-14 on Qwen3-14B with SGLang on four RTX 4090 (in Chinese)",
            "RTX 4090",
            "sglang=0.5.9",
            "SGLang's release: a commit with PyTorch 2.9",
        ),
        (
            "eight-h100s",
            "Qwen3-235B-A22B FP8 and Qwen3-32B, eight GPUs",
            "https://github.com/DaisukeTakai/eval_dataset",
            "H100 80GB",
            "vllm=0.10.0",
            "the experts are whole on a GPU, an eighth of them, which takes as much; the interval of what lies outside "
            "PyTorch was then widened to these starts",
        ),
        (
            "memsuit",
            "Qwen2.5-3B and Llama-3.1-8B",
            "https://github.com/LzyFischer/MemSuit",
            "A100 80GB",
            "vllm=0.17.1",
            "which A100: by its memory",
        ),
        (
            "qwen3-30b-online",
            "Qwen3-30B-A3B, quantized to fp8 as it is loaded",
            "https://github.com/NnamdiOdozi/mlops-assignment",
            "H100 80GB",
            "vllm=0.22.1",
            "",
        ),
        ("llama-3.1-l4", "Llama-3.1-8B", "https://github.com/abinavChandar/demo_env_l4", "L4", "vllm=0.11.0", ""),
        (
            "r1-qwen-32b-fp8",
            "DeepSeek-R1-Distill-Qwen-32B FP8",
            "https://github.com/dawn-boy/elloraa",
            "L40S",
            "vllm=0.11.0",
            "",
        ),
        ("llama-3-h200", "Llama-3-8B", "https://github.com/faradawn/bench3", "H200", "vllm=0.11.2", ""),
        (
            "qwen3-30b-h100",
            "Qwen3-30B-A3B",
            "https://github.com/kolyangg/mlops-assignment",
            "H100 80GB",
            "vllm=0.10.2",
            "",
        ),
        (
            "qwen2.5-1.5b-l40s",
            "Qwen2.5-1.5B",
            "https://github.com/lennonYe/6998_project",
            "L40S",
            "vllm=0.6.6",
            "the card, of two that its pages name: by its memory",
        ),
        (
            "qwen2.5-1.5b-sglang",
            "Qwen2.5-1.5B",
            "https://github.com/lennonYe/6998_project",
            "L40S",
            "sglang=0.5.10",
            "SGLang's release: that of the month; the card, of two that its pages name: by its memory",
        ),
        (
            "llama-3.1-energy",
            "Llama-3.1-8B, two starts",
            "https://github.com/qweewqq/EnergyLLM",
            "A100 40GB",
            "vllm=0.11.0",
            "which A100: by its memory",
        ),
        (
            "qwen3-8b-lora",
            "Qwen3-8B with a LoRA adapter, two GPUs, four starts",
            "https://github.com/trietnguyeminh/Submission---EXACT--IJCNN",
            "T4",
            "vllm=0.22.1",
            "",
        ),
        (
            "qwen3.8-mtp",
            "Qwen3.8-27B and Qwen3.6-35B-A3B with MTP, tokens of a cache",
            "https://github.com/sostrowsk/dgx-spark-local-llm",
            "B300",
            "vllm=0.25.1",
            "the models' configs; the size of the cache is given, as the GPU of the log is not among those here",
        ),
        (
            "qwen3.5-4b",
            "Qwen3.5-4B, a hybrid, tokens of a cache",
            "https://github.com, notes of 2026-06-04 on a service with vLLM 0.22.0 and Qwen3.5-4B (in Chinese)",
            "L40S",
            "vllm=0.22.0",
            "the model's config; the size of the cache is given, as the card is not named; the tokens had been seen",
        ),
        (
            "qwen3.5-9b",
            "Qwen3.5-9B, a hybrid, tokens of a cache",
            "https://github.com, notes of 2026-04-07 on vLLM 0.19.0 in a notebook on an L40S",
            "L40S",
            "vllm=0.19.0",
            "the model's config; the size of the cache is given; the tokens had been seen",
        ),
        *(
            (
                f"qwen2.5-math-{card.lower()}",
                "Qwen2.5-Math-1.5B",
                "https://github.com, notes of 2026-03-01 on an evaluation with vLLM 0.7.2 on an A10 and an L40",
                card,
                "vllm=0.7.2",
                "",
            )
            for card in ("A10", "L40")
        ),
        (
            "r1-qwen-7b-v100",
            "DeepSeek-R1-Distill-Qwen-7B",
            "https://github.com, a page of 2025-03-23 on DeepSeek-R1-Distill-Qwen-7B with vLLM 0.7.1 (in Chinese)",
            "V100 32GB",
            "vllm=0.7.1",
            "the card is not named: its memory, and XFormers' attention",
        ),
        (
            "qwen2.5-7b-v100",
            "Qwen2.5-7B",
            "https://zhuanlan.zhihu.com/p/1916529253169734444",
            "V100 32GB",
            "vllm=0.8.5",
            "",
        ),
        (
            "qwen2.5-0.5b-t4",
            "Qwen2.5-0.5B",
            "https://github.com, notes of 2026-08-01 on vLLM 0.6.6 in Google's Colab (in Korean)",
            "T4",
            "vllm=0.6.6",
            "the card is not named: its memory, and XFormers' attention",
        ),
        (
            "gemma-3-1b",
            "Gemma 3 1B without CUDA graphs",
            "https://github.com, notes of 2026-01-16 on generating with vLLM 0.13.0 and gemma-3-1b-it",
            "RTX 5090",
            "vllm=0.13.0",
            "the card is not named: by its memory",
        ),
        (
            "llama-3-70b-awq",
            "Llama-3-70B AWQ, two GPUs",
            "https://github.com, notes of 2026-02-27 on vLLM 0.16.0 on two GPUs",
            "L40S",
            "vllm=0.16.0",
            "the card is not named: of Ada, by its memory",
        ),
        (
            "qwen3-vl-30b",
            "Qwen3-VL-30B-A3B",
            "https://github.com, a log of 2025-12-25 of a trained Qwen3-VL-30B-A3B with vLLM 0.13.0",
            "H100 NVL",
            "vllm=0.13.0",
            "the model's config; its table of positions and the buffers of its images were missing before; its cache "
            "depends on the largest image, which the config does not say",
        ),
        (
            "qwen3-next",
            "Qwen3-Next-80B-A3B, a hybrid, two GPUs",
            "https://github.com, a terminal's text of 2025-10-23 on Qwen3-Next-80B-A3B with vLLM 0.10.2",
            "H200",
            "vllm=0.10.2",
            "what lies outside PyTorch had been known from this log",
        ),
        *(
            (
                f"nemotron-3-{name}",
                f"{title}, a hybrid, tokens of a cache",
                f"https://github.com, {where}",
                "B300",
                f"vllm={release}",
                f"the model's config; the size of the cache is given, as the GPU {reason}; the tokens had been seen",
            )
            for name, title, where, release, reason in (
                (
                    "30b",
                    "Nemotron-Cascade-2-30B-A3B",
                    "a log of 2026-04-26 of an agent with Nemotron-Cascade-2-30B-A3B-NVFP4",
                    "0.19.0",
                    "is not named",
                ),
                (
                    "30b-longer",
                    "Nemotron-Cascade-2-30B-A3B",
                    "notes of 2026-05-01 on Nemotron-Cascade-2-30B-A3B-NVFP4 with a nightly vLLM 0.20.1",
                    "0.21.0",
                    "is not named, and of a nightly build",
                ),
                (
                    "4b",
                    "Nemotron-3-Nano-4B",
                    "a log of 2026-03-18 of Nemotron-3-Nano-4B-FP8 in NVIDIA's container of vLLM 0.13.0",
                    "0.13.0",
                    "is not named",
                ),
            )
        ),
        (
            "qwen3.5-prefixes",
            "Qwen3.5-0.8B and Qwen3.8-27B, hybrids whose prefixes are cached",
            "https://github.com, notes of 2026-09-08 on Qwen3.5-0.8B and Qwen3.8-27B with vLLM 0.28.0 (in Chinese)",
            "A100 80GB",
            "vllm=0.28.0",
            "the models' configs; the size of the cache is given, as their encoder is not; the tokens had been seen",
        ),
        (
            "granite-4.0-h-1b",
            "Granite 4.0 H 1B, a hybrid",
            "https://github.com, notes of 2026-04-06 on a chat with vLLM 0.19.0 and granite-4.0-h-1b",
            "RTX 3060",
            "vllm=0.19.0",
            "the model's config; the card is not named, and weights are the same on each",
        ),
        ("qwen3-235b", "Qwen3-235B-A22B FP8, four GPUs", f"{_ISSUES}/21348", "H100 80GB", "vllm=0.9.2", ""),
        (
            "qwen3-235b-sglang",
            "Qwen3-235B-A22B FP8, four GPUs",
            f"{_ISSUES}/21348",
            "H100 80GB",
            "sglang=0.4.9",
            "SGLang's release is not stated: that of the month",
        ),
        ("qwen3-1.7b", "Qwen3-1.7B, tokens of a cache", f"{_ISSUES}/33263", "H100 80GB", "vllm=0.14.0", ""),
        (
            "gemma-4-26b",
            "Gemma 4 26B-A4B",
            "https://myoceane.fr/index.php/ai-vllm-a100-gemma-4",
            "A100 80GB",
            "vllm=0.19.0",
            "the config of its image encoder",
        ),
        *(
            (
                f"gemma-4-31b-{release}",
                "Gemma 4 31B AWQ",
                f"{_ISSUES}/43308",
                "A100 80GB",
                f"vllm={release}.0",
                "the length of a request; the figures are rounded to two and three digits",
            )
            for release in ("0.20", "0.21")
        ),
    )
)

_BOOK: Final = "https://github.com/rasbt/LLMs-from-scratch/tree/28c65cdfbc/ch05/10_llm-training-speed"
_LIGER: Final = "https://github.com/linkedin/Liger-Kernel, commit ead96b618e, benchmark/data/all_benchmark_data.csv"
_PEFT: Final = "https://github.com/huggingface/peft, commit 5d602fdbff, method_comparison/image-gen/results"
_OF_THE_DAY: Final = "the release of PyTorch is not stated: that of the day"
_OPERATORS: Final[tuple[tuple[str, Kind, str, str, str], ...]] = (
    ("geglu", "gated MLPs", "GEGLU, 4096 to 11008", "A100 80GB", "torch=2.4,cuda=12.1"),
    ("swiglu", "gated MLPs", "SwiGLU, 4096 to 11008", "A100 80GB", "torch=2.4,cuda=12.1"),
    ("tiled-geglu", "gated MLPs", "GEGLU, 2048 to 4096", "GeForce RTX 4090", "torch=2.9,cuda=12.8"),
    ("experts", "mixtures of experts", "Qwen3-30B's layer of experts", "H100 80GB", "torch=2.10,cuda=12.8"),
    ("layer-norm-2.4", "norms and rotary embeddings", "LayerNorm", "A100 80GB", "torch=2.4,cuda=12.1"),
    ("layer-norm-2.7", "norms and rotary embeddings", "LayerNorm", "H100 80GB", "torch=2.7,cuda=12.6"),
    ("rms-norm", "norms and rotary embeddings", "Llama's RMSNorm", "A100 80GB", "torch=2.4,cuda=12.1"),
    ("added-rms-norm", "norms and rotary embeddings", "RMSNorm of a sum", "H100 80GB", "torch=2.10,cuda=12.8"),
    ("native-rms-norm", "norms and rotary embeddings", "nn.RMSNorm", "H100 80GB", "torch=2.12,cuda=13.0"),
    ("rotary", "norms and rotary embeddings", "Llama's rotary embedding", "A100 80GB", "torch=2.4,cuda=12.1"),
    ("rotary-complex", "norms and rotary embeddings", "Llama 4's rotary embedding", "H100 80GB", "torch=2.7,cuda=12.6"),
    ("cross-entropy", "losses of language models", "cross-entropy", "A100 80GB", "torch=2.4,cuda=12.1"),
    ("jsd", "losses of language models", "Jensen-Shannon divergence", "H100 80GB", "torch=2.4,cuda=12.1"),
    ("jsd-head", "losses of language models", "the same with two heads", "H100 80GB", "torch=2.4,cuda=12.1"),
    ("jsd-tokens", "losses of language models", "the same by token", "B200", "torch=2.12,cuda=13.0"),
    ("total-variation", "losses of language models", "total variation", "H100 80GB", "torch=2.10,cuda=12.8"),
    ("grpo", "losses of language models", "GRPO with two heads", "A100 80GB", "torch=2.7,cuda=12.6"),
)
"""Liger-Kernel's benchmarks of eager PyTorch: name, kind, title, GPU, and stack."""

_TORCHAO: Final = "https://github.com/pytorch/ao"

_GOLF: Final = "https://github.com/openai/parameter-golf"

_GOLF_RELEASES: Final[tuple[tuple[str, Confidence, str], ...]] = (
    ("2.8", "high", ""),
    ("2.9", "high", ""),
    ("2.10", "medium", "the release: another run of this setting took the same with it"),
)

_NEWER: Final = (
    *(
        Source(
            f"parameter-golf/{release}",
            "compiled code",
            "parameter-golf's GPTs of 9 to 11 blocks, one step after the other",
            f"{_GOLF}, records",
            "H100 80GB",
            f"torch={release},cuda=12.8",
            "allocated",
            MiB,
            confidence,
            inferred,
            "parameter-golf-4908dc46",
            "train_gpt.py of each record",
        )
        for release, confidence, inferred in _GOLF_RELEASES
    ),
    Source(
        "compiled-book/gpt",
        "compiled code",
        "the book's GPT with 124M parameters, compiled, on one GPU or on each of four",
        _BOOK,
        "A100 40GB",
        "torch=2.6,cuda=12.4",
        "reserved",
        GIB,
        "medium",
        "the size of the A100",
        "book-28c65cdf",
        "01_opt_single_gpu.py and 02_opt_multi_gpu_ddp.py",
    ),
    Source(
        "compiled-book/generation",
        "compiled code",
        "the book's compiled Llama 3.2 1B and Qwen3 0.6B, with and without a cache",
        f"{_BOOK.partition('/tree')[0]}, ch05/07_gpt_to_llama and 11_qwen3",
        "A100 40GB",
        "torch=2.6,cuda=12.4",
        "allocated",
        GIB,
        "low",
        "the release of PyTorch and the size of the A100; which products an earlier run had measured, in one row",
        "book-218221ab",
        "README.md of the folders and pkg/llms_from_scratch",
    ),
    Source(
        "compiled-torchao/vit-huge",
        "compiled code",
        "torchao's training of a ViT-H/14 with its optimizers, bfloat16 autocast",
        f"{_TORCHAO}, torchao/optim/README.md",
        "GeForce RTX 4070 Ti SUPER",
        "torch=2.4,cuda=12.1",
        "allocated",
        GB,
        "medium",
        "that today's script and torchao take what those of the day took",
        "torchao-36027d82",
        "benchmarks/benchmark_low_bit_adam.py",
    ),
    Source(
        "compiled-torchao/llama2-1b",
        "compiled code",
        "a Llama 2 with 1.0 billion weights, in bfloat16 or int8, with checkpoints",
        f"{_TORCHAO}, torchao/prototype/quantized_training/README.md",
        "GeForce RTX 4070 Ti SUPER",
        "torch=2.4,cuda=12.1",
        "allocated",
        GB,
        "low",
        "how many tokens of text lie on the GPU; torchao's int8 weights are today's",
        "torchao-training-9acc9a4d",
        "benchmarks/quantized_training/pretrain_llama2.py",
    ),
    Source(
        "torchtune/llama-3.2-3b",
        "compiled code",
        "torchtune's fine-tuning of Llama 3.2 3B, one option after the other",
        "https://github.com/pytorch/torchtune, README.md since commit 1814feb17",
        "A100 80GB",
        "torch=2.5,cuda=12.4",
        "allocated",
        GIB,
        "low",
        "the release of PyTorch, that of the day; that AdamW is fused; that 8-bit AdamW is torchao's",
        "torchtune-1814feb1",
        "recipes/full_finetune_single_device.py and lora_finetune_single_device.py",
    ),
    Source(
        "generation/book",
        "transformers, inference",
        "the book's Llama 3.2 1B, Qwen3 0.6B and variants of GPT, with and without a cache",
        "https://github.com/rasbt/LLMs-from-scratch, ch04/04_gqa to 07_moe, ch05/07_gpt_to_llama and 11_qwen3",
        "A100 40GB",
        "torch=2.7,cuda=12.6",
        "allocated",
        GIB,
        "medium",
        "the release of PyTorch and the size of the A100; the code is that of October 2025",
        "book-218221ab",
        "the scripts of the folders and pkg/llms_from_scratch",
    ),
    Source(
        "torchao/vit-giant",
        "vision transformers",
        "DINOv2's ViT-g/14 in bfloat16, optimizer on the GPU or the CPU",
        f"{_TORCHAO}, torchao/optim/README.md",
        "GeForce RTX 4070 Ti SUPER",
        "torch=2.4,cuda=12.1",
        "allocated",
        GB,
        "medium",
        "images of 224 × 224, as the script's of that day are cut",
        "torchao-9acc9a4d",
        "benchmarks/benchmark_low_bit_adam.py",
    ),
    Source(
        "torchao/llama2-1b",
        "transformers, whole steps",
        "a Llama 2 with 1.0 billion weights, in bfloat16 or int8",
        f"{_TORCHAO}, torchao/prototype/quantized_training/README.md",
        "GeForce RTX 4070 Ti SUPER",
        "torch=2.4,cuda=12.1",
        "allocated",
        GB,
        "medium",
        "how many tokens of text lie on the GPU",
        "torchao-9acc9a4d",
        "benchmarks/quantized_training/pretrain_llama2.py",
    ),
    Source(
        "qwen-image/autoencoder",
        "convolutional networks",
        "Qwen-Image's autoencoder in float16, ten sizes",
        "https://github.com/invoke-ai/InvokeAI/pull/9305, comment of 2026-06-30",
        "RTX 4090",
        "torch=2.7,cuda=12.8",
        "allocated",
        GIB,
        "medium",
        "the script; diffusers' release",
        "cudnn-9.5",
    ),
    Source(
        "layers/convolution",
        "convolutional networks",
        "3 × 3 over 256 channels in float16, ten widths",
        "https://github.com/pytorch/pytorch/issues/123533",
        "A100 40GB",
        "torch=2.4,cuda=12.1",
        "reserved",
        GIB,
        "low",
        "the GPU and the release: of April 2024",
        "cudnn-9.1",
        "in the issue",
    ),
    *(
        Source(
            f"budgets/{name}",
            kind,
            title,
            "https://github.com/siddddd17/ackaudit, results/measured_backward; pytorch/pytorch#197838",
            "T4",
            "torch=2.14,cuda=13.0",
            "allocated",
            1,
            "medium",
            "the release of transformers; a T4 stands in for the GTX 1650, which has its compute capability",
            script="experiments/measured_backward/run_d.py",
        )
        for name, kind, title in (
            ("eager", "decoders, forward and backward", "a Llama with 32 layers of width 256"),
            ("compiled", "compiled code", "a Llama of width 256, compiled with budgets for activations"),
        )
    ),
    *(
        Source(
            f"head/{name}",
            kind,
            f"Gemma 2's head and loss, {title}",
            "https://arxiv.org/abs/2411.09009, table 1",
            "A100 80GB",
            "torch=2.4,cuda=12.4",
            "allocated",
            MiB,
            "high",
            "",
            environment,
            "https://github.com/apple/ml-cross-entropy, benchmark",
        )
        for name, kind, title, environment in (
            ("eager", "losses of language models", "uncompiled", None),
            ("compiled", "compiled code", "compiled", None),
            ("cce", "losses of language models", "by Cut Cross-Entropy", "cce-d42911f9"),
        )
    ),
    Source(
        "video/ltx",
        "diffusion transformers, forward and backward",
        "LTX-Video's transformer with checkpoints in some of its blocks",
        "https://github.com/huggingface/diffusers/pull/10611",
        "A100 80GB",
        "torch=2.5,cuda=12.4",
        "reserved",
        GIB,
        "low",
        "the GPU, PyTorch's release, the length of the text, the loss, and that gradients stay",
        "diffusers-0.33.1",
        "in the pull request",
    ),
    Source(
        "pipelines/flux",
        "diffusion pipelines",
        "FLUX.1-dev: after loading, and with an image of 1024 × 1024",
        "https://github.com/huggingface/blog/blob/main/diffusers-quantization.md",
        "H100 80GB",
        "torch=2.7,cuda=12.6",
        "reserved",
        GIB,
        "low",
        "the releases; that the GPU is given for torchao's models as the page does it for 4 bits; the order of loading"
        "; that the GGUF files are city96's, whose tools say which layers are quantized",
        "diffusers-0.34.0",
        "on the page",
    ),
    Source(
        "book/gpt",
        "transformers, whole steps",
        "the book's GPT with 124M parameters, change by change",
        _BOOK,
        "A100 40GB",
        "torch=2.6,cuda=12.4",
        "reserved",
        2**30,
        "medium",
        "the scripts between the first and the last, from their description; the size of the A100",
    ),
    *(
        Source(
            f"peft/flux2-klein-{release}",
            "diffusion transformers, adapters",
            "FLUX.2-klein with PEFT's adapters",
            _PEFT,
            "L40S",
            f"torch={release},cuda=13.0",
            "reserved",
            MiB,
            "medium",
            "the number of tokens of a prompt",
            environment,
            "method_comparison/image-gen/run.py of the day of the results",
        )
        for release, environment in (("2.12", "peft-638b395f"), ("2.13", "peft-a5526d27"))
    ),
    *(
        Source(f"liger/{name}", kind, title, _LIGER, gpu, stack, "allocated", MiB, "medium", _OF_THE_DAY)
        for name, kind, title, gpu, stack in _OPERATORS
    ),
)

SOURCES: Final[Mapping[str, Source]] = {source.name: source for source in (*_ALL, *_NEWER, *_SERVERS)}

NOT_COUNTED: Final = (
    (
        "OPT-350m, BERT-base, GPT-2 large and Pythia-410m, `generate`",
        f"{_SDPA}, the models' pages",
        "98 figures of branches that were not released: the loop that generates decides how many logits and caches "
        "are alive at once, and it changed several times in those months. Of ten of OPT-350m's the three with eager "
        "attention after 1,024 tokens, whose peak is in the scores, come out within 0.1 % (a test); the others 2 to "
        "5 % too low where the logits of the whole prompt are alive, 1 % too low to 28 % too high with the loop of the "
        "release that followed, and up to 31 % too low with today's, which makes the last logits alone",
    ),
    (
        "OPT-350m, 4 × 2048 and 8 × 2048",
        _OPT,
        "the table repeats the figures of 1,024 tokens in the rows of 2,048",
    ),
    (
        "LitGPT on several GPUs",
        _LITGPT,
        "its own script runs instead, with batches whose length follows from three of the ten figures: see "
        "docs/ranks_published.md",
    ),
    (
        "Llama 3 with torchtitan",
        "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
        "its own script runs instead: see docs/ranks_published.md",
    ),
    (
        "Llama-3.1-8B with torchao's generate.py",
        "https://github.com/pytorch/ao/pull/738",
        "measured with torch.compile, and not predicted yet; from 8,192 to 16,384 tokens it grew by 1.95 "
        "GB, of which the cache takes 1.07",
    ),
    (
        "LitGPT with bitsandbytes",
        _LITGPT,
        "its kernels and their buffers need a GPU",
    ),
    (
        "Llama-3.1-8B with 35,000 tokens in vLLM 0.6.4",
        f"{_ISSUES}/10517",
        "the step of 62 MiB has the logits of fewer sequences than by default, and how many is not stated",
    ),
    (
        "Llama-3.1-8B's cache in vLLM 0.8.4",
        f"{_PULLS}/17122",
        "158,656 tokens on an L40S, for which neither the share of the card nor the number of sequences is stated",
    ),
    (
        "Qwen3-VL-30B-A3B's cache in vLLM 0.13.0",
        "https://github.com, a log of 2025-12-25 of a trained Qwen3-VL-30B-A3B",
        "19.40 GiB on an H100 NVL, predicted as 19.60 to 19.75: vLLM measures with the largest image of the "
        "processor, of which the config says nothing",
    ),
    (
        "Liger-Kernel's embeddings, ORPO and SimPO, 28 figures of PyTorch's, and 26 of its own kernels",
        _LIGER,
        "their processes hold more, as it seems what torch.compile keeps of benchmarks before: 12,240.0 and 13,769.6 "
        "MiB beside the predictions of the embeddings, the same to 5 KiB from 1,024 to 131,072 rows, and 2,084.0 MiB "
        "beside those of ORPO and SimPO with 1,024 tokens. ORPO's with 4,096 grow half as fast as its script asks for. "
        "12,240 are three times the 4,080 MiB of all tables that are 4,096 wide. Of the kernels, "
        "RMSNorm's take 16 to 112 MiB more than the release's code asks for; embeddings and GRPO have no stand-in",
    ),
    (
        "seven of PEFT's runs on FLUX.2-klein",
        _PEFT,
        "BOFT compiles an extension, SHiRA's indices depend on values, LoKr ran with a later script, HRA's prediction "
        "runs out of memory, WaveFT's was not tried; those of FourierFT and FRoD take long: the first took 13 % more "
        "than predicted in an earlier state of memsize, cuFFT's work areas are not known, the second 0.7 % less",
    ),
    (
        "Qwen3 with a cache of eight texts, and Gemma 3, in LLMs-from-scratch",
        _BOOK.partition("/tree")[0],
        "the first took 3.13 GB where 1.69 are predicted: the difference is a second copy of the model, 1.44, as a "
        "session has it that ran the variant without a cache before; of the second, it is not stated how many tokens "
        "came before the end",
    ),
    (
        "torch.compile in Liger-Kernel's tables, in the book's Gemma 3 and its Qwen3 with a cache, and torchao's FP8 "
        "optimizer with it",
        f"{_LIGER}; {_BOOK.partition('/tree')[0]}; {_TORCHAO}, torchao/optim/README.md",
        "Liger-Kernel's processes hold more, see above. Qwen3's 1.48 GiB are those of a run whose products were all "
        "measured before: 1.47 without measuring them, 1.99 with it. The others were not predicted yet",
    ),
    (
        "Four images by SDXL, with optimizations of memory",
        "https://github.com/huggingface/blog/blob/main/simple_sdxl_optimizations.md",
        "PyTorch 2.0 has cuDNN 8, which cannot be asked: with 9.1's workspaces the first two rows, 28.09 and 21.72 "
        "GiB, come out 1.0 GiB too low, with estimates 4 too high. In the notebook the others follow "
        "torch.compile, and seem to hold its UNet's 4.78 GiB too: they are in the rows with CPU offload (20.21 and "
        "19.91, beside 15.4 and 15.1 for the decoder alone), and with them VAE slicing comes out at 15.3 (15.40 "
        "published)",
    ),
    (
        "torchtune's first row, and QLoRA",
        "https://github.com/pytorch/torchtune, README.md",
        "the first depends on the lengths of Alpaca's samples; the other was not predicted: its weights are "
        "quantized on the host, whose memory did not suffice",
    ),
    (
        "Optimizer in the backward pass",
        "https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html",
        "published to one digit",
    ),
)
"""Published figures that are left out: what, where, and why."""
