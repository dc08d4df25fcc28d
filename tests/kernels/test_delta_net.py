import gc
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.delta_net import (
    backward,
    chunks,
    delta_rule,
    delta_rule_bytes,
    delta_rule_reference,
    rule,
)
from tests.kernels.ahead_of_time import KernelToCompile
from tests.kernels.compare import outputs_and_gradients, random
from tests.storage_counter import StorageCounter

_WIDTHS = {"R": 2, "K": 128, "C": 64}
_KEYS, _VALUES, _SQUARE = (
    "tensordesc<bf16[64, 128]>",
    "tensordesc<bf16[64, 64]>",
    "tensordesc<bf16[64, 64]>",
)
_STATES, _KEY_BLOCK = "tensordesc<bf16[64, 128]>", "tensordesc<bf16[64, 32]>"
_TYPES = {f"{name}_ptr": "*bf16" for name in ("q", "k", "v", "out", "inverse", "scores")}
_TYPES |= {f"{name}_ptr": "*bf16" for name in ("dq", "dk", "dv")}
_TYPES |= {
    f"{name}_ptr": "*fp32"
    for name in ("g", "beta", "gates", "initial", "kept", "final", "dg", "d_beta")
}
_TYPES |= {f"{name}_ptr": "*fp32" for name in ("d_final", "d_initial", "carried", "carry")}
_TYPES |= {f"{name}_ptr": "*i64" for name in ("chunks", "pieces", "parts")}
_TYPES |= {"new_d": _SQUARE, "y_d": _SQUARE, "states_d": _STATES, "d_states_d": _STATES}
_TYPES |= {
    "q_d": _KEYS,
    "k_d": _KEYS,
    "v_d": _VALUES,
    "inverse_d": _SQUARE,
    "scores_d": _SQUARE,
    "d_out_d": _VALUES,
}
_SCAN = {"H": 32, "V": 128, "BLOCK_V": 64, "STAGES": 3} | _WIDTHS
_WHOLE_HEADS = {"d_out_d": _KEYS, "new_d": _KEYS, "y_d": _KEYS} | dict.fromkeys(
    ("q_d", "k_d"), _KEY_BLOCK
)
_WHOLE_HEADS |= dict.fromkeys(("states_d", "d_states_d"), "tensordesc<bf16[128, 32]>")


def kernel(name, constants, without=(), types=None):
    types = {n: t for n, t in (_TYPES | (types or {})).items() if n not in without}
    return KernelToCompile(name, types, constants | dict.fromkeys(without), least_capability=90)


def by_pointer(kernel):
    """Returns what GPUs before Hopper run in place of a kernel."""
    tiles, signature = (
        chunks.OLDER,
        {n: "*bf16" if "tensordesc" in t else t for n, t in kernel.signature.items()},
    )
    is_scan = "BLOCK_V" in kernel.constants
    sizes = (
        {"BLOCK_V": tiles.columns, "STAGES": tiles.stages}
        if is_scan
        else {"STAGES": tiles.gradient_stages}
    )
    constants = kernel.constants | sizes
    kernel = replace(kernel, signature=signature, constants=constants, num_warps=tiles.warps)
    return replace(kernel, least_capability=80, most_capability=80)


_READ_IN_BLOCKS = [
    kernel(
        "chunks._scan_kernel",
        _SCAN | {"PIECE": 64},
        ("new_d", "states_d", "initial_ptr", "final_ptr"),
    ),
    kernel("chunks._scan_kernel", _SCAN | {"PIECE": 64}, ("out_ptr", "final_ptr", "initial_ptr")),
    kernel("backward._reverse_scan_kernel", _SCAN, ("d_final_ptr", "d_initial_ptr")),
    kernel(
        "backward._gradients_kernel",
        {"G": 16, "V": 128, "BLOCK_K": 32, "STAGES": 2} | _WIDTHS,
        types=_WHOLE_HEADS,
    ),
]
KERNELS_TO_COMPILE = [
    replace(
        kernel("chunks._chunk_kernel", {"G": 16, "DTYPE": tl.float16} | _WIDTHS),
        least_capability=80,
    ),
    *_READ_IN_BLOCKS,
    *map(by_pointer, _READ_IN_BLOCKS),
]


