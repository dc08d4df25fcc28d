import importlib
import logging
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from kernels.attention.documents import find_documents
from kernels.attention.full import FULL
from kernels.attention.nsa.nsa import NSA
from kernels.attention.sparse.sparse_attention import Sparse
from kernels.attention.window import Window
from kernels.gated_delta_net import DeltaNet
from kernels.gated_mlp import GatedMLPPart
from kernels.head_loss import NextToken, Scored, log_loss_choice
from kernels.rope import LinearScaling, Llama3Scaling, RotaryTables, YarnScaling, rope_frequencies
from model import MODEL_SIZES, KeyValueCache, ModelOutput, Transformer
from tests.shapes import reshape
from training.data.loader import Batch
from training.families.config_json import in_family, to_config_json
from training.families.rows import FAMILIES
from training.memory.execution import WHOLE, Execution, Placement
from training.memory.placement import apply_execution

TINY = reshape(MODEL_SIZES["tiny"], num_hidden_layers=2, hidden_size=64, intermediate_size=96)


def build(config=TINY, seed=0, dtype=torch.float32, loss_impl="auto"):
    torch.manual_seed(seed)
    model = Transformer(config).to(dtype)
    model.loss_impl = loss_impl
    return model


def tokens(*shape, seed=0, high=256):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("tiny", 820_608), ("0.6B", 596_049_920), ("1.7B", 1_720_574_976), ("4B", 4_022_468_096),
        ("8B", 8_190_735_360), ("14B", 14_768_307_200), ("32B", 32_762_123_264),
    ],
)  # fmt: skip
def test_parameter_counts(size, count):
    with torch.device("meta"):
        model = Transformer(MODEL_SIZES[size])
    assert sum(p.numel() for p in model.parameters()) == MODEL_SIZES[size].num_parameters() == count


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_parts_declare_the_parameters_that_modules_have(model_type, ranks):
    """Tries every family, layers with gates and without, and MLPs of two widths, whole and as one
    rank's shard."""
    mlps = GatedMLPPart(96), GatedMLPPart(160, "gelu_tanh"), GatedMLPPart(96)
    pattern = {"kinds": (FULL, NSA()), "mlps": mlps, "num_hidden_layers": 5}
    config = reshape(in_family(TINY, model_type), **pattern, tie_word_embeddings=ranks == 1)
    with torch.device("meta"):
        model = Transformer(config, ranks)
    declared = model.shard.parameters()
    assert [(name, p.shape) for name, p in model.named_parameters()] == [
        (n, p.shape) for n, p in declared.items()
    ]
    # Ranks do not share a norm of all heads.
    for name, whole in config.parameters().items() if config.attention.qk_norm != "width" else ():
        sizes = [
            size // ranks if dim == whole.shared_dim else size
            for dim, size in enumerate(whole.shape)
        ]
        assert declared[name].shape == tuple(sizes), name
    projections = {
        name
        for name, module in model.layers[1].named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert {name.rpartition(".")[2] for name in projections} == {*config.maps(1), "g_proj"}


def test_gates_of_nsa_are_counted():
    """The gates of a layer: 3 for each of 4 query heads, from 64 inputs."""
    config = TINY.with_kinds(NSA())
    assert config.num_parameters() == TINY.num_parameters() + 2 * (12 * 64 + 12)
    model = Transformer(config)
    assert config.num_parameters() == sum(p.numel() for p in model.parameters())
    assert not any(layer.self_attn.g_proj.bias.any() for layer in model.layers)


def test_each_layer_has_its_kind_of_attention():
    """A pattern repeats over the layers: layers of NSA alone have gates, and every second layer
    rotates."""
    pattern = (Window(64), NSA(), FULL)
    config = reshape(TINY, num_hidden_layers=4, kinds=pattern, rotates=(True, False))
    model = build(config)
    assert (
        [layer.self_attn.kind for layer in model.layers]
        == [*pattern, Window(64)]
        == list(config.kinds)
    )
    assert [layer.self_attn.part.rotates for layer in model.layers] == [True, False] * 2
    assert [layer.self_attn.g_proj is not None for layer in model.layers] == [
        False,
        True,
        False,
        False,
    ]
    assert config.num_parameters() == sum(p.numel() for p in model.parameters())
    apply_execution(model, Execution((WHOLE,) * 4, kinds=(FULL, NSA(4), FULL, FULL)))
    apply_execution(model, Execution((WHOLE,) * 4))
    assert [layer.self_attn.kind for layer in model.layers] == list(config.kinds)
    with pytest.raises(ValueError, match="layers must not be empty"):
        replace(TINY, layers=())


@pytest.mark.parametrize("denominator", [None, 1000])
def test_chunked_and_standard_losses_agree(denominator):
    ids, gradients, losses = tokens(2, 65), [], []
    labels = torch.where(tokens(2, 65, seed=1, high=4) == 0, -100, ids)
    for loss_impl in ("chunked", "standard"):
        model = build(loss_impl=loss_impl)
        loss = model(ids, loss=NextToken.from_labels(labels, denominator=denominator)).loss
        loss.backward()
        losses.append(loss)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)


