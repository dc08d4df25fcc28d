import math

import pytest
import torch
from torch import nn

from training.optimizer import MasterAdamW, warmup_cosine


def make_parameters(dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (8, 16), "norm.weight": (16,)}
    return {n: nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for n, s in shapes.items()}


def backward(parameters, seed):
    """A loss whose gradients are known: random numbers in the parameters' dtype, returned by name."""
    generator = torch.Generator().manual_seed(seed)
    gradients = {n: torch.randn(p.shape, generator=generator).to(p) for n, p in parameters.items()}
    sum((p * gradients[n]).sum() for n, p in parameters.items()).backward()
    return gradients


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_adamw_in_float64_over_micro_batches(dtype):
    """The update of Loshchilov and Hutter, algorithm 2, written out."""
    parameters = make_parameters(dtype)
    optimizer = MasterAdamW(parameters.items(), learning_rate=1e-2, weight_decay=0.1)
    expected = {n: p.detach().double() for n, p in parameters.items()}
    m, v = ({n: torch.zeros_like(e) for n, e in expected.items()} for _ in range(2))
    for step in range(1, 6):
        gradients = [backward(parameters, seed=10 * step + micro) for micro in range(3)]
        optimizer.step(1e-2)
        for n in expected:
            g = sum(gradient[n].double() for gradient in gradients)
            expected[n] *= 1 - 1e-2 * (0.1 if n == "matrix" else 0.0)
            m[n] = 0.9 * m[n] + 0.1 * g
            v[n] = 0.95 * v[n] + 0.05 * g**2
            expected[n] -= 1e-2 * (m[n] / (1 - 0.9**step)) / ((v[n] / (1 - 0.95**step)).sqrt() + 1e-8)
    for n, master in optimizer.masters.items():
        torch.testing.assert_close(master.detach().double(), expected[n], rtol=1e-5, atol=1e-6)
        assert torch.equal(parameters[n], master.to(dtype)) and parameters[n].grad is None


def test_gradients_of_bf16_parameters_accumulate_in_float32_and_are_freed():
    parameters = make_parameters(torch.bfloat16)
    optimizer = MasterAdamW(parameters.items(), learning_rate=1e-2)
    total = {n: torch.zeros(p.shape) for n, p in parameters.items()}
    for seed in range(64):  # 64 sums would lose bits in bf16
        for n, gradient in backward(parameters, seed).items():
            total[n] += gradient.float()
    for n, parameter in parameters.items():
        assert parameter.grad is None
        assert torch.equal(optimizer.masters[n].grad, total[n])


def test_clipping_is_by_the_global_norm():
    parameters = make_parameters(torch.bfloat16)
    optimizer = MasterAdamW(parameters.items(), learning_rate=1e-2)
    gradients = backward(parameters, 0)
    norm = math.sqrt(sum(g.double().square().sum() for g in gradients.values()))
    assert optimizer.clip_grad_norm(1.0) == pytest.approx(norm, rel=1e-5)
    clipped = math.sqrt(sum(m.grad.double().square().sum() for m in optimizer.masters.values()))
    assert clipped == pytest.approx(1.0, rel=1e-4)
    assert optimizer.clip_grad_norm(100.0) == pytest.approx(clipped, rel=1e-5)
    unclipped = math.sqrt(sum(m.grad.double().square().sum() for m in optimizer.masters.values()))
    assert unclipped == pytest.approx(clipped, rel=1e-5)


def test_state_restores_the_optimizer_exactly():
    parameters, restored = make_parameters(torch.bfloat16), make_parameters(torch.bfloat16)
    optimizer = MasterAdamW(parameters.items(), learning_rate=1e-2)
    other = MasterAdamW(restored.items(), learning_rate=1e-2)
    backward(parameters, 0)
    optimizer.step(1e-2)
    for name, tensors in other.state_dict().items():
        for key, tensor in tensors.items():
            tensor.copy_(optimizer.state_dict()[name][key])
    other.restore_parameters()
    for both in (parameters, restored):
        backward(both, 1)
    optimizer.step(1e-2)
    other.step(1e-2)
    for n in parameters:
        assert torch.equal(optimizer.masters[n], other.masters[n]) and torch.equal(parameters[n], restored[n])


def test_learning_rate_schedule():
    rates = [warmup_cosine(s, learning_rate=1.0, warmup_steps=4, max_steps=11, final_ratio=0.1) for s in range(11)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[-1] == pytest.approx(0.1) and rates == [*rates[:4], *sorted(rates[4:], reverse=True)]
    assert rates[7] == pytest.approx(0.1 + 0.9 * 0.5)
    assert warmup_cosine(0, learning_rate=1.0, warmup_steps=0, max_steps=1, final_ratio=0.1) == 1.0
