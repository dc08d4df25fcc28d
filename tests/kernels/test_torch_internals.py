"""Checks that each private part of PyTorch in kernels/ still behaves as kernels/ needs it to."""

import pytest
import torch
import torch.distributed as dist

from kernels import torch_internals
from kernels.attention.full import attention_reference

SIGNATURES = {
    "cudnn_attention": "query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal",
    "cudnn_attention_backward": "grad_out, query, key, value, out, logsumexp, philox_seed, "
    "philox_offset, attn_bias, "
    "cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal",
    "flash_attention": "query, key, value, dropout_p, is_causal",
    "flash_attention_backward": "grad_out, query, key, value, out, logsumexp, cum_seq_q, "
    "cum_seq_k, max_q, max_k, "
    "dropout_p, is_causal, philox_seed, philox_offset",
    "varlen_flash_attention": "query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, "
    "is_causal, "
    "return_debug_mask",
    "varlen_flash_attention_backward": "grad_out, query, key, value, out, logsumexp, cum_seq_q, "
    "cum_seq_k, max_q, "
    "max_k, dropout_p, is_causal, rng_state, unused",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_gpu_attention_takes_its_arguments_in_this_order(name):
    """Checks names alone; tests/kernels/attention/test_full.py checks results on a GPU."""
    operation = getattr(torch_internals, name).default
    names = [argument.name for argument in operation._schema.arguments]
    expected = SIGNATURES[name].split(", ")
    assert names[: len(expected)] == expected
    if not name.endswith("backward"):
        names = [value.name for value in operation._schema.returns[:2]]
        assert names in (["output", "logsumexp"], ["output", "softmax_logsumexp"], ["", ""])


def test_scaled_products_take_a_scale_per_row():
    """Checks the shape alone; tests/kernels/test_fp8.py checks results on a GPU."""
    a, b = (torch.empty(rows, 32, dtype=torch.float8_e4m3fn, device="meta") for rows in (16, 48))
    scales = [torch.empty(rows, 1, device="meta") for rows in (16, 48)]
    product = torch_internals.scaled_mm(
        a, b.t(), scales[0], scales[1].t(), out_dtype=torch.bfloat16, out=None
    )
    assert product.shape == (16, 48) and product.dtype == torch.bfloat16


def test_cpu_attention():
    """Compares with the reference, for query heads that share key/value heads."""
    q, k, v = (
        torch.randn(2, 7, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )
    expected = attention_reference(q, k, v)
    dout = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, (q, k, v), dout)
    q, k, v, dout = (x.detach().transpose(1, 2) for x in (q, k, v, dout))
    out, lse = torch_internals.cpu_attention(q, k, v, 0.0, True)
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    scores.masked_fill_(torch.ones(7, 7).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1))
    torch.testing.assert_close(out.transpose(1, 2), expected)
    for found, gradient in zip(
        torch_internals.cpu_attention_backward(dout, q, k, v, out, lse, 0.0, True),
        expected_gradients,
    ):
        torch.testing.assert_close(found.transpose(1, 2), gradient)


def test_assert_async():
    torch_internals.assert_async(torch.tensor(True), "holds")
    with pytest.raises(RuntimeError, match="a message of ours"):
        torch_internals.assert_async(torch.tensor(False), "a message of ours")


def test_resolve_process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        assert torch_internals.resolve_process_group(group.group_name) is group
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("keeps", [False, True])
def test_backward_keeps_graph(keeps):
    seen = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(torch_internals.backward_keeps_graph()))
    y.backward(retain_graph=keeps)
    assert seen == [keeps]


def test_a_function_that_is_assumed_constant_is_called_while_the_compiler_traces():
    """The graph lacks the call, as with torch.compiler.assume_constant_result."""

    @torch_internals.assume_constant
    def choose() -> int:
        return 2

    compiled = torch.compile(lambda x: x * choose(), backend="eager", fullgraph=True)
    assert compiled(torch.ones(3)).tolist() == [2.0] * 3
    assert vars(choose) == vars(torch.compiler.assume_constant_result(lambda: 2))
