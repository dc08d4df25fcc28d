"""Parameters as the parts of a model declare them: their initial values, and their dtypes."""

from typing import Self

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .parts import Parameter


class Declared(nn.Module):
    """Mixin of a decoder."""

    config: ModelConfig
    declared: dict[str, Parameter]  # by name, of the whole decoder and its adapters

    @torch.no_grad()
    def initialize_parameter(
        self, name: str, tensor: Tensor, generator: torch.Generator | None = None
    ) -> None:
        """Fills `tensor` with the initial value of the parameter `name`, as
        `kernels.parts.Parameter` declares it.

        Matrices that write into the residual stream are scaled by 1/sqrt(2 x layers), as in GPT-2.
        Gates of attention start near 1/2, as in flash-linear-attention: a small matrix and no bias.
        Adapters start as in peft: A is uniform within 1 / sqrt(width), B is zero.
        """
        start = self.declared[name].start
        if start in ("neutral", "one"):
            tensor.fill_(1.0 - self.config.block.offset * (start == "neutral"))
        elif start == "decay":
            tensor.uniform_(0.01, 16, generator=generator).log_()
        elif start == "zero":
            tensor.zero_()
        elif start == "uniform":
            bound = tensor.shape[-1] ** -0.5
            tensor.uniform_(-bound, bound, generator=generator)
        else:
            scale = (2 * self.config.num_hidden_layers) ** -0.5 if start == "residual" else 1.0
            tensor.normal_(0.0, scale * self.config.initializer_range, generator=generator)

    def cast(self, dtype: torch.dtype, *, only_frozen: bool = False) -> Self:
        """Casts the parameters but those declared exact, or of these the frozen ones alone."""
        exact = {id(p) for name, p in self.named_parameters() if self.declared[name].is_exact}
        return self._apply(
            lambda p: p if id(p) in exact or (only_frozen and p.requires_grad) else p.to(dtype),
            recurse=True,
        )
