import functools
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kernels.experts import expert_mlp, expert_mlp_reference, products, route, tokens_per_expert
from kernels.experts.balance import Routing
from kernels.parts import Adapted
from tests.kernels.ahead_of_time import KernelToCompile
from tests.kernels.compare import (
    compare_with_float64,
    outputs_and_gradients,
    random,
    requested_peak,
)
from tests.storage_counter import StorageCounter

_SIZES = {"K": 8, "D": 2048, "F": 768}  # Qwen3-30B-A3B's
_TYPES = dict.fromkeys(
    ("x_ptr", "dy_ptr", "tokens_ptr", "rows_ptr", "weights_ptr", "out_ptr"), "*bf16"
)
_TYPES |= dict.fromkeys(("kept_ptr", "d_kept_ptr", "hidden_ptr"), "*bf16")
_TYPES |= dict.fromkeys(("order_ptr", "offsets_ptr", "tiles_ptr", "count_ptr"), "*i32") | {
    "d_weights_ptr": "*fp32"
}


# Products that a rank compiles nothing new for: rank 0 has no adapters; ranks 16 and 80 add the
# same branch to a product, a step of 16 and three of 32.
_LEFT_OUT = {0: ["narrow"], 16: ["d_gate_up", "d_hidden", "dx"], 80: ["d_gate_up", "down"]}


def kernels_to_compile():
    """Yields every kernel at the 30B's sizes, in tiles for Hopper and for older GPUs, without and
    with adapters."""
    for (tiles, gpu), rank in itertools.product(
        ((products.HOPPER, 90), (products.OLDER, 80)), _LEFT_OUT
    ):
        for product, kernel, constants in (
            (
                "gate_up",
                "_gate_up_kernel",
                _SIZES if rank < 64 else {"K": 2, "D": 40, "F": 24},
            ),  # one step of depth
            ("d_hidden", "_d_hidden_kernel", _SIZES),
            ("down", "_project_kernel", {"INTO": 768, "OUT_OF": 2048, "TRANSPOSED": False}),
            ("dx", "_project_kernel", {"INTO": 1536, "OUT_OF": 2048, "TRANSPOSED": True}),
            ("narrow", "_narrow_kernel", {"K": 8, "D": 2048, "WIDTH": rank}),
            (
                "d_down",
                "_d_weight_kernel",
                {"K": 8, "D": 2048, "WIDTH": rank or 768, "TRANSPOSED": False, "ADD": False},
            ),
            (
                "d_gate_up",
                "_d_weight_kernel",
                {"K": 8, "D": 2048, "WIDTH": 1536, "TRANSPOSED": True, "ADD": False},
            ),
        ):
            if product in _LEFT_OUT[rank]:
                continue
            tile = products.fitted(tiles[product], constants.get("WIDTH", 256))
            straight, turned, rows = (
                f"tensordesc<bf16[{a}, {b}]>"
                for a, b in (
                    (tile.columns, tile.depth),
                    (tile.depth, tile.columns),
                    (128, tile.depth),
                )
            )
            is_turned = constants.get("TRANSPOSED") or kernel == "_d_hidden_kernel"
            described = {
                "gate_up_d": straight,
                "down_d": turned,
                "weight_d": turned if is_turned else straight,
            }
            described["rows_d"] = rows if kernel == "_project_kernel" else turned
            sizes = {"ROWS": 128, "COLUMNS": tile.columns, "DEPTH": tile.depth}
            if product in ("gate_up", "d_hidden", "down", "dx"):
                step = min(products.RANK_DEPTH, max(16, rank))
                block = (step, tile.columns) if is_turned else (tile.columns, step)
                low = {
                    "low_d": f"tensordesc<bf16[128, {step}]>",
                    "factor_d": f"tensordesc<bf16[{block[0]}, {block[1]}]>",
                }
                described |= low if rank else {}
                sizes |= {"RANK": rank, "STEP": step} | ({} if rank else dict.fromkeys(low))
            sizes |= {} if kernel == "_d_weight_kernel" else {"PERSISTENT": tile.persistent}
            yield KernelToCompile(
                f"products.{kernel}",
                _TYPES | described,
                constants | sizes,
                tile.warps,
                tile.stages,
                gpu,
                gpu,
            )
    yield KernelToCompile("products._sum_kernel", _TYPES, {"K": 8, "D": 2048, "BLOCK_D": 1024})


KERNELS_TO_COMPILE = [*kernels_to_compile()]


@pytest.fixture
def qwen():
    return pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")