def test_loss_choice_is_logged_once(caplog):
    model = build()
    log_loss_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="kernels.head_loss"):
        for _ in range(2):
            model(tokens(1, 16), loss=NextToken.from_labels(tokens(1, 16)))
    assert [r.getMessage().startswith("loss: standard (16 tokens") for r in caplog.records] == [
        True
    ]


def test_packed_documents_equal_separate_ones():
    model = build()
    ids = tokens(2, 48)
    documents = find_documents(torch.tensor([[0] * 10 + [1] * 1 + [2] * 37, [4] * 48]))
    packed = model(ids, documents).hidden_states
    for row, start, stop in [(0, 0, 10), (0, 10, 11), (0, 11, 48), (1, 0, 48)]:
        alone = model(ids[row : row + 1, start:stop]).hidden_states
        torch.testing.assert_close(packed[row : row + 1, start:stop], alone, rtol=1e-4, atol=1e-5)


def shared_and_separate(groups, width=None):
    """Rows of a prompt and its answers as one row of `width` tokens each, and each answer after its
    prompt by itself.

    Args:
        groups: for each row, tuples of the tokens of a prompt and of its answers.

    Returns:
        Of shared rows ids, targets, document_ids and prompt_ids; ids and targets of the others.
    """
    generator, shared, separate = torch.Generator().manual_seed(len(groups)), [], []
    for row in groups:
        made, number = [], 0  # (id, target, document, prompt)
        for count, *answers in row:
            *prompt, last = torch.randint(256, (count,), generator=generator).tolist()
            made += [(i, -100, number, number) for i in prompt]
            for document, tokens in enumerate(answers, number + 1):
                answer = torch.randint(256, (tokens,), generator=generator).tolist()
                targets = [*answer, -100]
                made += [
                    (i, target, document, number) for i, target in zip([last, *answer], targets)
                ]
                separate.append(([*prompt, last, *answer], [-100] * len(prompt) + targets))
            number += len(answers) + 1
        shared.append(made + (width - len(made)) * [(0, -100, number, number)])
    return torch.tensor(shared).unbind(2), [torch.tensor(row).unsqueeze(1) for row in separate]


@pytest.mark.parametrize(
    "kind",
    [FULL, Window(5), Sparse(2, 32, 64, 90), NSA(4, 64), DeltaNet(2, 4, 16, 16)],
    ids=lambda kind: type(kind).__name__,
)
def test_a_shared_prompt_equals_separate_rows(kind):
    """Loss and every gradient, of 1 to 8 answers; whole blocks, and blocks that run again some
    heads at a time."""
    config = reshape(TINY, kinds=(kind, FULL))
    for groups, width in (
        ([[(7, 1)]], 8), ([[(9, 3, 1, 20, 2, 5, 1, 1, 8)]], 60),
        ([[(100, 70, 1), (2, 4, 6)], [(130, 30, 1, 2)]], 200),
    ):  # fmt: skip
        (ids, targets, documents, prompts), separate = shared_and_separate(groups, width)
        documents = find_documents(documents, prompts)
        expected, whole, placed = (build(config) for _ in range(3))
        apply_execution(
            placed,
            Execution((Placement("gpu", "recompute"), Placement("gpu", "gpu")), heads_at_a_time=1),
        )
        losses = [
            expected(ids, loss=NextToken(targets, denominator=10.0)).loss
            for ids, targets in separate
        ]
        sum(losses).backward()
        for model in (whole, placed):
            loss = model(ids, documents, NextToken(targets, denominator=10.0)).loss
            loss.backward()
            torch.testing.assert_close(loss, sum(losses), rtol=1e-6, atol=0)
            for ours, theirs in zip(model.parameters(), expected.parameters()):
                error = (ours.grad - theirs.grad).abs().max()
                assert (
                    error <= 1e-5 * theirs.grad.abs().max() + 3e-8
                )  # a delta net's decays have gradients of 1e-7


