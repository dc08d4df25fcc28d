import functools
import gc
import importlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels import gated_activation
from kernels.attention import NSA, Sparse, Window
from kernels.attention.documents import find_documents
from kernels.attention.full import FULL
from kernels.attention.libraries import KERNELS
from kernels.head_loss import NextToken
from model import MODEL_SIZES, Transformer
from tests.optimizers import make_optimizer
from tests.ranks import run_ranks
from tests.shapes import reshape
from training.host.memory import PinnedArena
from training.memory.cost_model import arena_bytes
from training.memory.dry_run import results_bytes
from training.memory.execution import PLACES, WHOLE, Execution, Placement, inventory_of
from training.memory.placement import apply_execution, apply_placement
from training.memory.step import Step
from training.parallel.fsdp import copy_weights, initial_weights, shard_model
from training.parallel.world import World

CPU = torch.device("cpu")
TINY = MODEL_SIZES["tiny"]  # 4 layers
UNIFORM = {f"{i} {a}": (Placement(i, a),) * 4 for i in ("gpu", "host") for a in PLACES}
MIXED = {
    "pairs": [Placement("host", "gpu"), Placement("recompute", "host")] * 2,
    "chain": [
        Placement("gpu", "host"),
        Placement("recompute"),
        Placement("recompute", "gpu"),
        Placement("host"),
    ],
}
PLACEMENTS = UNIFORM | MIXED
WEIGHTS = {  # that live on the host
    "weights": [Placement("host", "host", weights="host")] * 4,
    "weights, pairs": [
        Placement("host", "gpu", weights="host"),
        Placement("recompute", "host", weights="host"),
    ]
    * 2,
    "weights, chain": [replace(placement, weights="host") for placement in MIXED["chain"]],
    "weights of every second": [Placement(weights="host"), Placement("recompute", "host")] * 2,
}
WITH_WHOLE = {
    "all whole": [WHOLE] * 4,
    "whole last": [Placement("host", "host"), Placement("gpu", "gpu"), WHOLE, WHOLE],
    "whole first": [WHOLE, Placement("host", "gpu"), Placement("recompute", "host"), WHOLE],
    "whole beside weights": [
        Placement("host", weights="host"),
        WHOLE,
        Placement("gpu", "gpu", weights="host"),
        WHOLE,
    ],
}


def build(placements=None, dtype=torch.float32, mlp_tile_size=None, kinds=(FULL,), **options):
    """A tiny model, the same every time; without placements, of the same MLP."""
    torch.manual_seed(0)
    model = Transformer(reshape(TINY, kinds=kinds)).to(dtype)
    for block in model.layers:
        block.mlp.tile_size = mlp_tile_size
    if placements is not None:
        execution = Execution(tuple(placements), mlp_tile_size, **options)
        apply_execution(model, execution, arena_bytes=2**22, homes=send_home(model, execution))
    return model


def send_home(model, execution):
    """Move the weights that live on the host there, as the optimizer does; returns them by
    parameter."""
    inventory = inventory_of(model.named_parameters(), model.declared, execution, accumulate=True)
    parameters = [model.get_parameter(row.name) for row in inventory if row.weight_on_host]
    arena = PinnedArena(sum(p.nbytes + 512 for p in parameters), model.embed_tokens.weight.device)
    homes = {p: arena.allocate(p.shape, p.dtype).copy_(p.detach()) for p in parameters}
    for parameter in parameters:
        parameter.untyped_storage().resize_(0)
    return homes


def engine(model):
    """What runs a model's blocks where they are placed."""
    return model.layers[0].forward.func.__self__


def make_batch(packed):
    ids = torch.randint(256, (2, 51), generator=torch.Generator().manual_seed(0))
    documents = torch.zeros_like(ids)
    for row, start in ((0, 13), (0, 40), (1, 29)):
        documents[row, start:] += 1
    return ids, find_documents(documents) if packed else None


def run(model, packed=False):
    """Loss and all gradients, flat; after another pass, which leaves its own in arena and slots."""
    ids, documents = make_batch(packed)
    for tokens in (ids.flip(0, 1), ids):
        model.zero_grad()
        loss = model(tokens, documents, NextToken.from_labels(tokens, documents)).loss
        loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tile_size", [None, 40])
