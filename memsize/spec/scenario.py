"""The one table of scenarios: in which precision a model is stored and run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal, cast, get_args

from memsize.errors import ScenarioError, UnknownScenarioError

Recipe = Literal["as-given", "cast", "autocast", "apex", "quantized"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
"""The modes of `torch.compile`."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way to store and run a model.

    `compile` is the mode of `torch.compile` under which the model's calls are compiled, None where it runs eagerly.
    `dtype` is what floating parameters are cast to (None: left as they are), before any are quantized. `autocast`
    is the lower precision of an autocast region around the forward. `keep_norms` leaves batch norms in float32,
    `master_weights` says that the optimizer holds float32 copies, `cast_io` that floating inputs are cast to
    `dtype` and outputs to float32 (apex O2 and O3). `layout` names the storage layout of quantized weights
    (`memsize.precision.layouts`).
    """

    name: str
    title: str
    recipe: Recipe
    dtype: str | None = None
    autocast: str | None = None
    keep_norms: bool = False
    master_weights: bool = False
    cast_io: bool = False
    layout: str | None = None
    compile: CompileMode | None = None


_TABLE = (
    Scenario("as-given", "the model as it is", "as-given"),
    Scenario("fp32", "every floating tensor in float32", "cast", dtype="float32"),
    Scenario("fp16", "model.half()", "cast", dtype="float16"),
    Scenario("bf16", "model.bfloat16()", "cast", dtype="bfloat16"),
    Scenario("amp-fp16", "float32 under torch.autocast(float16)", "autocast", dtype="float32", autocast="float16"),
    Scenario("amp-bf16", "float32 under torch.autocast(bfloat16)", "autocast", dtype="float32", autocast="bfloat16"),
    Scenario("apex-O0", "apex O0: pure float32", "apex", dtype="float32"),
    Scenario("apex-O1", "apex O1: float32, functions patched to cast", "apex", dtype="float32", autocast="float16"),
    Scenario(
        "apex-O2",
        "apex O2: float16 with float32 batch norms and master weights",
        "apex",
        dtype="float16",
        keep_norms=True,
        master_weights=True,
        cast_io=True,
    ),
    Scenario("apex-O3", "apex O3: pure float16", "apex", dtype="float16", cast_io=True),
    Scenario("int8-dynamic", "torch.ao.quantization.quantize_dynamic", "quantized", layout="int8-dynamic"),
    Scenario("int8-weight", "int8 weights, one scale per output channel", "quantized", layout="int8-weight"),
    Scenario("int4-weight", "int4 weights in groups", "quantized", layout="int4-weight"),
    Scenario("fp8-weight", "float8_e4m3fn weights, one scale per output channel", "quantized", layout="fp8-weight"),
    Scenario("nf4", "4-bit NormalFloat weights with block scales", "quantized", layout="nf4"),
    Scenario("nf4-double", "the same with double quantization", "quantized", layout="nf4-double"),
    Scenario("fp4", "4-bit float weights with block scales", "quantized", layout="fp4"),
    Scenario("int8", "bitsandbytes' LLM.int8", "quantized", layout="int8"),
    Scenario("mxfp4", "4-bit weights, a one-byte scale per 32", "quantized", layout="mxfp4"),
    Scenario("nvfp4", "4-bit weights, a float8 scale per 16", "quantized", layout="nvfp4"),
)

SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in _TABLE}
DEFAULT = ("as-given", "fp32", "fp16", "bf16", "amp-fp16", "amp-bf16", "int8-weight")
COMPILED: Final = "+compile"
"""A scenario `amp-bf16+compile` is `amp-bf16` with the model compiled by `torch.compile`."""
TORCHAO = "torchao:"
"""A scenario `torchao:Int8WeightOnlyConfig` applies that torchao configuration itself."""


_ALIASES = {
    **dict.fromkeys(("float32", "float"), "fp32"),
    **dict.fromkeys(("float16", "half"), "fp16"),
    "bfloat16": "bf16",
}
"""PyTorch's names of the dtypes that scenarios cast to."""


def select(names: str | Iterable[str] | None) -> tuple[Scenario, ...]:
    """The scenarios that `names` asks for, in the table's order: a comma list, names, ``"all"``, or None for `DEFAULT`.

    Raises `ScenarioError` naming the nearest scenarios when one is unknown.
    """
    parts = DEFAULT if names is None else names.split(",") if isinstance(names, str) else names
    requested = tuple(part.strip() for part in parts if part.strip())
    if not requested:
        raise ScenarioError(f"no scenario given: choose from {', '.join(SCENARIOS)}, or all")
    if "all" in requested:
        requested = tuple(SCENARIOS)
    named = {scenario.name: scenario for scenario in map(scenario_named, requested)}
    scenarios = tuple(scenario for name, scenario in SCENARIOS.items() if name in named)
    return scenarios + tuple(scenario for name, scenario in named.items() if name not in SCENARIOS)


def selected(
    names: str | Iterable[str] | None, compile: bool | str, usual: str | Iterable[str] | None = None
) -> tuple[Scenario, ...]:
    """The scenarios that `names` asks for, as `select` does, or else `usual`; with `compile` each is followed by itself
    compiled, and where no names are given the model is shown as it is: each scenario is compiled anew.
    """
    if not compile:
        return select(usual if names is None else names)
    chosen = select("as-given" if names is None else names)
    return tuple(s for one in chosen for s in ((one,) if one.compile else (one, compiled_from(one, compile))))


def refuse_compiled(scenarios: Iterable[Scenario], purpose: str) -> None:
    """Raise `ScenarioError` where one of `scenarios` is compiled: its figures for `purpose` are not predicted."""
    for scenario in scenarios:
        if scenario.compile:
            raise ScenarioError(f"{scenario.name}: compiled code is not predicted for {purpose}")


def scenario_named(name: str) -> Scenario:
    """The scenario called `name`; raises `ScenarioError` with the nearest names when there is none."""
    name = _ALIASES.get(name, name)
    if name in SCENARIOS:
        return SCENARIOS[name]
    base, compiled, mode = name.partition(COMPILED)
    if compiled:
        return compiled_from(scenario_named(base), mode.removeprefix(":") or "default")
    if name.startswith(TORCHAO) and name != TORCHAO:
        return Scenario(name, f"torchao.quantization.quantize_ with {name[len(TORCHAO) :]}", "quantized", layout=name)
    raise UnknownScenarioError("scenario", name, SCENARIOS)


def compiled_from(scenario: Scenario, mode: bool | str = True) -> Scenario:
    """The scenario in which calls of the model are compiled, in the usual mode or in that of this name; raises
    `ScenarioError` for an unknown one.
    """
    mode = "default" if isinstance(mode, bool) else mode
    if mode not in get_args(CompileMode):
        raise UnknownScenarioError("compile mode", mode, get_args(CompileMode))
    suffix = COMPILED if mode == "default" else f"{COMPILED}:{mode}"
    title = f"{scenario.title}, compiled by torch.compile"
    return replace(scenario, name=f"{scenario.name}{suffix}", title=title, compile=cast("CompileMode", mode))


def quantized_from(scenario: Scenario, name: str) -> Scenario:
    """The quantized scenario called `name`, of a model in the dtype to which `scenario` casts it."""
    return replace(SCENARIOS[name], dtype=scenario.dtype if scenario.recipe == "cast" else None)
