"""Says what a run trains of a model: here every parameter, or all but routers; in `lora.py`
adapters alone."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from kernels.config import ModelConfig
from kernels.linear import Linear
from kernels.parts import Parameter


@dataclass(frozen=True, repr=False)
class Trained:
    """Trains every parameter of a model. A subclass trains others."""

    # whether checkpoints hold the model, its frozen parameters as well
    is_whole: ClassVar[bool] = True

    def __repr__(self) -> str:
        return "no adapters"

    def prepare(self, model: nn.Module) -> None:
        """Freezes parameters of a model.Transformer and adds others, on the device where it is."""

    def linear(self, base: Linear) -> Linear:
        """Returns the linear map of blocks whose matrices `base` multiplies by."""
        return base

    def elements(self, shard: ModelConfig) -> int:
        return shard.num_parameters()

    def layer_elements(self, shard: ModelConfig, layer: int) -> int:
        """Returns the trained elements of a block's matrices."""
        return shard.layer_matrix_parameters(layer)

    def added(self, declared: dict[str, Parameter]) -> dict[str, Parameter]:
        """Returns the parameters that are added to a model's, or to a block's, by name."""
        return {}

    def traffic(self, shard: ModelConfig, layer: int) -> tuple[dict[str, int], dict[str, int]]:
        """Returns what added parameters of a block read and write in forward and in backward.

        Elements per token, by the name of a rate.
        """
        return {}, {}

    def described(self, shard: ModelConfig) -> list[tuple[str, str]]:
        """Returns rows of a plan, each with a title."""
        return []


@dataclass(frozen=True, repr=False)
class WithoutRouters(Trained):
    """Trains all but the routers' matrices, so that tokens go on to similar experts."""

    def __repr__(self) -> str:
        return "no adapters, and with frozen routers"

    def prepare(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if model.declared[name].role == "router":
                parameter.requires_grad_(False)

    def elements(self, shard: ModelConfig) -> int:
        return shard.num_parameters() - sum(
            _router_elements(shard, layer) for layer in range(shard.num_hidden_layers)
        )

    def layer_elements(self, shard: ModelConfig, layer: int) -> int:
        return shard.layer_matrix_parameters(layer) - _router_elements(shard, layer)

    def described(self, shard: ModelConfig) -> list[tuple[str, str]]:
        return [("routers", "frozen")]


def _router_elements(shard: ModelConfig, layer: int) -> int:
    parameters = shard.layer_parameters(layer).values()
    return sum(parameter.numel for parameter in parameters if parameter.role == "router")


ALL = Trained()