def test_placements_change_no_bit(tile_size, packed):
    loss, gradients = run(build(mlp_tile_size=tile_size), packed)
    for name, placements in (
        PLACEMENTS | WEIGHTS | (WITH_WHOLE if tile_size is None else {})
    ).items():
        placed_loss, placed_gradients = run(build(placements, mlp_tile_size=tile_size), packed)
        assert torch.equal(placed_loss, loss) and torch.equal(placed_gradients, gradients), name


def assert_close_runs(found, expected, error=1e-6):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    assert (found[1] - expected[1]).abs().max() <= error * expected[1].abs().max()


@pytest.mark.parametrize("heads_at_a_time", [None, 1])
def test_whole_blocks_beside_tiles_and_groups_differ_by_rounding(heads_at_a_time):
    """And are of all rows and heads at once."""
    expected = run(build())
    for name, placements in WITH_WHOLE.items():
        found = run(build(placements, mlp_tile_size=40, heads_at_a_time=heads_at_a_time))
        assert_close_runs(found, expected)
        assert name != "all whole" or torch.equal(found[1], expected[1])


@pytest.mark.parametrize("packed", [False, True])
def test_attention_by_groups_differs_by_rounding(packed):
    """And all placements of it agree, bit for bit."""
    expected = run(build(mlp_tile_size=40), packed)
    results = [
        run(build(p, heads_at_a_time=1, mlp_tile_size=40), packed) for p in PLACEMENTS.values()
    ]
    assert_close_runs(results[0], expected)
    assert all(
        torch.equal(found, same) for result in results for found, same in zip(result, results[0])
    )


def test_attention_by_groups_is_as_exact():
    """Against float64; in bfloat16, where the input's gradient is rounded once a group."""
    _, expected = run(build(dtype=torch.float64))
    for dtype in (torch.float32, torch.bfloat16):
        (_, whole), (_, by_groups) = (
            run(build(dtype=dtype)),
            run(build([Placement()] * 4, dtype, heads_at_a_time=1)),
        )
        whole_error, error = ((gradients - expected).norm() for gradients in (whole, by_groups))
        assert error <= 1.5 * whole_error


@given(
    first=st.sampled_from(("gpu", "host")),
    inputs=st.lists(st.sampled_from(PLACES), min_size=3, max_size=3),
    attention=st.lists(st.sampled_from(PLACES), min_size=4, max_size=4),
    weights=st.lists(st.sampled_from(("gpu", "host")), min_size=4, max_size=4),
    heads_at_a_time=st.sampled_from((None, 1)),
)
@settings(derandomize=True, deadline=None, max_examples=15)
def test_any_mixture_of_placements(first, inputs, attention, weights, heads_at_a_time):
    places = zip((first, *inputs), attention, weights)
    placements = [Placement(input, results, weights=weight) for input, results, weight in places]
    loss, gradients = run(build(placements, heads_at_a_time=heads_at_a_time), packed=True)
    expected_loss, expected = checkpointed(heads_at_a_time)
    assert torch.equal(loss, expected_loss) and torch.equal(gradients, expected)


@functools.cache
def checkpointed(heads_at_a_time):
    return run(build([Placement()] * 4, heads_at_a_time=heads_at_a_time), packed=True)


@pytest.mark.parametrize("heads_at_a_time", [None, 1])
def test_what_is_kept_does_not_run_again(heads_at_a_time, monkeypatch):
    calls = {"attention": 0, "mlp": 0}

    def counted(name, function):
        def count(*args):
            calls[name] += 1
            return function(*args)

        return count

    reference = "gated_activation_reference"
    monkeypatch.setattr(
        gated_activation, reference, counted("mlp", getattr(gated_activation, reference))
    )
    kernel = KERNELS["cpu"]
    monkeypatch.setitem(
        KERNELS, "cpu", kernel._replace(forward=counted("attention", kernel.forward))
    )

    def count(placements, mlp_tile_size):
        model = build(placements, mlp_tile_size=mlp_tile_size, heads_at_a_time=heads_at_a_time)
        ids, _ = make_batch(packed=False)
        loss = model(ids, loss=NextToken.from_labels(ids)).loss
        calls.update(attention=0, mlp=0)
        loss.backward()
        return calls["attention"] / (
            TINY.attention.num_key_value_heads if heads_at_a_time else 1
        ), calls["mlp"]

    assert count([Placement("gpu", "gpu")] * 4, None) == (0, 4)
    assert count([Placement("host", "host")] * 4, 102) == (0, 0)
    assert count([Placement()] * 4, 102) == (4, 0)
    assert count([WHOLE] * 4, 102) == (0, 0)
    # Blocks 1 and 2 are rebuilt from block 0, which runs again for both, attention and all where
    # that was not kept.
    assert count(PLACEMENTS["chain"], 102) == (1 + 1 + 1, 1 + 2)


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that were made under it and still live."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return output

    def total(self):
        self.storages = {
            key: value for key, value in self.storages.items() if not value[0].expired()
        }
        return sum(nbytes for _, nbytes in self.storages.values())


