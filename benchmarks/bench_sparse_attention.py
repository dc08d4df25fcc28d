"""Block-sparse attention, each piece alone and the whole layer: `python -m
benchmarks.bench_sparse_attention`.

`--kind nsa` measures native sparse attention; its `--selected` counts the three forced blocks.

Correctness comes first: outputs and gradients on given lists are compared with float64 at small
sizes, and two runs at the measured sizes must be bitwise equal. `--tune gather,band,scores,combine`
tries tile configurations instead of measuring pieces. `--workspace_mib 512,1024,2048` measures the
layer with each size of workspace.
"""

import argparse
import functools
import itertools
import sys
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.common import (
    environment,
    extra_gib,
    print_json,
    print_table,
    relative_error,
    time_interleaved,
)
from kernels.attention.attend import attention
from kernels.attention.full import BACKWARD_FLOPS, attention_flops
from kernels.attention.libraries import choose_backend
from kernels.attention.nsa import compression, gates, nsa
from kernels.attention.nsa.compression import make_windows
from kernels.attention.nsa.nsa import NSA, nsa_attention_reference
from kernels.attention.nsa.window_scores import score_windows
from kernels.attention.reference import attend_written_out
from kernels.attention.sparse import band, combine, gather, inverse_index, selection
from kernels.attention.sparse.common import TileConfig
from kernels.attention.sparse.layout import EMPTY, first_local_block, make_layout
from kernels.attention.sparse.sparse_attention import (
    SCORES_BYTES,
    WORKSPACE_BYTES,
    Sparse,
    sparse_backward,
    sparse_forward,
    visible_keys,
    work_ranges,
)