NAMES = "out", "state", "q", "k", "v", "g", "beta", "initial state"
LENGTHS = [[1], [3], [63], [64], [65], [65, 1, 3, 64, 63, 130], [200]]


def inputs(T, G=1, H=2, K=16, V=16, *, documents=1, dtype=torch.float32, fastest=1.0, B=1):
    """Returns q, k, v, g, beta and initial states. g is 0 to -`fastest`, and beta has zeros and
    ones."""
    q, k = (F.normalize(random(B, T, G, K, seed=seed), dim=-1) for seed in (0, 1))
    g, beta = -fastest * random(B, T, H, seed=3).sigmoid(), random(B, T, H, seed=4).sigmoid()
    g[:, ::5], beta[:, 1::7], beta[:, 2::7] = 0.0, 0.0, 1.0
    initial = random(documents, H, K, V, seed=5)
    return [
        (q * K**-0.5).to(dtype),
        k.to(dtype),
        random(B, T, H, V, seed=2, dtype=dtype),
        g,
        beta,
        initial,
    ]


def segments_of(lengths):
    stops = torch.tensor(lengths).cumsum(0)
    return torch.stack([torch.zeros_like(stops), stops - torch.tensor(lengths), stops], dim=1)


def call(function, **options):
    return lambda *x: function(*x[:5], initial_state=x[5], **options)


def ours(impl="triton", **options):
    return call(delta_rule, with_state=True, impl=impl, **options)


def errors(function, tensors, **options):
    """Returns the relative error of each output and gradient against the recurrence in float64."""
    exact = outputs_and_gradients(
        call(delta_rule_reference, **options), [x.double() for x in tensors]
    )
    found = outputs_and_gradients(function, tensors)
    return {n: float((f.double() - e).norm() / e.norm()) for n, f, e in zip(NAMES, found, exact)}


@pytest.fixture
def small_stretches(monkeypatch):
    """Keeps a state every chunk, and divides two chunks and more into stretches."""
    set_constants(monkeypatch, PIECE=1, STRETCH=2)
    chunks.stretches_of.cache_clear()
    yield
    chunks.stretches_of.cache_clear()


def set_constants(monkeypatch, **constants):
    for name, value in constants.items():
        for module in (chunks, rule):
            monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_matches_the_recurrence(lengths, device, poisoned_memory, small_stretches):
    tensors = inputs(sum(lengths), documents=len(lengths))
    options = {"segments": segments_of(lengths)}
    for name, error in errors(ours(**options), tensors, **options).items():
        assert error < 3e-6, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("fastest", [0.1, 50.0])
def test_low_precision_and_fast_decay(dtype, fastest, device, poisoned_memory):
    tensors = inputs(130, dtype=dtype, fastest=fastest)
    for name, error in errors(ours(), tensors).items():
        assert error < (0.03 if dtype == torch.bfloat16 else 0.004), f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("fastest", [0.0, 50.0], ids=["no decay", "fast decay"])
def test_decay_in_float32(fastest, device, small_stretches):
    for name, error in errors(ours(), inputs(130, fastest=fastest)).items():
        assert error < 3e-5, f"{name} is off by {error:.1e}"


def test_beta_of_zero_writes_nothing_and_one_replaces(device):
    q, k, v, g, beta, _ = inputs(70)
    assert not delta_rule(q, k, v, g, torch.zeros_like(beta), impl="triton").any()
    out = delta_rule(k, k, v, torch.zeros_like(g), torch.ones_like(beta), impl="triton")
    torch.testing.assert_close(
        out, v, rtol=1e-4, atol=1e-4
    )  # each key gives back what was just written


def test_equal_keys_are_exact(device):
    """A is all ones below the diagonal: its powers are large, and its inverse is not."""
    q, k, v, g, beta, initial = inputs(64)
    tensors = [q, k[:, :1].expand_as(k).contiguous(), v, 0 * g, torch.ones_like(beta), initial]
    assert max(errors(ours(), tensors).values()) < 1e-5


