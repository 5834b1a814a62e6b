"""``hf:NAME``: a transformers model from its config alone: no weights, no tokenizer.

NAME is a folder with a config.json, such a file, an architecture (``hf:llama``, ``hf:LlamaForCausalLM``) in its default
size, or a Hub id: its config is in the local cache, a preset, or with `online` fetched. The class is the config's own
`architectures` entry, so a causal language model has its head; where a config names none, it is the one that the Auto
classes give its type.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from memsize.errors import TargetError, causes, first_line
from memsize.loading.building import LoadedModel
from memsize.loading.hubs import (
    CHECKPOINT_CONFIG,
    build_library_model,
    first_cause,
    import_library,
    is_broken,
    unknown_name,
)
from memsize.loading.hubs.hub_files import CONFIG, cached_file, fetched_file, read_config
from memsize.loading.hubs.huggingface_inputs import config_input_maker
from memsize.loading.hubs.input_batch import PLACEHOLDERS, TEXT, part
from memsize.loading.presets import presets, unknown_id

_COUNTS = (
    (re.compile(r"(^|_)(layers?|blocks?|depths?|stages?)(_|$)"), 10_000),
    (re.compile(r"(^|_)(experts?|heads?|labels?)(_|$)"), 1_000_000),
)
"""Entries that count parts, and more than any model has of them: the deepest have a thousand layers, the broadest two
thousand experts. A config makes lists of that length even before the model is built.
"""

_TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MASKED_LM", "CAUSAL_LM", "CTC",
    "ZERO_SHOT_IMAGE_CLASSIFICATION", "ZERO_SHOT_OBJECT_DETECTION", "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION", "OBJECT_DETECTION", "UNIVERSAL_SEGMENTATION", "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION",
    "MASK_GENERATION", "INSTANCE_SEGMENTATION", "MULTIMODAL_LM", "RETRIEVAL", "TEXT_RECOGNITION", "TABLE_RECOGNITION",
    "KEYPOINT_DETECTION", "KEYPOINT_MATCHING", "POSE_ESTIMATION", "IMAGE_MATTING", "IMAGE_TO_IMAGE",
    "TIME_SERIES_PREDICTION", "TEXT_TO_SPECTROGRAM", "RNNT", "TDT", "DECISION",
)  # fmt: skip
"""The tasks whose class a config without `architectures` gets, the first that knows its type."""

_TABLES = (*(f"MODEL_FOR_{task}_MAPPING_NAMES" for task in _TASKS), "MODEL_MAPPING_NAMES",
           "MODEL_FOR_BACKBONE_MAPPING_NAMES", "MODEL_FOR_PRETRAINING_MAPPING_NAMES")  # fmt: skip


def load_transformers_model(name: str, arguments: Mapping[str, object], online: bool = False) -> LoadedModel:
    """The model of the config that `name` means, whose entries `arguments` replace, and inputs that suit it.

    transformers checks that torchvision is installed, not that it works. If it does not work, models that only *could*
    use it fail to import too; transformers is then called once more as if torchvision were not installed.
    """
    try:
        try:
            return _load(name, arguments, online)
        except (ImportError, RuntimeError) as error:
            if not (any("torchvision" in str(cause) for cause in causes(error)) or is_broken("torchvision")):
                raise
        with _without_torchvision():
            return _load(name, arguments, online)
    except (ImportError, RuntimeError) as error:
        raise TargetError(
            f"transformers cannot import what hf:{name} needs: {first_line(first_cause(error))}"
        ) from error


def _load(name: str, arguments: Mapping[str, object], online: bool) -> LoadedModel:
    transformers = import_library("transformers")
    label = f"hf:{name}"
    file = _config_file(name)
    data, note = (_read(file) if file else _by_architecture(transformers, name)), ""
    if data is None:
        source = hub_config(name, online)
        data, note = (_read(source), "") if isinstance(source, Path) else (source, presets()[name].note)
    stored = data.pop("quantization_config", None)
    config, notes = _config(transformers, data, arguments, label)
    kind = model_class(transformers, config, label)
    module, built = build_library_model(lambda: kind._from_config(config), label, {})
    if stored:
        vars(module)[CHECKPOINT_CONFIG] = stored
    preprocessor: Any = {}  # the sizes that its processor makes
    with suppress(OSError, ValueError):
        preprocessor = read_config(file.with_name("preprocessor_config.json")) if file else {}
    maker = config_input_maker(module, preprocessor if isinstance(preprocessor, dict) else {})
    return LoadedModel(module, f"{label} ({kind.__name__})", (*filter(None, [note]), *notes, *built), inputs=maker)


# -- the config -------------------------------------------------------------------------------------------------------


def _config_file(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise TargetError(f"no such folder or file: {name} ({first_line(error)})") from None
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise TargetError(f"{path} has no config.json, so it is not a transformers model")
        return path / "config.json"
    if path.is_file():
        return path
    if path.suffix == ".json":
        raise TargetError(f"no such file: {path}")
    return None


def _read(file: Path) -> dict[str, Any]:
    try:
        data = read_config(file)
    except (OSError, ValueError) as error:
        raise TargetError(f"cannot read {file.name} as a config: {getattr(error, 'strerror', error)}") from None
    if not isinstance(data, dict) or not (data.get("model_type") or data.get("architectures")):
        raise TargetError(f"{file.name} is not a transformers config: it has neither model_type nor architectures")
    return data


def _by_architecture(transformers: Any, name: str) -> dict[str, Any] | None:
    types = transformers.CONFIG_MAPPING
    if name in types:
        return {"model_type": name}
    kind = _attribute(transformers, name) if name.isidentifier() else None
    config = kind if name.endswith("Config") else getattr(kind, "config_class", None)
    if config is not None:
        return {"model_type": config.model_type} | ({} if kind is config else {"architectures": [name]})
    if (name.count("/") == 1 and not name.startswith((".", "/", "~"))) or name in presets():
        return None
    raise unknown_name("transformers", name, types.keys())


def _config(
    transformers: Any, data: dict[str, Any], arguments: Mapping[str, object], label: str
) -> tuple[Any, tuple[str, ...]]:
    data = dict(data)
    model_type = data.pop("model_type", None)
    if not model_type:
        architecture = _attribute(transformers, data["architectures"][0])
        model_type = str(getattr(getattr(architecture, "config_class", None), "model_type", ""))
    if model_type not in transformers.CONFIG_MAPPING:
        own = " It comes with code of its own, which memsize does not run." if data.get("auto_map") else ""
        raise TargetError(f"transformers {transformers.__version__} knows no model type {model_type!r}.{own}")
    data.pop("auto_map", None)
    kind = transformers.CONFIG_MAPPING[model_type]
    defaults = kind()
    names = {*vars(defaults), *data, *getattr(defaults, "attribute_map", {}), "architectures", "dtype"}
    names.add("head_dim")  # attention reads it, also of configs that have none by default
    for name in arguments:
        if name not in names and not hasattr(defaults, name):
            raise unknown_name(f"the config of {label}", name, sorted(names), "entry")
    try:
        entries = _replaced(data, arguments)
        _check_counts(entries, label)
        config = kind.from_dict(entries) if entries else kind()
    except TargetError:
        raise
    except Exception as error:  # configs check themselves, each in its own words
        raise TargetError(f"{label} is not a {kind.__name__}: {first_line(error)}") from error
    return config, tuple(_place_placeholders(config))


def _place_placeholders(config: Any) -> Iterator[str]:
    """Give the tokens that stand for images and sound a place in the vocabulary, where a default config has none.

    Which id they are changes no size; a model with an id beyond its embedding's table cannot run.
    """
    size = getattr(part(config, TEXT), "vocab_size", None)
    names = [name for name in PLACEHOLDERS if name in vars(config)]
    if not isinstance(size, int) or size <= 2 * len(names):
        return
    entries = vars(config).items()
    taken = {value for name, value in entries if name.endswith(("token_id", "token_index")) and isinstance(value, int)}
    free = (token for token in range(size - 1, 0, -1) if token not in taken)
    for name in names:
        token = getattr(config, name)
        if token is None or (isinstance(token, int) and not 0 <= token < size):
            setattr(config, name, next(free))
            yield f"its config's {name} is {token}: token {getattr(config, name)} of {size} stands for it"


def _check_counts(entries: Any, label: str) -> None:
    rest: list[tuple[str, Any]] = [("", entries)]
    while rest:
        name, value = rest.pop()
        if isinstance(value, dict):
            rest += ((str(key), item) for key, item in value.items())
        elif isinstance(value, list):
            rest += ((name, item) for item in value)
        elif isinstance(value, int):
            most = next((most for pattern, most in _COUNTS if pattern.search(name)), value)
            if value > most:
                raise TargetError(f"{label} has {value:,} as its {name}: no model has more than {most:,}")


def _replaced(data: dict[str, Any], arguments: Mapping[str, object]) -> dict[str, Any]:
    """`data` with the entries that `arguments` give; a list with one entry per layer follows their number."""
    replaced = data | dict(arguments)
    if isinstance(replaced.get("architectures"), str):
        replaced["architectures"] = [replaced["architectures"]]
    before, layers = data.get("num_hidden_layers"), arguments.get("num_hidden_layers")
    if isinstance(before, int) and isinstance(layers, int) and layers < before:
        for name, value in data.items():
            if isinstance(value, list) and len(value) == before and name not in arguments:
                replaced[name] = value[:layers]
    return replaced


# -- the class --------------------------------------------------------------------------------------------------------


def model_class(transformers: Any, config: Any, label: str) -> Any:
    """The model class: the config's own, else that of the first task that knows its type."""
    for name in config.architectures or ():
        model = _attribute(transformers, name)
        if model is not None:
            return model
    auto = import_library("transformers.models.auto.modeling_auto")
    for table in _TABLES:
        if "_CTC_" in table and getattr(config, "vocab_size", None) is None:
            continue  # its head has one output for each character
        entry = getattr(auto, table, {}).get(config.model_type)
        name = entry[0] if isinstance(entry, (tuple, list)) else entry
        model = _attribute(transformers, name) if name else None
        if model is not None:
            return model
    model = _of_config(transformers, type(config))
    if model is None:
        raise TargetError(f"{label}: transformers has no model for the type {config.model_type!r}")
    return model


