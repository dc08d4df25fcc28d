import importlib
import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard, distribute_tensor

from kernels.linear import PLAIN, Linear
from kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from tests.kernels.compare import DEVICE, STRIDES, strided
from tests.kernels.test_cross_entropy import weights_of
from tests.ranks import run_ranks

cross_entropy_module = importlib.import_module(
    "kernels.cross_entropy"
)  # the package has the function by this name
module = importlib.import_module(
    "kernels.linear_cross_entropy"
)  # the package has the function by this name

IMPLEMENTATIONS = ("torch", "triton")
# Casts to bf16 round on a GPU and in PyTorch. Triton's interpreter truncates, which doubles the
# error.
GRADIENT_FACTOR = 2 if torch.cuda.is_available() else 3


def _inputs(device, shape=(2, 7), hidden=24, vocab=131, dtype=torch.float32):
    torch.manual_seed(0)
    input = torch.randn(*shape, hidden).to(dtype)
    linear_weight = (0.3 * torch.randn(vocab, hidden)).to(dtype)
    target = torch.randint(vocab, shape)
    target.view(-1)[[1, 4]] = -100
    return input.to(device), linear_weight.to(device), target.to(device)


def _loss_and_gradients(
    function, input, linear_weight, target, d_loss=1.0, linear_bias=None, **options
):
    leaves = [
        t.detach().clone().requires_grad_()
        for t in (input, linear_weight, linear_bias)
        if t is not None
    ]
    if linear_bias is not None:
        options["linear_bias"] = leaves[2]
    loss = function(leaves[0] * 1, leaves[1], target, **options)
    gradients = torch.autograd.grad((loss * d_loss).sum(), leaves)
    return [loss.detach().double(), *(g.double() for g in gradients)]


def _error(actual, exact):
    return float((actual - exact).detach().norm() / exact.norm().clamp(min=1e-30))


def _assert_as_exact_as_pytorch(
    input, linear_weight, target, d_loss=1.0, slack=2e-6, chunk_size=4, **options
):
    of_chunks = {"impl": "triton", "chunk_size": chunk_size}
    of_chunks |= {k: options.pop(k) for k in ("impl", "num_valid_tokens") if k in options}
    in_float64 = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    exact = _loss_and_gradients(
        linear_cross_entropy_reference,
        input.double(),
        linear_weight.double(),
        target,
        d_loss,
        **in_float64,
    )
    pytorch = _loss_and_gradients(
        linear_cross_entropy_reference, input, linear_weight, target, d_loss, **options
    )
    ours = _loss_and_gradients(
        linear_cross_entropy, input, linear_weight, target, d_loss, **options, **of_chunks
    )
    for factor, a, p, e in zip((3, *[GRADIENT_FACTOR] * 3), ours, pytorch, exact):
        assert _error(a, e) <= factor * _error(p, e) + slack


OPTIONS = [
    {}, {"reduction": "sum"}, {"denominator": 17}, {"softcap": 2.0}, {"linear_bias": True},
    {"num_valid_tokens": 12},
    {"ignore_index": 0}, {"linear_bias": True, "softcap": 2.0, "reduction": "none"},
    {"weights": True},
    {"weights": True, "linear_bias": True, "softcap": 2.0, "num_valid_tokens": 12},
]  # fmt: skip


