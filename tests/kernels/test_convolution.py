import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import convolution
from kernels.convolution import convolution_workspace, qkv_convolution, qkv_convolution_reference
from tests.kernels.ahead_of_time import KernelToCompile
from tests.kernels.compare import DTYPES, compare_with_float64, outputs_and_gradients, random

_TYPES = {f"{name}_ptr": "*bf16" for name in ("x", "out", "d_out", "weight", "dx")}
_TYPES |= {"positions_ptr": "*i8", "partial_ptr": "*fp32", "num_tokens": "i32", "x_stride": "i64"}
_TYPES |= {"eps": "fp32", "scale": "fp32"}
_BACKWARD = {"STRIPS": 4, "STRIP": 128, "BLOCK": 1024}
_HEADS = [
    {"HEADS": heads, "K": 128, "NORMALISE": normalise}
    for heads, normalise in ((16, True), (32, False))
]
KERNELS_TO_COMPILE = [
    KernelToCompile(name, _TYPES, constants | heads, num_warps=4)
    for heads in _HEADS
    for name, constants in (
        ("_convolution_kernel", {"BLOCK_T": 16}),
        ("_convolution_backward_kernel", _BACKWARD | {"CHANNELS": 8192}),
    )
]
G, H, K, V = 2, 3, 32, 16
CHANNELS = 2 * G * K + H * V
LENGTHS = [[1], [3], [3, 1, 2, 17, 5]]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(convolution, "BLOCK_T", 16)
    monkeypatch.setattr(convolution, "STRIPS", 2)
    monkeypatch.setattr(convolution, "STRIP", 8)


def inputs(T, B=1, dtype=torch.float32):
    return [random(B, T, CHANNELS, dtype=dtype), random(CHANNELS, 4, seed=1)]


def segments_of(lengths):
    stops = torch.tensor(lengths).cumsum(0)
    return torch.stack([torch.zeros_like(stops), stops - torch.tensor(lengths), stops], dim=1)


def call(function, **options):
    return lambda x, weight: function(x, weight, G, H, K, **options)


triton = functools.partial(call, qkv_convolution, impl="triton")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_matches_float64(lengths, dtype, device, poisoned_memory):
    options = {"segments": segments_of(lengths)}
    tensors = inputs(sum(lengths), dtype=dtype)
    compare_with_float64(call(qkv_convolution_reference, **options), triton(**options), tensors)


def test_reference_is_the_sum_over_taps_and_norms():
    x, weight = (t.double().cpu() for t in inputs(9))
    q, k, v = qkv_convolution_reference(x, weight, G, H, K)
    past = torch.cat([torch.zeros(1, 3, CHANNELS), x], dim=1).double()
    y = torch.nn.functional.silu(sum(weight[:, tap] * past[:, tap : tap + 9] for tap in range(4)))
    assert v.flatten(2).allclose(y[..., 2 * G * K :])
    heads = y[..., : 2 * G * K].unflatten(-1, (2, G, K)) * 1.0
    assert torch.stack([q * K**0.5, k], dim=2).allclose(
        heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    )


def test_rows_of_a_batch_are_documents(device):
    x, weight = inputs(20, B=2)
    together = triton()(x, weight)
    alone = [triton()(row, weight) for row in x.split(1)]
    for whole, *rows in zip(together, *alone):
        assert torch.equal(whole, torch.cat(rows))


def test_channels_sliced_out_of_a_fused_projection(device):
    wide = random(2, 9, CHANNELS + 64)
    for x in (wide[..., 32 : 32 + CHANNELS], wide[:, :8, 32 : 32 + CHANNELS]):
        weight = inputs(1)[1]
        sliced = outputs_and_gradients(triton(), [x, weight])
        for found, expected in zip(
            sliced, outputs_and_gradients(triton(), [x.contiguous(), weight])
        ):
            assert torch.equal(found, expected)


def test_parts_apart(device):
    x, weight = inputs(20, B=2)
    sizes = [G * K, G * K, H * V]

    def apart(x, weight):
        return qkv_convolution(
            [part.contiguous() for part in x.split(sizes, -1)], weight, G, H, K, impl="triton"
        )

    for found, expected in zip(
        *(outputs_and_gradients(function, [x, weight]) for function in (apart, triton()))
    ):
        assert torch.equal(found, expected)


def test_workspace():
    assert (
        convolution_workspace(100, CHANNELS) == 7 * 4 * CHANNELS * 4
    )  # 100 tokens in strips of 2 x 8


@pytest.mark.parametrize(("x", "weight", "segments", "message"), [
    ((1, 8, CHANNELS), (CHANNELS, 3), None, r"a weight \[channels, 4\]"),
    ((1, 8, CHANNELS + 1), (CHANNELS + 1, 4), None, r"128 \+ 3 \* V channels"),
    ((1, 8, 128), (128, 4), None, r"128 \+ 3 \* V channels"),
    ((1, 8, 128 + 3 * 20), (128 + 3 * 20, 4), None, "got 32 and 20"),
    ((1, 8, CHANNELS), (CHANNELS, 4), [(0, 0, 7)], "each of 1 x 8 tokens once"),
])  # fmt: skip
def test_refused(x, weight, segments, message, device):
    segments = None if segments is None else torch.tensor(segments)
    with pytest.raises(ValueError, match=message):
        triton(segments=segments)(torch.ones(x, device=device), torch.ones(weight, device=device))


@settings(derandomize=True, deadline=None, max_examples=3)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3), dtype=st.sampled_from(DTYPES))
def test_property_matches_float64(lengths, dtype):
    options = {"segments": segments_of(lengths)}
    compare_with_float64(
        call(qkv_convolution_reference, **options),
        triton(**options),
        inputs(sum(lengths), dtype=dtype),
    )


@pytest.mark.gpu(gib=20)
def test_past_2_to_the_31_elements(device, monkeypatch):
    """Two documents of which the second begins past the 2^31st element, beside the second alone."""
    monkeypatch.setattr(convolution, "STRIP", 128)
    lengths = [270_000, 300]
    x, weight = random(1, sum(lengths), 8192, dtype=torch.bfloat16), random(8192, 4, seed=1)
    assert x[:, : lengths[0]].numel() > 2**31

    def tail(x, weight):
        return tuple(
            part[:, -300:]
            for part in qkv_convolution(x, weight, 16, 32, 128, segments=segments_of(lengths))
        )

    packed = outputs_and_gradients(tail, [x, weight])
    alone = outputs_and_gradients(
        lambda x, weight: qkv_convolution(x, weight, 16, 32, 128), [x[:, -300:], weight]
    )
    packed[3] = packed[3][:, -300:]
    *parts, d_weight = packed
    for both, one in zip(parts, alone):
        torch.testing.assert_close(both, one)
    torch.testing.assert_close(
        d_weight, alone[-1], rtol=1e-5, atol=1e-4
    )  # float32 sums over strips of other rows