def config(qwen, E=6, k=3, D=16, I=8, normalize=True):
    return qwen.Qwen3MoeConfig(
        num_experts=E,
        num_experts_per_tok=k,
        hidden_size=D,
        moe_intermediate_size=I,
        norm_topk_prob=normalize,
    )


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 2, 3, 6])
def test_routes_as_transformers(top_k, dtype, normalize, device, qwen):
    router = qwen.Qwen3MoeTopKRouter(config(qwen, k=top_k, normalize=normalize)).to(device, dtype)
    router.weight.data.normal_()
    for N in (1, 3, 127):
        x = random(N, 16, dtype=dtype, device=device)
        logits, weights, experts = router(x)
        choice = route(logits, top_k, normalize=normalize)
        assert torch.equal(choice.weights, weights) and choice.weights.dtype == dtype
        assert choice.experts.dtype == torch.int32 and torch.equal(choice.experts.long(), experts)
        arriving = random(N, top_k, seed=1, dtype=dtype, device=device)
        ours, theirs = (
            torch.autograd.grad(w, router.weight, arriving, True) for w in (choice.weights, weights)
        )
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


def test_the_auxiliary_loss_is_transformers(device, qwen):
    layers = tuple(random(50, 6, seed=seed, device=device).requires_grad_() for seed in range(3))
    theirs, routing = qwen.load_balancing_loss_func(layers, 6, 2), Routing(1.0)
    total = sum(routing.balanced(logits).sum() for logits in layers) * 0
    for layer, logits in enumerate(layers):
        routing.note(layer, logits, route(logits, 2, normalize=True).experts)
    ours, load, auxiliary = routing.finish(total, 1.0, None)
    torch.testing.assert_close((ours, auxiliary), (theirs, theirs.detach()))
    assert load.sum(1).tolist() == [100] * 3
    for a, b in zip(*(torch.autograd.grad(loss, layers) for loss in (ours, theirs))):
        torch.testing.assert_close(a, b)


def test_counts(device):
    experts = torch.tensor([[0, 5], [5, 3], [3, 5]], device=device)
    assert tokens_per_expert(experts, 7).tolist() == [1, 0, 0, 2, 0, 3, 0]
    assert not tokens_per_expert(experts[:0], 7).any()


@pytest.fixture
def small_tiles(monkeypatch):
    """Has many tiles in few rows, in the interpreter. A GPU has its own tiles."""
    if torch.cuda.is_available():
        return
    monkeypatch.setattr(products, "rows_of", lambda x: 16)
    for tiles in (products.HOPPER, products.EXACT):
        for product, persistent in zip([*tiles], (False, True) * 4):
            monkeypatch.setitem(tiles, product, products.Tile(32, 32, 2, 4, persistent))


# Tokens, experts, k, D, F, and which experts tokens go to.
CASES = [
    (1, 1, 1, 8, 8, "any"),
    (1, 5, 3, 16, 8, "any"),
    (3, 4, 2, 5, 3, "any"),  # odd widths
    (37, 3, 1, 24, 40, "last"),
    (19, 4, 2, 40, 24, "not the last"),
    (2, 6, 6, 8, 9, "any"),
]


def inputs(N, E, k, D, width, chosen="not the last", dtype=torch.float32):
    """Returns x, the experts' matrices and the router's weights; and the choice of experts."""
    tensors = [
        random(N, D),
        D**-0.5 * random(E, 2 * width, D, seed=1),
        width**-0.5 * random(E, D, width, seed=2),
    ]
    experts = random(N, E - (chosen == "not the last"), seed=3).topk(k).indices.int()
    if chosen == "last":
        experts = torch.full_like(experts, E - 1)
    return [t.to(dtype) for t in (*tensors, random(N, k, seed=4).softmax(-1))], experts


def call(experts, function=expert_mlp, **options):
    return lambda x, gate_up, down, weights: function(x, gate_up, down, experts, weights, **options)


# Triton's interpreter has no products in bfloat16.
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("tile_size", [None, 1, 12, 100])
def test_matches_float64(tile_size, dtype, device, poisoned_memory, small_tiles):
    for case in CASES if tile_size is None else CASES[4:5] if tile_size > 1 else CASES[2:3]:
        tensors, experts = inputs(*case, dtype)
        ours = call(experts, tile_size=tile_size, impl="triton")
        compare_with_float64(call(experts, expert_mlp_reference), ours, tensors)


