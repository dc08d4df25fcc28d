"""Compare choices of blocks by the loss of the whole model, on weights that were not trained with them.

    python -m benchmarks.experiments.choices CHECKPOINT --data corpus/held_out.jsonl --selected_blocks 8 16

Each variant attends as `Sparse` does (first block, window, chosen blocks; one list per key/value head), but scores the
candidates in its own way. Its loss minus the loss of attention to everything, on the same tokens, is printed by
position. Variants:

- own: `Sparse.choose`, the kernels: heads up to position 32,767, then max; FP8 where the GPU has it
- heads: every query head against every key; the largest logit of all heads
- mass: the same with the sum over the heads of the block's share of attention
- max: the mean of the group's query heads against every key; the largest logit of the block
- lse: the same with the log-sum-exp of the block's logits
- max_fp8: max, with the mean query and the keys rounded to float8_e4m3fn
- max_pairs_fp8: the same, on means of 2 neighbouring keys
- means: every query head against two mean keys per block, 32 keys each; the larger sum of attention shares. Before
  2026-11-24 the kernels chose so
- two_stage: max on means of 8 keys picks 4 times as many blocks, then max chooses among these

`+tail1` after a name adds a tail: candidates that are not chosen enter the same softmax as one pseudo-token each, with
the logit scale q . k_mean + log(keys of the mean) and the value v_mean. `+tail2` takes two, a half of the block each.

Scores are computed for a range of queries at a time, in float32; a GPU rounds their factors to TF32, which holds
float8 and bfloat16 exactly. On a CPU attention is the reference, which writes the tokens x tokens matrix out.
"""

import json
import math
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import print_table
from benchmarks.experiments.sparsity import Bucket, add_losses, hidden_states, load_model
from kernels.attention.documents import all_segments, find_documents
from kernels.attention.full import FULL
from kernels.attention.sparse.layout import EMPTY
from kernels.attention.sparse.selection import ranges
from kernels.attention.sparse.sparse_attention import Sparse
from kernels.parts import AttentionKind
from model import IGNORE_INDEX, Transformer
from training.data.corpus import open_stores
from training.data.loader import Batch
from training.data.tokens import join
from training.evaluation.positions import longest_pieces
from training.flags import Parser
from training.host.errors import UserError
from training.host.processes import command
from training.inference import open_tokenizer, token_losses
from training.memory.placement import set_kinds
from training.parallel.world import join_world

SCORES_BYTES = 2**30  # limit on logits that exist at once
LARGEST_FP8 = 448.0  # float8_e4m3fn's
FIRST_STAGE = 4  # blocks that the first of two stages picks per chosen block
LEAST_POSITION = 1024  # buckets before it are not printed: their tokens have few candidates


class Score(NamedTuple):
    """A score of blocks by one query per key/value head, the mean of the group's query heads."""

    keys: int = 1  # neighbouring keys of a mean
    sums: bool = False  # the block's log-sum-exp in place of its largest logit
    is_fp8: bool = False
    first_keys: int = 0  # keys of a mean in a stage before; 0: there is one stage


SCORES = {
    "heads": Score(), "mass": Score(), "max": Score(), "lse": Score(sums=True), "max_fp8": Score(is_fp8=True),
    "max_pairs_fp8": Score(keys=2, is_fp8=True), "two_stage": Score(first_keys=8), "means": Score(keys=32),
}  # fmt: skip
VARIANTS = "own", *SCORES, "heads+tail1", "heads+tail2"


def round_fp8(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).float()


def mean_queries(q_THK: Tensor, G: int, is_fp8: bool) -> Tensor:
    """Returns [G, T, K] float32. FP8 scales each row so that its largest element is the largest of FP8."""
    q_GTK = q_THK.unflatten(1, (G, -1)).float().mean(2).transpose(0, 1)
    return round_fp8(q_GTK * (LARGEST_FP8 / q_GTK.abs().amax(-1, keepdim=True).clamp(min=1e-30))) if is_fp8 else q_GTK


def mean_rows(x_TGK: Tensor, count: int) -> Tensor:
    """Returns means of `count` neighbouring rows, [G, T / count, K] float32."""
    return x_TGK.float().unflatten(0, (-1, count)).mean(1).transpose(0, 1).contiguous()


def candidates(tokens: range, kind: Sparse, device: torch.device) -> Tensor:
    """Returns which blocks are candidates of tokens of one document: bool [tokens, blocks], cut after the last one."""
    left = torch.arange(tokens.start, tokens.stop, device=device) // kind.block_size - kind.window // kind.block_size
    j = torch.arange(max(0, int(left[-1]) + 1), device=device)
    return (j >= 1) & (j <= left[:, None])


