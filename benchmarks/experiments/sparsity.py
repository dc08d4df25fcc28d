"""Probe attention to chosen blocks on given weights: its share of attention's mass, and its cost in loss.

    python -m benchmarks.experiments.sparsity CHECKPOINT

For each layer, over queries evenly spread through the context, with softmax over all keys that a query may see:

- captured: the share of attention's mass on the visible blocks (first block, window, chosen blocks); mean over heads
- best: the same if the blocks of highest mass were chosen, one list for the query heads of a key/value head
- recall: the share of the best blocks that are chosen
- worst: the query head with the least captured mass

Queries and keys come from a forward that attends to everything. For the whole model: loss with attention to chosen
blocks minus loss with attention to everything, on the same tokens, by a token's position in its document. Memory on a
GPU is linear in the tokens: masses exist for a range of queries at a time. On a CPU the sparse forward is the reference
in `kernels.attention.sparse`. It writes the tokens x tokens matrix out: take at most 8,192 tokens.
"""

import json
import math
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.full import FULL
from kernels.attention.sparse.layout import Layout, first_local_block, make_layout
from kernels.attention.sparse.sparse_attention import HEAD_DIMS, Sparse
from kernels.common import use_triton
from kernels.qkv_attention import project_heads
from model import IGNORE_INDEX, Transformer
from training.attention_flags import numbers_by_layer
from training.checkpoint.files import load_trainer_state
from training.checkpoint.weights import load_model_weights, parameter_shapes, shape_of_weights
from training.data.corpus import open_stores
from training.data.loader import Batch, validation_batches
from training.data.tokens import join
from training.flags import Parser
from training.host.errors import UserError
from training.host.processes import command
from training.inference import open_tokenizer, token_losses
from training.memory.placement import set_kinds
from training.parallel.fsdp import copy_weights
from training.parallel.world import join_world

Choose = Callable[[Tensor, Tensor, Tensor | None, Sparse], Tensor]
MASSES_BYTES = 2**28  # limit on attention's probabilities that exist at once
FIRST_BUCKET = 64  # positions: the first bucket is 0 to 63, the next ones 64 to 127, 128 to 255, ...


def choose_blocks(q_BTHK: Tensor, k_BTGK: Tensor, segments: Tensor | None, kind: Sparse) -> Tensor:
    """The lists that training and generation choose, int16 [B, T, G, blocks]; another `Choose` may take its place."""
    return replace(kind, dense_below=0).choose(q_BTHK, k_BTGK, segments, use_triton("auto", q_BTHK))


class Captured:
    """Sums over queries that give the shares of attention's mass."""

    def __init__(self, num_heads: int):
        self.visible = torch.zeros(num_heads, dtype=torch.float64)
        self.best = torch.zeros(num_heads, dtype=torch.float64)
        self.recall, self.queries = 0.0, 0

    def shares(self) -> dict[str, float]:
        """A row of the table: means over queries and heads; `worst` is one head's mean over queries."""
        by_head = self.visible / self.queries
        head = int(by_head.argmin())
        return {
            "captured": float(by_head.mean()), "best": float(self.best.mean() / self.queries),
            "recall": self.recall / self.queries, "worst": float(by_head[head]), "worst_head": head,
            "best_of_worst": float(self.best[head] / self.queries),
        }  # fmt: skip