def adapted_inputs(rank, *case):
    """Returns x, the matrices' adapters, the router's weights and the matrices; and the choice of
    experts.

    The adapter of gate and up has twice the rank.
    """
    (x, gate_up, down, weights), experts = inputs(*case)
    (E, width, D), F = gate_up.shape, down.shape[2]
    shapes = (E, 2 * rank, D), (E, width, 2 * rank), (E, rank, F), (E, D, rank)
    factors = [
        shape[2] ** -0.5 * random(*shape, seed=5 + i, dtype=x.dtype)
        for i, shape in enumerate(shapes)
    ]
    return [x, *factors, weights, gate_up, down], experts


def call_adapted(experts, function=expert_mlp, **options):
    def run(x, a_in, b_in, a_out, b_out, weights, gate_up, down):
        return function(
            x,
            Adapted(gate_up, a_in, b_in),
            Adapted(down, a_out, b_out),
            experts,
            weights,
            **options,
        )

    return run


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("tile_size", [None, 1, 12])
def test_adapters_match_float64(tile_size, dtype, device, poisoned_memory, small_tiles):
    """Checks outputs and all gradients, those of the matrices as well."""
    cases = [*zip((3, 8, 1, 5, 40, 16), CASES)]
    for rank, case in cases if tile_size is None else cases[4:5] if tile_size > 1 else cases[2:3]:
        tensors, experts = adapted_inputs(rank, *case, dtype)
        ours = call_adapted(experts, tile_size=tile_size, impl="triton")
        compare_with_float64(call_adapted(experts, expert_mlp_reference), ours, tensors, units=1)


@pytest.mark.parametrize("tile_size", [None, 5])
def test_adapters_of_frozen_experts(tile_size, device, small_tiles):
    """Checks that gradients are of x, adapters and weights alone, twice the same bits; and zeros
    without tokens."""
    tensors, experts = adapted_inputs(4, 9, 4, 2, 16, 8)
    found = []
    for impl in ("torch", "triton", "triton"):
        leaves = [t.clone().requires_grad_(i < 6) for i, t in enumerate(tensors)]
        call_adapted(experts, impl=impl, tile_size=tile_size)(*leaves).square().sum().backward()
        found.append([t.grad for t in leaves])
    for exact, *ours in zip(*found):
        assert (exact is None) == (ours[0] is None)
        if exact is not None:
            torch.testing.assert_close(ours[0], exact, rtol=1e-4, atol=1e-5)
            assert torch.equal(*ours)
    assert not any(gradient[3].any() for gradient in found[1][1:5]) and found[1][-1] is None


def test_adapters_add_their_product_to_the_matrices(device):
    """Checks against matrices with the adapters added."""
    (x, a_in, b_in, a_out, b_out, weights, gate_up, down), experts = adapted_inputs(
        3, 19, 4, 2, 40, 24
    )
    y = call_adapted(experts)(x, a_in, b_in, a_out, b_out, weights, gate_up, down)
    torch.testing.assert_close(
        y, expert_mlp(x, gate_up + b_in @ a_in, down + b_out @ a_out, experts, weights)
    )
    with pytest.raises(
        ValueError, match=r"adapters of experts must be \[\[4, 6, 40\], .*got \[4, 6, 40\]"
    ):
        expert_mlp(x, Adapted(gate_up, a_in, b_in), down, experts, weights)


def test_experts_without_tokens_get_zeros(device, poisoned_memory, small_tiles):
    for chosen, without in (("last", [0, 1, 2]), ("not the last", [3])):
        tensors, experts = inputs(9, 4, 2, 16, 8, chosen)
        for tile_size in (None, 5):
            _, _, *found, _ = outputs_and_gradients(
                call(experts, tile_size=tile_size, impl="triton"), tensors
            )
            for gradient in found:
                assert not gradient[without].any() and gradient[-1 if chosen == "last" else 0].any()


def test_order_of_experts_does_not_matter(device, small_tiles):
    (x, gate_up, down, weights), experts = inputs(19, 5, 3, 16, 24)
    order = torch.tensor([3, 0, 4, 2, 1], device=device)  # new expert i is the old order[i]
    y = expert_mlp(x, gate_up, down, experts, weights, impl="triton")
    other = expert_mlp(
        x, gate_up[order], down[order], order.argsort()[experts.long()], weights, impl="triton"
    )
    assert torch.equal(y, other)


def test_two_runs_are_bitwise_equal(device, small_tiles):
    tensors, experts = inputs(19, 4, 2, 16, 24)
    for tile_size in (None, 12):
        run = functools.partial(
            outputs_and_gradients, call(experts, tile_size=tile_size, impl="triton"), tensors
        )
        assert all(map(torch.equal, run(), run()))


