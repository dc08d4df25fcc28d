"""Sequences of unlike micro-batches: one long document, many short ones, long again, and random
mixes.

A document is computed by what it is alone. So packing, batch size and accumulation change no loss,
and any order of batches fits the memory that was planned. Both broke once where one batch was
repeated in every test.
"""

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.attention import NSA, Sparse, Window
from kernels.attention.attend import attention
from kernels.attention.documents import find_documents
from kernels.attention.full import FULL
from kernels.head_loss import NextToken
from model import Transformer
from tests.shapes import model_of, reshape
from training.memory.execution import WHOLE, Execution, Placement, inventory_of
from training.memory.placement import apply_execution
from training.memory.plan import Plan
from training.memory.step import PackedDocuments, Step
from training.optim.adamw import MasterAdamW

B, T = 2, 288  # rows and tokens of a micro-batch
DENSE_BELOW = 161
SPARSE = Sparse(
    selected_blocks=1, block_size=32, window=32, dense_below=DENSE_BELOW
)  # a token chooses 1 of 0 to 7
NATIVE = NSA(selected_blocks=4, window=64)  # the last block's tokens choose 1 of 2
KINDS = {
    "full": (FULL,),
    "window": (Window(64),),
    "sparse": (SPARSE,),
    "nsa": (NATIVE,),
    "window, full": (Window(50), FULL),
    "sparse, window, nsa": (SPARSE, Window(128), NATIVE),
}
ON_HOST = Placement("host", "host")
PLACEMENTS = {  # and key/value heads at a time
    "whole": ((WHOLE,) * 3, None),
    "gpu": ((Placement("gpu", "gpu"),) * 3, 1),
    "host": ((ON_HOST,) * 3, None),
    "checkpointing": ((Placement(),) * 3, 1),
    "chain": (
        (Placement("host", "host"), Placement("recompute"), Placement("recompute", "host")),
        None,
    ),
    "host, then whole": ((ON_HOST, Placement("recompute", "gpu"), WHOLE), 1),
}
CONFIG = model_of(
    64, 32, 48, 3, 4, 2, 16, initializer_range=0.2
)  # weights so large that attention matters

# Lengths of the documents of each row. SPARSE chooses blocks in the first document of LONG alone.
# In documents of 144 tokens, which attend to everything, it would choose 1 block of up to 3.
LONG, SHORT = ((T,), (144, 144)), ((24,) * 12, (5, 40, 1, 90, 152))


@st.composite
def rows(draw):
    """Lengths of the documents of one row: T, many short ones, and any mixture around
    DENSE_BELOW."""
    kinds_of_lengths = (
        st.integers(1, 40),
        st.sampled_from((128, 160, 161, 162)),
        st.integers(100, T),
    )
    lengths, left = [], T
    for length in draw(st.lists(st.one_of(kinds_of_lengths), max_size=6)):
        lengths.append(min(length, left))
        left -= lengths[-1]
        if left == 0:
            return tuple(lengths)
    return (*lengths, left)


def build(kinds, tied=True):
    """The same weights every time, blocks left to autograd."""
    torch.manual_seed(0)
    return Transformer(reshape(CONFIG, kinds=kinds, tie_word_embeddings=tied))


def build_as_planned(kinds, placements, heads_at_a_time):
    """A model under a placement, with an arena of the bytes that a plan for a batch says."""
    model, documents = build(kinds), PackedDocuments(T, ((T, 1.0), (24, 6.0)))
    step = Step(model.shard, model.named_parameters(), T, B, documents=documents, element_size=4)
    plan = Plan(step, Execution(placements, mlp_tile_size=64, heads_at_a_time=heads_at_a_time))
    apply_execution(model, plan.execution, plan.arena_bytes)
    return model


def tokens_of(batch):
    """Token ids [B, T] that depend on the lengths, and the documents' numbers in each row."""
    ids = torch.randint(64, (len(batch), T), generator=torch.Generator().manual_seed(batch[0][0]))
    documents = [
        torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)) for lengths in batch
    ]
    return ids, torch.stack(documents)


def batched(batch):
    """The micro-batch as it is."""
    ids, documents = tokens_of(batch)
    return [(ids, documents)]


def accumulated(batch):
    """A micro-batch for each row."""
    ids, documents = tokens_of(batch)
    return [*zip(ids.split(1), documents.split(1))]


def packed(batch):
    """All documents in one row."""
    ids, documents = tokens_of(batch)
    documents += torch.arange(len(batch))[:, None] * T
    return [(ids.view(1, -1), documents.view(1, -1))]