def block_masses(q: Tensor, k: Tensor, layout: Layout, queries: Tensor, head: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Attention's mass by block, for the query heads of a key/value head.

    Args:
        q, k: [tokens, H, K] and [tokens, G, K].
        queries: ascending indices of tokens, on q's device.

    Yields:
        Some of the queries [n], all of one document, and their masses [n, H / G, blocks of the document] float32.
    """
    group, K, size = q.shape[1] // k.shape[1], q.shape[2], layout.block_size
    block = layout.token_block[queries].long()
    first_block = layout.first_block[block].long()
    starts, documents = layout.block_start[first_block].long().unique_consecutive(return_counts=True)
    for start, of_document in zip(starts.tolist(), queries.split(documents.tolist())):
        stop = int(of_document[-1]) + 1
        keys = k[start:stop, head].float()
        position = torch.arange(start, stop, device=q.device)
        for some in of_document.split(max(1, MASSES_BYTES // (4 * group * len(keys)))):
            scores = q[some, head * group : (head + 1) * group].float() @ keys.T / math.sqrt(K)  # [n, R, keys]
            masses = scores.masked_fill(position > some[:, None, None], float("-inf")).softmax(-1)
            padded = F.pad(masses, (0, -len(keys) % size))
            yield some, padded.unflatten(-1, (-1, size)).sum(-1)


def probe(
    q_BTHK: Tensor, k_BTGK: Tensor, lists_BTGS: Tensor, segments: Tensor | None, queries: Tensor, kind: Sparse,
    captured: Captured,
) -> None:  # fmt: skip
    """Add to `captured` the mass of `queries` that `lists_BTGS` see; ascending indices into the B * T tokens."""
    layout = make_layout(q_BTHK, segments, kind.block_size, kind.window)
    q, k, lists = (x.flatten(0, 1) for x in (q_BTHK, k_BTGK, lists_BTGS))
    (_, H, _), G, S = q.shape, k.shape[1], lists.shape[-1]
    first_local = first_local_block(layout)
    for head in range(G):
        heads = slice(head * H // G, (head + 1) * H // G)
        for some, masses in block_masses(q, k, layout, queries, head):
            j = torch.arange(masses.shape[-1], device=q.device)
            is_candidate = (j >= 1) & (j < first_local[some, None])  # [n, blocks]
            band = masses.masked_fill(is_candidate[:, None], 0).sum(-1)  # [n, R]
            of_group = masses.sum(1).masked_fill(~is_candidate, -1)
            values, order = of_group.topk(min(S, len(j)))
            is_best = torch.zeros_like(is_candidate).scatter(1, order, values >= 0)
            entries = lists[some, head].long()
            is_chosen = torch.zeros(len(some), len(j) + 1, dtype=torch.bool, device=q.device)
            is_chosen = is_chosen.scatter(1, entries.clamp(max=len(j)), True)[:, :-1] & is_candidate
            for total, blocks in ((captured.visible, is_chosen), (captured.best, is_best)):
                total[heads] += (band + (masses * blocks[:, None]).sum(-1)).double().sum(0).cpu()
            share = (is_chosen & is_best).sum(-1) / is_best.sum(-1).clamp(min=1)
            captured.recall += float(share.double().sum()) / G
    captured.queries += len(queries)


def spread_queries(layout: Layout, targets: Tensor, selected: int, count: int) -> Tensor:
    """Up to `count` tokens, evenly spread over tokens with a target and more than `selected` blocks to choose from."""
    can_choose = first_local_block(layout) - 1 > selected
    choosing = (can_choose & (targets.flatten() != IGNORE_INDEX).to(can_choose.device)).nonzero().squeeze(1)
    if len(choosing) <= count:
        return choosing
    return choosing[torch.linspace(0, len(choosing) - 1, count, device=choosing.device).round().long()]


@torch.no_grad()
def probe_model(
    model: Transformer, batch: Batch, kinds: Sequence[Sparse | None], num_queries: int,
    captured: dict[int, Captured], choose: Choose = choose_blocks,
) -> Tensor:  # fmt: skip
    """Run a forward that attends to everything, and probe each layer that it reaches.

    Args:
        kinds: for each layer; None: the layer is not probed.
        captured: sums by layer, to be added to.
        choose: gives the lists that are probed.

    Returns:
        The hidden states [B, T, D].
    """
    most = max(kind.selected_blocks for kind in kinds if kind is not None)

    def before(attention, arguments):
        x, context = arguments
        q, k, _ = project_heads(x, attention.qkv_parameters(), *context.rotations[attention.is_local])
        of_layer = kinds[attention.layer]
        layout = make_layout(q, context.segments, of_layer.block_size, of_layer.window)
        queries = spread_queries(layout, batch.targets, most, num_queries)
        lists = choose(q, k, context.segments, of_layer)
        probe(q, k, lists, context.segments, queries, of_layer, captured[attention.layer])

    set_kinds(model, [FULL] * len(kinds))
    probed = [block.self_attn for block, of_layer in zip(model.layers, kinds) if of_layer is not None]
    hooks = [attention.register_forward_pre_hook(before) for attention in probed]
    try:
        return hidden_states(model, batch)
    finally:
        for hook in hooks:
            hook.remove()


def hidden_states(model: Transformer, batch: Batch) -> Tensor:
    ids = batch.input_ids.to(model.embed_tokens.weight.device)
    return model(ids, documents=batch.documents, return_hidden_states=True).hidden_states


@dataclass
class Bucket:
    """Tokens at neighbouring positions of their documents, and their summed losses."""

    tokens: int = 0
    dense: float = 0.0
    sparse: float = 0.0


def add_losses(buckets: dict[int, Bucket], batch: Batch, dense: Tensor, sparse: Tensor) -> None:
    """Add `token_losses` to the tokens' buckets; a bucket's key is its first position, 0 or a power of two."""
    has_target = batch.targets.flatten() != IGNORE_INDEX
    positions = batch.documents.positions_BT.flatten()
    first = 2 ** positions.clamp(min=1).log2().long()
    first = torch.where(positions < FIRST_BUCKET, 0, first)
    for key in first[has_target].unique().tolist():
        here = has_target & (first == key)
        bucket = buckets[key]
        bucket.tokens += int(here.sum())
        bucket.dense += float(dense[here].double().sum())
        bucket.sparse += float(sparse[here].double().sum())


def evaluate(
    model: Transformer, batches: Iterable[Batch], kinds: Sequence[Sparse | None], num_queries: int,
    choose: Choose = choose_blocks,
) -> dict:  # fmt: skip
    """Shares of mass and losses over all batches, in the form of --json.

    Args:
        kinds: for each layer; None: the layer attends to everything and is not probed.
        num_queries: queries per layer and batch.
        choose: gives the lists that are probed; the loss is always measured with the model's own choice.
    """
    heads = model.config.num_attention_heads
    captured = {layer: Captured(heads) for layer, of_layer in enumerate(kinds) if of_layer is not None}
    buckets: dict[int, Bucket] = defaultdict(Bucket)
    for batch in batches:
        dense = token_losses(model, probe_model(model, batch, kinds, num_queries, captured, choose), batch.targets)
        set_kinds(model, [kind or FULL for kind in kinds])
        with torch.no_grad():
            sparse = token_losses(model, hidden_states(model, batch), batch.targets)
        add_losses(buckets, batch, dense, sparse)
    layers = [{"layer": layer, **of_layer.shares()} for layer, of_layer in captured.items()]
    by_position = [
        {"first": first, "last": max(2 * first, FIRST_BUCKET) - 1, **asdict(buckets[first])}
        for first in sorted(buckets)
    ]
    return {"queries": next(iter(captured.values())).queries, "layers": layers, "losses": by_position}


def format_results(results: dict) -> str:
    """The two tables."""
    lines = [
        f"attention's mass, {results['queries']:,} queries a layer, of tokens that do not see everything",
        f"{'layer':>5}{'captured':>10}{'best':>8}{'recall':>8}{'worst head':>12}{'captured':>10}{'best':>8}",
    ]
    for row in results["layers"]:
        lines.append(
            f"{row['layer']:>5}{row['captured']:10.4f}{row['best']:8.4f}{row['recall']:8.3f}{row['worst_head']:>12}"
            f"{row['worst']:10.4f}{row['best_of_worst']:8.4f}"
        )
    means = (
        sum(row[name] for row in results["layers"]) / len(results["layers"]) for name in ("captured", "best", "recall")
    )
    lines += [
        "{:>5}{:10.4f}{:8.4f}{:8.3f}".format("mean", *means),
        "",
        "loss, nats per token, by position in the document",
    ]
    lines.append(f"{'positions':>20}{'tokens':>12}{'dense':>9}{'sparse':>9}{'sparse - dense':>16}")
    total = Bucket()
    for row in results["losses"]:
        total = Bucket(*(getattr(total, name) + row[name] for name in ("tokens", "dense", "sparse")))
        lines.append(_loss_row(f"{row['first']:,} to {row['last']:,}", row["tokens"], row["dense"], row["sparse"]))
    lines.append(_loss_row("all", total.tokens, total.dense, total.sparse))
    return "\n".join(lines)


def _loss_row(name: str, tokens: int, dense: float, sparse: float) -> str:
    dense, sparse = dense / tokens, sparse / tokens
    return f"{name:>20}{tokens:>12,}{dense:9.4f}{sparse:9.4f}{sparse - dense:+16.4f}"


# The command


def parse_flags(argv: list[str]) -> Namespace:
    parser = Parser(
        prog="python -m benchmarks.experiments.sparsity", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("checkpoint", help="a step_ folder of a run, or a folder in Hugging Face's form")
    add("--data", nargs="+", help="train.py's flag; default: Python's standard library")
    add("--context_length", type=int, default=32_768, help="tokens of a sequence; default: 32768")
    add("--sequences", type=int, default=4, help="sequences of the data; default: 4")
    add("--selected_blocks", help="by layer as 64x4,32; default: what the checkpoint was trained with, else 32")
    add("--layers", type=int, nargs="+", help="only these choose blocks, the others attend to everything; default: all")
    add("--queries", type=int, default=1024, help="per layer and sequence, evenly spread; default: 1024")
    add("--tokenizer", help="a tokenizer.json, or bytes; default: the one that the weights were trained with")
    add("--device", default="auto", choices=("auto", "cuda", "cpu"))
    add("--json", type=Path, help="write everything there")
    return parser.parse_args(argv)


def load_model(checkpoint: Path, device: torch.device) -> Transformer:
    """A checkpoint's model, bf16 on a GPU and float32 on a CPU."""
    config = shape_of_weights(checkpoint)
    if others := {kind.name for kind in config.kinds} - {FULL.name}:
        raise UserError(f"{checkpoint} attends by {', '.join(others)}; give one whose layers can attend to everything")
    if device.type == "cuda" and config.head_dim not in HEAD_DIMS:
        raise UserError(f"sparse attention has GPU kernels for head_dim {HEAD_DIMS}, not {config.head_dim}; use cpu")
    with torch.device("meta"):
        model = Transformer(config)
    model = model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).to_empty(device=device)
    copy_weights(model, load_model_weights(checkpoint, parameter_shapes(config)))
    return model