def test_documents_are_found():
    documents = find_documents(torch.tensor([[0, 0, 1, 3], [2, 2, 2, 2]]))
    assert documents.segments.tolist() == [[0, 0, 2], [0, 2, 3], [0, 3, 4], [1, 0, 4]]
    assert documents.positions_BT.tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert documents.lengths == [2, 1, 1, 4]
    one_each = find_documents(torch.zeros(3, 5, dtype=torch.int32))
    assert one_each.segments is None and one_each.lengths == [5, 5, 5]
    with pytest.raises(ValueError, match="must not decrease"):
        find_documents(torch.tensor([[1, 0]]))


@pytest.mark.parametrize("loss_impl", ["chunked", "standard"])
def test_no_token_is_trained_to_predict_the_next_document(loss_impl):
    model, ids = build(loss_impl=loss_impl), tokens(2, 12)
    documents = find_documents(torch.tensor([[0] * 5 + [1] * 7, [3] * 12]))
    labels = ids.clone()
    labels[0, 5] = -100  # the second document's first token
    expected = model(ids, documents, NextToken.from_labels(labels, documents)).loss
    assert torch.equal(model(ids, documents, NextToken.from_labels(ids, documents)).loss, expected)
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    assert torch.equal(model(ids, documents, NextToken(targets)).loss, expected)
    logits_too = model(ids, documents, NextToken(targets), return_logits=True)
    torch.testing.assert_close(logits_too.loss, expected)


def test_the_loss_gathers_no_rows_where_every_position_has_a_target(monkeypatch):
    module = importlib.import_module(
        "kernels.linear_cross_entropy"
    )  # the package's attribute is the function
    rows_to_compute, gathered = module.rows_to_compute, []
    monkeypatch.setattr(
        module, "rows_to_compute", lambda *args: gathered.append(rows_to_compute(*args))
    )
    for rows in (1, 3):
        model, ids = build(loss_impl="chunked"), tokens(rows, 12)
        model(ids, loss=NextToken.from_labels(ids)).loss.backward()
        targets, whole = (
            F.pad(ids[:, 1:], (0, 1), value=-100),
            find_documents(torch.zeros_like(ids)),
        )
        for documents in (None, whole):
            model(ids, documents, NextToken(targets)).loss.backward()
    assert gathered == [None] * 6


@pytest.mark.parametrize("loss_impl", ["chunked", "standard"])
@pytest.mark.parametrize("return_logits", [False, True])
def test_a_share_of_a_sequence_has_a_target_at_its_last_position(loss_impl, return_logits):
    """The losses of the shares add up in a model without attention: its positions know nothing of
    each other."""
    model, ids = build(loss_impl=loss_impl), tokens(2, 12)
    model.layers = torch.nn.ModuleList()
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)
    batch = Batch(ids, targets, find_documents(torch.zeros_like(ids)), 22)
    shares, losses = [batch.slice(rank, 3) for rank in range(3)], []
    assert batch.documents.are_whole and not any(share.documents.are_whole for share in shares)
    for share in shares:
        loss = NextToken(share.targets, denominator=22)
        output = model(share.input_ids, share.documents, loss, return_logits=return_logits)
        losses.append(output.loss)
    torch.testing.assert_close(sum(losses), model(ids, loss=NextToken.from_labels(ids)).loss)


def test_the_last_position_has_no_target():
    model, ids = build(), tokens(1, 8)
    documents = find_documents(torch.zeros_like(ids))
    with pytest.raises(ValueError, match="documents must have input_ids' shape"):
        model(ids[:, :4], documents)
    with pytest.raises(RuntimeError, match="-100 at the last position"):
        model(ids, loss=NextToken(ids))


