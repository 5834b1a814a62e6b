"""``diffusers:NAME``: a pipeline from its configs alone: text encoders, UNet or transformer, and autoencoder.

NAME is a folder with a model_index.json, and a folder with a config for each part; or a Hub id, whose configs are in
the local cache, a preset, or with `online` fetched. No weights are loaded, and no tokenizer: all prompts have as many
tokens as the text encoder takes. The module's forward is a whole generation by the pipeline's own code, of few steps:
each is like the others. Options: steps, guidance_scale, height, width and others of the pipeline's call; `tiling` and
`slicing` of the autoencoder.

A part of it, ``diffusers:NAME/unet`` or ``…/transformer``, comes with the inputs of a training step: images or clips of
the size that it was made for, and prompts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from memsize.errors import TargetError, UnknownTargetError
from memsize.loading.building import LoadedModel
from memsize.loading.hubs import build_library_model, import_library, quiet, unknown_name
from memsize.loading.hubs.hub_files import CONFIG, PIPELINE, cached_file, fetched_file, read_config
from memsize.loading.hubs.input_batch import unknown
from memsize.loading.presets import is_hub_id, presets, unknown_id
from memsize.spec.inputs import InputMaker, InputRequest

_SCHEDULER: Final = "scheduler_config.json"
_Configs = Callable[[str], dict[str, Any]]
"""Returns the config of a part of a pipeline by its name, and for "" the pipeline's index."""
_STEPS: Final = 2
_TOKENS: Final = 77
"""Of CLIP, where the text encoder's config has no other number."""
_MOST_TOKENS: Final = 512


class Pipeline(nn.Module):
    """A pipeline of class `kind` with its `parts`; `others` are its tokenizers and the like, or make one for each
    generation; `options` are those of a call.

    The forward takes token ids, of which only their number of rows matters, and returns the images.
    """

    def __init__(self, kind: type, parts: Mapping[str, nn.Module], others: Mapping[str, Any], options: Any) -> None:
        super().__init__()
        for name, module in parts.items():
            self.add_module(name, module)
            module.register_forward_pre_hook(_with_timestep, with_kwargs=True)
        self.kind, self.others, self.options = kind, dict(others), dict(options)

    def train(self, mode: bool = True) -> Pipeline:
        """Leave the parts in evaluation mode, as in every generation: diffusers loads them so."""
        return super().train(False)

    def forward(self, prompts: Tensor) -> Any:
        others = {name: other() if isinstance(other, partial) else other for name, other in self.others.items()}
        pipeline: Any = self.kind(**dict(self.named_children()), **others)
        pipeline.set_progress_bar_config(disable=True)
        with quiet():
            return pipeline(prompt=[""] * len(prompts), output_type="pt", return_dict=False, **self.options)[0]