GATHER_CONFIGS = [
    TileConfig(*c)
    for c in (
        (64, 4, 1, 32), (64, 4, 2, 32), (64, 4, 3, 32), (64, 4, 4, 32), (64, 4, 2, 64),
        (64, 4, 3, 64), (64, 4, 2, 128),
        (64, 8, 1, 64), (64, 8, 2, 64), (64, 8, 3, 64), (32, 4, 3, 64), (32, 8, 2, 128),
        (32, 8, 3, 128),
        (128, 4, 1, 16), (128, 4, 2, 16), (128, 4, 3, 16), (128, 4, 2, 32), (128, 8, 1, 16),
        (128, 8, 2, 32),
    )
]  # fmt: skip
BAND_CONFIGS = [
    TileConfig(*c)
    for c in (
        (32, 8, 2), (32, 8, 3), (64, 4, 1), (64, 4, 2), (64, 4, 3), (64, 8, 1), (64, 8, 2),
        (64, 8, 3), (128, 4, 2),
        (128, 8, 1), (128, 8, 2), (128, 8, 3),
    )
]  # fmt: skip
SCORES_CONFIGS = [
    selection.ScoresConfig(*c)
    for c in (
        (64, 256, 8, 3), (128, 128, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3), (128, 128, 8, 4),
        (128, 128, 16, 3),
        (128, 256, 8, 3), (128, 256, 16, 3), (256, 64, 16, 3), (256, 128, 8, 3), (256, 128, 16, 3),
        (256, 128, 16, 4),
    )
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kind", choices=["sparse", "nsa"], default="sparse")
    parser.add_argument(
        "--backend", default="auto", help="nsa only: kernel of the compressed branch"
    )
    parser.add_argument("--tokens", default="32768,131072", help="lengths, separated by commas")
    parser.add_argument(
        "--selected", help="blocks per list, separated by commas; default: 32, nsa: 16"
    )
    parser.add_argument(
        "--workspace_mib", help="sizes, separated by commas; default: the layer's own"
    )
    parser.add_argument(
        "--tune", default="", help="any of gather, band, scores, combine, separated by commas"
    )
    parser.add_argument(
        "--heads", default="32,8,128", help="query heads, key/value heads, head_dim"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--check",
        choices=["none", "quick", "full"],
        default="quick",
        help="full: every kind of group",
    )
    arguments = parser.parse_args()
    device, is_nsa = torch.device(arguments.device), arguments.kind == "nsa"
    if is_nsa and arguments.tune:
        parser.error(
            "--tune has no effect with --kind nsa, whose kernels are those of sparse; drop one"
        )
    selected_blocks, workspaces = (
        arguments.selected or (16 if is_nsa else 32),
        arguments.workspace_mib,
    )
    workspaces = workspaces or (nsa.WORKSPACE_BYTES if is_nsa else WORKSPACE_BYTES) // 2**20
    print(environment(device))
    torch.manual_seed(0)
    if arguments.check != "none":
        check(device, arguments.check == "full", is_nsa)
    results = {}
    for tokens, selected in itertools.product(
        _integers(arguments.tokens), _integers(str(selected_blocks))
    ):
        make = functools.partial(NSABench, backend=arguments.backend) if is_nsa else Bench
        bench = make(tokens, selected, *_integers(arguments.heads), device, arguments.repeats)
        for mib in _integers(str(workspaces)):
            name = f"{arguments.kind}, {tokens} tokens, {selected} blocks, {mib} MiB"
            if arguments.tune:
                results[name] = bench.tune(name, arguments.tune.split(","), mib * 2**20)
            else:
                results[name] = {
                    "layer": bench.layer(name, mib * 2**20),
                    "pieces": bench.pieces(name, mib * 2**20),
                }
        del bench
    print_json("nsa" if is_nsa else "sparse_attention", device, results=results)


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def check(device: torch.device, full: bool, is_nsa: bool) -> None:
    """Exit with status 1 if an error against float64 is more than 2.5 times the error of the
    reference in bf16."""
    cpu = device.type == "cpu"
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    cases = [
        ((8, 2, 128, 64, 128), bf16),
        ((6, 2, 64, 64 if is_nsa else 32, 128 if is_nsa else 64), bf16),
    ]
    if full:
        cases += [((n, 1, 128, 64, 128 if is_nsa else 64), bf16) for n in (1, 2, 8, 16)]
        cases += [((8, 2, 64, 64, 128), fp16)]
    if full and not is_nsa:
        cases += [((8, 2, 256, 64, 128), bf16), ((8, 2, 64, 64, 128), fp32)]
    rows = []
    for case, dtype in cases:
        heads, kv_heads, dim, block_size, window = case
        T = 300 if cpu else 1500
        segments = torch.tensor([[0, 0, T // 3], [0, T // 3, T - 33], [0, T - 33, T], [1, 0, T]])
        inputs = [
            torch.randn(2, T, n, dim, device=device).to(dtype) for n in (heads, kv_heads, kv_heads)
        ]
        inputs += [torch.randn(2, T, heads, 3, device=device).to(dtype)] if is_nsa else []
        sizes = {"block_size": block_size, "window": window}
        lists = _random_lists(inputs[0], kv_heads, segments, 4, **sizes)
        arriving = torch.randn_like(inputs[0])

        def outputs(function, dtype, inputs=inputs, arriving=arriving):
            tensors = [x.to(dtype).requires_grad_() for x in inputs]
            out = function(*tensors)
            return [out.detach(), *torch.autograd.grad(out, tensors, arriving.to(dtype))]

        if is_nsa:
            reference = functools.partial(nsa_attention_reference, blocks=lists, segments=segments)
            own = {}
        else:
            visible = visible_keys(inputs[0], lists, segments, **sizes)
            reference, own = functools.partial(_on_keys, is_visible=visible), sizes
        ours = functools.partial(_attend, segments=segments, lists=lists, **own)
        exact, plain, found = (
            outputs(reference, torch.float64),
            outputs(reference, dtype),
            outputs(ours, dtype),
        )
        small = functools.partial(ours, workspace_bytes=2**20)  # several ranges of heads and tokens
        ranged = outputs(small, dtype)
        allowed = [max(relative_error(p, e), 1e-7) for p, e in zip(plain, exact)]
        errors = [
            relative_error(f, e) / a for f, e, a in zip(found + ranged, exact * 2, allowed * 2)
        ]
        rows.append([str(case), str(dtype)[6:], *errors[: len(exact)], max(errors[len(exact) :])])
    title = (
        "error / error of the reference in the same dtype; (heads, kv heads, head_dim, block, "
        "window)"
    )
    columns = ["out", "dq", "dk", "dv", *(["dgates"] if is_nsa else [])]
    print_table(title, ["case", "dtype", *columns, "worst by ranges"], rows)
    if not all(error <= (30 if row[1] == "float32" else 2.5) for row in rows for error in row[2:]):
        sys.exit("sparse attention is wrong on this machine: not measured")


def _on_keys(q, k, v, *, is_visible: Tensor) -> Tensor:
    return attend_written_out(q, k, v, is_visible)[0]


def _attend(q, k, v, gates=None, *, segments=None, lists=None, backend="auto", **options) -> Tensor:
    """Attends by Triton's kernels: natively if there are gates, else to chosen blocks, in short
    documents too."""
    kind = NSA(**options) if gates is not None else Sparse(dense_below=0, **options)
    given = {"segments": segments, "gates": gates, "lists": lists}
    return attention(q, k, v, kind=kind, backend=backend, impl="triton", **given)


def _random_lists(q, kv_heads, segments, selected, block_size, window) -> Tensor:
    """Up to `selected` random candidates for each token."""
    layout = make_layout(q, segments, block_size, window)
    first_local = first_local_block(layout)
    longest = int(layout.index_of_block.max()) + 1
    scores = torch.rand(layout.num_tokens, kv_heads, longest, device=q.device)
    j = torch.arange(longest, device=q.device)
    scores = scores.masked_fill((j < 1) | (j >= first_local[:, None, None]), -1)
    return selection.top_blocks_reference(scores, selected).view(*q.shape[:2], kv_heads, selected)


class Bench:
    """One length and number of selected blocks: inputs, lists chosen from them, and their
    timings."""

    must_repeat = True  # two runs must be equal bit for bit, or nothing is measured

    def __init__(
        self, tokens: int, selected: int, H: int, G: int, K: int, device: torch.device, repeats: int
    ):
        torch.manual_seed(0)
        self.q, self.k, self.v, self.dout = (
            torch.randn(tokens, n, K, dtype=torch.bfloat16, device=device) for n in (H, G, G, H)
        )
        self.H, self.G, self.K = H, G, K
        self.selected, self.device, self.repeats = selected, device, repeats
        self.layout = make_layout(self.q[None], None, 64, 512)
        self.lists = self.choose()
        entries = int((self.lists != EMPTY).sum())
        pair_flops = 2 * (H // G) * 64 * K  # one product of a token's heads with one block of keys
        own = self.layout.index_of_block.double()
        band_pairs = float((own.clamp(max=7) + 0.5 + (own > 7)).sum()) * 64 * G
        candidates = float((own - 7).clamp(min=0).sum()) * 64 * G
        self.gather_flops, self.band_flops = entries * pair_flops, band_pairs * pair_flops
        self.score_flops = Sparse(selected, dense_below=0).flops(tokens, H, G, K).choice
        self.slot_bytes = entries * (H // G) * K * 2
        self.score_bytes = candidates * 4

    def choose(self) -> Tensor:
        """Returns the lists of all tokens."""
        kind = Sparse(self.selected, dense_below=0)
        return kind.choose(self.q[None], self.k[None], None, on_triton=True)[0]

    def inputs(self) -> list[Tensor]:
        """Inputs of `attend`, without the dimension of rows."""
        return [self.q, self.k, self.v]

    def attend(self, *inputs: Tensor, **options) -> Tensor:
        return _attend(*inputs, **options)

    def time(self, function) -> float:
        return time_interleaved({"": function}, self.device, self.repeats)[""]

    def layer(self, title: str, workspace_bytes: int) -> dict[str, float]:
        """Measure the public function forward and backward; two runs must be bitwise equal."""
        inputs = [x[None].requires_grad_() for x in self.inputs()]
        options = {"selected_blocks": self.selected, "workspace_bytes": workspace_bytes}
        function = functools.partial(self.attend, *inputs, **options)

        def forward_and_backward():
            return torch.autograd.grad(function(), inputs, self.dout[None])

        out = function()
        backward = functools.partial(
            torch.autograd.grad, out, inputs, self.dout[None], retain_graph=True
        )
        runs = [[function(), *backward()] for _ in range(2)]
        names = ["out", "dq", "dk", "dv", "dgates"]
        different = [name for name, a, b in zip(names, *runs) if not torch.equal(a, b)]
        del runs
        if different:
            print(f"two runs differ in {', '.join(different)}")
            if self.must_repeat:
                sys.exit("not measured")
        results = {
            "forward_ms": self.time(function),
            "backward_ms": self.time(backward),
            "both_ms": self.time(forward_and_backward),
            "forward_extra_gib": extra_gib(function, self.device),
            "backward_extra_gib": extra_gib(backward, self.device),
        }
        print_table(
            f"layer, {title}", [key.replace("_", " ") for key in results], [list(results.values())]
        )
        return results

    def pieces(self, title: str, workspace_bytes: int) -> dict[str, float]:
        """Measure each piece over all heads and tokens, in the layer's ranges."""
        q, k, v, dout, lists, layout = self.q, self.k, self.v, self.dout, self.lists, self.layout
        rows, results = [], {}

        def add(name, function, flops=0.0, num_bytes=0.0):
            ms = self.time(function)
            results[name] = ms
            rows.append(
                [
                    name,
                    ms,
                    flops / ms / 1e9 if flops else "",
                    num_bytes / ms / 1e6 if num_bytes else "",
                ]
            )

        out, lse = sparse_forward(q, k, v, lists, layout, workspace_bytes)
        dtype = selection.scoring_dtype(q)
        add("choose (round keys, scores, top-k)", self.choose)
        add(
            "  round keys", lambda: selection.round_keys(k, layout, dtype), num_bytes=k.nbytes * 1.5
        )
        add("  scores", lambda: self.all_scores(None), self.score_flops, self.score_bytes)
        add("  top-k", self.top_blocks_of_random_scores(), num_bytes=self.score_bytes)

        work = self.work(workspace_bytes)
        chunk = gather.item_tokens(gather.forward_config(q), q, k, 64)
        by_heads = work_ranges(layout, q, self.G, self.selected, workspace_bytes)
        add(
            f"inverse index ({len(work)} ranges)",
            lambda: [
                inverse_index.build_inverse_index(lists, layout, *w, chunk) and None
                for w in by_heads
            ],
            num_bytes=lists.nbytes * 2 + lists.numel() * 8,
        )
        add("band forward", lambda: band.band_forward(q, k, v, layout), 2 * self.band_flops)
        slots = q.new_empty(
            max(len(h) * len(t) for h, t in work), self.selected, self.H // self.G, self.K
        ).zero_()
        slot_lse = torch.zeros(slots.shape[:-1], device=q.device)
        forward, combined = self.gather_forward(work, slots, slot_lse, gather.forward_config(q))
        add("gather forward", forward, 2 * self.gather_flops, 2 * self.slot_bytes)
        add(
            "combine",
            lambda: combined(out.clone(), lse.clone()),
            num_bytes=self.slot_bytes + 4 * out.nbytes,
        )

        dq = torch.empty_like(q)
        delta = band.band_dq(dout, q, k, v, out, lse, dq, layout)
        add(
            "band dq",
            lambda: band.band_dq(dout, q, k, v, out, lse, dq, layout),
            3 * self.band_flops,
        )
        dk, dv, total = (
            torch.empty_like(k),
            torch.empty_like(v),
            torch.zeros(2, 1, len(q), self.K, device=q.device),
        )
        heads = [range(g, g + 1) for g in range(self.G)]
        add(
            "band dk, dv",
            lambda: [
                band.band_dkv(dout, q, k, v, lse, delta, total, dk, dv, layout, h) for h in heads
            ],
            4 * self.band_flops * 8 / 9,
        )
        add(
            "band dk, dv of first blocks",
            lambda: [
                combine.add_partials(
                    total, *band.band_dkv_extra(dout, q, k, v, lse, delta, layout, h), layout
                ) for h in heads
            ],
            4 * self.band_flops / 9,
        )  # fmt: skip
        backward, partials = self.gather_backward(
            work, slots, out, lse, delta, gather.backward_config(q)
        )
        add("gather backward", backward, 5 * self.gather_flops, 3 * self.slot_bytes)
        add("dk, dv partial sums", partials)
        add("dq combine", lambda: [combine.combine(dq, _slots(slots, w), lists, *w) for w in work],
            num_bytes=self.slot_bytes + 2 * dq.nbytes)  # fmt: skip
        print_table(f"pieces, {title}", ["piece", "ms", "TFLOP/s", "GB/s"], rows)
        return results

    def score_ranges(self):
        """(range of query blocks, its columns of scores), in the steps of `choose_blocks`."""
        layout = self.layout
        width = selection.score_width(layout, range(layout.num_blocks))
        block_bytes = 64 * self.G * selection.query_bytes(width, self.selected)
        step = selection.blocks_at_a_time(SCORES_BYTES, block_bytes, 64, self.G, selection.WAVE)
        return [
            (r, selection.score_width(layout, r)) for r in selection.ranges(layout.num_blocks, step)
        ]

    def all_scores(self, config):
        if not hasattr(self, "keys"):
            dtype = selection.scoring_dtype(self.q)
            self.keys = [
                selection.round_keys(self.k, self.layout, dtype, mean_keys)
                for mean_keys in (False, True)
            ]
        for blocks, width in self.score_ranges():
            selection.score_blocks(
                self.q, self.keys.__getitem__, self.layout, blocks, width, config
            )

    def top_blocks_of_random_scores(self):
        """A function that chooses from random scores; every range reads the same scores."""
        lists, work = torch.full_like(self.lists, EMPTY), []
        scores = torch.rand(SCORES_BYTES // 4, device=self.device)
        for blocks, width in self.score_ranges():
            of_range = scores[: self.G * len(blocks) * 64 * width].view(self.G, -1, width)
            work.append((of_range, of_range.unflatten(-1, (-1, selection.CHUNK)).amax(-1), blocks))

        def run():
            for of_range, maxima, blocks in work:
                selection.top_blocks(of_range, maxima, lists, self.layout, blocks)

        return run

    def work(self, workspace_bytes: int) -> list[tuple[range, range]]:
        by_heads = work_ranges(self.layout, self.q, self.G, self.selected, workspace_bytes)
        return [(heads, tokens) for heads, token_ranges in by_heads for tokens in token_ranges]

    def gather_forward(self, work, slots, slot_lse, config):
        indices = self.indices(work, config)
        arguments = (self.q, self.k, self.v)

        def forward():
            for w, index in zip(work, indices):
                gather.gather_forward(
                    *arguments,
                    _slots(slots, w),
                    _slots(slot_lse, w),
                    index,
                    self.layout,
                    *w,
                    config=config,
                )

        def combined(out, lse):
            for w in work:
                combine.combine(out, _slots(slots, w), self.lists, *w, lse, _slots(slot_lse, w))

        return forward, combined

    def gather_backward(self, work, slots, out, lse, delta, config):
        indices = self.indices(work, config)

        def backward():
            for w, index in zip(work, indices):
                gather.gather_backward(
                    self.dout, self.q, self.k, self.v, lse, delta, _slots(slots, w), index,
                    self.layout, *w,
                    config=config,
                )  # fmt: skip

        def partials():
            for (heads, _), index in zip(work, indices):
                combine.add_partials(
                    totals[: 2 * len(heads)].view(2, len(heads), *totals.shape[1:]),
                    partial[:, : len(index.item_row)],
                    index.first_item,
                    self.layout,
                )

        most_heads, most_items = (
            max(len(h) for h, _ in work),
            max(len(index.item_row) for index in indices),
        )
        totals = torch.zeros(2 * most_heads, len(self.q), self.K, device=self.device)
        partial = torch.zeros(2, most_items, 64, self.K, device=self.device)
        return backward, partials

    def indices(self, work, config):
        chunk = gather.item_tokens(config, self.q, self.k, 64)
        by_heads = [
            (heads, [t for h, t in work if h == heads])
            for heads in dict.fromkeys(h for h, _ in work)
        ]
        return [
            i
            for w in by_heads
            for i in inverse_index.build_inverse_index(self.lists, self.layout, *w, chunk)
        ]

    def tune(
        self, title: str, parts: list[str], workspace_bytes: int
    ) -> dict[str, dict[str, float]]:
        """Milliseconds of each configuration. Gather kernels run over one range of heads, scaled to
        all heads."""
        q, k, v, dout, lists, layout = self.q, self.k, self.v, self.dout, self.lists, self.layout
        results = {}

        def compare(name, configs, make, scale=1.0):
            results[name] = {}
            for config in configs:
                try:
                    results[name][str(tuple(config))] = scale * self.time(make(config))
                except OutOfResources:  # a configuration that does not fit is a result
                    results[name][f"{tuple(config)}: does not fit"] = float("inf")
            table = sorted(results[name].items(), key=lambda item: item[1])
            print_table(
                f"{name}, {title}",
                ["rows, warps, stages, tiles", "ms"],
                [list(row) for row in table],
            )

        out, lse = band.band_forward(q, k, v, layout)
        dq = torch.empty_like(q)
        delta = band.band_dq(dout, q, k, v, out, lse, dq, layout)
        if "gather" in parts:
            heads, token_ranges = work_ranges(layout, q, self.G, self.selected, workspace_bytes)[0]
            work = [(heads, tokens) for tokens in token_ranges]
            slots = q.new_empty(
                max(len(h) * len(t) for h, t in work), self.selected, self.H // self.G, self.K
            )
            slot_lse = torch.empty(slots.shape[:-1], device=q.device)
            scale = self.G / len(heads)
            compare(
                "gather forward",
                GATHER_CONFIGS,
                lambda c: self.gather_forward(work, slots, slot_lse, c)[0],
                scale,
            )

            def backward_and_sums(config):
                backward, partials = self.gather_backward(work, slots, out, lse, delta, config)
                return lambda: (backward(), partials())

            compare(
                "gather backward and its partial sums", GATHER_CONFIGS, backward_and_sums, scale
            )
        if "band" in parts:
            total, dk, dv = (
                torch.zeros(2, 1, len(q), self.K, device=q.device),
                torch.empty_like(k),
                torch.empty_like(v),
            )

            def with_tiles(function, *arguments):
                def make(config):
                    names = "KEYS_CONFIG", "WIDE_FORWARD_CONFIG", "WIDE_BACKWARD_CONFIG"
                    tiles = mock.patch.multiple(
                        band, queries_config=lambda *_: config, **dict.fromkeys(names, config)
                    )
                    return tiles(lambda: function(*arguments))

                return make

            compare("band forward", BAND_CONFIGS, with_tiles(band.band_forward, q, k, v, layout))
            compare(
                "band dq",
                BAND_CONFIGS,
                with_tiles(band.band_dq, dout, q, k, v, out, lse, dq, layout),
            )
            of_keys = with_tiles(
                band.band_dkv, dout, q, k, v, lse, delta, total, dk, dv, layout, range(1)
            )
            compare("band dk, dv", BAND_CONFIGS, of_keys, self.G)
        if "scores" in parts:
            compare("scores", SCORES_CONFIGS, lambda c: lambda: self.all_scores(c))
        if "combine" in parts:
            work = work_ranges(layout, q, self.G, self.selected, workspace_bytes)[0]
            w = (work[0], work[1][-1])
            slots = q.new_zeros(len(w[0]) * len(w[1]), self.selected, self.H // self.G, self.K)
            slot_lse = torch.zeros(slots.shape[:-1], device=q.device)
            configs = [
                TileConfig(*c, 0)
                for c in ((4, 1), (8, 1), (8, 2), (16, 2), (16, 4), (32, 4), (64, 8))
            ]

            def with_config(config):
                combine.ROWS, combine.NUM_WARPS = config.rows, config.num_warps
                return lambda: combine.combine(
                    out, _slots(slots, w), lists, *w, lse, _slots(slot_lse, w)
                )

            before = combine.ROWS, combine.NUM_WARPS
            compare("combine", configs, with_config, self.G * len(q) / len(w[0]) / len(w[1]))
            combine.ROWS, combine.NUM_WARPS = before
        return results


class NSABench(Bench):
    """Measures native sparse attention with a window of 512.

    The compressed branch's backward comes from a library. It may add up dq in any order: then a
    line says so.
    """

    must_repeat = False

    def __init__(
        self, tokens: int, selected: int, H: int, G: int, K: int, device, repeats: int, backend: str
    ):
        torch.manual_seed(0)
        self.q, self.k, self.v, self.dout = (
            torch.randn(tokens, n, K, dtype=torch.bfloat16, device=device) for n in (H, G, G, H)
        )
        self.gates = torch.randn(tokens, H, 3, dtype=torch.bfloat16, device=device)
        self.selected, self.device, self.repeats = selected, device, repeats
        self.backend = choose_backend(backend, device)
        self.nsa = NSA(selected)
        self.flops = self.nsa.flops(tokens, H, G, K)

    def inputs(self) -> list[Tensor]:
        return [self.q, self.k, self.v, self.gates]

    def attend(self, *inputs: Tensor, **options) -> Tensor:
        return _attend(*inputs, backend=self.backend, **options)

    def layer(self, title: str, workspace_bytes: int) -> dict[str, float]:
        results = super().layer(title, workspace_bytes)
        flops = self.flops
        rates = {
            "forward_tflops": (flops.forward + flops.choice) / results["forward_ms"] / 1e9,
            "backward_tflops": flops.backward / results["backward_ms"] / 1e9,
        }
        print_table(f"rates, {title}", [*rates], [[*rates.values()]])
        return results | rates

    def pieces(self, title: str, workspace_bytes: int) -> dict[str, float]:
        """Measure each branch forward and backward, and our own part of the compressed branch."""
        rows, results = [], {}

        def add(name, function, flops=0.0, num_bytes=0.0):
            ms = self.time(function)
            results[name] = ms
            rows.append(
                [
                    name,
                    ms,
                    flops / ms / 1e9 if flops else "",
                    num_bytes / ms / 1e6 if num_bytes else "",
                ]
            )

        q, k, v, backend = self.q, self.k, self.v, self.backend
        (_, H, K), G = q.shape, k.shape[1]
        layout, windows = (
            make_layout(q[None], None, nsa.BLOCK_SIZE, nsa.LOCAL_TOKENS),
            make_windows(q[None], None),
        )
        in_window = layout._replace(window_blocks=self.nsa.window // nsa.BLOCK_SIZE)
        library_flops = attention_flops(H, K, 8 * windows.num_windows * (windows.num_windows + 1))
        tiles_bytes = 2 * self.q.nbytes  # read and written by a copy of the rows of all heads

        # Each is called at least once before it is timed; its results go into the next.
        pooled = [compression.pool_windows(x, windows) for x in (k, v)]

        def compressed() -> tuple[Tensor, Tensor]:
            pooled = [compression.pool_windows(x, windows) for x in (k, v)]
            return compression.compressed_forward(q, *pooled, windows, backend, workspace_bytes)

        def choose() -> Tensor:
            lists = torch.full(
                (*k.shape[:2], self.nsa.list_length), EMPTY, dtype=torch.int16, device=k.device
            )
            score = functools.partial(score_windows, q, pooled[0], lse_c, first_window, layout)
            selection.choose_blocks(score, layout, lists, nsa.SCORES_BYTES)
            return lists

        (out_c, lse_c), first_window = compressed(), windows.first_window[layout.block_start]
        lists = choose()
        selected = functools.partial(sparse_forward, q, k, v, lists, layout, workspace_bytes)
        window = functools.partial(band.band_forward, q, k, v, in_window, exact=True)
        outs, lses = zip((out_c, lse_c), selected(), window())

        add(
            "pool windows of keys",
            lambda: compression.pool_windows(k, windows),
            num_bytes=k.nbytes * 17 / 16,
        )
        add("compressed forward", compressed, library_flops)
        add(
            "  tiles of q alone",
            lambda: self.all_tiles(windows, workspace_bytes),
            num_bytes=tiles_bytes,
        )
        add("choose (scores, top-k)", choose, self.flops.choice)
        add("selected forward", selected)
        add("window forward", window)
        add("gated sum", lambda: gates.gated_sum(outs, self.gates), num_bytes=4 * self.q.nbytes)

        d_gates, dq, dk, dv = (torch.zeros_like(x) for x in (self.gates, self.q, self.k, self.v))
        gate_backward = functools.partial(
            gates.gate_backward, self.dout, outs[0], self.gates, 0, d_gates
        )
        add("gate backward, one branch", gate_backward, num_bytes=3 * self.q.nbytes)
        flat = self.dout, self.q, self.k, self.v
        delta = band.band_dq(*flat, outs[2], lses[2], dq, in_window, exact=True)
        add("window dq", lambda: band.band_dq(*flat, outs[2], lses[2], dq, in_window, exact=True))
        add(
            "window dk, dv",
            lambda: band.band_dkv(*flat, lses[2], delta, None, dk, dv, in_window, range(G)),
        )
        backward = functools.partial(
            sparse_backward,
            *flat,
            outs[1],
            lses[1],
            lists,
            layout,
            workspace_bytes,
            add_to=(dq, dk, dv),
        )
        add("selected backward", backward)
        arguments = (
            self.dout,
            self.q,
            *pooled,
            outs[0],
            lses[0],
            windows,
            backend,
            workspace_bytes,
            dq,
        )
        add(
            "compressed backward",
            lambda: compression.compressed_backward(*arguments),
            BACKWARD_FLOPS * library_flops,
        )
        d_pooled = torch.zeros(2, *pooled[0].shape, device=self.device)
        add(
            "unpool",
            lambda: compression.add_unpooled(dk, dv, d_pooled, windows),
            num_bytes=4 * self.k.nbytes,
        )
        print_table(f"pieces, {title}", ["piece", "ms", "TFLOP/s", "GB/s"], rows)
        return results

    def all_tiles(self, windows, workspace_bytes: int) -> None:
        """Copy q's rows into tiles, in the branch's ranges of heads."""
        for heads, groups in compression.head_ranges(
            self.q, self.k.shape[1], windows, self.backend, workspace_bytes
        ):
            compression.to_tiles(self.q, heads, len(groups), windows)


def _slots(buffer: Tensor, work: tuple[range, range]) -> Tensor:
    """A range's part of `buffer` [heads * tokens, ...], as [heads, tokens, ...]."""
    heads, tokens = work
    return buffer[: len(heads) * len(tokens)].unflatten(0, (len(heads), len(tokens)))


if __name__ == "__main__":
    main()
