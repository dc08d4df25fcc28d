"""AdamW on float32 master weights, with gradients accumulated in float32, for plain and for sharded parameters.

A float32 parameter (CPU, or a shard under FSDP, which computes in bf16) is its own master. Of a bf16 parameter the
optimizer keeps a float32 copy; as backward makes a gradient it is added to the copy's float32 gradient and freed, so
that micro-batches accumulate in float32 and no bf16 gradients pile up.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class MasterAdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101), decoupled weight decay on matrices only.

    Args:
        named_parameters: of the model; names key the saved state.
        learning_rate, weight_decay, betas, eps: as torch.optim.AdamW.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        learning_rate: float,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ):
        self.parameters = dict(named_parameters)
        self.masters = {name: self._make_master(parameter) for name, parameter in self.parameters.items()}
        groups = [
            {"params": [m for m in self.masters.values() if m.ndim >= 2], "weight_decay": weight_decay},
            {"params": [m for m in self.masters.values() if m.ndim < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=True)

    @staticmethod
    def _make_master(parameter: nn.Parameter) -> Tensor:
        if parameter.dtype == torch.float32:
            return parameter
        master = parameter.detach().float().requires_grad_()

        def move_gradient(parameter: Tensor) -> None:
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(move_gradient)
        return master

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before that."""
        norm = nn.utils.clip_grad_norm_(self.masters.values(), max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the masters from their gradients, round them into the parameters, and drop the gradients."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """References to the state, by parameter name: master, exp_avg, exp_avg_sq and step, all float32.

        Loading in place (torch.distributed.checkpoint does) restores it; then call `restore_parameters`.
        """
        state: dict[str, dict[str, Tensor]] = {}
        for name, master in self.masters.items():
            moments = self.adamw.state[master]
            if not moments:  # before the first step: what torch's AdamW would create in it
                moments["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
                moments["exp_avg"], moments["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
            state[name] = {"master": master.detach(), **moments}
        return state

    @torch.no_grad()
    def restore_parameters(self) -> None:
        """Round the masters into the parameters, after the state was loaded."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.masters[name])


def warmup_cosine(step: int, *, learning_rate: float, warmup_steps: int, max_steps: int, final_ratio: float) -> float:
    """Learning rate of step 0 .. max_steps-1: linear warm-up, then a cosine down to `final_ratio` of the peak."""
    if step < warmup_steps:
        return learning_rate * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, max_steps - 1 - warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return learning_rate * (final_ratio + (1 - final_ratio) * cosine)