def test_fsdp_leaves_documents_on_the_cpu():
    """FSDP moves tensors to the GPU, also in lists and dicts. The borders of documents would have
    to come back."""
    from torch.distributed.utils import _to_kwargs

    documents = find_documents(torch.tensor([[0, 0, 1, 3]]))
    moved = _to_kwargs((), {"documents": documents}, torch.device("meta"), False)[1][0]["documents"]
    assert moved.segments.device.type == moved.positions_BT.device.type == "cpu"


SCALINGS = [
    None,
    LinearScaling(4.0),
    Llama3Scaling(8.0, 1.0, 4.0, 8192),
    YarnScaling(4.0, 32_768),
    YarnScaling(
        32.0, 4096, beta_fast=20, beta_slow=2, mscale=0.7, mscale_all_dim=1.2, truncate=False
    ),
    YarnScaling(40.0, 8, attention_factor=1.25),  # all frequencies divided
]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rotary_tables_are_right_at_a_million_positions(scaling):
    """Frequencies and factor of each scaling equal transformers', which computes them in
    float32."""
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = replace(MODEL_SIZES["4B"], rope_scaling=scaling)
    frequencies, factor = rope_frequencies(128, 1e6, scaling), 1.0
    if scaling is not None:
        theirs = Qwen3Config(**to_config_json(config))
        expected, factor = ROPE_INIT_FUNCTIONS[scaling.rope_type](theirs, torch.device("cpu"))
        torch.testing.assert_close(frequencies.float(), expected, rtol=2e-6, atol=0)
        assert scaling.table_factor == pytest.approx(factor, rel=1e-12)
    cache = RotaryTables(128, 1e6, scaling)
    cos, sin = cache.tables(
        2**20 if scaling is None else 2**17 if factor != 1 else 4096, torch.device("cpu")
    )
    for position in (0, 1, len(cos) // 8 - 1, len(cos) - 1):
        for i in (0, 1, 40, 63):
            angle = position * frequencies[i]
            assert abs(cos[position, i].item() - factor * angle.cos().item()) < 1e-6
            assert abs(sin[position, i].item() - factor * angle.sin().item()) < 1e-6
    if scaling is None:
        assert frequencies.tolist() == pytest.approx(
            [1e6 ** (-2 * i / 128) for i in range(64)], rel=1e-14
        )


def test_rotary_cache_survives_meta_construction_moves_and_growth(device):
    with torch.device("meta"):
        model = Transformer(TINY)
    model.to_empty(device="cpu")
    reference = build()
    model.load_state_dict(reference.state_dict())
    short, long = tokens(1, 8), tokens(1, 40)
    for ids in (short, long, short):  # within the cached length, past it, within it again
        expected = build()(ids).hidden_states
        torch.testing.assert_close(model(ids).hidden_states, expected, rtol=0, atol=0)
    model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    moved = model(tokens(1, 80).to(device)).hidden_states
    assert moved.device.type == device.type
    expected = build()(tokens(1, 80)).hidden_states
    tolerance = 0.1 if device.type == "cuda" else 1e-6
    torch.testing.assert_close(moved.float().cpu(), expected, rtol=0, atol=tolerance)
    cache, device = model.rotary, moved.device  # this device has its index
    before = cache.tables(10, device)[0]
    assert cache.tables(80, device)[0] is before, "an ample cache was rebuilt"
    assert cache.tables(81, device)[0].shape[0] == 160, "growth must be geometric"
    assert cache.tables(10, torch.device("meta"))[0].device.type == "meta"


def greedy_by_full_forwards(model, ids, num_tokens):
    """Returns `ids` and `num_tokens` more, each found by a run over the whole sequence."""
    for _ in range(num_tokens):
        next_ids = model(ids, return_logits=True).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, next_ids], 1)
    return ids


def test_generation_with_the_cache_equals_full_forwards():
    model = build()
    ids = tokens(2, 7)
    assert torch.equal(model.generate(ids, 9), greedy_by_full_forwards(model, ids, 9))
    sampled = [
        model.generate(ids[:, :1], 9, temperature=1.0, generator=torch.Generator().manual_seed(s))
        for s in (1, 1, 2)
    ]
    assert torch.equal(sampled[0], sampled[1]) and not torch.equal(sampled[0], sampled[2])
    with pytest.raises(ValueError, match="0 tokens"):
        model.generate(ids[:, :0], 1)