def _with_timestep(part: nn.Module, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pass the timestep to a part on its own device, where a pipeline's schedule is; ours stays on the host."""
    if isinstance(timestep := options.get("timestep"), Tensor):
        options["timestep"] = timestep.to(next(part.parameters()).device)
    return arguments, options


def _scheduler(kind: Any, config: Mapping[str, Any]) -> Any:
    """A scheduler for one generation, which works out its steps on the host, in part with NumPy."""
    with _disable_current_modes():
        scheduler = kind.from_config(config)
    set_timesteps = scheduler.set_timesteps

    @wraps(set_timesteps)
    def on_host(*arguments: Any, device: object = None, **options: Any) -> None:
        with _disable_current_modes():
            set_timesteps(*arguments, **options)

    scheduler.set_timesteps = on_host
    return scheduler


class _Tokenizer:
    """Makes ids of prompts, padded to `length` or what a call has as its `max_length`.

    Pipelines pad to the longest prompt only to see whether that was cut off: it has one token.
    """

    def __init__(self, length: int) -> None:
        self.model_max_length = length

    def __call__(
        self, prompt: Any, *_: Any, max_length: int | None = None, padding: object = None, **__: Any
    ) -> SimpleNamespace:
        rows = 1 if isinstance(prompt, str) else len(prompt)
        most = 1 if padding == "longest" else self.model_max_length
        ids = torch.zeros((rows, min(max_length or most, most)), dtype=torch.int64)
        return SimpleNamespace(input_ids=ids, attention_mask=torch.ones_like(ids))

    def tokenize(self, _: str) -> list[str]:
        """No token stands for a picture."""
        return []


def load_pipeline(name: str, arguments: Mapping[str, object], online: bool = False) -> LoadedModel:
    """The pipeline that `name` means, or one part of it, and a batch of prompts, or of that part's inputs."""
    diffusers = import_library("diffusers")
    label = f"diffusers:{name}"
    configs, path, note = _configs_of(name, online)
    if path is not None:
        return _load_part(diffusers, configs(path), label, note, arguments)
    index = configs("")
    kind = getattr(diffusers, str(index.get("_class_name")), None)
    if kind is None:
        raise TargetError(f"diffusers has no pipeline {index.get('_class_name')!r}, which {label} names")
    options = _options(kind, dict(arguments), label)
    tiling, slicing = (bool(options.pop(option, False)) for option in ("tiling", "slicing"))
    parts, others, notes = _parts(diffusers, configs, index, label)
    for switched, method in ((tiling, "enable_tiling"), (slicing, "enable_slicing")):
        if switched:
            getattr(parts["vae"], method)()
    if "requires_safety_checker" in inspect.signature(kind).parameters:
        others["requires_safety_checker"] = False
    module = Pipeline(kind, parts, others, {"num_inference_steps": _STEPS, **options})
    steps = module.options["num_inference_steps"]
    notes = (*note, *notes, f"{steps} steps of the scheduler are run, each of which takes the same memory")

    def make(request: InputRequest) -> Any:
        return (torch.zeros((request.batch_size, 1), dtype=torch.int64),)

    return LoadedModel(module, f"{label} ({kind.__name__})", notes, inputs=InputMaker(make))


def _configs_of(name: str, online: bool) -> tuple[_Configs, str | None, tuple[str, ...]]:
    """How to get the configs of the pipeline that `name` means, the part of it that it names, and a note on them."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if (folder / PIPELINE).is_file():
            return partial(_config_in, folder), None, ()
        if (folder / CONFIG).is_file():
            return partial(_config_in, folder.parent), folder.name, ()
        raise TargetError(f"{folder} has neither a {PIPELINE}, as a pipeline of diffusers, nor a {CONFIG}")
    organization, _, rest = name.partition("/")
    repository, _, path = rest.partition("/")
    if not is_hub_id(id := f"{organization}/{repository}"):
        ids = [id for id, preset in presets().items() if preset.parts]
        raise UnknownTargetError("pipeline", name, ids, problem=f"no such folder: {folder}")
    if cached := cached_file(id, PIPELINE):
        return partial(_config_in, cached.parent), path or None, ()
    preset = presets().get(id)
    if preset and preset.parts:
        if path and path not in preset.parts:
            raise unknown_name(f"the pipeline {id}", path, preset.parts, "part")
        return lambda part: dict(preset.parts[part] if part else preset.config), path or None, (preset.note,)
    if online:
        return lambda part: _read(fetched_file(id, _file_of(part))), path or None, ()
    raise unknown_id(id)


def _file_of(part: str) -> str:
    """The config of a part, and for "" the pipeline's index."""
    return f"{part}/{_SCHEDULER if part == 'scheduler' else CONFIG}" if part else PIPELINE


def _config_in(folder: Path, part: str) -> dict[str, Any]:
    return _read(folder / _file_of(part))


def _read(path: Path) -> dict[str, Any]:
    try:
        data = read_config(path)
    except (OSError, ValueError) as error:
        raise TargetError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from error
    return data if isinstance(data, dict) else {}


def _load_part(
    diffusers: Any, config: dict[str, Any], label: str, note: tuple[str, ...], arguments: Mapping[str, object]
) -> LoadedModel:
    cls = str(config.get("_class_name"))
    make = _PART_INPUTS.get(cls)
    if make is None:
        raise unknown_name(label, cls, _PART_INPUTS, "class with inputs that memsize knows")
    module, notes = build_library_model(
        partial(getattr(diffusers, cls).from_config, config | dict(arguments)), label, {}
    )
    inputs = InputMaker(lambda request: make(module.config, request.batch_size))
    return LoadedModel(module, f"{label} ({cls})", (*note, *notes), inputs=inputs)


def _unet_inputs(config: Any, batch: int) -> dict[str, Any]:
    side = config.sample_size
    inputs: dict[str, Any] = {
        "sample": unknown(batch, config.in_channels, side, side),
        "timestep": torch.ones(batch, dtype=torch.int64),
        "encoder_hidden_states": unknown(batch, _TOKENS, config.cross_attention_dim),
    }
    if config.addition_embed_type == "text_time":  # Stable Diffusion XL: a pooled text and six numbers of the image
        numbers = 6
        pooled = config.projection_class_embeddings_input_dim - numbers * config.addition_time_embed_dim
        inputs["added_cond_kwargs"] = {"text_embeds": unknown(batch, pooled), "time_ids": unknown(batch, numbers)}
    return inputs


def _sd3_inputs(config: Any, batch: int) -> dict[str, Any]:
    """The texts of CLIP and T5 one after the other."""
    side = config.sample_size
    return {
        "hidden_states": unknown(batch, config.in_channels, side, side),
        "encoder_hidden_states": unknown(batch, 2 * _TOKENS, config.joint_attention_dim),
        "pooled_projections": unknown(batch, config.pooled_projection_dim),
        "timestep": torch.ones(batch, dtype=torch.int64),
    }


def _flux_inputs(config: Any, batch: int) -> dict[str, Any]:
    """An image of 1,024 pixels in patches of 16, each with its position, and the text of T5."""
    patches = (1024 // 16) ** 2
    return {
        "hidden_states": unknown(batch, patches, config.in_channels),
        "encoder_hidden_states": unknown(batch, _MOST_TOKENS, config.joint_attention_dim),
        "pooled_projections": unknown(batch, config.pooled_projection_dim),
        "timestep": unknown(batch),
        "guidance": unknown(batch) if config.guidance_embeds else None,
        "img_ids": torch.zeros(patches, 3),
        "txt_ids": torch.zeros(_MOST_TOKENS, 3),
    }


def _wan_inputs(config: Any, batch: int) -> dict[str, Any]:
    """A clip of 81 frames of 480 × 832 pixels, which the autoencoder makes 4, 8 and 8 times smaller."""
    return {
        "hidden_states": unknown(batch, config.in_channels, 21, 60, 104),
        "timestep": torch.ones(batch, dtype=torch.int64),
        "encoder_hidden_states": unknown(batch, _MOST_TOKENS, config.text_dim),
    }


def _cogvideox_inputs(config: Any, batch: int) -> dict[str, Any]:
    """A clip of as many frames as the model was trained with, of which the autoencoder makes one of the first, and one
    of each four others.
    """
    frames = (config.sample_frames - 1) // config.temporal_compression_ratio + 1
    height, width = config.sample_height, config.sample_width
    inputs: dict[str, Any] = {
        "hidden_states": unknown(batch, frames, config.in_channels, height, width),
        "encoder_hidden_states": unknown(batch, config.max_text_seq_length, config.text_embed_dim),
        "timestep": torch.ones(batch, dtype=torch.int64),
    }
    if config.use_rotary_positional_embeddings:
        patches = frames * (height // config.patch_size) * (width // config.patch_size)
        inputs["image_rotary_emb"] = tuple(torch.zeros(patches, config.attention_head_dim) for _ in range(2))
    return inputs


_PART_INPUTS: Final = {
    "CogVideoXTransformer3DModel": _cogvideox_inputs,
    "UNet2DConditionModel": _unet_inputs,
    "SD3Transformer2DModel": _sd3_inputs,
    "FluxTransformer2DModel": _flux_inputs,
    "WanTransformer3DModel": _wan_inputs,
}


def _options(kind: Any, arguments: dict[str, Any], label: str) -> dict[str, Any]:
    """The options of a call; ``steps`` and ``guidance`` are short for its own names."""
    for short, long in (("steps", "num_inference_steps"), ("guidance", "guidance_scale")):
        if short in arguments:
            arguments[long] = arguments.pop(short)
    _, *names = (*inspect.signature(kind.__call__).parameters, "tiling", "slicing")
    for name in arguments:
        if name not in names:
            raise unknown_name(label, name, names, "option")
    return arguments


def _parts(
    diffusers: Any, configs: _Configs, index: Mapping[str, Any], label: str
) -> tuple[dict[str, nn.Module], dict[str, Any], tuple[str, ...]]:
    modules: dict[str, nn.Module] = {}
    others: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    for name, entry in index.items():
        if name.startswith("_") or not isinstance(entry, list):
            if not name.startswith("_"):
                others[name] = entry
            continue
        library, cls = entry
        if cls is None or name in ("safety_checker", "feature_extractor", "image_encoder"):
            others[name] = None
        elif "Tokenizer" in cls or "Processor" in cls:
            others[name] = _Tokenizer(_tokens(configs(name.replace("tokenizer", "text_encoder"))))
        elif library == "diffusers" and "Scheduler" in cls:
            others[name] = partial(_scheduler, getattr(diffusers, cls), configs(name))
        else:
            package = import_library(library)
            config, make = configs(name), getattr(package, cls)
            if library == "transformers":
                config.pop("dtype", None)  # without a dtype of the call, diffusers loads every part in float32
                make = partial(make._from_config, make.config_class.from_dict(config))
            else:
                make = partial(make.from_config, config)
            modules[name], more = build_library_model(make, f"{label}/{name}", {})
            notes += more
    return modules, others, notes


def _tokens(config: Mapping[str, Any]) -> int:
    return min(int(config.get("max_position_embeddings") or config.get("n_positions") or _MOST_TOKENS), _MOST_TOKENS)