def kept_bytes(placements, **options):
    """What forward leaves, but for the arena; and how much of the arena it uses."""
    model = build(placements, **options)
    ids, _ = make_batch(packed=False)
    model(ids, loss=NextToken.from_labels(ids)).loss.backward()  # RoPE's tables are there
    placed = engine(model)
    arena_storage = (
        None if placed.copies is None else placed.copies.arena._bytes.untyped_storage()._cdata
    )
    with LiveBytes() as live:
        loss = model(ids, loss=NextToken.from_labels(ids)).loss
    live.storages.pop(arena_storage, None)
    total = live.total()
    loss.backward()
    return total, placed.copies.arena.used_bytes


@pytest.mark.parametrize("heads_at_a_time", [None, 1])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_keeps_what_is_planned(name, heads_at_a_time):
    placements = PLACEMENTS[name]
    step = Step(TINY, Transformer(TINY).named_parameters(), 51, batch_size=2, element_size=4)
    nothing, _ = kept_bytes(UNIFORM["host recompute"], heads_at_a_time=heads_at_a_time)
    total, used = kept_bytes(placements, heads_at_a_time=heads_at_a_time)
    planned = step.input_bytes * sum(p.input == "gpu" for p in placements)
    planned += results_bytes(step, step.parts[0])[0] * sum(p.results == "gpu" for p in placements)
    assert total - nothing == planned
    assert 0 <= arena_bytes(step, Execution(tuple(placements))) - used <= 1024 * 8 + 512


def test_nothing_grows_over_twenty_steps():
    model = build(PLACEMENTS["pairs"], heads_at_a_time=1, mlp_tile_size=40)
    placed = engine(model)
    optimizer = make_optimizer(model.named_parameters(), gpu_state_bytes=0)
    ids, documents = make_batch(packed=True)
    seen = []
    for step in range(20):
        model(ids, documents, NextToken.from_labels(ids, documents)).loss.backward()
        optimizer.step(1e-3)
        if step % 4 == 3:
            gc.collect()
            tensors = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
            seen.append(
                (
                    tensors,
                    placed.copies.arena.used_bytes,
                    len(placed.copies.slots),
                    len(placed.on_gpu),
                )
            )
    assert set(seen) == {seen[0]} and seen[0][-1] == 0


@pytest.mark.parametrize(
    "placements", [PLACEMENTS["pairs"], WEIGHTS["weights, pairs"]], ids=["pairs", "weights"]
)
def test_validation_and_generation_keep_nothing(placements):
    ids, documents = make_batch(packed=True)
    plain, placed = build(), build(placements, heads_at_a_time=1)
    with torch.no_grad():
        losses = [
            model(ids, documents, NextToken.from_labels(ids, documents)).loss
            for model in (plain, placed)
        ]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    assert torch.equal(plain.generate(ids[:1], 5), placed.generate(ids[:1], 5))
    assert not engine(placed).copies.slots
    assert placements[0].weights == "gpu" or resident(placed) == placed.embed_tokens.weight.nbytes


def resident(model):
    """Bytes of the weights on the device, without the last norm's."""
    return sum(p.untyped_storage().nbytes() for p in model.parameters()) - model.norm.weight.nbytes


