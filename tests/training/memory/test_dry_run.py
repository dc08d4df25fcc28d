"""Bytes of a block, counted by hand, at lengths that were not run, and on a GPU."""

from dataclasses import replace

import pytest
import torch

from kernels.attention import NSA, Sparse, Window
from kernels.attention.full import FULL
from kernels.experts.part import ExpertsPart
from kernels.fp8 import FP8
from kernels.gated_delta_net import DeltaNet
from kernels.gated_mlp import GatedMLPPart
from kernels.linear import PLAIN
from kernels.mixed import Mixed
from model import MODEL_SIZES, Transformer
from tests.gpu import free_memory
from tests.shapes import reshape
from training.families.config_json import in_family
from training.families.lora import Adapters
from training.families.trained import ALL
from training.memory import dry_run
from training.memory.dry_run import LONG, block_bytes, sent_bytes, waiting_bytes
from training.memory.execution import WHOLE, Execution, Placement
from training.memory.placement import apply_execution
from training.memory.step import PackedDocuments
from training.run.build import step_on_meta

PLACED, KEPT = Placement(), Placement("gpu", "gpu")
SMALL_BYTES = 2**23
D, F, H, G, K = 2560, 9728, 32, 8, 128  # the 4B's


def step_of(
    tokens, kind=FULL, linear=None, trained=ALL, model_type="qwen3", num_ranks=1, **changes
):
    config = reshape(
        MODEL_SIZES["4B"], num_hidden_layers=1, vocab_size=64, kinds=(kind,), **changes
    )
    given = Execution(linear=linear or trained.linear(PLAIN), attention_backend="cudnn")
    return step_on_meta(
        in_family(config, model_type),
        tokens,
        given=given,
        trained=trained,
        context_parallel_size=num_ranks,
    )


def bytes_of(step, placement, tile_size=None, heads_at_a_time=None):
    execution = replace(
        step.given,
        placements=(placement,),
        mlp_tile_size=tile_size,
        heads_at_a_time=heads_at_a_time,
    )
    return block_bytes(step, execution, placement, step.parts[0])


def test_what_a_whole_block_keeps():
    """In bf16. Attention: its input's norm, q and k thrice, v, the output; in float32 1 / rms and a
    log-sum-exp.

    q and k are kept before their norms and after their rotation, which the norms' outputs do not
    outlive. The MLP: the residual sum, its norm, gate and up.
    """
    T = 65_536
    attention = 2 * D + 2 * K * (2 * H + 2 * G) + 2 * K * (G + H) + 4 * (1 + H + G + H)
    mlp = 2 * 2 * D + 2 * 2 * F + 4
    assert bytes_of(step_of(T), WHOLE).kept == (attention * T, mlp * T)


def test_a_placed_block_keeps_attention_s_results_alone():
    T = 65_536
    for kind, branches, lists in (
        (FULL, 1, 0),
        (Window(), 1, 0),
        (Sparse(24), 1, 24),
        (NSA(16), 3, 13),
    ):
        results, choices = branches * (2 * K + 4) * H * T, 2 * G * lists * T
        for heads in (None, 1):
            assert sum(bytes_of(step_of(T, kind), KEPT, 8192, heads).kept) == results + choices, (
                kind
            )
            assert sum(bytes_of(step_of(T, kind), PLACED, 8192, heads).kept) == choices, kind


@pytest.mark.parametrize("results", ["gpu", "host", "recompute"])
def test_what_waits_and_leaves_of_a_placed_block(results):
    """Choices of blocks and of experts wait on the GPU, wherever the results of attention are."""
    T, E, k = 65_536, 16, 4
    for kind, mlp, lists in (
        (FULL, None, 0),
        (Sparse(24), None, 24),
        (Sparse(24), ExpertsPart(E, k, 64), 24),
    ):
        step = step_of(T, kind, **({} if mlp is None else {"mlps": (mlp,)}))
        for where in ("gpu", "host"):
            placement, part = Placement(where, results), step.parts[0]
            of_attention, of_mlp = (2 * K + 4) * H * T, 0 if mlp is None else 4 * k * T
            waits = waiting_bytes(step, step.given, placement, part)
            inputs = 2 * D * T
            kept = (results == "gpu") * of_attention + 2 * G * lists * T
            assert waits == ((where == "gpu") * inputs, kept, of_mlp)
            leaves = sent_bytes(step, placement, part)
            assert leaves == ((where == "host") * inputs, (results == "host") * of_attention)