@pytest.mark.parametrize(("G", "H", "K", "V"), [(1, 1, 32, 16), (2, 6, 16, 32), (1, 2, 128, 128)])
def test_heads_and_widths(G, H, K, V, device):
    for name, error in errors(ours(), inputs(66, G, H, K, V, dtype=torch.float16)).items():
        assert error < 0.004, f"{name} is off by {error:.1e}"


def test_scans_of_some_columns(device, monkeypatch):
    """On GPUs of the RTX 50 a program has 32 columns of the state, so that it fits their shared
    memory."""
    monkeypatch.setattr(chunks, "tiles_of", lambda device: chunks.Tiles(16, 2))
    for name, error in errors(ours(), inputs(66, 1, 1, 16, 32)).items():
        assert error < 3e-6, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize(("lengths", "G", "H", "K", "V", "dtype"), [
    ([65, 1, 3, 64, 63, 130], 1, 2, 16, 16, torch.float32),
    ([3], 1, 1, 64, 16, torch.float32),
    ([66], 2, 4, 32, 64, torch.float16),
], ids=str)  # fmt: skip
def test_by_pointer(
    lengths, G, H, K, V, dtype, device, poisoned_memory, small_stretches, monkeypatch
):
    """GPUs before Hopper read matrices by pointer. NaN follows the last token: it is not read."""
    for module in (chunks, backward):
        monkeypatch.setattr(module, "tiles_of", lambda device: chunks.OLDER)
    *tensors, initial = inputs(sum(lengths), G, H, K, V, documents=len(lengths), dtype=dtype)
    tensors = [
        torch.cat([x, torch.full_like(x, torch.nan)], dim=1)[:, : x.shape[1]] for x in tensors
    ] + [initial]
    options = {"segments": segments_of(lengths)}
    for name, error in errors(ours(**options), tensors, **options).items():
        assert error < (3e-6 if dtype == torch.float32 else 0.004), f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("lengths", [[1], [64], [65, 3, 130]], ids=str)
def test_chunks_in_pytorch_match_the_recurrence(lengths):
    tensors = [x.double().cpu() for x in inputs(sum(lengths), documents=len(lengths), fastest=3.0)]
    options = {"segments": segments_of(lengths)}
    assert max(errors(ours("torch", **options), tensors, **options).values()) < 1e-12


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_packed_documents_are_as_separate(impl, device):
    tensors = inputs(100, B=2, documents=3)[:5]
    segments = torch.tensor([(0, 0, 100), (1, 0, 30), (1, 30, 100)])
    packed, states = delta_rule(*tensors, segments=segments, with_state=True, impl=impl)
    for document, (row, start, stop) in enumerate(segments.tolist()):
        alone = [x[row : row + 1, start:stop] for x in tensors]
        out, state = delta_rule(*alone, with_state=True, impl=impl)
        torch.testing.assert_close(packed[row : row + 1, start:stop], out)
        torch.testing.assert_close(states[document], state[0])


def test_a_sequence_in_two_calls_is_one(device, small_stretches):
    tensors, initial = inputs(150)[:5], inputs(150)[5]
    whole, end = delta_rule(*tensors, initial_state=initial, with_state=True, impl="triton")
    first, middle = delta_rule(
        *(x[:, :64] for x in tensors), initial_state=initial, with_state=True, impl="triton"
    )
    second, last = delta_rule(
        *(x[:, 64:] for x in tensors), initial_state=middle, with_state=True, impl="triton"
    )
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    torch.testing.assert_close(last, end)


def test_unaligned_and_strided_inputs(device):
    tensors = inputs(70)[:5]
    expected = delta_rule(*tensors, impl="triton")
    shifted = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in tensors]
    assert any(x.data_ptr() % 16 for x in shifted)
    assert torch.equal(delta_rule(*shifted, impl="triton"), expected)
    columns = [torch.stack([x, x + 1], dim=-1)[..., 0] for x in tensors]
    assert torch.equal(delta_rule(*columns, impl="triton"), expected)