def kinds_by_layer(flags: Namespace, checkpoint: Path, layers: int) -> list[Sparse | None]:
    """The kind of each layer, for documents of any length; None for layers that --layers leaves out."""
    file = checkpoint / "trainer.json"
    settings = load_trainer_state(checkpoint).get("settings", {}) if file.is_file() else {}
    blocks = flags.selected_blocks or settings.get("selected_blocks") or Sparse().selected_blocks
    numbers = numbers_by_layer("selected_blocks", str(blocks), layers)
    for layer in flags.layers or ():
        if not 0 <= layer < layers:
            raise UserError(f"layers must be from 0 to {layers - 1}, got {layer}")
    probed = range(layers) if flags.layers is None else flags.layers
    return [Sparse(number, dense_below=1) if i in probed else None for i, number in enumerate(numbers)]


def load_batches(flags: Namespace, checkpoint: Path, vocab_size: int) -> list[Batch]:
    loaded = open_tokenizer(flags.tokenizer, checkpoint, vocab_size)
    assert loaded.eos_id is not None, "load_tokenizer refuses a file without one"
    store = join(open_stores(flags.data, loaded, vocab_size))
    return list(validation_batches(store, flags.context_length, 1, limit=flags.sequences))


def check_flags(flags: Namespace) -> None:
    for name, least in (("context_length", 2), ("sequences", 1), ("queries", 1)):
        if getattr(flags, name) < least:
            raise UserError(f"{name} must be at least {least}, got {getattr(flags, name)}")
    if flags.json and (flags.json.is_dir() or not flags.json.parent.is_dir()):
        raise UserError(f"--json {flags.json}: give a file in a folder that is there")