@pytest.mark.parametrize(
    ("name", "ends"),
    [*((name, "gpu") for name in (*WEIGHTS, "whole beside weights")), ("weights", "host")],
)
def test_weights_of_two_blocks_visit_at_a_time(name, ends):
    """Weights from the host are there for the block that runs and for the next; none are left after
    a pass."""
    placements = (WEIGHTS | WITH_WHOLE)[name]
    model, seen = build(placements, ends=ends, loss_impl="chunked"), []
    block = sum(p.nbytes for p in model.layers[0].parameters())
    own = block * sum(placement.weights == "gpu" for placement in placements)
    own += 256 * 128 * 4 if ends == "gpu" else 0
    assert resident(model) == own
    parts = (part for layer in model.layers for part in (layer, layer.self_attn, layer.mlp))
    for part in (model.embed_tokens, *parts, model.norm):
        part.register_forward_hook(lambda *_: seen.append(resident(model)))
    for parameter in model.layers.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(resident(model)))
    ids, documents = make_batch(packed=True)
    for _ in range(2):
        model(ids, documents, NextToken.from_labels(ids, documents)).loss.backward()
        assert resident(model) == own
    visiting = (
        1 if name == "whole beside weights" else 2
    )  # beside a whole block no others' weights visit
    assert max(seen) == own + visiting * block and len(seen) > 2 * 4 * 11
    with torch.no_grad():
        model(ids, documents, NextToken.from_labels(ids, documents))
    assert resident(model) == own and max(seen) <= own + 2 * block


@pytest.mark.parametrize("ends", ["gpu", "host"])
def test_weights_that_changed_since_a_broken_pass_are_fetched_anew(ends):
    model = build(WEIGHTS["weights"], ends=ends, loss_impl="chunked")
    expected = build(PLACEMENTS["host host"], loss_impl="chunked")
    blocks = engine(model).weights.homes.values()
    homes = {parameter: home for block in blocks for parameter, home in block.items()}
    ids, _ = make_batch(packed=False)
    handle = model.layers[0].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids, loss=NextToken.from_labels(ids))
    handle.remove()
    assert resident(model)
    with torch.no_grad():
        for own, parameter in zip(model.parameters(), expected.parameters()):
            for changed in (homes[own], parameter) if own in homes else ():
                changed.mul_(1.5)
        assert torch.equal(
            model(ids, loss=NextToken.from_labels(ids)).loss,
            expected(ids, loss=NextToken.from_labels(ids)).loss,
        )
    assert all(map(torch.equal, run(model), run(expected)))


def test_a_graph_that_is_older_than_a_visit_is_refused():
    model = build(WEIGHTS["weights"])
    weights, parameter = engine(model).weights, model.layers[0].mlp.up_proj.weight
    with weights.visit(0):
        made = (parameter * parameter).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.backward()
    with weights.visit(0), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.backward()