def test_second_backward_is_the_first(device, small_tiles):
    tensors, experts = inputs(9, 4, 2, 16, 24)
    leaves = [t.requires_grad_() for t in tensors]
    loss = call(experts, impl="triton")(*leaves).square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, leaves)))


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (3,), (0, 2)])
def test_only_the_gradients_asked_for(needed, device):
    tensors, experts = inputs(7, 2, 1, 8, 8)
    gradients = []
    for impl, tile_size in (("torch", None), ("triton", None), ("triton", 5)):
        leaves = [t.clone().requires_grad_(i in needed) for i, t in enumerate(tensors)]
        call(experts, impl=impl, tile_size=tile_size)(*leaves).square().sum().backward()
        gradients.append([t.grad for t in leaves])
    for plain, *ours in zip(*gradients):
        for found in ours:
            assert (plain is None) == (found is None)
            if found is not None:
                torch.testing.assert_close(found, plain)


@pytest.mark.gpu
def test_weight_gradients_do_not_lose_small_tiles(device):
    """Sums 600 tiles of one token, all terms of one sign. A bfloat16 sum would stop growing at 256
    terms."""
    (x, gate_up, down, weights), experts = inputs(600, 1, 1, 8, 8, "any", torch.bfloat16)
    tensors, gradients = [t.abs() for t in (x, gate_up, down, weights)], []
    for function, dtype in (
        (call(experts, expert_mlp_reference), torch.float64),
        (call(experts, tile_size=1), None),
    ):
        leaves = [t.to(dtype or t.dtype).requires_grad_() for t in tensors]
        y = function(*leaves)
        gradients.append(torch.autograd.grad(y, leaves[1:3], torch.ones_like(y)))
    for exact, ours in zip(*gradients):
        assert ((ours.double() - exact).abs() <= 0.02 * exact).all()


@pytest.mark.parametrize("tile_size", [None, 5])
def test_under_compile_and_checkpoint(tile_size, device):
    tensors, experts = inputs(7, 2, 1, 8, 8)
    function = call(experts, tile_size=tile_size, skippable=True, impl="triton")
    plain = outputs_and_gradients(function, tensors)
    for wrapped in (
        lambda *t: checkpoint(function, *t, use_reentrant=False),
        torch.compile(function, fullgraph=True, backend="aot_eager"),
    ):
        for a, b in zip(plain, outputs_and_gradients(wrapped, tensors)):
            torch.testing.assert_close(a, b)


def test_under_autocast(device):
    tensors, experts = inputs(9, 4, 2, 16, 24)
    with torch.autocast(device.type, torch.bfloat16):
        y, *gradients = outputs_and_gradients(call(experts), tensors)
    assert y.dtype == torch.bfloat16 and all(g.dtype == torch.float32 for g in gradients)
    plain = outputs_and_gradients(call(experts, impl="torch"), tensors)
    for a, b in zip([y.float(), *gradients], plain):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_custom_ops(device):
    tensors, experts = inputs(3, 2, 1, 8, 8)
    x, gate_up, down, weights = (t.requires_grad_() for t in tensors)
    tiled = torch.ops.fathom.tiled_expert_mlp
    torch.library.opcheck(tiled, (x, gate_up, down, experts, weights, 9, *4 * [None]))
    (x, *factors, weights, gate_up, down), experts = adapted_inputs(8, 3, 2, 1, 8, 8)
    factors = [t.requires_grad_() for t in factors]
    torch.library.opcheck(tiled, (x.requires_grad_(), gate_up, down, experts, weights, 9, *factors))
    torch.library.opcheck(torch.ops.fathom.choose_experts, (x.detach(), 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_up": torch.ones(4, 47, 16)}, r"\[4, 47, 16\]"),
        ({"down": torch.ones(4, 16, 24).half()}, "float16"),
        ({"experts": torch.zeros(9, 3, dtype=torch.int32)}, r"\[9, 3\]"),
        ({"experts": torch.zeros(9, 2)}, "float32"),
        ({"tile_size": 0}, "got 0"),
    ],
)
def test_refused(change, message):
    (x, gate_up, down, weights), experts = inputs(9, 4, 2, 16, 24)
    arguments = {"x": x, "gate_up": gate_up, "down": down, "experts": experts, "weights": weights}
    with pytest.raises(ValueError, match=message):
        expert_mlp(**arguments | change)


def test_top_k_is_refused_above_the_experts():
    with pytest.raises(ValueError, match="1 to 6 experts, got 7"):
        route(torch.ones(3, 6), 7, normalize=True)