@command
def main(argv: list[str]) -> None:
    flags = parse_flags(argv)
    check_flags(flags)
    checkpoint = Path(flags.checkpoint)
    with join_world(flags.device) as world:
        if world.size > 1:
            raise UserError("the probe runs in one process: start it with python, not torchrun")
        model = load_model(checkpoint, world.device)
        kinds = kinds_by_layer(flags, checkpoint, model.config.num_hidden_layers)
        batches = load_batches(flags, checkpoint, model.config.vocab_size)
        check_lengths(batches, kinds)
        results = evaluate(model, batches, kinds, flags.queries)
    print(format_results(results))
    if flags.json:
        settings = {name: value for name, value in vars(flags).items() if name != "json"}
        flags.json.write_text(json.dumps({"settings": settings, "torch": torch.__version__, **results}) + "\n")


def check_lengths(batches: list[Batch], kinds: Sequence[Sparse | None]) -> None:
    """Refuse data in which no token has more blocks to choose from than it may choose."""
    most = max((kind for kind in kinds if kind is not None), key=lambda kind: kind.selected_blocks)
    positions = torch.cat([batch.documents.positions_BT[batch.targets != IGNORE_INDEX] for batch in batches])
    longest = int(positions.max()) + 1 if len(positions) else 0
    seen = most.block_size * (most.selected_blocks + 1) + most.window
    if longest <= seen:
        raise UserError(
            f"the longest document has {longest} tokens, of {seen} a token sees all with {most.selected_blocks} chosen "
            "blocks; give longer --data, a larger --context_length or fewer --selected_blocks"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