def test_experts_keep_their_choice_and_a_tile_at_a_time():
    """Backward in tiles: gradients of its output and input, its input, the residual sum, choices
    and weights.

    It comes with sums of matrices' gradients in float32, and a tile's gate and up, their product,
    and rows of dx.
    """
    T, tile, E, k, F = 131_072, 32_768, 16, 4, 768
    step = step_of(T, mlps=(ExpertsPart(E, k, F),))
    assert bytes_of(step, PLACED, tile).kept == (0, 4 * k * T)
    most = 4 * 2 * D * T + 4 * 3 * E * D * F + 2 * k * tile * (2 * F + D)
    found = bytes_of(step, PLACED, tile).mlp_backward[1]
    assert most < found < most + 4 * E * 3 * T + 2 * k * tile * F
    assert (
        bytes_of(step, PLACED).mlp_backward[1] - found
        > 2 * k * (T - tile) * (2 * F + D) - 4 * 3 * E * D * F
    )


def test_a_tile_and_a_group_of_heads_free_what_grows_with_the_sequence():
    """Backward of the MLP in tiles: gradients of its output and input, its input, the residual sum;
    no hidden states.

    It comes with sums of weights' gradients in float32 and three buffers of a tile.
    """
    T, weights = 65_536, 3 * D * F
    untiled, tiled = (bytes_of(step_of(T), PLACED, size) for size in (None, 8192))
    rows = 2 * D * T
    assert tiled.mlp_backward[1] == 4 * rows + 4 * T + 4 * weights + 3 * 2 * 8192 * F
    assert untiled.mlp_backward[1] - tiled.mlp_backward[1] > 2 * 3 * F * T - 2 * rows - 6 * weights
    by_head = bytes_of(step_of(T), PLACED, 8192, 1)
    assert (
        by_head.attention_backward[0] < bytes_of(step_of(T), PLACED, 8192).attention_backward[0] / 2
    )


@pytest.fixture
def traces(monkeypatch):
    """The traces that `bytes_of` makes."""
    made, trace = [], dry_run.trace
    monkeypatch.setattr(dry_run, "trace", lambda *given: made.append(trace(*given)) or made[-1])
    dry_run._block_bytes.cache_clear()
    return made


def test_backward_of_a_gated_norm_writes_over_the_gradient_of_its_result(traces):
    """A delta net keeps its input, q, k and v before and after the convolution, the rule's output,
    z, states.

    Gradients are of the block's output, of the residual sum, of the rule's output, and of z.
    """
    T, (G, H, K, V) = 65_536, DeltaNet().sizes
    bytes_of(step_of(T, DeltaNet(), model_type="qwen3_5_text"), PLACED, 8192)
    rows = 2 * (3 * D + 2 * (2 * G * K + H * V) + 4 * H * V) + H * K * V / 1024
    names = (moment.operation for moment in traces[0].moments if moment.phase == "attention")
    sizes = [
        size
        for moment, size in zip(traces[0].moments, traces[0].alive)
        if moment.phase == "attention"
    ]
    assert max(size for name, size in zip(names, sizes) if "rms_norm" in name) == pytest.approx(
        rows * T, rel=0.01
    )


def test_a_second_forward_makes_no_sum_with_a_skipped_mlp(traces):
    for changes in {}, {"model_type": "granite", "multiplier": 0.25}:
        bytes_of(step_of(LONG, **changes), PLACED, 8192)
        phases = [
            moment.phase for moment in traces[-1].moments if moment.operation == "aten::add.Tensor"
        ]
        assert "forward" in phases and "MLP" not in phases, changes


def test_a_packed_document_attends_in_a_call_of_its_own():
    """Its output exists twice in forward, before it is copied to all documents' output. Here heads
    have no norms."""
    T = 65_536
    whole = step_of(T, model_type="llama")
    packed = replace(whole, documents=PackedDocuments(T - 300, ((300.0, 1), (T - 300.0, 1))))
    q, k, x = 2 * H * K, 2 * G * K, 2 * D
    for step, size in ((packed, 3 * q + 2 * k + x), (whole, 2 * q + 3 * k + x)):
        assert sum(bytes_of(step, PLACED, 2048).forward) == pytest.approx(size * T, rel=0.01)