def alone(batch):
    """A micro-batch for each document; one token alone predicts nothing."""
    ids, _ = tokens_of(batch)
    parts = [part for row, lengths in zip(ids, batch) for part in row.split(lengths)]
    return [(part[None], None) for part in parts if len(part) > 1]


def run(model, micro_batches):
    """The summed loss over a constant, and all gradients."""
    model.zero_grad()
    total = 0.0
    for ids, documents in micro_batches:
        documents = None if documents is None else find_documents(documents)
        loss = model(ids, documents, NextToken.from_labels(ids, documents, denominator=B * T)).loss
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_close(found, expected, what):
    """Losses to 1e-6, each parameter's gradient to a few roundings of its norm."""
    assert found[0] == pytest.approx(expected[0], rel=1e-6), what
    for name, gradient in expected[1].items():
        difference = float((found[1][name] - gradient).norm() / gradient.norm())
        assert difference < 5e-6, (what, name, difference)


@functools.cache
def unplaced(name, batch, divided=batched):
    return run(build(KINDS[name]), divided(batch))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", KINDS)
def test_long_then_short_then_long_fits_the_planned_arena(name, placement):
    """One model under a placement goes through unlike batches in an arena of the planned bytes, as
    an unplaced one."""
    model = build_as_planned(KINDS[name], *PLACEMENTS[placement])
    for batch in (LONG, SHORT, LONG):
        assert_close(run(model, batched(batch)), unplaced(name, batch), batch)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=3, derandomize=True, deadline=None, database=None)
@example([LONG, SHORT], "host, then whole")
@given(
    sequence=st.lists(st.tuples(rows(), rows()), min_size=1, max_size=2),
    placement=st.sampled_from([*PLACEMENTS]),
)
def test_how_documents_are_divided_changes_nothing(name, sequence, placement):
    """In any sequence of batches a document's loss and gradients do not depend on its neighbours.

    One model under a placement, in the arena that was planned for a batch, has the same documents
    as a batch, as a micro-batch for each row, and packed in one row. An unplaced model has each
    document alone.
    """
    model = build_as_planned(KINDS[name], *PLACEMENTS[placement])
    for batch in sequence:
        for divided in (batched, accumulated, packed):
            assert_close(
                run(model, divided(batch)), unplaced(name, batch, alone), (divided.__name__, batch)
            )


def test_a_sparse_run_lives_through_mixed_documents():
    """Results on the host, all heads at once: long documents, short ones, long again, in an arena
    of planned bytes.

    Batches of short documents, all attended to densely, once kept log-sum-exps in another layout
    than long ones. They took new slots of the arena, and the run died: "the pinned arena of ...
    bytes has ... left".
    """
    placements = (Placement("gpu", "host"), ON_HOST, Placement("recompute", "host"))
    placed = build_as_planned((SPARSE,), placements, None)
    arena, used = placed.layers[0].forward.func.__self__.copies.arena, set()
    for batch in (LONG, SHORT, LONG, ((T,), (T,)), SHORT, LONG):
        assert_close(run(placed, batched(batch)), unplaced("sparse", batch), batch)
        used.add(arena.used_bytes)
    assert len(used) == 1 and 0 <= arena.num_bytes - arena.used_bytes <= 1024 * 5


def on_host(placement):
    return replace(placement, weights="host")


VISITING = {  # and key/value heads at a time
    "all": ((on_host(ON_HOST),) * 3, None),
    "some": (
        (on_host(Placement("gpu", "host")), Placement("recompute", "gpu"), on_host(ON_HOST)),
        1,
    ),
    "chain": (tuple(map(on_host, PLACEMENTS["chain"][0])), None),
    "beside a whole block": ((on_host(Placement()), WHOLE, on_host(Placement("gpu", "host"))), 1),
}