def test_nsa_generates_with_a_cache_as_without():
    model, ids = (
        build(TINY.with_kinds(NSA(selected_blocks=4, window=64))),
        tokens(1, 260),
    )
    assert torch.equal(model.generate(ids, 3), greedy_by_full_forwards(model, ids, 3))


def test_sparse_generation_with_the_cache_equals_full_forwards():
    """The prompt has key blocks to choose from, and generation ends a block. Large weights make the
    choice matter."""
    model = build(replace(TINY, initializer_range=0.3))
    for blocks, layer in zip((2, 1), model.layers):
        layer.self_attn.kind = Sparse(blocks, block_size=32, window=32, dense_below=150)
    ids = tokens(2, 184)
    expected = greedy_by_full_forwards(model, ids, 20)
    assert torch.equal(model.generate(ids, 20), expected)
    for layer in model.layers:
        layer.self_attn.kind = FULL
    assert not torch.equal(model.generate(ids, 20), expected)


def test_generation_past_windows_equals_full_forwards():
    """Prompts shorter than a window, of one, and longer than two; the cache of a window never holds
    three."""
    config = reshape(TINY, initializer_range=0.3, kinds=(Window(50), FULL), num_hidden_layers=3)
    model = build(config)
    for length in (5, 50, 190, 49, 100):
        ids = tokens(2, length)
        assert torch.equal(model.generate(ids, 12), greedy_by_full_forwards(model, ids, 12))
    cache, keys = KeyValueCache(1000, 64), torch.arange(1000.0).view(1, 1000, 1, 1)
    for first, last in ((0, 3), (3, 100), (100, 290), *((i, i + 1) for i in range(290, 500))):
        held = cache.append(keys[:, first:last], -keys[:, first:last])
        for stored, expected in zip(held, (keys, -keys)):
            assert (
                torch.equal(stored[:, -64:], expected[:, max(0, last - 64) : last])
                and stored.shape[1] <= 128
            )
            assert stored.untyped_storage().nbytes() == 4 * 128
        assert cache.length == last


def test_caches_refuse_documents_and_chunks():
    model, ids = build(), tokens(1, 4)
    caches = [KeyValueCache(8) for _ in model.layers]
    model(ids, caches=caches)
    with pytest.raises(ValueError, match="one token at a time"):
        model(ids, caches=caches)
    with pytest.raises(ValueError, match="one document"):
        model(
            ids,
            find_documents(torch.zeros_like(ids)),
            caches=[KeyValueCache(8) for _ in model.layers],
        )


@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre", "forward"])
def test_hooks_of_norms_see_the_gradients_of_their_results(kind):
    found = {"torch": [], "triton": []}
    for impl, kept in found.items():

        def see(module, *seen, kept=kept):
            *_, results = seen  # or their gradients
            if kind == "forward":
                results[0].register_hook(kept.append)
            else:
                kept.append(results[0].clone() if kind == "full_backward" else results[0])

        model = build()
        norm = model.layers[0].post_attention_layernorm
        norm.impl = impl
        getattr(norm, f"register_{kind}_hook")(see)
        model(tokens(1, 9), loss=NextToken.from_labels(tokens(1, 9))).loss.backward()
    assert len(found["torch"]) == 1
    torch.testing.assert_close(found["triton"], found["torch"])


def test_output_has_only_what_was_asked_for():
    model, ids = build(), tokens(1, 8)
    (hidden,) = [x for x in tree_leaves(model(ids)) if x is not None]
    output = model(ids, loss=NextToken.from_labels(ids), return_logits=True)
    assert isinstance(output, ModelOutput) and output.logits.shape == (1, 8, 256)
    assert output.hidden_states is None and not output.log_probs.requires_grad
    torch.testing.assert_close(F.linear(hidden, model.output_weight), output.logits)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits[0, :-1], ids[0, 1:]))
    with pytest.raises(ValueError, match="targets must have input_ids' shape"):
        model(ids, loss=NextToken.from_labels(ids[:, :-1]))