UNLIKE = {
    "whole": ({}, WHOLE, None, None),
    "attention again": ({}, PLACED, None, None),
    "heads and tiles": ({}, KEPT, 8192, 1),
    "sparse": ({"kind": Sparse()}, PLACED, 8192, 2),
    "gates": ({"kind": NSA()}, KEPT, 4096, None),
    "fp8": ({"linear": FP8()}, KEPT, 8192, 1),
    "fp8 of gradients": ({"linear": Mixed(dx=FP8(), d_weight=FP8())}, KEPT, 8192, 1),
    "fp8 of gradients, whole": ({"linear": Mixed(dx=FP8(), d_weight=FP8())}, WHOLE, None, None),
    "adapters": ({"trained": Adapters(16, 16.0, ("q_proj", "down_proj"))}, WHOLE, None, None),
    "norms after": ({"model_type": "olmo3"}, KEPT, 8192, None),
    "four norms": ({"model_type": "gemma3_text"}, PLACED, 2048, 1),
    "shared": ({"num_ranks": 4}, KEPT, 8192, 1),
    "delta net": ({"kind": DeltaNet(), "model_type": "qwen3_5_text"}, KEPT, 8192, None),
    "delta net, whole": ({"kind": DeltaNet(), "model_type": "qwen3_5_text"}, WHOLE, None, None),
    "delta net, shared": (
        {"kind": DeltaNet(), "model_type": "qwen3_5_text", "num_ranks": 4},
        KEPT,
        8192,
        None,
    ),
    "output gate": ({"model_type": "qwen3_5_text", "rotary_dim": 64}, PLACED, 8192, None),
    "experts": ({"mlps": (ExpertsPart(16, 4, 768),)}, KEPT, 8192, None),
    "experts, whole": ({"mlps": (ExpertsPart(16, 4, 768),)}, WHOLE, None, None),
    "wider": ({"mlps": (GatedMLPPart(24_576, "gelu_tanh"),)}, KEPT, None, None),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_two_lengths_tell_of_all_longer_ones(case, monkeypatch):
    """To the byte, against a run of that length. Gated delta nets keep a state for every 4,096
    tokens."""
    options, placement, tile_size, heads = UNLIKE[case]
    for T in (LONG + 4096, 3 * LONG):
        step = step_of(T * options.get("num_ranks", 1), **options)
        found = bytes_of(step, placement, tile_size, heads)
        with monkeypatch.context() as patch:
            dry_run._block_bytes.cache_clear()
            patch.setattr(dry_run, "LONG", 2**40)
            assert bytes_of(step, placement, tile_size, heads) == found
        dry_run._block_bytes.cache_clear()


ON_GPU: dict = {kind.name: {"kind": kind} for kind in (FULL, Window(), Sparse(), NSA())}
ON_GPU["delta"] = {"kind": DeltaNet()}
ON_GPU["experts"] = {"mlps": (ExpertsPart(16, 4, 768),)}


@pytest.mark.gpu(gib=8)
@pytest.mark.parametrize("case", ON_GPU)
@pytest.mark.parametrize(
    ("placement", "tile_size", "heads"),
    [(WHOLE, None, None), (PLACED, None, None), (KEPT, 2048, None), (KEPT, 2048, 1)],
)
def test_a_block_on_a_gpu(placement, tile_size, heads, case):
    """At the fullest moments of forward and backward, and between them: to within 2%."""
    step = step_of(16_384, **ON_GPU[case])
    expected = bytes_of(step, placement, tile_size, heads)
    model = Transformer(step.shard).cuda().cast(torch.bfloat16)
    apply_execution(model, Execution((placement,), tile_size, heads))
    [block] = model.layers
    for parameter in block.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for _ in range(2):  # in the first run libraries make their workspaces
        x = torch.randn(1, step.tokens, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        context = model.context(torch.zeros(1, step.tokens, dtype=torch.long, device="cuda"))
        free_memory()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = block(x, context)
        forward, kept = (
            torch.cuda.max_memory_allocated() - before,
            torch.cuda.memory_allocated() - before - y.nbytes,
        )
        end = dry_run._End.apply(y)
        del y
        torch.cuda.reset_peak_memory_stats()
        end.backward()
        backward = torch.cuda.max_memory_allocated() - before
        del x, end
    gradients = sum(p.nbytes for p in block.mixer.parameters()) * (heads is not None)
    assert forward == pytest.approx(sum(expected.forward), rel=0.02, abs=SMALL_BYTES)
    assert kept == pytest.approx(sum(expected.kept), rel=0.02, abs=SMALL_BYTES)
    most = max(sum(expected.mlp_backward), sum(expected.attention_backward))
    assert 0.98 * most - SMALL_BYTES <= backward <= 1.02 * most + gradients + SMALL_BYTES
