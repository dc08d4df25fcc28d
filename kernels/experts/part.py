"""A mixture of experts as a part of a layer, in the MLP's place."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..gated_mlp import GatedMLPPart
from ..parts import Parameter, Work
from .mlp import expert_mlp
from .route import route

MEASURED_TOKENS = 32_768


@dataclass(frozen=True)
class ExpertsPart:
    """A router and gated MLPs, of which each token goes through some, see `kernels.parts.MLPPart`.

    Args:
        num_experts: E.
        per_token: k, experts of each token.
        intermediate_size: F, of each expert.
        normalizes: whether a token's k weights sum to 1.
        shared_size: F of an expert that every token goes through, times a sigmoid per token; 0:
            there is none.

    Raises:
        ValueError: sizes below 1, or more experts per token than there are.
    """

    num_experts: int
    per_token: int
    intermediate_size: int
    normalizes: bool = True
    shared_size: int = 0
    module: ClassVar[str] = "mlp"
    tile_size: ClassVar[int] = 32_768  # 2,048 rows for each of 128 experts, 8 per token
    kept_whole: ClassVar[str] = "experts, and experts over ranks are not there yet"
    routes: ClassVar[bool] = True
    rate: ClassVar[str] = "experts"
    # FLOP/s of forward and backward, random tokens,
    # on an H100 (benchmarks/results/experts_h100_2026-11-27.md).
    h200_rate: ClassVar[float] = 498e12

    def __post_init__(self):
        if (
            min(self.num_experts, self.per_token, self.intermediate_size) < 1
            or self.per_token > self.num_experts
        ):
            raise ValueError(
                f"experts need sizes above 0, and at most num_experts of them per token, got {self}"
            )

    @property
    def shared(self) -> GatedMLPPart | None:
        return GatedMLPPart(self.shared_size) if self.shared_size else None

    @property
    def active_width(self) -> int:
        return self.per_token * self.intermediate_size + self.shared_size

    def shard(self, ranks: int) -> "ExpertsPart":
        return self

    def choice_bytes(self, num_tokens: int) -> int:
        return 4 * self.per_token * num_tokens

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        E, F, D = (self.num_experts, self.intermediate_size, hidden_size)
        active = self.per_token / self.num_experts
        shared = self.shared.parameters(D) if self.shared else {}
        gate = Parameter((1, D), role="shared_gate", target="shared_expert_gate")
        down = Parameter(
            (E, D, F), "residual", target="experts", active=active, matrices=("down_proj",)
        )
        # peft has the first of a module's two adapters in its base_layer.
        matrices, path = ("gate_proj", "up_proj"), ".base_layer"
        gate_up = replace(
            down, shape=(E, 2 * F, D), start="normal", matrices=matrices, adapter_path=path
        )
        return {
            "gate.weight": Parameter((E, D), role="router", target="gate"),
            "experts.gate_up_proj": gate_up,
            "experts.down_proj": down,
            **{
                f"shared_expert.{name}": replace(parameter, shared_dim=None)
                for name, parameter in shared.items()
            },
            **({"shared_expert_gate.weight": gate} if shared else {}),
        }

    def shared_sizes(self) -> dict[str, int]:
        return {}

    def linear_work(
        self, num_tokens: int, hidden_size: int, element_size: int, *, tile_size: int | None = None,
        is_skippable: bool = True,
    ) -> Work:  # fmt: skip
        """Counts the products of router and experts.

        Backward in tiles computes gate and up again. It spares a second forward that may skip the
        experts. Beside the products, rows of each of a token's experts are read, and their sum is
        written.
        """
        entries = self.per_token * num_tokens
        widths = (
            3 * self.intermediate_size * entries
            + (self.num_experts + 3 * self.shared_size) * num_tokens
        )
        flops = 2.0 * hidden_size * widths
        is_skipped = is_skippable and tile_size is not None
        again = flops * (not is_skipped) + (0 if tile_size is None else 2 / 3 * flops)
        moved = element_size * hidden_size * (entries + num_tokens)
        return Work(flops, again, moved, is_skipped, self.rate)

    def measure_rates(
        self, hidden_size: int, seconds: Callable[..., float], device: torch.device
    ) -> dict[str, float]:
        """Measures the FLOP/s of forward and backward by random experts."""
        D = hidden_size
        N = MEASURED_TOKENS
        options = {"device": device, "dtype": torch.bfloat16}
        shapes = (
            (N, D),
            (self.num_experts, 2 * self.intermediate_size, D),
            (self.num_experts, D, self.intermediate_size),
        )
        x, gate_up, down = (torch.randn(shape, **options).requires_grad_() for shape in shapes)
        logits = torch.randn(N, self.num_experts, **options)
        experts, weights = route(logits, self.per_token, normalize=self.normalizes)

        def forward_and_backward() -> None:
            torch.autograd.grad(
                expert_mlp(x, gate_up, down, experts, weights), [x, gate_up, down], x.detach()
            )

        flops = 3 * self.linear_work(N, D, 2).matrix_flops
        return {self.rate: flops / seconds(forward_and_backward)}