def _bias(linear_weight):
    torch.manual_seed(1)
    return torch.randn(len(linear_weight)).to(linear_weight)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "options"), [
    *((torch.float32, options) for options in OPTIONS),
    *((dtype, {"linear_bias": True, **options}) for dtype in (torch.bfloat16, torch.float16)
      for options in ({}, {"weights": True})),
])  # fmt: skip
def test_every_option_is_as_exact_as_pytorch(device, dtype, options, impl):
    shape = (2, 7) if dtype == torch.float32 else (3, 11)
    input, linear_weight, target = _inputs(device, shape, dtype=dtype)
    if "ignore_index" in options:
        target[target == -100] = 0
    if "linear_bias" in options:
        options = {**options, "linear_bias": _bias(linear_weight)}
    if "weights" in options:
        options = {**options, "weights": weights_of(target)}
    d_loss = 0.7 if dtype == torch.float32 else 1.0
    _assert_as_exact_as_pytorch(input, linear_weight, target, d_loss, impl=impl, **options)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_weights_of_1_change_no_bit_and_cost_no_product(device, impl):
    inputs = _inputs(device, dtype=torch.bfloat16)
    runs = []
    for options in ({}, {"weights": torch.ones(2, 7, device=device), "return_entropy": False}):
        _PRODUCTS.clear()
        options |= {"impl": impl, "chunk_size": 5, "linear": _Counted()}
        runs.append(
            [
                *_loss_and_gradients(linear_cross_entropy, *inputs, **options),
                torch.tensor(_PRODUCTS),
            ]
        )
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_incoming_gradient_of_each_row(device, impl):
    input, linear_weight, target = _inputs(device)
    d_loss = torch.randn(target.shape, device=device)
    _assert_as_exact_as_pytorch(input, linear_weight, target, d_loss, reduction="none", impl=impl)


@pytest.mark.parametrize("ignored", [False, True])
def test_chunk_size_does_not_matter(device, ignored):
    input, linear_weight, target = _inputs(device)
    if not ignored:
        target[target == -100] = 3
    exact = _loss_and_gradients(
        linear_cross_entropy_reference, input.double(), linear_weight.double(), target
    )
    for chunk_size in (1, 3, 5, 12, 14, 4096):
        ours = _loss_and_gradients(
            linear_cross_entropy,
            input.double(),
            linear_weight.double(),
            target,
            chunk_size=chunk_size,
            impl="torch",
        )
        for a, e in zip(ours, exact):
            assert _error(a, e) < 1e-14


def test_head_gradient_accumulates_in_float32_over_chunks(device):
    input, linear_weight, target = _inputs(device, shape=(512,), vocab=17, dtype=torch.bfloat16)
    *_, exact = _loss_and_gradients(
        linear_cross_entropy_reference,
        input.double(),
        linear_weight.double(),
        target,
        reduction="sum",
    )
    *_, whole = _loss_and_gradients(
        linear_cross_entropy, input, linear_weight, target, reduction="sum", impl="torch"
    )
    *_, in_chunks = _loss_and_gradients(
        linear_cross_entropy,
        input,
        linear_weight,
        target,
        reduction="sum",
        impl="torch",
        chunk_size=2,
    )
    assert _error(in_chunks, exact) < 1.1 * _error(whole, exact)


def test_the_scale_of_a_16_bit_gradient_is_not_rounded_to_16_bits(device):
    """Fails on CUDA only, where PyTorch rounds a 0-d factor to the dtype of the other factor."""
    inputs = _inputs(device, shape=(200,), dtype=torch.bfloat16)
    _, unscaled, _ = _loss_and_gradients(
        linear_cross_entropy, *inputs, reduction="sum", impl="torch"
    )
    scale = 1.41015  # half-way between two bf16 numbers: off by 2.8e-3 if rounded
    _, scaled, _ = _loss_and_gradients(
        linear_cross_entropy, *inputs, denominator=1 / scale, impl="torch"
    )
    ratio = (scaled * unscaled).sum() / unscaled.square().sum()
    assert abs(ratio / scale - 1) < 5e-4