def test_bytes(device, small_stretches, monkeypatch):
    """Counts what the operations allocate, also inside of them."""
    set_constants(monkeypatch, PIECE=2)
    T, G, H, K, V = 300, 1, 2, 64, 32
    of_states, in_forward, in_backward = delta_rule_bytes(T, H, K, V, element_size=4)
    tensors = [x.to(device) for x in inputs(T, G, H, K, V)[:5]]
    delta_rule(*tensors, impl="triton")  # makes the tables
    empty_chunks = chunks._empty_chunks

    def collect_first(*arguments):
        gc.collect()  # Triton's interpreter leaves cycles
        return empty_chunks(*arguments)

    monkeypatch.setattr(chunks, "_empty_chunks", collect_first)
    with StorageCounter() as counter:
        tensors = [x.view_as(x) for x in tensors]  # the counter knows them from here on
        before = counter.read().allocated
        out, kept, _ = rule._forward._init_fn(*tensors, None, None, False)
        assert counter.read().peak - before == pytest.approx(
            out.nbytes + of_states + in_forward, abs=2**10
        )
        assert kept.nbytes == of_states
        gc.collect()
        before = counter.read().allocated
        backward.delta_rule_backward._init_fn(out, None, *tensors, kept, None, None)
        gradients = sum(x.nbytes for x in tensors)
        assert counter.read().peak - before == pytest.approx(gradients + in_backward, abs=2**10)


@pytest.mark.parametrize(("change", "message"), [
    ({"q": (1, 8, 2, 32)}, "q and k must be"),
    ({"v": (1, 8, 3, 16)}, "H a multiple of G"),
    ({"g": (1, 8, 2)}, "g and beta must be"),
    ({"k": (1, 8, 2, 16), "dtype": torch.float16}, "of one dtype"),
    ({"q": (1, 8, 2, 24), "k": (1, 8, 2, 24)}, r"\(16, 32, 64, 128\), got 24"),
    ({"segments": torch.tensor([(0, 0, 4)])}, "each of 1 x 8 tokens once"),
    ({"segments": torch.tensor([(0, 0, 4), (0, 5, 8)])}, "each of 1 x 8 tokens once"),
    ({"segments": torch.tensor([(0, 0, 8), (0, 8, 8)])}, "no empty document"),
    ({"initial": (2, 4, 16, 16)}, r"initial_state must be \[1, 4, 16, 16\]"),
])  # fmt: skip
def test_refused(change, message, device):
    shapes = {
        "q": (1, 8, 2, 16),
        "k": (1, 8, 2, 16),
        "v": (1, 8, 4, 16),
        "g": (1, 8, 4),
        "beta": (1, 8, 4),
    } | change
    tensors = {n: torch.zeros(s, device=device) for n, s in shapes.items() if isinstance(s, tuple)}
    if "dtype" in change:
        tensors["k"] = tensors["k"].to(change["dtype"])
    initial = tensors.pop("initial", None)
    with pytest.raises(ValueError, match=message):
        delta_rule(
            *tensors.values(), initial_state=initial, segments=change.get("segments"), impl="triton"
        )


@settings(derandomize=True, deadline=None, max_examples=4)
@given(
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (1, 2), (2, 4)]),
    fastest=st.sampled_from([0.01, 1.0, 20.0]),
)
def test_property_matches_the_recurrence(lengths, heads, fastest):
    options = {"segments": segments_of(lengths)}
    tensors = inputs(sum(lengths), *heads, documents=len(lengths), fastest=fastest)
    assert max(errors(ours(**options), tensors, **options).values()) < 3e-5


@pytest.mark.gpu(gib=24)
def test_past_2_to_the_31_elements(device):
    """Two documents of which the second begins past the 2^31st element, beside the second alone."""
    lengths, tail = [530_000, 300], slice(530_000, None)
    tensors = inputs(sum(lengths), 2, 32, 128, 128, dtype=torch.bfloat16)[:5]
    assert tensors[2].numel() > 2**31
    packed = outputs_and_gradients(
        lambda *x: delta_rule(*x, segments=segments_of(lengths))[:, tail], tensors
    )
    alone = outputs_and_gradients(delta_rule, [x[:, tail] for x in tensors])
    torch.testing.assert_close(packed[0], alone[0])
    for of_both, of_one in zip(packed[1:], alone[1:]):
        torch.testing.assert_close(of_both[:, tail], of_one)
