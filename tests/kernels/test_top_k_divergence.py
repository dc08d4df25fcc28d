"""Divergence from a teacher's likeliest words against PyTorch in float64: odd sizes, weights,
chunks, sure teachers."""

import pytest
import torch

from kernels.top_k_divergence import top_k_divergence, top_k_divergence_reference


def inputs(device, k=5, dtype=torch.float32, vocab=131, tokens=7):
    torch.manual_seed(0)
    x, weight = torch.randn(2, tokens, 24).to(dtype), (0.3 * torch.randn(vocab, 24)).to(dtype)
    log_p, ids = (3 * torch.randn(2, tokens, vocab)).log_softmax(-1).topk(k)
    log_p[0, 2, 0], log_p[0, 2, 1:] = 0.0, -60.0  # nothing is left for the bucket
    target = ids[..., 0].clone()
    target[0, 1] = target[1, 3] = -100
    return [each.to(device) for each in (x, weight, target, ids, log_p, torch.randn(2, tokens))]


def run(function, x, weight, target, ids, log_p, **options):
    leaves = [each.detach().clone().requires_grad_() for each in (x, weight)]
    loss = function(leaves[0] * 1, leaves[1], target, ids, log_p, **options)
    loss = loss if isinstance(loss, torch.Tensor) else loss.loss
    return [loss.detach().double(), *(g.double() for g in torch.autograd.grad(3 * loss, leaves))]


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"denominator": 5.0, "weights": True}, {"k": 1}, {"k": 131}]
)
def test_loss_and_gradients_are_as_exact_as_pytorch(device, dtype, options, impl):
    x, weight, target, ids, log_p, weights = inputs(device, options.get("k", 5), dtype)
    known = {
        "denominator": options.get("denominator"),
        "weights": weights if "weights" in options else None,
    }
    in_float64 = {
        name: v.double() if isinstance(v, torch.Tensor) else v for name, v in known.items()
    }
    exact = run(
        top_k_divergence_reference,
        x.double(),
        weight.double(),
        target,
        ids,
        log_p.double(),
        **in_float64,
    )
    pytorch = run(top_k_divergence_reference, x, weight, target, ids, log_p, **known)
    ours = run(
        top_k_divergence,
        x,
        weight,
        target,
        ids,
        log_p,
        **known,
        chunk_size=4,
        impl=impl,
        num_valid_tokens=12,
    )
    slack = 1e-5 if dtype == torch.float32 else 3e-2 if impl == "triton" else 0
    for found, theirs, wanted in zip(ours, pytorch, exact):
        errors = [
            float((each - wanted).norm().detach() / wanted.norm().detach())
            for each in (found, theirs)
        ]
        assert errors[0] <= 3 * errors[1] + slack


def test_a_student_that_is_its_teacher_has_no_loss_and_no_gradient(device):
    x, weight, target, *_ = inputs(device)
    log_p, ids = (x @ weight.T).log_softmax(-1).topk(9)
    loss, *gradients = run(top_k_divergence, x, weight, target, ids, log_p)
    assert abs(loss) < 1e-6 and all(g.abs().max() < 1e-6 for g in gradients)


def test_a_label_that_is_ignored_everywhere_costs_nothing(device):
    x, weight, target, ids, log_p, _ = inputs(device)
    found = run(top_k_divergence, x, weight, torch.full_like(target, -100), ids, log_p)
    assert all((each == 0).all() for each in found)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [49155, 151936])
def test_real_vocabularies_without_a_wait_for_the_gpu(device, vocab):
    x, weight, target, ids, log_p, _ = inputs(device, 16, torch.bfloat16, vocab, 300)
    exact = run(
        top_k_divergence_reference, x.double(), weight.double(), target, ids, log_p.double()
    )
    pytorch = run(top_k_divergence_reference, x, weight, target, ids, log_p)
    known = {"chunk_size": 256, "num_valid_tokens": 598, "denominator": 598.0}
    run(top_k_divergence, x, weight, target, ids, log_p, **known)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = run(top_k_divergence, x, weight, target, ids, log_p, **known)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for found, theirs, wanted in zip(ours, pytorch, exact):
        assert (found - wanted).norm() <= 3 * (theirs - wanted).norm() + 1e-6 * wanted.norm()