def test_micro_batches_over_a_common_denominator_add_up(device):
    input, linear_weight, target = _inputs(device, shape=(8, 5))
    whole = _loss_and_gradients(linear_cross_entropy, input, linear_weight, target, impl="triton")
    denominator = (target != -100).sum()
    parts = [
        _loss_and_gradients(
            linear_cross_entropy, input[i : i + 2], linear_weight, target[i : i + 2],
            denominator=denominator, impl="triton", chunk_size=4,
        )
        for i in range(0, 8, 2)
    ]  # fmt: skip
    loss, d_inputs, d_weights = zip(*parts)
    torch.testing.assert_close(sum(loss), whole[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.cat(d_inputs), whole[1], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(sum(d_weights), whole[2], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_valid_tokens", [None, 0])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_all_labels_ignored(device, reduction, num_valid_tokens, impl):
    input, linear_weight, target = _inputs(device)
    loss, *gradients = _loss_and_gradients(
        linear_cross_entropy, input, linear_weight, torch.full_like(target, -100),
        reduction=reduction, num_valid_tokens=num_valid_tokens, impl=impl,
    )  # fmt: skip
    assert loss.eq(0).all() and all(g.eq(0).all() for g in gradients)


def test_details(device):
    input, linear_weight, target = _inputs(device)
    options = {"return_details": True, "return_entropy": True, "weights": weights_of(target)}
    expected = linear_cross_entropy_reference(input, linear_weight, target, **options)
    details = linear_cross_entropy(
        input, linear_weight.requires_grad_(), target, chunk_size=4, impl="triton", **options
    )
    for value, wanted in zip(details, expected):
        torch.testing.assert_close(value.detach(), wanted)
    assert (
        details.log_sum_exp.shape == target.shape
        and details.log_sum_exp[target == -100].eq(0).all()
    )
    assert details.entropy[target == -100].eq(0).all()
    assert details.loss.requires_grad and not details.per_token_loss.requires_grad


_PRODUCTS = []  # words and multiply-adds of each product of `_Counted`


@dataclass(frozen=True)
class _Counted(Linear):
    def forward(self, x, weight, *rest, **options):
        _PRODUCTS.append((len(weight), len(x) * weight.numel()))
        return super().forward(x, weight, *rest, **options)

    def input_gradient(self, dy, weight, **options):
        _PRODUCTS.append((dy.shape[1], len(dy) * weight.numel()))
        return super().input_gradient(dy, weight, **options)

    def weight_gradient(self, dy_t, x_t, **options):
        _PRODUCTS.append((len(dy_t), dy_t.numel() * len(x_t)))
        return super().weight_gradient(dy_t, x_t, **options)


@pytest.mark.parametrize(
    "trained, gemms",
    [(("input", "head"), 3), (("input",), 2), (("head",), 2), (("bias",), 1), ((), 1)],
)
def test_what_is_frozen_costs_no_gemm(device, trained, gemms):
    input, linear_weight, target = _inputs(device)
    tensors = {
        "input": input,
        "head": linear_weight,
        "bias": torch.zeros(len(linear_weight), device=device),
    }
    leaves = {name: tensor.requires_grad_(name in trained) for name, tensor in tensors.items()}
    expected = linear_cross_entropy_reference(
        leaves["input"], leaves["head"], target, linear_bias=leaves["bias"]
    )
    _PRODUCTS.clear()
    loss = linear_cross_entropy(
        leaves["input"], leaves["head"], target,
        linear_bias=leaves["bias"], chunk_size=5, linear=_Counted(), impl="torch",
    )  # fmt: skip
    assert loss.requires_grad == bool(trained)
    if trained:
        wanted = torch.autograd.grad(expected, [leaves[name] for name in trained])
        gradients = torch.autograd.grad(loss, [leaves[name] for name in trained])
        torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-6)
    assert (
        sum(count for _, count in _PRODUCTS) == gemms * 12 * linear_weight.numel()
    )  # 12 valid rows


@pytest.mark.parametrize("vocab, words", [(131, [3, 128]), (128, [128]), (7, [7])])
def test_products_take_multiples_of_8_words_and_the_few_that_are_left(device, vocab, words):
    input, linear_weight, target = _inputs(device, vocab=vocab)
    leaves = input.requires_grad_(), linear_weight.requires_grad_()
    _PRODUCTS.clear()
    torch.autograd.grad(
        linear_cross_entropy(*leaves, target, linear=_Counted(), impl="torch"), leaves
    )
    assert [found for found, _ in _PRODUCTS] == 3 * words


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_grad_computes_the_loss_alone(device, reduction):
    input, linear_weight, target = _inputs(device)
    linear_weight.requires_grad_()
    _PRODUCTS.clear()
    with torch.no_grad():
        loss = linear_cross_entropy(
            input, linear_weight, target, reduction=reduction, linear=_Counted(), impl="triton"
        )
    torch.testing.assert_close(
        loss, linear_cross_entropy_reference(input, linear_weight, target, reduction=reduction)
    )
    assert (
        not loss.requires_grad
        and sum(count for _, count in _PRODUCTS) == 12 * linear_weight.numel()
    )


def test_an_ignored_row_is_read_by_no_gemm(device):
    input, linear_weight, target = _inputs(device)
    input[target == -100] = torch.nan
    loss, d_input, d_weight = _loss_and_gradients(
        linear_cross_entropy, input, linear_weight, target, impl="triton"
    )
    assert loss.isfinite() and d_weight.isfinite().all() and d_input[target == -100].eq(0).all()


@pytest.mark.parametrize("num_valid_tokens", [11, 13])
def test_a_wrong_number_of_valid_tokens_is_an_error(num_valid_tokens):
    with pytest.raises(RuntimeError, match="num_valid_tokens"):
        linear_cross_entropy(*_inputs("cpu"), num_valid_tokens=num_valid_tokens)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_may_run_again_on_a_kept_graph(device, reduction, dtype):
    input, linear_weight, target = _inputs(device, dtype=dtype)
    leaves = input.requires_grad_(), linear_weight.requires_grad_()
    loss = linear_cross_entropy(
        *leaves, target, reduction=reduction, impl="torch", chunk_size=4
    ).sum()
    runs = [
        torch.autograd.grad(3 * loss, leaves, retain_graph=keep) for keep in (True, True, False)
    ]
    for again in runs[1:]:
        assert all(a.equal(b) for a, b in zip(runs[0], again))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


def test_second_derivative_is_refused(device):
    input, linear_weight, target = _inputs(device)
    loss = linear_cross_entropy(input, linear_weight.requires_grad_(), target)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, linear_weight, create_graph=True)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("rows", "chunk_size"), [(12, 5), (200, 4096)]
)  # a CPU multiplies many rows in another way
def test_same_bits_every_time_out_of_poisoned_memory(
    device, poisoned_memory, impl, rows, chunk_size
):
    inputs = _inputs(device, shape=(rows,), dtype=torch.bfloat16)
    runs = [
        _loss_and_gradients(linear_cross_entropy, *inputs, chunk_size=chunk_size, impl=impl)
        for _ in range(2)
    ]
    for first, second in zip(*runs):
        assert first.equal(second) and first.isfinite().all()


