"""bitsandbytes 0.50: optimizers with states of 8 bits or in pages.

Source: bitsandbytes 0.50.2, `optim/optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from memsize.virtual.packages.bitsandbytes import functional, note_use

_BLOCK: Final = 256
"""Elements of a state that share a maximum."""
_SMALLEST: Final = 4096
"""Elements of a parameter from which its state has 8 bits."""
_PAGED_FROM: Final = 100_000
"""Elements of a parameter from which its state is in pages."""


class GlobalOptimManager:
    """Options of single parameters, such as the 32 bits that a Trainer asks for the states of embeddings."""

    def __init__(self) -> None:
        self.module_weight_config_triple: list[tuple[nn.Module, str, dict[str, Any]]] = []
        self.pid2config: dict[int, dict[str, Any]] = {}

    @classmethod
    def get_instance(cls) -> GlobalOptimManager:
        """The one of this run."""
        manager: GlobalOptimManager = vars(functional()).setdefault("_manager", cls())
        return manager

    def register_parameters(self, params: Any) -> None:
        """Do nothing: parameters are found by themselves."""

    def override_config(self, parameters: Any, key: Any = None, value: Any = None, key_value_dict: Any = None) -> None:
        """Set options of one or several parameters."""
        for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
            self.pid2config.setdefault(id(parameter), {}).update(key_value_dict or {key: value})

    def register_module_override(self, module: nn.Module, param_name: str, config: dict[str, Any]) -> None:
        """Set options of a module's parameter."""
        self.module_weight_config_triple.append((module, param_name, config))

    def options_of(self, parameter: Tensor) -> dict[str, Any]:
        """The options of a parameter that are not the optimizer's."""
        options = self.pid2config.get(id(parameter), {})
        for module, name, config in self.module_weight_config_triple:
            if getattr(module, name) is parameter:
                options = options | config
        return options


class _Optimizer(torch.optim.Optimizer):
    """One or two states of each parameter, of 8 bits with a float32 maximum for each block; kernels work in place."""

    states = 2
    first_states = 1
    """Tensors in the first state."""
    bits = 32
    paged = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *_: Any,
        optim_bits: int | None = None,
        min_8bit_size: int = _SMALLEST,
        is_paged: bool | None = None,
        **options: Any,
    ) -> None:
        note_use()
        super().__init__(params, {"lr": lr, **options})
        self.bits = optim_bits or self.bits
        self.is_paged, self._smallest = self.paged if is_paged is None else is_paged, min_8bit_size

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update in place."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self._begin(parameter, self.state[parameter])
        return loss

    def _begin(self, parameter: Tensor, state: dict[str, Any]) -> None:
        state["step"] = 0
        options = GlobalOptimManager.get_instance().options_of(parameter)
        is_small = options.get("optim_bits", self.bits) == 32
        is_small = is_small or parameter.numel() < options.get("min_8bit_size", self._smallest)
        blocks = -(-parameter.numel() // _BLOCK)
        for number in range(1, self.states + 1):
            several = (self.first_states,) if number == 1 and self.first_states > 1 else ()
            dtype = torch.float32 if is_small else torch.uint8
            state[f"state{number}"] = self._buffer(parameter, (*several, *parameter.shape), dtype)
            if not is_small:
                state[f"qmap{number}"] = self._codes(f"of state {number}", parameter.device)
                state[f"absmax{number}"] = parameter.new_zeros((*several, blocks), dtype=torch.float32)

    def _codes(self, name: str, device: torch.device) -> Tensor:
        codes: dict[str, Tensor] = vars(self).setdefault("_maps", {})
        if name not in codes:
            codes[name] = torch.zeros(256, device=device)
        return codes[name]

    def _buffer(self, parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.is_paged and parameter.numel() >= _PAGED_FROM:
            paged: Tensor = functional().get_paged(*shape, dtype=dtype, device=parameter.device)
            return paged
        return parameter.new_zeros(shape, dtype=dtype)


def _optimizers(name: str, paged: bool, states: int = 2, first_states: int = 1) -> dict[str, type[_Optimizer]]:
    """The classes of an optimizer by their names: of either number of bits, in pages and not."""
    classes: dict[str, type[_Optimizer]] = {}
    for prefix in ("", "Paged")[: 1 + paged]:
        for suffix, bits in {"": 32, "8bit": 8, "32bit": 32}.items():
            traits = {"states": states, "first_states": first_states, "bits": bits, "paged": bool(prefix)}
            classes[prefix + name + suffix] = type(prefix + name + suffix, (_Optimizer,), traits)
    return classes


MODULES: Final[dict[str, dict[str, Any]]] = {
    "bitsandbytes.optim": {
        "GlobalOptimManager": GlobalOptimManager,
        **_optimizers("Adam", paged=True),
        **_optimizers("AdamW", paged=True),
        **_optimizers("LAMB", paged=False),
        **_optimizers("AdEMAMix", paged=True, first_states=2),
        **_optimizers("Lion", paged=True, states=1),
        **_optimizers("RMSprop", paged=False, states=1),
        **_optimizers("Adagrad", paged=False, states=1),
        **_optimizers("LARS", paged=False, states=1),
        **_optimizers("SGD", paged=False, states=1),
    }
}
