import pytest
import torch

from kernels.experts import expert_mlp, expert_mlp_reference, load_balancing_loss, route, tokens_per_expert
from tests.kernels.compare import outputs_and_gradients, random

qwen = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")


def config(E=6, k=3, D=16, I=8, normalize=True):
    return qwen.Qwen3MoeConfig(
        num_experts=E, num_experts_per_tok=k, hidden_size=D, moe_intermediate_size=I, norm_topk_prob=normalize
    )


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routes_as_transformers(dtype, normalize, device):
    router = qwen.Qwen3MoeTopKRouter(config(normalize=normalize)).to(device, dtype)
    router.weight.data.normal_()
    for N in (1, 3, 127):
        x = random(N, 16, dtype=dtype, device=device)
        logits, weights, experts = router(x)
        choice = route(logits, 3, normalize=normalize)
        assert torch.equal(choice.weights, weights) and choice.weights.dtype == dtype
        assert choice.experts.dtype == torch.int32 and torch.equal(choice.experts.long(), experts)
        arriving = random(N, 3, seed=1, dtype=dtype, device=device)
        ours, theirs = (torch.autograd.grad(w, router.weight, arriving, True) for w in (choice.weights, weights))
        assert torch.equal(*ours, *theirs)


def test_a_choice_that_was_made_is_taken(device):
    logits = random(9, 6, device=device).requires_grad_()
    experts = torch.stack([torch.randperm(6)[:2] for _ in range(9)]).to(device)
    choice = route(logits, 2, normalize=False, experts=experts)
    assert choice.experts is experts
    assert torch.equal(choice.weights, logits.softmax(-1).gather(1, experts))
    made = route(logits, 2, normalize=True)
    again = route(logits, 2, normalize=True, experts=made.experts)
    assert torch.equal(made.weights, again.weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_balancing_loss_is_transformers(dtype, device):
    layers = tuple(random(N, 6, seed=N, dtype=dtype, device=device).requires_grad_() for N in (50, 50, 50))
    theirs = qwen.load_balancing_loss_func(layers, 6, 2)
    ours = load_balancing_loss(layers, 2)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(ours, load_balancing_loss(torch.stack(layers), 2))
    for a, b in zip(*(torch.autograd.grad(loss, layers) for loss in (ours, theirs))):
        torch.testing.assert_close(a, b)


def test_counts(device):
    experts = torch.tensor([[0, 5], [5, 3], [3, 5]], device=device)
    assert tokens_per_expert(experts, 7).tolist() == [1, 0, 0, 2, 0, 3, 0]
    assert not tokens_per_expert(experts[:0], 7).any()


def inputs(N, E, k, D, I, dtype=torch.float32):
    """Returns x, weights of the experts, and the router's weights; and experts, the last of E without tokens."""
    tensors = [random(N, D), D**-0.5 * random(E, 2 * I, D, seed=1), I**-0.5 * random(E, D, I, seed=2)]
    experts = random(N, E - 1, seed=3).topk(k).indices
    return [t.to(dtype) for t in (*tensors, random(N, k, seed=4).softmax(-1))], experts


def test_the_block_is_transformers(device):
    block = qwen.Qwen3MoeSparseMoeBlock(config()).to(device)
    for i, parameter in enumerate(block.parameters()):
        parameter.data.copy_(0.3 * random(*parameter.shape, seed=i))
    x, weights = random(1, 40, 16), [*block.parameters()]
    gate_up, down = block.experts.gate_up_proj, block.experts.down_proj
    choice = route(x[0] @ block.gate.weight.T, 3, normalize=True)
    ours, theirs = expert_mlp(x[0], gate_up, down, *choice), block(x)[0]
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), weights) for y in (ours, theirs))):
        torch.testing.assert_close(a, b)


def test_reference_in_float64_is_a_loop_over_tokens(device):
    (x, gate_up, down, weights), experts = inputs(7, 4, 2, 5, 3, torch.float64)
    rows = []
    for n in range(7):
        total = torch.zeros(5, dtype=x.dtype, device=device)
        for e, w in zip(experts[n], weights[n]):
            gate, up = (gate_up[e] @ x[n]).chunk(2)
            total = total + w * (down[e] @ (torch.nn.functional.silu(gate) * up))
        rows.append(total)
    y, *gradients = outputs_and_gradients(
        lambda *t: expert_mlp_reference(*t[:3], experts, t[3]), [x, gate_up, down, weights]
    )
    torch.testing.assert_close(y, torch.stack(rows))
    assert not gradients[1][3].any() and not gradients[2][3].any()  # an expert without tokens