def bytes_on_meta(tile_size, N=4096, E=16, k=4, D=512, width=256):
    """Returns the peaks of forward and of forward and backward, as a dry run on the meta device
    sees them."""
    with StorageCounter() as counter, torch.device("meta"):
        shapes = (N, D), (E, 2 * width, D), (E, D, width), (N, k)
        leaves = [torch.empty(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
        experts = torch.empty(N, k, dtype=torch.int32)
        before = counter.read().allocated
        y = call(experts, tile_size=tile_size)(*leaves)
        forward = counter.read().peak - before
        torch.autograd.grad(y, leaves, torch.empty_like(y))
        return forward, counter.read().peak - before


def test_a_dry_run_sees_the_workspace():
    rows, pair, hidden = (2 * 4096 * 4 * width for width in (512, 512, 256))
    for tile_size, kept, tiles in ((None, pair, 1), (4096, 0, 1), (1024, 0, 4)):
        forward, both = bytes_on_meta(tile_size)
        y, matrices, tables = 2 * 4096 * 512, 2 * 16 * 3 * 512 * 256, 32 * 4096 * 4
        assert (
            y + kept + (rows + hidden) // tiles
            <= forward
            <= y + kept + (rows + hidden + tables) // tiles
        )
        sums = 4 * 16 * 3 * 512 * 256 if tiles > 1 else matrices
        least = 3 * y + kept + (pair + rows) // tiles + sums  # y, dy and dx
        assert least <= both <= least + tables + (matrices if tiles > 1 else 0)


def test_the_gradient_of_weights_leaves_nothing_beside_the_rows_of_dx():
    """Of each entry only its gradient in bf16 and its int32 place are there, not the float32 sum."""
    N, k, D, width, E = 4096, 4, 512, 256, 16
    rows, matrices = 2 * N * k * (2 * width + D), 2 * E * 3 * D * width
    _, both = bytes_on_meta(N)
    assert both - (3 * 2 * N * D + rows + matrices) < (2 + 4 + 1) * N * k


@pytest.mark.gpu
@pytest.mark.parametrize("tile_size", [None, 4096, 1024])
def test_a_gpu_takes_the_bytes_of_a_dry_run(tile_size, device):
    tensors, experts = inputs(4096, 16, 4, 512, 256, dtype=torch.bfloat16)
    leaves = [t.requires_grad_() for t in tensors]

    def run():
        y = call(experts, tile_size=tile_size)(*leaves)
        return torch.autograd.grad(y, leaves, torch.empty_like(y))

    run()
    _, peak = requested_peak(run)
    assert peak == pytest.approx(bytes_on_meta(tile_size)[1], rel=0.05)


@pytest.mark.gpu
def test_never_waits_for_the_gpu(device):
    (tensors, _), logits = inputs(300, 16, 4, 64, 128, dtype=torch.bfloat16), random(300, 16)
    leaves = [t.requires_grad_() for t in tensors]
    for mode in ("default", "error"):  # compiles in the first round
        torch.cuda.set_sync_debug_mode(mode)
        try:
            choice = route(logits, 4, normalize=True)
            tokens_per_expert(choice.experts, 16)
            call(choice.experts, tile_size=128)(*leaves).backward(torch.ones_like(leaves[0]))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_qwen_30b_matches_float64(device):
    for chosen in ("any", "not the last", "last"):
        tensors, experts = inputs(
            2048, 8, 1 if chosen == "last" else 4, 2048, 768, chosen, torch.bfloat16
        )
        compare_with_float64(call(experts, expert_mlp_reference), call(experts), tensors)


@pytest.mark.gpu(gib=16)
def test_past_2_to_the_31_elements(device):
    """Gate and up of 180,000 tokens, k 8, are 2.2e9 elements. The first and the last tokens are as
    alone."""
    N, E, k, D, width = 180_000, 16, 8, 256, 768
    tensors, experts = inputs(N, E, k, D, width, "any", torch.bfloat16)
    assert N * k * 2 * width > 2**31
    leaves = [t.requires_grad_() for t in tensors]
    y = call(experts)(*leaves)
    dx, d_weights = torch.autograd.grad(y, (leaves[0], leaves[3]), y.detach())
    for part in (slice(0, 64), slice(N - 64, N)):
        own = [t.detach()[part].requires_grad_() for t in (leaves[0], leaves[3])]
        y_alone = expert_mlp(own[0], *leaves[1:3], experts[part], own[1])
        alone = y_alone, *torch.autograd.grad(y_alone, own, y.detach()[part])
        for ours, expected in zip((y[part], dx[part], d_weights[part]), alone):
            torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)


def test_the_block_is_transformers(device, qwen):
    block = qwen.Qwen3MoeSparseMoeBlock(config(qwen)).to(device)
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
    (x, gate_up, down, weights), experts = inputs(7, 4, 2, 5, 3, dtype=torch.float64)
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
