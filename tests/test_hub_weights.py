"""`memsize run` where weights of a hub are not on this machine: what stands for them takes what they would take."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import memsize
from memsize import ProgramRun

transformers = pytest.importorskip("transformers")

TRAINING = """
import sys, torch
from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained({source}, num_labels=5{options}).cuda()
assert model.name_or_path == model.config._name_or_path == {name!r}  # by which trainers look for the tokenizer
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    tokens, labels = torch.ones(2, 16, dtype=torch.long).cuda(), torch.ones(2, dtype=torch.long).cuda()
    model(input_ids=tokens, labels=labels).loss.backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config and weights, in bfloat16."""
    folder = tmp_path_factory.mktemp("model")
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256, vocab_size=1000, num_labels=5
    )
    transformers.BertForSequenceClassification(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts write their folders there."""
    monkeypatch.chdir(tmp_path)


def ran(folder: Path, text: str) -> ProgramRun:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(text), encoding="utf-8")
    run = memsize.run(script, gpu="t4")
    assert isinstance(run, ProgramRun)
    return run


@pytest.mark.parametrize("options", ["", ", dtype='auto'", ", dtype=torch.float16, device_map='cuda'"])
def test_what_stands_for_weights_takes_what_they_take(
    weights: Path, tmp_path: Path, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "hub"
    snapshot = cache / "models--nobody--tiny" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (cache / "models--nobody--tiny" / "refs").mkdir()
    (cache / "models--nobody--tiny" / "refs" / "main").write_text("0123")
    (snapshot / "config.json").write_bytes((weights / "config.json").read_bytes())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    there = ran(tmp_path, TRAINING.format(source=repr(str(weights)), options=options, name=str(weights)))
    source = f"'nobody/tiny', cache_dir={str(cache)!r}"
    stood_in = ran(tmp_path, TRAINING.format(source=source, options=options, name="nobody/tiny"))
    if "device_map" in options:  # several threads read weights to the GPU, in an order of their own
        sizes = [sorted(storage.bytes for storage in run.trace.storages) for run in (stood_in, there)]
        assert sizes[0] == sizes[1] and stood_in.peak.requested == there.peak.requested
    else:
        assert stood_in.trace.events == there.trace.events and stood_in.peak == there.peak
    assert stood_in.steps == there.steps == 3
    assert any("the weights of nobody/tiny are not on this machine" in note for note in stood_in.trace.notes)
    assert not any("not on this machine" in note for note in there.trace.notes)


def test_a_dtype_may_be_a_name(tmp_path: Path) -> None:
    """As in transformers 4, for what release 5 wrote: the embedding of 2 × 512 × 64 bytes is read in 16 bits."""
    run = ran(
        tmp_path,
        """
        from transformers import BertConfig, BertModel
        config = BertConfig(vocab_size=512, hidden_size=64, num_hidden_layers=0, num_attention_heads=1)
        config.save_pretrained("tiny")
        config.dtype = "bfloat16"
        model = BertModel.from_pretrained("tiny", config=config, add_pooling_layer=False, dtype="auto").cuda()
        """,
    )
    assert run.failure is None
    assert 2 * 512 * 64 in [storage.bytes for storage in run.trace.storages]


def test_a_constructor_may_read_what_is_not_a_weight(tmp_path: Path) -> None:
    """transformers 5 makes `linspace` on the CPU for that, release 4 every buffer. A weight has 4 × 512 × 64 bytes."""
    run = ran(
        tmp_path,
        """
        import torch
        from transformers import BertConfig, PreTrainedModel

        class Net(PreTrainedModel):
            config_class = BertConfig

            def __init__(self, config):
                super().__init__(config)
                self.rates = torch.linspace(0, 0.5, 3).tolist()
                self.layer = torch.nn.Linear(64, 512)
                self.small = torch.nn.Linear(2, 2)
                self.post_init()

        BertConfig().save_pretrained("tiny")
        before = torch.get_rng_state()
        assert Net.from_pretrained("tiny", dtype=torch.float32).cuda().rates == [0, 0.25, 0.5]
        assert torch.equal(torch.get_rng_state(), before)  # nothing is drawn for weights that are read
        """,
    )
    assert run.failure is None
    assert 4 * 512 * 64 in [storage.bytes for storage in run.trace.storages]


def test_nothing_is_uploaded(tmp_path: Path) -> None:
    """A trainer creates its repository before the first step, and commits checkpoints to it."""
    run = ran(
        tmp_path,
        """
        import torch
        from huggingface_hub import HfApi, upload_file
        import transformers.trainer
        assert HfApi().create_repo("net", private=True).repo_id == "user/net"
        assert upload_file(path_or_fileobj=b"1", path_in_repo="a", repo_id="me/net").oid == "0" * 40
        torch.ones(1).cuda()
        """,
    )
    assert run.failure is None
    assert "nothing is uploaded: me/net was neither created nor changed" in run.trace.notes


def test_weights_that_cannot_be_downloaded_are_stood_in_for(tmp_path: Path) -> None:
    run = ran(
        tmp_path,
        """
        import torch
        model = torch.nn.Linear(512, 1024).cuda()
        state = torch.hub.load_state_dict_from_url("http://127.0.0.1:9/net-0123.pth", "cache", "cuda")
        model.load_state_dict(state)
        """,
    )
    assert run.failure is None
    assert sum(storage.bytes for storage in run.trace.storages) == 2 * 4 * (512 * 1024 + 1024)
    assert any("net-0123.pth does not exist" in note for note in run.trace.notes)
    assert not (tmp_path / "cache" / "net-0123.pth").exists()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from transformers import AutoConfig\nAutoConfig.from_pretrained('org/model')", "ORG/MODEL"),
        ("raise OSError('Cannot load model org/model: the model is not fully cached locally')", "org/model"),
    ],
)
def test_a_config_that_is_not_here_is_to_be_fetched(
    tmp_path: Path, text: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(memsize.ForwardError) as caught:
        ran(tmp_path, text)
    assert (
        "The Hub cannot be reached, and its cache has no config of the model. Where there is a network, "
        f'hf download {name} --exclude "*.safetensors" "*.bin" fetches config and tokenizer: weights are not needed.'
    ) in str(caught.value)


def test_mamba_loads_what_stands_for_its_weights(tmp_path: Path) -> None:
    """What it loads in 16 bits it reads to the CPU: the GPU has the model's own four weights of 256² alone."""
    package = tmp_path / "mamba_ssm" / "utils"
    package.mkdir(parents=True)
    (package / "hf.py").write_text("def load_state_dict_hf(name, device=None, dtype=None): raise OSError(name)")
    run = ran(
        tmp_path,
        """
        import torch
        from mamba_ssm.utils.hf import load_state_dict_hf
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(4))).cuda().bfloat16()
        model.load_state_dict(load_state_dict_hf("state-spaces/mamba-9b", "cuda", torch.bfloat16))
        """,
    )
    assert run.failure is None and [storage.bytes for storage in run.trace.storages].count(2 * 256**2) == 4
    assert any("state-spaces/mamba-9b are not on this machine" in note for note in run.trace.notes)


def test_a_timm_model_whose_weights_cannot_be_downloaded_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("timm")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text = """
        import timm, torch
        model = timm.create_model("resnet10t", pretrained={}).cuda()
        model(torch.ones(1, 3, 64, 64, device="cuda")).sum().backward()
        """
    pretrained, initial = (ran(tmp_path, text.format(choice)) for choice in (True, False))
    assert pretrained.failure is None and pretrained.trace.events == initial.trace.events
    assert any("the weights of ResNet could not be downloaded" in note for note in pretrained.trace.notes)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "dtype": "bfloat16",
}
LOADED = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model, loading = AutoModelForCausalLM.from_pretrained({folder!r}, device_map="cuda", output_loading_info=True)
assert not any(loading.values()), loading
print(json.dumps([torch.cuda.memory_allocated(), sorted({{str(parameter.dtype) for parameter in model.parameters()}})]))
"""


def loaded(folder: Path, capfd: pytest.CaptureFixture[str]) -> tuple[ProgramRun, list[Any]]:
    run = ran(folder, LOADED.format(folder=str(folder)))
    return run, json.loads([line for line in capfd.readouterr().out.splitlines() if line.startswith("[")][-1])


def rounded(*sizes: int) -> int:
    """The blocks of tensors of these sizes."""
    return sum(-(-size // 512) * 512 for size in sizes)


def test_a_checkpoint_in_float8_has_its_scales(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": quantization}))
    script = LOADED.format(folder=str(tmp_path))
    (tmp_path / "train.py").write_text(script)
    run = memsize.run(tmp_path / "train.py", gpu="h100")
    allocated, dtypes = json.loads(next(line for line in capfd.readouterr().out.splitlines() if line.startswith("[")))
    assert dtypes == ["torch.bfloat16", "torch.float32", "torch.float8_e4m3fn"]
    shapes = [(256, 256), (128, 256), (128, 256), (256, 256), (512, 256), (512, 256), (256, 512)]
    blocks = [4 * (rows // 128) * (columns // 128) for rows, columns in shapes]
    layer = rounded(*(rows * columns for rows, columns in shapes), *blocks, 2 * 256, 2 * 256)
    frequencies = 2 * 512  # of the rotary embedding, and their originals
    assert allocated == 2 * layer + rounded(2 * 256, 2 * 1000 * 256, 2 * 1000 * 256) + frequencies
    assert any("are not on this machine" in note for note in run.trace.notes)


def test_a_checkpoint_in_mxfp4_becomes_bfloat16_without_its_kernels(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = LLAMA | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256}
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": skipped}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, (allocated, dtypes) = loaded(tmp_path, capfd)
    assert dtypes == ["torch.bfloat16"]
    experts = 2 * 4 * (256 * 512 + 256 * 256)
    assert allocated > 2 * experts + 2 * 2 * 1000 * 256


BITSANDBYTES = [
    {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    {"load_in_8bit": True},
]


@pytest.mark.parametrize("options", BITSANDBYTES)
def test_a_checkpoint_of_bitsandbytes_takes_what_a_real_one_takes(
    options: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bitsandbytes")
    for name in ("plain", "real", "config"):
        (tmp_path / name).mkdir()
    (tmp_path / "plain" / "config.json").write_text(json.dumps(LLAMA))
    make: Any = transformers.AutoModelForCausalLM
    config = transformers.AutoConfig.from_pretrained(tmp_path / "plain")
    make.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    quantization = transformers.BitsAndBytesConfig(**options)
    real = make.from_pretrained(tmp_path / "plain", quantization_config=quantization, device_map="cpu")
    real.save_pretrained(tmp_path / "real")
    (tmp_path / "config" / "config.json").write_bytes((tmp_path / "real" / "config.json").read_bytes())
    (there, ours), (stood_in, theirs) = (loaded(tmp_path / name, capfd) for name in ("real", "config"))
    assert ours == theirs
    # In blocks: bitsandbytes writes its state as text, in which an offset has more digits.
    sizes = [sorted(rounded(storage.bytes) for storage in run.trace.storages) for run in (there, stood_in)]
    assert sizes[0] == sizes[1]


def test_a_pipeline_of_diffusers_is_made_from_its_configs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    diffusers = pytest.importorskip("diffusers")
    unet = diffusers.UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    pipeline = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler())
    script = """