def test_autocast(device):
    input, linear_weight, target = _inputs(device)
    leaves = [t.clone().requires_grad_() for t in (input, linear_weight)]
    with torch.autocast(device.type, torch.bfloat16):
        loss = linear_cross_entropy(*leaves, target, impl="triton", chunk_size=4)
    gradients = torch.autograd.grad(loss, leaves)
    assert loss.dtype == torch.float32 and all(g.dtype == torch.float32 for g in gradients)
    rounded = [t.bfloat16() for t in (input, linear_weight)]
    expected = _loss_and_gradients(
        linear_cross_entropy, *rounded, target, impl="triton", chunk_size=4
    )
    for value, wanted in zip((loss, *gradients), expected):
        assert value.double().equal(wanted)


@pytest.mark.parametrize(
    ("reduction", "impl"), [("mean", "triton"), ("none", "triton"), ("none", "torch")]
)
def test_compiles_in_one_graph(device, reduction, impl):
    input, linear_weight, target = _inputs(device)

    def loss(x, w):
        return linear_cross_entropy(
            x * 1, w, target, reduction=reduction, chunk_size=4, impl=impl
        ).sum()

    leaves = [t.clone().requires_grad_() for t in (input, linear_weight)]
    backend = "inductor" if device.type == "cuda" else "aot_eager"  # compiles no C++
    compiled = torch.compile(loss, fullgraph=True, backend=backend)(*leaves)
    gradients = torch.autograd.grad(compiled, leaves)
    torch.testing.assert_close(compiled, loss(*leaves))
    torch.testing.assert_close(gradients, torch.autograd.grad(loss(*leaves), leaves))