def _of_config(transformers: Any, kind: type) -> Any:
    """A class that transformers offers for configs of `kind` alone: a part of larger models, such as their encoder of
    images, which no Auto class knows. One with a head comes first, then the shortest name.
    """
    package = sys.modules[kind.__module__].__package__
    modules = {name: f"transformers.{module}" for name, module in transformers._class_to_module.items()}
    near = [name for name, module in modules.items() if module.startswith(f"{package}.modeling")]
    for name in sorted(near, key=lambda name: ("For" not in name, len(name), name)):
        model = _attribute(transformers, name)
        if getattr(model, "config_class", None) is kind and not name.endswith("PreTrainedModel"):
            return model
    return None


def _attribute(transformers: Any, name: str) -> Any:
    try:
        return getattr(transformers, name)
    except AttributeError as error:
        if name not in dir(transformers):  # half a second: only where there is a doubt
            return None
        raise TargetError(f"transformers cannot import {name}: {first_line(first_cause(error))}") from error


@contextmanager
def _without_torchvision() -> Iterator[None]:
    """While open, torchvision is not installed; transformers keeps in mind that it wasn't."""
    checks = import_library("transformers.utils.import_utils")
    for check in ("is_torchvision_available", "is_torchvision_v2_available"):
        cleared = getattr(getattr(checks, check, None), "cache_clear", None)
        if cleared is not None:
            cleared()
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "torchvision"}
    sys.modules["torchvision"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torchvision"]
        sys.modules.update(hidden)


# -- the config of a Hub id --------------------------------------------------------------------------------------------


def hub_config(name: str, online: bool) -> Path | dict[str, Any]:
    """Return the config of the Hub id `name` as a file, or as the entries of a preset.

    Raises `TargetError` with the nearest presets where there is none, or what the Hub refuses.
    """
    if cached := cached_file(name, CONFIG):
        return cached
    if name in presets():
        return dict(presets()[name].config)
    if online:
        return fetched_file(name, CONFIG)
    raise unknown_id(name)
