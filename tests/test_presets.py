"""The presets that ship, and configs that are fetched from a server which speaks the Hub's API."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import memsize
from memsize.errors import InputError, TargetError
from tests.conftest import Python
from tests.models import Target, load, parse_target, presets

_FILE = Path(memsize.__file__).parent / "loading" / "presets.jsonl"
PRESETS = {preset["id"]: preset for preset in map(json.loads, _FILE.read_text().splitlines())}
UNITS = {"M": 10**6, "B": 10**9}


def published(text: str, parameters: int) -> str:
    """`parameters` in the unit and with the decimals of a published number, ``8.03B``."""
    decimals = len(text[:-1].partition(".")[2])
    return f"{parameters / UNITS[text[-1]]:.{decimals}f}{text[-1]}"


@pytest.mark.thorough
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_its_published_number_of_parameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "/nonexistent")
    if "parts" in PRESETS[name]:
        pytest.importorskip("diffusers")
    model = load(name).module
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert published(PRESETS[name]["parameters"], parameters) == PRESETS[name]["parameters"]


def test_a_preset_names_its_source_and_date() -> None:
    for preset in PRESETS.values():
        assert re.fullmatch(r"https://\S+(, (its|the) [\w -]+ from https://\S+)?", preset["source"])
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", preset["date"])
        facts = {"_class_name"} if "parts" in preset else {"architectures", "model_type"}
        assert facts <= set(preset["config"])
    assert len(PRESETS) >= 60


def test_a_model_and_those_made_of_it_may_take_contexts_of_other_lengths() -> None:
    """By the models' cards, and litgpt's table of configs."""
    contexts = {
        "Qwen/Qwen2.5-7B": 131_072,
        "Qwen/Qwen2.5-7B-Instruct": 32_768,
        "Qwen/Qwen2.5-Coder-14B": 32_768,
        "Qwen/Qwen3-30B-A3B": 40_960,
        "Qwen/Qwen3-30B-A3B-Instruct-2507": 262_144,
        "microsoft/phi-4": 16_384,
        "microsoft/Phi-4-reasoning": 32_768,
        "google/gemma-3-1b-pt": 32_768,
    }
    assert {name: presets()[name].config["max_position_embeddings"] for name in contexts} == contexts
    base, instruct = (dict(presets()[name].config) for name in ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct"))
    assert base == {**instruct, "max_position_embeddings": 131_072}


def test_the_cache_of_a_token_is_what_transformers_keeps() -> None:
    """Of two layers, so that it is quick: what generate's own cache grows by, in bfloat16."""
    pytest.importorskip("transformers")
    for name in ("HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B", "openai-community/gpt2"):
        preset = presets()[name]
        layers = "n_layer" if name.endswith("gpt2") else "num_hidden_layers"
        two = replace(preset, config={**preset.config, layers: 2})
        report = memsize.generate(f"{name}?{layers}=2", prompt=8, max_new_tokens=4, scenarios="bf16")
        assert two.cache_per_token == report.generation_rows[0].per_token
    assert presets()["google/gemma-2-2b"].cache_per_token is None  # half of its layers have a window
    assert presets()["deepseek-ai/DeepSeek-V3"].cache_per_token is None  # it keeps a compressed one
    assert presets()["google-bert/bert-base-uncased"].cache_per_token is None


def test_no_id_is_that_of_two_presets() -> None:
    names = [name for preset in PRESETS.values() for name in (preset["id"], *preset["also"])]
    assert len(names) == len(set(names))


def test_a_hub_id_alone_is_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    llama = "meta-llama/Llama-3.1-8B"
    assert parse_target(llama) == Target(None, None, llama, "hf")
    assert parse_target(f"{llama}?num_hidden_layers=2").options == (("num_hidden_layers", 2),)
    (tmp_path / "meta-llama").mkdir()  # now it could as well be a file in that folder
    with pytest.raises(TargetError, match="no such file"):
        parse_target(llama)


def test_a_report_of_a_preset_names_its_source() -> None:
    report = memsize.report("HuggingFaceTB/SmolLM2-135M?num_hidden_layers=2", scenarios="as-given", seq_len=8)
    assert report.model == "hf:HuggingFaceTB/SmolLM2-135M (LlamaForCausalLM)"
    assert any("preset HuggingFaceTB/SmolLM2-135M of 20" in note and "https://" in note for note in report.notes)


def test_a_wrong_name_gets_the_nearest_three() -> None:
    with pytest.raises(TargetError, match="--online") as caught:
        load("meta-llama/Llama-3.1-8C")
    assert str(caught.value).endswith(
        "did you mean meta-llama/Llama-3.1-8B, meta-llama/Llama-3.1-70B, meta-llama/Llama-3.1-405B?"
    )