def test_op_has_the_schema_and_fake_outputs_it_claims(device):
    input, linear_weight, target = _inputs(device)
    rest = (PLAIN.number, 5, 4096, None, -100, None, False)
    weights, one = weights_of(target[0]), torch.ones((), device=device)
    for weighted, *needs in (
        (None, True, True, False, False),
        (weights, False, False, False, True),
    ):
        torch.library.opcheck(
            module._loss_and_gradients,
            (input[0], linear_weight, target[0], None, weighted, one, *needs, *rest),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_noncontiguous_inputs(device):
    input, linear_weight, target = _inputs(device)
    expected = _loss_and_gradients(
        linear_cross_entropy, input, linear_weight, target, impl="triton"
    )
    strided = input.mT.contiguous().mT, linear_weight.T.contiguous().T, target.T.contiguous().T
    assert not any(t.is_contiguous() for t in strided)
    ours = _loss_and_gradients(linear_cross_entropy, *strided, impl="triton")
    torch.testing.assert_close(ours, expected)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    shape=st.sampled_from([(6,), (6, 1), (1, 6), (2, 3)]), of_target=st.sampled_from(STRIDES),
    reduction=st.sampled_from(["mean", "none"]), all_valid=st.booleans(),
    chunk_size=st.sampled_from([4, 4096]),
    impl=st.sampled_from(IMPLEMENTATIONS),
)  # fmt: skip
def test_strides_of_target(shape, of_target, reduction, all_valid, chunk_size, impl):
    target = torch.tensor([2, 0, 1 if all_valid else -100, 3, 1, 4], device=DEVICE).view(shape)
    generator = torch.Generator().manual_seed(0)
    input, linear_weight = (
        torch.randn(*s, 8, generator=generator).to(DEVICE) for s in (shape, (5,))
    )
    options = {"chunk_size": chunk_size, "impl": impl, "reduction": reduction}
    _assert_as_exact_as_pytorch(input, linear_weight, strided(target, of_target), **options)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_triton_runs_once_a_chunk_and_torch_never(device, monkeypatch, impl):
    grids, kernel = [], cross_entropy_module._cross_entropy_kernel

    class Spy:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(cross_entropy_module, "_cross_entropy_kernel", Spy())
    input, linear_weight, target = _inputs(device)
    linear_cross_entropy(input.requires_grad_(), linear_weight, target, chunk_size=5, impl=impl)
    assert grids == ([(5,), (5,), (2,)] if impl == "triton" else [])


@pytest.mark.parametrize("change, message", [
    ({"target": torch.zeros(3, dtype=torch.long)}, "target must be"),
    ({"linear_weight": torch.zeros(131, 23)}, "linear_weight must be"),
    ({"linear_weight": torch.zeros(131, 24, dtype=torch.bfloat16)}, "input's dtype"),
    ({"linear_bias": torch.zeros(130)}, "linear_bias must be"),
    ({"reduction": "average"}, "reduction"),
    ({"num_valid_tokens": 15}, "num_valid_tokens"),
    ({"chunk_size": 0}, "chunk_size"),
    ({"weights": torch.zeros(7)}, "weights must be"),
    ({"weights": torch.zeros(2, 7, dtype=torch.long)}, "weights must be"),
    ({"weights": torch.zeros(2, 7), "reduction": "none"}, "no effect"),
    ({"impl": "cuda"}, "impl"),
])  # fmt: skip
def test_refuses(device, change, message):
    arguments = dict(zip(("input", "linear_weight", "target"), _inputs(device)))
    arguments |= {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments)


REDUCTIONS = [{"reduction": reduction} for reduction in ("none", "mean", "sum")]


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.data())
def test_any_shape_and_options(data):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hidden, vocab, num_tokens = (
        data.draw(st.integers(*limits)) for limits in ((1, 40), (2, 40), (1, 15))
    )
    generator = torch.Generator(device).manual_seed(data.draw(st.integers(0, 2**31)))
    input = torch.randn(num_tokens, hidden, device=device, generator=generator)
    linear_weight = torch.randn(vocab, hidden, device=device, generator=generator)
    target = torch.randint(vocab, (num_tokens,), device=device, generator=generator)
    target[torch.rand(num_tokens, device=device, generator=generator) < 0.2] = -100
    knows = data.draw(st.booleans())
    _assert_as_exact_as_pytorch(
        input, linear_weight, target,
        d_loss=data.draw(st.sampled_from([1.0, -3.0])),
        impl=data.draw(st.sampled_from(IMPLEMENTATIONS)),
        chunk_size=data.draw(st.integers(1, 20)),
        num_valid_tokens=int((target != -100).sum()) if knows else None,
        linear_bias=data.draw(st.sampled_from([None, torch.linspace(-1, 1, vocab, device=device)])),
        **data.draw(st.sampled_from([*REDUCTIONS, {"weights": weights_of(target)}])),
        softcap=data.draw(st.sampled_from([None, 8.0])),
        slack=1e-5,
    )  # fmt: skip