def best_blocks(q_THK: Tensor, k_TGK: Tensor, kind: "Variant") -> Tensor:
    """Returns the lists of one document's tokens, int16 [T, G, selected]: ascending, then EMPTY."""
    (T, G, K), size, score, S = k_TGK.shape, kind.block_size, SCORES[kind.score], kind.selected_blocks
    whole = k_TGK[: T // size * size]
    queries, keys = mean_queries(q_THK, G, score.is_fp8), mean_rows(whole, score.keys)
    keys = round_fp8(keys / 4) if score.is_fp8 else keys
    first_keys = mean_rows(whole, score.first_keys) if score.first_keys else None
    lists = torch.full((T, G, S), EMPTY, dtype=torch.int16, device=k_TGK.device)

    def scores_of(tokens: range, keys: Tensor, hidden: Tensor) -> Tensor:
        """[G, tokens, blocks]; -inf where `hidden`."""
        per_block, blocks = keys.shape[1] * size // len(whole), hidden.shape[-1]
        if kind.score in OF_ALL_HEADS:
            return OF_ALL_HEADS[kind.score](q_THK[tokens.start : tokens.stop], keys, per_block, hidden)
        logits = queries[:, tokens.start : tokens.stop] @ keys[:, : blocks * per_block].transpose(1, 2)
        logits = logits.unflatten(-1, (blocks, per_block))
        scores = (logits / math.sqrt(K)).logsumexp(-1) if score.sums else logits.amax(-1)
        return scores.masked_fill_(hidden, float("-inf"))

    for tokens in ranges(T, max(size, SCORES_BYTES // (4 * q_THK.shape[1] * T))):
        hidden = ~candidates(tokens, kind, q_THK.device)
        if (blocks := hidden.shape[-1]) < 2:
            continue
        if first_keys is not None:
            picked = scores_of(tokens, first_keys, hidden).topk(min(FIRST_STAGE * S, blocks)).indices
            hidden = hidden | torch.ones(G, *hidden.shape, dtype=torch.bool, device=q_THK.device).scatter_(
                -1, picked, False
            )
        values, order = scores_of(tokens, keys, hidden).topk(min(S, blocks))
        order = torch.where(values > float("-inf"), order, EMPTY).sort(-1).values
        lists[tokens.start : tokens.stop, :, : order.shape[-1]] = order.transpose(0, 1).to(torch.int16)
    return lists


def logits_of_heads(q_THK: Tensor, keys_GPK: Tensor, per_block: int, blocks: int) -> Tensor:
    """Returns scaled logits of every query head, [G, R, T, blocks, per_block]."""
    queries = q_THK.unflatten(1, (len(keys_GPK), -1)).float().permute(1, 2, 0, 3)
    logits = queries @ keys_GPK[:, None, : blocks * per_block].transpose(2, 3) / math.sqrt(q_THK.shape[-1])
    return logits.unflatten(-1, (blocks, per_block))


def shares_of_means(q_THK: Tensor, means_GPK: Tensor, per_block: int, hidden: Tensor) -> Tensor:
    """Returns scores [G, T, blocks]: the larger of two halves' shares of attention, summed over the query heads."""
    logits = logits_of_heads(q_THK, means_GPK, per_block, hidden.shape[-1])
    lse = logits.mean(-1).masked_fill(hidden, float("-inf")).logsumexp(-1)[..., None, None]
    return (logits - lse).clamp(max=80).exp().sum(1).amax(-1).masked_fill(hidden, float("-inf"))


def shares_of_keys(q_THK: Tensor, keys_GTK: Tensor, per_block: int, hidden: Tensor) -> Tensor:
    """Returns scores [G, T, blocks]: a block's share of the candidates' attention, summed over the query heads."""
    lse = logits_of_heads(q_THK, keys_GTK, per_block, hidden.shape[-1]).logsumexp(-1)
    lse = lse.masked_fill(hidden, float("-inf"))
    return lse.softmax(-1).sum(1).masked_fill(hidden, float("-inf"))


def largest_of_heads(q_THK: Tensor, keys_GTK: Tensor, per_block: int, hidden: Tensor) -> Tensor:
    """Returns scores [G, T, blocks]: the largest logit of all query heads and keys of the block."""
    logits = logits_of_heads(q_THK, keys_GTK, per_block, hidden.shape[-1])
    return logits.amax((1, -1)).masked_fill(hidden, float("-inf"))


OF_ALL_HEADS = {"means": shares_of_means, "mass": shares_of_keys, "heads": largest_of_heads}


def add_tail(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, lists_TGS: Tensor, out_THK: Tensor, lse_TH: Tensor, kind: "Variant"
) -> None:
    """Add to one document's `out` and `lse` the candidates that its lists leave out, as `kind.tails` tokens each."""
    (T, G, K), part = k_TGK.shape, kind.block_size // kind.tails
    whole = T // kind.block_size * kind.block_size
    keys, values = mean_rows(k_TGK[:whole], part), mean_rows(v_TGK[:whole], part)
    for tokens in ranges(T, max(1, SCORES_BYTES // (4 * q_THK.shape[1] * (keys.shape[1] + 1)))):
        here = slice(tokens.start, tokens.stop)
        is_candidate = candidates(tokens, kind, q_THK.device)
        if (blocks := is_candidate.shape[-1]) < 2:
            continue
        chosen = torch.zeros(G, len(tokens), blocks + 1, dtype=torch.bool, device=q_THK.device)
        chosen.scatter_(-1, lists_TGS[here].long().clamp(max=blocks).transpose(0, 1), True)
        in_tail = (is_candidate & ~chosen[..., :blocks]).repeat_interleave(kind.tails, -1)  # [G, tokens, means]
        q, out = (x[here].float().unflatten(1, (G, -1)).permute(1, 2, 0, 3) for x in (q_THK, out_THK))
        lse = lse_TH[here].float().unflatten(1, (G, -1)).permute(1, 2, 0)  # [G, R, tokens]
        logits = torch.einsum("grtk,gpk->grtp", q, keys[:, : in_tail.shape[-1]]) / math.sqrt(K) + math.log(part)
        logits.masked_fill_(~in_tail[:, None], float("-inf"))
        total = torch.logaddexp(lse, logits.logsumexp(-1))
        shares = (logits - total[..., None]).exp_()
        tail = torch.einsum("grtp,gpk->grtk", shares, values[:, : in_tail.shape[-1]])
        out = (lse - total).exp()[..., None] * out + tail
        out_THK[here] = out.permute(2, 0, 1, 3).flatten(1, 2).to(out_THK.dtype)
        lse_TH[here] = total.permute(2, 0, 1).flatten(1).to(lse_TH.dtype)


@dataclass(frozen=True)
class Variant(Sparse):
    """`Sparse` with another choice of blocks, and a tail of `tails` pseudo-tokens per block; forward only."""

    score: str = "max"  # "own", or a name in SCORES
    tails: int = 0

    def choose(self, q, k, segments, on_triton):
        if self.score == "own":
            return super().choose(q, k, segments, on_triton)
        lists = torch.full((*k.shape[:3], self.selected_blocks), EMPTY, dtype=torch.int16, device=q.device)
        for q_n, k_n, lists_n in documents_of(segments, q, k, lists):
            lists_n.copy_(best_blocks(q_n, k_n, self))
        return lists

    def forward(self, q, k, v, segments, lists, backend, on_triton):
        [out], [lse], lists = super().forward(q, k, v, segments, lists, backend, on_triton)
        for of_document in documents_of(segments, q, k, v, lists, out, lse) if self.tails else ():
            add_tail(*of_document, self)
        return [out], [lse], lists


def documents_of(segments: Tensor | None, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Yields each document's rows of tensors [B, T, ...]."""
    for row, start, stop in all_segments(segments, *tensors[0].shape[:2]).tolist():
        yield [x[row, start:stop] for x in tensors]


def variant_of(name: str, selected_blocks: int, window: int) -> Variant:
    score, _, tails = name.partition("+tail")
    if (score != "own" and score not in SCORES) or tails not in ("", "1", "2"):
        raise UserError(f"{name} is no variant; give some of {', '.join(VARIANTS)}")
    return Variant(selected_blocks, window=window, dense_below=0, score=score, tails=int(tails or 0))


# The command


def as_batch(ids: np.ndarray) -> Batch:
    """Returns one text as a batch of one document."""
    input_ids = torch.from_numpy(ids.astype(np.int64))[None]
    targets = torch.nn.functional.pad(input_ids[:, 1:], (0, 1), value=IGNORE_INDEX)
    return Batch(input_ids, targets, find_documents(torch.zeros_like(input_ids)), len(ids) - 1)


@torch.no_grad()
def losses_with(model: Transformer, batch: Batch, kind: AttentionKind) -> Tensor:
    set_kinds(model, [kind] * model.config.num_hidden_layers)
    return token_losses(model, hidden_states(model, batch), batch.targets)


def evaluate(model: Transformer, batches: Sequence[Batch], variants: dict[str, Variant]) -> Iterator[list[dict]]:
    """Yields after each text, for each variant, the losses of all texts so far: JSON's "variants"."""
    buckets: dict[str, dict[int, Bucket]] = {name: defaultdict(Bucket) for name in variants}
    seconds: dict[str, float] = defaultdict(float)
    for i, batch in enumerate(batches):
        dense = losses_with(model, batch, FULL)
        for name, kind in variants.items():
            start = time.monotonic()
            sparse = losses_with(model, batch, kind)  # on the CPU: the GPU has finished
            seconds[name] += time.monotonic() - start
            add_losses(buckets[name], batch, dense, sparse)
            print(f"text {i + 1} of {len(batches)}: {name} {time.monotonic() - start:.1f} s", file=sys.stderr)
        yield [
            {
                "name": name, "score": kind.score, "tails": kind.tails, "selected_blocks": kind.selected_blocks,
                "seconds": seconds[name],
                "losses": [{"first": first, **asdict(buckets[name][first])} for first in sorted(buckets[name])],
            }
            for name, kind in variants.items()
        ]  # fmt: skip


def shown_losses(result: dict) -> list[dict]:
    return [row for row in result["losses"] if row["first"] >= LEAST_POSITION] or result["losses"][-1:]


def print_results(results: list[dict]) -> None:
    shown = shown_losses(results[0])
    dense = ["dense attention", "", *(f"{row['dense'] / row['tokens']:.4f}" for row in shown), ""]
    rows = [
        [one["name"], one["selected_blocks"],
         *(f"{(row['sparse'] - row['dense']) / row['tokens']:+.4f}" for row in shown_losses(one)),
         f"{one['seconds']:.1f}"]
        for one in results
    ]  # fmt: skip
    header = ["variant", "blocks", *(f"{row['first']:,} to {2 * row['first'] - 1:,}" for row in shown), "seconds"]
    print_table("loss, nats per token, above dense attention", header, [dense, *rows])


def parse_flags(argv: list[str]) -> Namespace:
    parser = Parser(
        prog="python -m benchmarks.experiments.choices", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("checkpoint", type=Path, help="a step_ folder of a run, or a folder in Hugging Face's form")
    add("--data", nargs="+", help="train.py's flag; default: Python's standard library")
    add("--context_length", type=int, default=8192, help="most tokens of a text; default: 8192")
    add("--sequences", type=int, default=5, help="the longest texts of the data, so many; default: 5")
    add("--variants", nargs="+", default=VARIANTS, help=f"default: {' '.join(VARIANTS)}")
    add("--selected_blocks", type=int, nargs="+", default=[8], help="numbers of chosen blocks; default: 8")
    add("--window", type=int, default=512, help="tokens; default: 512")
    add("--check", action="store_true", help="choose every block: all variants must give dense attention's loss")
    add("--tokenizer", help="a tokenizer.json, or bytes; default: the one that the weights were trained with")
    add("--device", default="auto", choices=("auto", "cuda", "cpu"))
    add("--json", type=Path, help="write everything there, anew after each text")
    return parser.parse_args(argv)


@command
def main(argv: list[str]) -> None:
    flags = parse_flags(argv)
    blocks = [-(-flags.context_length // 64)] if flags.check else flags.selected_blocks
    variants = {
        name if len(blocks) == 1 else f"{name} {count}": variant_of(name, count, flags.window)
        for count in blocks for name in flags.variants
    }  # fmt: skip
    with join_world(flags.device) as world:
        torch.backends.cuda.matmul.allow_tf32 = True
        model = load_model(flags.checkpoint, world.device)
        tokenizer = open_tokenizer(flags.tokenizer, flags.checkpoint, model.config.vocab_size)
        store = join(open_stores(flags.data, tokenizer, model.config.vocab_size))
        pieces = longest_pieces(store, flags.context_length, flags.sequences)
        settings = {"settings": vars(flags), "lengths": [len(piece.ids) for piece in pieces]}
        for results in evaluate(model, [as_batch(piece.ids) for piece in pieces], variants):
            if flags.json:
                text = json.dumps({**settings, "torch": torch.__version__, "variants": results}, default=str)
                flags.json.write_text(text + "\n")
    print(f"{len(pieces)} texts of {min(settings['lengths']):,} to {max(settings['lengths']):,} tokens")
    print_results(results)
    if flags.check:
        limit = 2e-3 if world.device.type == "cuda" else 1e-5  # bf16 and float32
        worst = {one["name"]: max(abs(row["sparse"] - row["dense"]) / row["tokens"] for row in shown_losses(one))
                 for one in results}  # fmt: skip
        if wrong := {name: value for name, value in worst.items() if not value < limit}:
            raise UserError(f"with every block chosen the loss differs from dense attention's by {wrong}")
        print(f"check: with every block chosen the losses above are within {limit} of dense attention's")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