@pytest.mark.parametrize("name", ["a..b/c--d", "hf:org/--x..", f"org/{'x' * 90}", "hf:.hidden/x y"])
def test_a_hostile_name_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(TargetError) as caught:
        load(name)
    assert "\n" not in str(caught.value)


def test_online_is_for_hub_ids_alone(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("from torch import nn\n\nnet = nn.Linear(2, 2)\n")
    with pytest.raises(InputError, match="online is for the model of a Hub id"):
        memsize.report(str(tmp_path / "net.py:net"), online=True)


# -- from the Hub ------------------------------------------------------------------------------------------------------

TINY = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "hidden_size": 32}
TINY |= {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
UNET = {"_class_name": "UNet2DConditionModel", "sample_size": 8, "block_out_channels": [8], "norm_num_groups": 4}
UNET |= {"layers_per_block": 1, "down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"]}
UNET |= {"mid_block_type": "UNetMidBlock2D", "cross_attention_dim": 8, "attention_head_dim": 4}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Hub(BaseHTTPRequestHandler):
    """The Hub's answers about ``config.json``: those of one good model, and of some that nobody would want."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self.wfile.write(self._answer())

    def _answer(self) -> bytes:
        self.server.requests.append(f"{self.command} {self.path}")  # type: ignore[attr-defined]
        name = self.path.split("/")[2]
        config = UNET if self.path.endswith("/unet/config.json") else TINY
        body = b"[" * 5_000 if name == "nested" else json.dumps(config).encode()
        if name == "silent":
            time.sleep(5)
        self.send_response(404 if name == "missing" else 200)
        if name == "missing":
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{name}"')
        size = 10 * 2**30 if name == "huge" else 0 if name == "missing" else len(body)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        return b"" if name == "missing" else body

    def log_message(self, format: str, *values: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        server.daemon_threads = True
        server.requests = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


PROGRAM = """
import os, sys
os.environ |= {"HF_ENDPOINT": sys.argv[1], "HF_HOME": "home", "HF_HUB_CACHE": "cache", "HF_HUB_ETAG_TIMEOUT": "1"}
import memsize
from memsize.errors import TargetError
for name in "good good missing huge nested silent".split():
    try:
        report = memsize.report(f"org/{name}", online=True, scenarios="as-given", seq_len=4)
        print(name, report.layers["parameters"].sum() > 0)
    except TargetError as error:
        print(name, error)
report = memsize.report("diffusers:org/pipeline/unet", online=True, scenarios="as-given")
print(report.model, report.parameters)
print(sorted(os.listdir(os.environ["HF_HUB_CACHE"])), file=sys.stderr)
"""


@pytest.mark.thorough
def test_a_config_is_fetched_once_and_hostile_ones_are_refused(hub: ThreadingHTTPServer, python: Python) -> None:
    diffusers = pytest.importorskip("diffusers")
    unet = sum(parameter.numel() for parameter in diffusers.UNet2DConditionModel.from_config(UNET).parameters())
    done = python("-c", PROGRAM, f"http://127.0.0.1:{hub.server_address[1]}")
    first, second, missing, huge, nested, silent, part = done.stdout.splitlines()
    assert (first, second) == ("good True", "good True")
    assert missing.startswith("missing cannot get the config of 'org/missing' from the Hub: ")
    assert huge == "huge the config.json of org/huge has 10,737,418,240 bytes: memsize fetches up to 16,777,216 bytes"
    assert nested.startswith("nested cannot read config.json as a config")
    assert silent.startswith("silent cannot get the config of 'org/silent' from the Hub: ")
    assert part == f"diffusers:org/pipeline/unet (UNet2DConditionModel) {unet}"
    asked = hub.requests  # type: ignore[attr-defined]
    assert (
        asked.count("GET /org/good/resolve/main/config.json")
        + asked.count(f"GET /org/good/resolve/{COMMIT}/config.json")
        == 1
    )
    assert not any("huge" in request for request in asked if request.startswith("GET"))
    assert not any("pipeline" in request and not request.endswith("/unet/config.json") for request in asked)
    others = {request for request in asked if not request.endswith("/config.json")}
    assert others <= {"GET /api/agent-harnesses"}  # huggingface_hub's own, once a day
    assert "huge" not in done.stderr.splitlines()[-1]


def test_a_preset_goes_by_its_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_target("gpt2-medium").library == "hf"
    with pytest.raises(TargetError, match="did you mean gpt2, gpt2-medium"):
        parse_target("gpt2-medum")
    Path("gpt2.py").write_text("")
    assert parse_target("gpt2").module == "gpt2"  # a module of one's own comes first