def of_given_logits(input, head, target, linear_bias, **options):
    return cross_entropy_module.cross_entropy(F.linear(input, head, linear_bias), target, **options)


def check_sharded(world, *impls):
    torch.manual_seed(0)
    vocab, hidden = 66, 16
    input, head, bias = (
        torch.randn(3, 5, hidden),
        0.3 * torch.randn(vocab, hidden),
        torch.randn(vocab),
    )
    target, d_loss = torch.randint(vocab, (3, 5)), torch.randn(3, 5)
    target[0, :3] = torch.tensor([-100, 32, 33])  # 32 and 33 are at the edge between the shards
    shard = slice(33 * world.rank, 33 * world.rank + 33)

    def run(function, rows, **options):
        leaves = [t.clone().requires_grad_() for t in (input, head[rows], bias[rows])]
        loss = function(leaves[0], leaves[1], target, linear_bias=leaves[2], **options)
        incoming = d_loss if options.get("reduction") == "none" else 1.0
        return loss.detach(), torch.autograd.grad((incoming * loss).sum(), leaves)

    for impl, options in itertools.product(impls, ({}, {"softcap": 3.0})):
        options = {**options, "linear_bias": None}
        exact = linear_cross_entropy_reference(
            input, head, target, return_entropy=True, **options
        ).entropy
        options |= {"return_entropy": True, "process_group": dist.group.WORLD, "impl": impl}
        for function in (linear_cross_entropy, of_given_logits):
            entropy = function(input, head[shard], target, **options).entropy
            torch.testing.assert_close(entropy, exact, rtol=1e-5, atol=1e-6)

    weighted = {"weights": weights_of(target)}
    for impl, options in itertools.product(
        impls, ({}, {"reduction": "none"}, {"softcap": 3.0}, weighted)
    ):
        loss, (d_input, d_head, d_bias) = run(
            linear_cross_entropy_reference, slice(None), **options
        )
        ours = run(
            linear_cross_entropy,
            shard,
            process_group=dist.group.WORLD,
            chunk_size=4,
            impl=impl,
            **options,
        )
        torch.testing.assert_close(
            ours, (loss, (d_input, d_head[shard], d_bias[shard])), rtol=1e-4, atol=1e-6
        )
        for inplace in (False, True):
            ours = run(
                of_given_logits,
                shard,
                process_group=dist.group.WORLD,
                inplace=inplace,
                impl=impl,
                **options,
            )
            dist.all_reduce(
                ours[1][0]
            )  # each rank has the share of its classes in the input's gradient
            torch.testing.assert_close(
                ours, (loss, (d_input, d_head[shard], d_bias[shard])), rtol=1e-4, atol=1e-6
            )

    # Ranks with different tokens gather a sharded head once, and sum its gradient.
    sharded = distribute_tensor(head, world.fsdp_mesh, [Shard(0)]).requires_grad_()
    own = slice(0, 2) if world.rank == 0 else slice(2, 3)
    denominator = (target != -100).sum()
    linear_cross_entropy(
        input[own], sharded, target[own], denominator=denominator, chunk_size=4
    ).backward()
    whole = head.clone().requires_grad_()
    linear_cross_entropy_reference(input, whole, target).backward()
    assert sharded.grad.placements == (Shard(0),)
    torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad, rtol=1e-4, atol=1e-6)


def test_vocabulary_and_head_sharded_over_two_ranks():
    """Runs on the CPU with gloo. test_cross_entropy.py runs the kernel on shards on a GPU."""
    run_ranks(2, check_sharded, *IMPLEMENTATIONS)