import json, torch
from diffusers import DDPMPipeline
pipeline = DDPMPipeline.from_pretrained({folder!r}, dtype=torch.float16).to("cuda")
pipeline(batch_size=2, num_inference_steps=2)
print(json.dumps([torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]))
assert pipeline.unet.config._name_or_path == {folder!r} + "/unet"
"""
    pipeline.save_pretrained(tmp_path / "pipeline")
    runs = []
    for _ in ("with weights", "without"):
        runs.append(ran(tmp_path, script.format(folder=str(tmp_path / "pipeline"))))
        for file in tmp_path.glob("pipeline/unet/*.safetensors"):
            file.unlink()
    assert runs[0].trace.events == runs[1].trace.events
    assert any("are not on this machine" in note for note in runs[1].trace.notes)


@pytest.mark.thorough
@pytest.mark.parametrize("library", ["transformers", "diffusers"])
def test_a_model_may_be_larger_than_the_memory_of_this_machine(tmp_path: Path, library: str) -> None:
    """A layer of 8,192 has 12 · 8,192² float32 weights, 3 GiB. Nobody reads them on the CPU."""
    width, memory = 8192, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    layers = memory // (12 * width**2 * 4) + 1
    if library == "transformers":
        config = transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=64, vocab_size=8, n_positions=8)
        loading = "from transformers import GPT2Model as Net"
    else:
        pytest.importorskip("diffusers")
        config = {"num_attention_heads": 64, "attention_head_dim": 128, "num_layers": layers, "dropout": 0.0}
        config |= {"_class_name": "DiTTransformer2DModel", "in_channels": 4, "sample_size": 8}
        loading = "from diffusers import DiTTransformer2DModel as Net"
    folder = tmp_path / "net"
    if isinstance(config, dict):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    else:
        config.save_pretrained(folder)
    run = ran(tmp_path, f"{loading}\nmodel = Net.from_pretrained({str(folder)!r})\nnext(model.parameters()).cuda()\n")
    assert run.failure is None and run.peak.requested


@pytest.mark.skipif(sys.platform != "linux", reason="pages that are resident are counted by Linux")
def test_weights_on_their_way_to_the_gpu_are_not_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A file of zeros has one value everywhere, which reading it to its end would show."""
    os.truncate(os.open(tmp_path / "weights", os.O_CREAT | os.O_WRONLY), 128 << 20)
    ran(
        tmp_path,
        f"""
        import re, torch
        def resident():
            with open("/proc/self/status") as status:
                return int(re.search(r"RssFile:\\s*(\\d+) kB", status.read())[1])
        weights = torch.from_file({str(tmp_path / "weights")!r}, size=64 << 20, dtype=torch.bfloat16).view(8192, 8192)
        before = resident()
        parameter = weights.cuda()
        print("read", resident() - before, "KiB")
        """,
    )
    kibibytes = int(capfd.readouterr().out.split("read ")[1].split()[0])
    assert kibibytes < 16_384, "of 131,072"