class TwoCalls(torch.nn.Module):
    """Attention, and attention again of what it gave, within one block."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x_BTD, context):
        return self.attention(x_BTD + self.attention(x_BTD, context), context)


@pytest.mark.parametrize("name", ["gpu gpu", "host host", "chain"])
def test_a_block_may_attend_twice(name):
    def gradients(placements):
        model = build()
        for block in model.layers:
            block.self_attn = TwoCalls(block.self_attn)
        if placements is not None:
            apply_placement(model.layers, placements, arena=PinnedArena(2**22, CPU))
        return run(model, packed=True)

    assert all(map(torch.equal, gradients(PLACEMENTS[name]), gradients(None)))


SPARSE = Sparse(
    selected_blocks=1, block_size=32, window=32, dense_below=200
)  # of 7 blocks each sees 3 at most
NATIVE = NSA(selected_blocks=4, window=64)
MIXED_KINDS = Window(64), SPARSE, FULL, Window(128)
KINDS = {
    "sparse": tuple(replace(SPARSE, selected_blocks=n) for n in (2, 1, 0, 1)), "mixed": MIXED_KINDS,
    "nsa": (NATIVE,)
}  # fmt: skip


@functools.cache
def run_sparsely(*kinds, placements=(WHOLE,) * 4, heads_at_a_time=None):
    """Loss and all gradients over a sequence of 220 tokens, and one of two documents."""
    model = build(
        placements, kinds=kinds or (FULL,), heads_at_a_time=heads_at_a_time, mlp_tile_size=40
    )
    ids = torch.randint(256, (2, 220), generator=torch.Generator().manual_seed(0))
    documents = torch.zeros_like(ids)
    documents[1, 90:] = 1
    packed = find_documents(documents)
    loss = model(ids, packed, NextToken.from_labels(ids, packed)).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize(("kind", "names", "heads_at_a_time"), [
    *(("sparse", ["gpu recompute", "gpu gpu", "host host", "chain"], heads) for heads in (None, 1)),
    *(("mixed", ["gpu gpu", "host host", "chain"], heads) for heads in (None, 1)),
    ("nsa", ["gpu recompute", "chain"], 1), ("nsa", ["host host"], None),
])  # fmt: skip
def test_kinds_of_attention_under_placements(kind, names, heads_at_a_time):
    """Also windows, chosen blocks and attention to everything in one model: each layer keeps its
    own kind."""
    for name in names:
        placed = {"placements": tuple(PLACEMENTS[name]), "heads_at_a_time": heads_at_a_time}
        assert_close_runs(run_sparsely(*KINDS[kind], **placed), run_sparsely(*KINDS[kind]), 2e-6)


def test_layers_of_several_kinds_differ():
    others = [FULL], [*MIXED_KINDS[1:], FULL], MIXED_KINDS[::-1]
    assert run_sparsely(*MIXED_KINDS)[0] not in [run_sparsely(*kinds)[0] for kinds in others]


def test_an_execution_says_how_layers_attend():
    """In place of the configuration, whose own kinds come back without it; layers keep the gates
    that they have."""
    mixed = (Window(64), SPARSE) * 2
    model, ids = build(), torch.randint(256, (1, 220), generator=torch.Generator().manual_seed(0))
    own, expected = (
        model(ids, loss=NextToken.from_labels(ids)).loss,
        build(kinds=mixed)(ids, loss=NextToken.from_labels(ids)).loss,
    )
    apply_execution(model, Execution((WHOLE,) * 4, kinds=mixed))
    assert model(ids, loss=NextToken.from_labels(ids)).loss == expected != own
    apply_execution(model, Execution((WHOLE,) * 4))
    assert model(ids, loss=NextToken.from_labels(ids)).loss == own
    for kinds, asked in (((FULL,), NATIVE), ((NATIVE,), SPARSE)):
        with pytest.raises(
            ValueError, match=f"own attention is {kinds[0].name} has no parameters for {asked.name}"
        ):
            apply_execution(build(kinds=kinds), Execution((WHOLE,) * 4, kinds=(asked,) * 4))


@pytest.mark.parametrize(
    ("kind", "module", "function"),
    [
        (SPARSE, "sparse.sparse_attention", "top_blocks_reference"),
        (NATIVE, "nsa.nsa", "top_blocks_reference"),
    ],
    ids=["sparse", "nsa"],
)
@pytest.mark.parametrize("heads_at_a_time", [None, 1])
def test_blocks_are_chosen_once(kind, module, function, heads_at_a_time, monkeypatch):
    """In forward, whether or not attention's results are kept for backward. NSA chooses in short
    documents as well."""
    module, chosen = importlib.import_module(f"kernels.attention.{module}"), []
    select = getattr(module, function)
    monkeypatch.setattr(module, function, lambda *a, **k: chosen.append(1) or select(*a, **k))
    for name in ("gpu recompute", "host gpu", "chain")[: 3 if kind is SPARSE else 1]:
        chosen.clear()
        run_sparsely.__wrapped__(kind, placements=PLACEMENTS[name], heads_at_a_time=heads_at_a_time)
        calls = 4 * (TINY.attention.num_key_value_heads if heads_at_a_time else 1)
        assert len(chosen) == calls * (1 if kind is SPARSE else 3)


def test_sparse_attention_with_all_blocks_is_dense():
    dense, some = run_sparsely(), run_sparsely(SPARSE)
    whole, short = (
        run_sparsely(replace(SPARSE, selected_blocks=8)),
        run_sparsely(replace(SPARSE, dense_below=221)),
    )
    assert_close_runs(whole, dense, 1e-5)
    assert torch.equal(short[1], dense[1]) and some[0] != dense[0]


@pytest.mark.parametrize("heads_at_a_time", [None, 1])
def test_second_derivatives_are_refused(heads_at_a_time):
    model = build([Placement()] * 4, heads_at_a_time=heads_at_a_time)
    ids, _ = make_batch(packed=False)
    loss = model(ids).hidden_states.square().sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        loss.backward(create_graph=True)


def test_a_second_forward_before_backward_is_refused():
    model = build(UNIFORM["host host"])
    ids, _ = make_batch(packed=False)
    outputs = [model(ids).hidden_states.sum() for _ in range(2)]
    outputs[1].backward(retain_graph=True)
    for output in outputs:
        with pytest.raises(RuntimeError, match="block 3 went forward or backward again"):
            output.backward()


@pytest.mark.parametrize(
    "placements", [UNIFORM["host host"], WITH_WHOLE["whole first"], WEIGHTS["weights, chain"]]
)
def test_a_pass_after_one_that_was_broken_off(placements):
    expected = run(build())
    model = build(placements)
    ids, _ = make_batch(packed=False)
    handle = model.layers[2].self_attn.o_proj.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids.roll(7), loss=NextToken.from_labels(ids)).loss.backward()
    handle.remove()
    assert all(map(torch.equal, run(model), expected))


def test_placements_that_make_no_sense_are_refused():
    blocks = Transformer(TINY).layers
    homes = {parameter: parameter.detach() for parameter in blocks[2].parameters()}
    there, again = (
        [Placement(), Placement(weights="host")] * 2,
        [Placement(), WHOLE, Placement("recompute"), Placement()],
    )
    ends, live = Execution((WHOLE,) * 4, loss_impl="chunked", ends="host"), "where they do not live"
    for message, place in (
        ("one of gpu, host, recompute, got 'disk'", lambda: Placement("disk")),
        ("4 blocks need as many placements, got 3", lambda: apply_placement(blocks, [Placement()] * 3)),
        ("first block", lambda: apply_placement(blocks, [Placement("recompute")] * 4)),
        ("need an arena", lambda: apply_placement(blocks, UNIFORM["gpu host"])),
        ("one of gpu, recompute, got 'host'", lambda: Placement("gpu", "gpu", "host")),
        ("weights must be placed in one of gpu, host, got 'recompute'", lambda: Placement(weights="recompute")),
        ("rest on gpu needs weights there, got host", lambda: replace(WHOLE, weights="host")),
        ("needs input and results there, got gpu and recompute", lambda: Placement(rest="gpu")),
        ("block 2's input cannot be recomputed from block 1", lambda: apply_placement(blocks, again)),
        (f"block 1 is placed with weights on the host, {live}", lambda: apply_placement(blocks, there)),
        ("ends must be one of gpu, host, got 'disk'", lambda: Execution(ends="disk")),
        ("ends on the host need loss_impl chunked, got auto; place them on gpu", lambda: Execution(ends="host")),
        (f"embedding and head are placed on the host, {live}", lambda: apply_execution(Transformer(TINY), ends)),
        (f"block 2 is placed with weights on the gpu, {live}",
         lambda: apply_placement(blocks, [Placement()] * 4, homes=homes)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            place()


def test_sharded_over_two_processes():
    run_ranks(2, compare_sharded)


def compare_sharded(world: World) -> None:
    """FSDP2 with and without placements, a micro-batch of its own on every rank: the same bits."""
    assert world.broadcast(Placement("host", ("gpu", "recompute")[world.rank])) == Placement(
        "host", "gpu"
    )

    def gradients(placements):
        with torch.device("meta"):
            model = Transformer(TINY)
        shard_model(model, model.layers, world)
        for there in (
            {"placements": (Placement(weights="host"),) * 4},
            {"loss_impl": "chunked", "ends": "host"},
        ):
            with pytest.raises(ValueError, match="sharded parameters stay on the GPU"):
                inventory_of(
                    model.named_parameters(), model.declared, Execution(**there), accumulate=True
                )
        model.to_empty(device=world.device)
        copy_weights(model, initial_weights(model, seed=0))
        if placements is not None:
            apply_placement(model.layers, placements, arena=PinnedArena(2**22, CPU))
        ids, documents = make_batch(packed=True)
        for shift in range(2):  # gradients add up
            tokens = ids.roll(2 * shift + world.rank, dims=1)
            model(tokens, documents, NextToken.from_labels(tokens, documents)).loss.backward()
        return torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])

    expected = gradients(None)
    for name in (
        "gpu gpu",
        "host host",
        "pairs",
        "chain",
        "whole last",
        "whole first",
    ):  # each place of each kind
        assert torch.equal(gradients((PLACEMENTS | WITH_WHOLE)[name]), expected), name
