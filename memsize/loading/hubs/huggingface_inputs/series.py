"""Time series and trajectories."""

from __future__ import annotations

from typing import Any

from memsize.loading.hubs.huggingface_inputs.makers import makes
from memsize.loading.hubs.huggingface_inputs.need import Need, ones, unknown, zeros
from memsize.loading.hubs.huggingface_inputs.text import length_of


def _past(need: Need) -> int:
    """Steps of the past: those that are looked at, and before them what the longest lag reaches back to."""
    lags = getattr(need.config, "lags_sequence", None)
    return need.number("context_length", "max_position_embeddings", default=512) + (max(lags) if lags else 0)


def _variables(need: Need) -> tuple[int, ...]:
    """The series that go side by side: their dimension is left out where a model has it for several only."""
    several = getattr(need.config, "num_input_channels", None)
    if isinstance(several, int):
        return (several,)
    count = getattr(need.config, "input_size", 1)
    return (count,) if isinstance(count, int) and count > 1 else ()


@makes("past_values")
def past_values(need: Need) -> Any:
    """Values (batch, steps), with several series (batch, steps, series)."""
    return unknown(need.batch, _past(need), *_variables(need))


@makes("past_observed_mask")
def observed(need: Need) -> Any:
    """One for each value, as none is missing."""
    found = need.get("past_values")
    return ones(*found.shape, dtype="float32")


@makes("past_values_padding")
def padding(need: Need) -> Any:
    """Zero for each value, as none is padding."""
    return zeros(*need.get("past_values").shape, dtype="float32")


@makes("past_time_features")
def past_times(need: Need) -> Any:
    """What is known of each step, such as its weekday (batch, steps, features)."""
    return unknown(need.batch, _past(need), need.number("num_time_features", default=0))


@makes("future_values")
def future_values(need: Need) -> Any:
    """What is to be predicted: known while a model trains, and the decoder's input."""
    steps = getattr(need.config, "prediction_length", None)
    return unknown(need.batch, steps, *_variables(need)) if isinstance(steps, int) else None


@makes("future_time_features")
def future_times(need: Need) -> Any:
    steps = getattr(need.config, "prediction_length", None)
    return unknown(need.batch, steps, need.number("num_time_features", default=0)) if isinstance(steps, int) else None


@makes("static_categorical_features")
def categories(need: Need) -> Any:
    count = need.number("num_static_categorical_features", default=0)
    return zeros(need.batch, count) if count else None


@makes("static_real_features")
def reals(need: Need) -> Any:
    count = need.number("num_static_real_features", default=0)
    return unknown(need.batch, count) if count else None


@makes("freq")
def frequency(need: Need) -> Any:
    """The class of each series' frequency (batch, 1)."""
    return zeros(need.batch, 1)


# -- trajectories -----------------------------------------------------------------------------------------------------


@makes("states")
def states(need: Need) -> Any:
    """(batch, steps, values of a state); as many steps as there are positions for the three tokens of each."""
    return unknown(need.batch, _steps(need), need.number("state_dim", default=1))


@makes("actions")
def actions(need: Need) -> Any:
    if "states" not in need.taken:
        return unknown(need.batch, need.number("chunk_size", default=1), need.number("max_action_dim", default=1))
    return unknown(need.batch, _steps(need), need.number("act_dim", default=1))


@makes("rewards", "returns_to_go")
def rewards(need: Need) -> Any:
    return unknown(need.batch, _steps(need), 1)


@makes("timesteps")
def timesteps(need: Need) -> Any:
    import torch

    return torch.arange(_steps(need)).expand(need.batch, -1).clone()


@makes("state")
def state(need: Need) -> Any:
    """What a robot feels of itself (batch, values); None for models whose state is that of a scan."""
    width = getattr(need.config, "max_state_dim", None)
    return unknown(need.batch, width) if isinstance(width, int) else None


def _steps(need: Need) -> int:
    return max(1, (need.request.seq_len or length_of(need)) // 3)