@pytest.mark.parametrize(("change", "message"), [
    ({"num_heads": 3}, "multiple of num_key_value_heads"),
    ({"head_dim": 33}, "even"),
    ({"vocab_size": 0}, "vocab_size must be at least 1"),
    ({"activation": "relu"}, "silu, gelu_tanh"),
])  # fmt: skip
def test_bad_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        reshape(TINY, **change)


class SquaredSums:
    """A loss of the sums of log-probabilities in each row, and of its entropy, which gives no
    gradient."""

    reads_entropy = True

    def __call__(self, log_probs, entropy):
        assert entropy.shape == log_probs.shape and entropy[log_probs == 0].eq(0).all()
        with torch.enable_grad():
            leaf = log_probs.detach().requires_grad_()
            value = (leaf.sum(1) / 10).square().sum()
            (gradient,) = torch.autograd.grad(value, leaf)
        return value.detach() + entropy.sum(), -gradient


@pytest.mark.parametrize("return_logits", [False, True])
@pytest.mark.parametrize("loss_impl", ["chunked", "standard"])
@pytest.mark.parametrize("tied", [False, True])
def test_an_objective_of_log_probabilities_is_differentiated_through_its_weights(
    tied, loss_impl, return_logits
):
    config = replace(
        MODEL_SIZES["tiny"], num_hidden_layers=2, tie_word_embeddings=tied, initializer_range=0.1
    )
    torch.manual_seed(0)
    model, ids = Transformer(config), torch.randint(256, (2, 9))
    labels = ids.clone()
    labels[0, :4] = -100
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    logits = model(ids, return_logits=True).logits.float()
    log_p = logits.log_softmax(-1)
    chosen = torch.where(
        targets == -100, 0, log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    )
    entropy = torch.where(targets == -100, 0, -(log_p.exp() * log_p).sum(-1))
    exact = (chosen.sum(1) / 10).square().sum()
    wanted = torch.autograd.grad(exact, list(model.parameters()))

    model.loss_impl = loss_impl
    scored = Scored(SquaredSums(), targets)
    found = model(ids, loss=scored, return_logits=return_logits)
    torch.testing.assert_close(found.log_probs, chosen.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        found.loss.detach(), (exact + entropy.sum()).detach(), rtol=1e-5, atol=0
    )
    for gradient, expected in zip(
        torch.autograd.grad(found.loss, list(model.parameters())), wanted
    ):
        torch.testing.assert_close(
            gradient, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())
        )
    with torch.no_grad():
        torch.testing.assert_close(
            model(ids, loss=scored, return_logits=return_logits).loss, found.loss.detach()
        )

    weights = torch.randn(2, 9)
    weighted = NextToken(targets, weights, denominator=3)
    found = model(ids, loss=weighted, return_logits=return_logits).loss
    expected = torch.autograd.grad(
        -(chosen_of(model, ids, targets) * weights).sum() / 3, list(model.parameters())
    )
    for gradient, wanted_ in zip(torch.autograd.grad(found, list(model.parameters())), expected):
        torch.testing.assert_close(
            gradient, wanted_, rtol=1e-4, atol=1e-5 * float(wanted_.abs().max())
        )


def chosen_of(model, ids, targets):
    log_p = model(ids, return_logits=True).logits.float().log_softmax(-1)
    return torch.where(
        targets == -100, 0, log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    )


def test_gemma_rounds_the_factor_of_its_embeddings_as_transformers_does():
    """In bf16 the square root of 2,560 is 50.5, by which each element is multiplied and rounded
    once."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    for width in (48, 2560):
        shape = replace(MODEL_SIZES["tiny"], num_hidden_layers=1, hidden_size=width, vocab_size=64)
        shape = replace(shape, embedding_multiplier=width**0.5)
        for dtype in (torch.float32, torch.bfloat16):
            model = Transformer(shape).to(dtype)
            theirs = Gemma3TextScaledWordEmbedding(64, width, None, embed_scale=width**0.5).to(
                dtype
            )
            theirs.weight.data = model.embed_tokens.weight.data
            ids = torch.arange(64)[None]
            assert torch.equal(model.embed(ids), theirs(ids))