@pytest.mark.gpu(gib=12)
@pytest.mark.parametrize("vocab", [32000, 49155, 50264, 100_278, 128256, 151936])
def test_real_vocabularies(device, vocab):
    input, linear_weight, target = _inputs(
        device, (1500,), hidden=512, vocab=vocab, dtype=torch.bfloat16
    )
    for options in ({}, {"weights": weights_of(target)}):
        _assert_as_exact_as_pytorch(
            input, linear_weight, target, impl="auto", chunk_size=1024, **options
        )
    exact = linear_cross_entropy_reference(
        input.double(), linear_weight.double(), target, return_entropy=True
    )
    pytorch = linear_cross_entropy_reference(input, linear_weight, target, return_entropy=True)
    found = linear_cross_entropy(input, linear_weight, target, return_entropy=True)
    assert _error(found.entropy, exact.entropy) <= 3 * _error(pytorch.entropy, exact.entropy)


@pytest.mark.gpu
def test_no_host_synchronisation_when_the_number_of_valid_tokens_is_known(device):
    input, linear_weight, target = _inputs(device, dtype=torch.bfloat16)
    leaves = input.requires_grad_(), linear_weight.requires_grad_()

    def step(**options):
        torch.autograd.grad(linear_cross_entropy(*leaves, target, chunk_size=4, **options), leaves)

    weights = weights_of(target)
    step(num_valid_tokens=12)  # compiles
    step(num_valid_tokens=12, weights=weights)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(num_valid_tokens=12)
        step(num_valid_tokens=12, denominator=40)
        step(num_valid_tokens=12, weights=weights, return_details=False)
        step(num_valid_tokens=12, denominator=torch.full((), 40, device=device))
        with pytest.raises(RuntimeError, match="synchroniz"):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "num_tokens, gib",
    [
        pytest.param(131_072, 3.3, marks=pytest.mark.gpu(gib=8)),
        pytest.param(1_048_576, 4.0 + 5.0, marks=pytest.mark.gpu(gib=18)),
    ],
)
def test_memory_and_sampled_rows_of_long_contexts(device, num_tokens, gib):
    """The 2^31st element is in row 14,134 of the logits and row 838,860 of the hidden states."""
    hidden, vocab = 2560, 151_936
    input = torch.randn(num_tokens, hidden, dtype=torch.bfloat16, device=device)
    linear_weight = torch.randn(vocab, hidden, dtype=torch.bfloat16, device=device).mul_(0.02)
    target = torch.randint(vocab, (num_tokens,), device=device)
    leaves = input.requires_grad_(), linear_weight.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    details = linear_cross_entropy(
        *leaves, target, reduction="sum", num_valid_tokens=num_tokens, return_details=True
    )
    d_input, _ = torch.autograd.grad(details.loss, leaves)
    assert (torch.cuda.max_memory_allocated() - before) / 2**30 <= gib

    rows = torch.tensor(
        [0, 4095, 4096, 14_133, 14_134, num_tokens // 2, num_tokens - 1], device=device
    )
    x = input.detach()[rows].float().requires_grad_()
    losses = linear_cross_entropy_reference(
        x, linear_weight.detach().float(), target[rows], reduction="none"
    )
    (expected,) = torch.autograd.grad(losses.sum(), x)
    torch.testing.assert_close(details.per_token_loss[rows], losses.detach(), rtol=5e-3, atol=0)
    assert _error(d_input[rows].double(), expected.double()) < 1e-2


def test_on_the_meta_device():
    input, linear_weight, target = (tensor.to("meta") for tensor in _inputs("cpu"))
    loss = linear_cross_entropy(input.requires_grad_(), linear_weight, target)
    loss.backward()
    assert (loss.shape, loss.device.type, input.grad.shape) == ((), "meta", input.shape)


def test_modules_give_the_losses_of_the_functions():
    x, head, target = torch.randn(6, 8), torch.randn(11, 8), torch.tensor([1, 2, 3, 4, 5, 9])
    options = {"reduction": "sum", "ignore_index": 9, "softcap": 5.0}
    fused = module.LinearCrossEntropyLoss(**options, chunk_size=4)
    given = cross_entropy_module.CrossEntropyLoss(**options)
    expected = linear_cross_entropy_reference(x, head, target, **options)
    torch.testing.assert_close(fused(x, head, target), expected)
    torch.testing.assert_close(given(x @ head.T, target), expected)
    with pytest.raises(TypeError, match="smoothing"):
        module.LinearCrossEntropyLoss(smoothing=0.1)
