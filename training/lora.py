"""Low-rank adapters of a model: which projections have one, and how large it is.

`adapt` freezes a model.Transformer and adds the adapters, which are then all that is trained. Names of parameters are
peft's behind "base_model.model.model.", such as layers.0.self_attn.q_proj.lora_A.weight.

Method: Hu et al., LoRA, arXiv 2106.09685.
"""

from dataclasses import dataclass

from torch import nn

from kernels.lora import LORA

TARGETS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"  # of every block


@dataclass(frozen=True)
class Adapters:
    """Adapters of all blocks of a model.

    Args:
        rank: rows of A and columns of B.
        alpha: B A is scaled by alpha / rank.
        targets: names of the projections that have one, in the order of `TARGETS`.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self):
        if self.rank < 1 or not self.targets or {*self.targets} - {*TARGETS}:
            raise ValueError(f"adapters need a rank of at least 1 and targets among {', '.join(TARGETS)}, got {self}")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def adapt(model: nn.Module, adapters: Adapters) -> None:
    """Freeze a model.Transformer, and give the projections of its blocks adapters on the device where they are.

    The embedding's output gets a gradient, although nothing takes it: autograd goes through blocks from there.
    """
    model.requires_grad_(False)
    for name, projection in [*model.layers.named_modules()]:
        if name.rpartition(".")[2] in adapters.targets:
            N, K = projection.weight.shape
            options = {"bias": False, "device": projection.weight.device, "dtype": projection.weight.dtype}
            projection.lora_A = nn.Linear(K, adapters.rank, **options)
            projection.lora_B = nn.Linear(adapters.rank, N, **options)
            projection.lora_scale = adapters.scale
    for name, parameter in model.named_parameters():
        if ".lora_" in name and not parameter.is_meta:
            model.initialize_parameter(name, parameter)
    for block in model.layers:
        block.self_attn.linear = block.mlp.linear = LORA
    model.embed_tokens.register_forward_hook(lambda module, inputs, x_BTD: x_BTD.requires_grad_())