def train(kinds, tied, execution, dtype, state_format):
    """Losses, norms and gradients of updates from unlike batches, validation losses after them, and
    the last weights.

    The second update follows a backward that was broken off, the third a forward that did not come
    to its loss.
    """
    model = build(kinds, tied).to(dtype)
    placed = replace(execution, state_format=state_format)
    optimizer = MasterAdamW(
        model.named_parameters(),
        inventory_of(model.named_parameters(), model.declared, placed, accumulate=True),
    )
    optimizer.update_beside_forward([model.embed_tokens, *model.layers, model.norm])
    documents = PackedDocuments(T, ((T, 1.0), (24, 6.0)))
    step = Step(
        model.shard,
        model.named_parameters(),
        T,
        B,
        documents=documents,
        element_size=dtype.itemsize,
    )
    plan = Plan(step, execution)
    apply_execution(model, plan.execution, plan.arena_bytes, optimizer.homes)
    seen = []

    def loss_of(batch):
        [(ids, documents)] = batched(batch)
        packed = find_documents(documents)
        return model(ids, packed, NextToken.from_labels(ids, packed, denominator=B * T)).loss

    for number, batches in enumerate([(LONG, SHORT), (SHORT,), (LONG, LONG, SHORT)]):
        if number:
            register = (
                model.layers[0].mlp.up_proj.weight.register_hook,
                model.norm.register_forward_pre_hook,
            )
            handle = register[number - 1](lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss_of(LONG).backward()
            handle.remove()
            optimizer.zero_grad()
        for batch in batches:
            loss = loss_of(batch)
            loss.backward()
            seen.append(loss.detach())
        seen += [state.gradient.clone() for state in optimizer.states.values()]
        seen.append(torch.tensor(optimizer.clip_grad_norm(1.0)))
        optimizer.step(1e-2)
        with torch.no_grad():
            seen.append(loss_of(LONG))
    return [*seen, *(weight.detach().clone() for weight in optimizer.weights().values())]


FORMATS = (torch.float32, "float32"), (torch.bfloat16, "float32"), (torch.bfloat16, "compact")
ENDS = "", "ends", "", "tied ends"  # ends on the host, for each case of VISITING
TRAINED = [("full", placement, *FORMATS[2], ends) for placement, ends in zip(VISITING, ENDS)]
TRAINED += [("full", "chain", *FORMATS[0], "ends"), ("full", "chain", *FORMATS[1], "tied ends")]
TRAINED += [
    ("full", "all", *FORMATS[2], "tied ends"),
    ("sparse, window, nsa", "chain", *FORMATS[2], ""),
]


@pytest.mark.parametrize(("name", "placement", "dtype", "state_format", "ends"), TRAINED)
def test_weights_on_the_host_train_alike(name, placement, dtype, state_format, ends):
    """Equal bit for bit to weights on the GPU, whether blocks alone are on the host or embedding
    and head as well."""
    placements, heads = VISITING[placement]
    there = tuple(replace(placement, weights="gpu") for placement in placements)
    runs = []
    for each, place in ((there, "gpu"), (placements, "host" if ends else "gpu")):
        loss_impl = "chunked" if ends else "auto"
        execution = Execution(each, 64, heads, loss_impl=loss_impl, ends=place)
        runs.append(train(KINDS[name], ends != "ends", execution, dtype, state_format))
    assert len(runs[0]) == len(runs[1]) and all(map(torch.equal, *runs))


def test_kinds_differ_where_they_should():
    """Chosen blocks and windows change the loss of a long document by far more than the tests above
    allow."""
    for batch, differ in ((LONG, True), (SHORT, False)):
        losses = {name: unplaced(name, batch)[0] for name in ("full", "sparse")}
        assert (abs(losses["sparse"] / losses["full"] - 1) > 1e-4) == differ
    assert len({round(unplaced(name, LONG)[0], 4) for name in KINDS}) == len(KINDS)


def test_kernels_attend_to_a_document_by_itself():
    """Triton's kernels give a document the output and the gradients that it has alone, in a batch
    and in one row."""
    kind = replace(SPARSE, dense_below=131)
    lengths, tokens = (160, 130, 30), 160
    generator = torch.Generator().manual_seed(0)
    widths = (2, 64), (1, 64), (1, 64), (2, 64)
    q, k, v, dout = (torch.randn(2 * tokens, *width, generator=generator) for width in widths)

    def attend(shape, own, lengths):
        """Output and gradients of some tokens, in rows of a shape and documents of these
        lengths."""
        inputs = [x[own].unflatten(0, shape).requires_grad_() for x in (q, k, v)]
        ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).view(shape)
        out = attention(*inputs, find_documents(ids).segments, kind=kind, impl="triton")
        found = out, *torch.autograd.grad(out, inputs, dout[own].unflatten(0, shape))
        return [x.detach().flatten(0, 1) for x in found]

    own = [attend((1, n), slice(start, start + n), [n]) for start, n in zip((0, 160, 290), lengths)]
    expected = [torch.cat(parts) for parts in zip(*own)]
    for shape in ((2, tokens), (1, 2 * tokens)):
        for found, of_document in zip(attend(shape, slice(None), lengths), expected, strict=True):
            assert (found - of_document).abs().max() <= 2e-6 * of_document.abs().max(), shape
