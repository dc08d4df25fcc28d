"""Gated delta net (arXiv 2412.06464): a mixer that remembers a state per value head, not keys.

The layer's input is x. There are G key heads of width K and H value heads of width V.

    q, k, v = convolution(x W_qkv^T), with SiLU, then q and k normalised      `qkv_convolution`
    g       = -exp(A_log) softplus(x W_a^T + dt_bias)                         log decay, float32
    beta    = sigmoid(x W_b^T)                                                strength, float32
    o       = delta rule of q, k, v, g and beta                               `delta_rule`
    out     = (norm(o) silu(x W_z^T)) W_out^T                                 norm of each head's o

A_log, dt_bias and the norm's weight stay float32 beside matrices in bf16: a rounded A_log is
another decay.

Ranks that share a sequence exchange tokens for heads before the convolution, and back before the
norm: in between, each rank has some heads of all tokens. `StateCache` holds the states, and the
last rows before the convolution.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention.documents import has_prompts
from .attention.prompts import Drop, Expand, copies_of
from .common import sum_dtype
from .convolution import WIDTH, convolution_workspace, qkv_convolution, qkv_convolution_reference
from .delta_net import delta_rule, delta_rule_bytes, delta_rule_reference
from .delta_net.chunks import CHUNK
from .delta_net.rule import HEAD_WIDTHS
from .head_exchange import HeadExchange
from .linear import PLAIN, Linear
from .parts import Adapted, AttentionFlops, MixerKind, Parameter, Weight, Work
from .rms_norm import rms_norm, rms_norm_reference

# Times forward's, in the delta rule: states and chunks' matrices are made again.
BACKWARD_FLOPS = 3.0


class DeltaNetParameters(NamedTuple):
    """Parameters of a gated delta net; C channels are 2 G K + H V."""

    qkv: Weight  # [C, D], rows of q, k and v
    z: Weight  # [H V, D]
    b: Tensor  # [H, D]
    a: Tensor  # [H, D]
    convolution: Tensor  # [C, 4]
    A_log: Tensor  # [H] float32
    dt_bias: Tensor  # [H] float32
    norm: Tensor  # [V]
    out: Weight  # [D, H V]
    eps: float  # added to mean squares under the norm's root


@dataclass(frozen=True)
class DeltaRule(MixerKind):
    """The gated delta rule as a kind of mixer: a state [K, V] per value head."""

    key_dim: int = 128
    value_dim: int = 128
    name: ClassVar[str] = "delta"
    has_keys: ClassVar[bool] = False
    reads_prompts: ClassVar[bool] = True  # its copies are three tokens of each prompt
    # Measured on an H100 (benchmarks/results/delta_net_h100_2026-11-26.md): scans wait for each
    # other, not for memory.
    h200_rates: ClassVar[dict[str, float]] = {"delta forward": 161e12, "delta backward": 153e12}

    def check_heads(self, head_dim):
        widths = self.key_dim, self.value_dim
        if not {*widths} <= {*HEAD_WIDTHS}:
            raise ValueError(
                f"gated delta nets have GPU kernels for heads of {HEAD_WIDTHS}, got {widths}"
            )

    def describe(self, selected_blocks):
        return "a gated delta net's state"

    def flops(self, length, H, G, K):
        """Counts the products of chunks and of the scan over them, of H value heads."""
        K, V = self.key_dim, self.value_dim
        forward = 2.0 * length * H * (CHUNK * (3 * K + 2 * V) + 3 * K * V)
        return AttentionFlops(forward, 0, BACKWARD_FLOPS * forward)

    def with_copies(self, lengths, prompts):
        return [*lengths]

    def measure_rates(
        self, H, G, K, context_length, backend, seconds: Callable[..., float], device
    ):
        T, K, V = 32_768, self.key_dim, self.value_dim
        q, k = (
            F.normalize(torch.randn(1, T, G, K, device=device), dim=-1).bfloat16() for _ in range(2)
        )
        v = torch.randn(1, T, H, V, device=device, dtype=torch.bfloat16)
        g = -torch.rand(1, T, H, device=device)
        beta = torch.rand(1, T, H, device=device)
        tensors = [x.requires_grad_() for x in (q, k, v, g, beta)]
        out = delta_rule(*tensors)
        flops = self.flops(T, H, G, K)
        forward = seconds(lambda: delta_rule(*(x.detach() for x in tensors)))
        backward = seconds(lambda: torch.autograd.grad(out, tensors, v, retain_graph=True))
        return {
            f"{self.name} forward": flops.forward / forward,
            f"{self.name} backward": flops.backward / backward,
        }


@dataclass(frozen=True)
class DeltaNet:
    """The gated delta net as a part of a layer, see `kernels.parts.MixerPart`. Raises ValueError
    for sizes that do not fit."""

    num_key_heads: int = 16
    num_value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    module: ClassVar[str] = "linear_attn"
    kept_whole: ClassVar[str] = "q, k and v, which gated delta nets have in one matrix"
    works_in_groups: ClassVar[bool] = False
    rotary_width: ClassVar[int] = 0

    def __post_init__(self):
        if min(self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim) < 1:
            raise ValueError(f"a gated delta net needs heads and widths above 0, got {self}")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                "linear_num_value_heads must be a multiple of linear_num_key_heads "
                f"({self.num_key_heads}), got {self.num_value_heads}"
            )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Key heads, value heads, width of a key, width of a value."""
        return self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim

    @property
    def columns(self) -> list[int]:
        """Columns of q, of k and of v."""
        G, H, K, V = self.sizes
        return [G * K, G * K, H * V]

    @property
    def channels(self) -> int:
        """Columns of q, k and v together."""
        return sum(self.columns)

    def of_rank(self, ranks: int) -> "DeltaNet":
        """Returns the heads of each of `ranks` that share a sequence. Raises ValueError if they do
        not divide them."""
        if self.num_key_heads % ranks:
            raise ValueError(
                f"{ranks} ranks do not divide the {self.num_key_heads} key heads; "
                "share between fewer"
            )
        return replace(
            self,
            num_key_heads=self.num_key_heads // ranks,
            num_value_heads=self.num_value_heads // ranks,
        )

    @functools.cached_property
    def kind(self) -> DeltaRule:
        return DeltaRule(self.key_dim, self.value_dim)

    def with_kind(self, kind: MixerKind) -> "DeltaNet":
        return self

    def shard(self, ranks: int) -> "DeltaNet":
        return self

    @property
    def heads(self) -> tuple[int, int, int]:
        """Value heads, key heads, width of a value: what q, k, v and the output count by."""
        return self.num_value_heads, self.num_key_heads, self.value_dim

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        _, H, _, V = self.sizes
        D, widths = hidden_size, {"in_proj_qkv": self.channels, "in_proj_z": H * V}
        maps = {
            f"{name}.weight": Parameter((rows, D), role="map", target=name)
            for name, rows in widths.items()
        }
        by_head = {
            f"{name}.weight": Parameter((H, D), target=name) for name in ("in_proj_b", "in_proj_a")
        }
        return {
            "dt_bias": Parameter((H,), "one", is_exact=True),
            "A_log": Parameter((H,), "decay", is_exact=True, is_exact_in_files=True),
            **maps,
            **by_head,
            "conv1d.weight": Parameter((self.channels, 1, WIDTH)),
            "norm.weight": Parameter((V,), "one", is_exact=True, is_exact_in_files=True),
            "out_proj.weight": Parameter((D, H * V), "residual", role="map", target="out_proj"),
        }

    def shared_sizes(self) -> dict[str, int]:
        return {}

    def heads_to_share(self) -> dict[str, int]:
        return {"key heads of gated delta nets": self.num_key_heads}

    def results_bytes(self, num_tokens: int, element_size: int) -> tuple[int, int]:
        kept, _, _ = delta_rule_bytes(num_tokens, *self.sizes[1:], element_size)
        return element_size * num_tokens * self.num_value_heads * self.value_dim + kept, 0

    def inside_bytes(
        self, num_tokens: int, element_size: int, *, num_ranks: int = 1, **options
    ) -> dict[str, int]:
        """Has no use for attention's other `options`."""
        shard = self.of_rank(num_ranks)
        num_tokens *= num_ranks
        _, forward, backward = delta_rule_bytes(num_tokens, *shard.sizes[1:], element_size)
        return {
            "fathom::delta_rule": forward,
            "fathom::delta_rule_backward": backward,
            "fathom::qkv_convolution_backward": convolution_workspace(num_tokens, shard.channels),
        }

    def linear_work(
        self, num_tokens: int, hidden_size: int, element_size: int, *, tile_size: int | None = None,
        is_skippable: bool = True,
    ) -> Work:  # fmt: skip
        _, H, _, V = self.sizes
        flops = 2.0 * num_tokens * hidden_size * (self.channels + 2 * H * V + 2 * H)
        return Work(flops, flops, element_size * num_tokens * (2 * self.channels + 3 * H * V))


class StateCache:
    """Keeps a gated delta net's states, and its convolution's last inputs, for later tokens."""

    def __init__(self):
        self.length = 0  # tokens seen so far
        self.state: Tensor | None = None  # [B, H, K, V] float32
        self.rows: Tensor | None = None  # [B, 3, C], zeros before the first token

    def append(self, x_BTC: Tensor) -> Tensor:
        """Returns inputs of the convolution behind the three rows before them, and keeps the last
        three rows."""
        if self.rows is None:
            self.rows = x_BTC.new_zeros(len(x_BTC), WIDTH - 1, x_BTC.shape[-1])
        rows = torch.cat([self.rows, x_BTC], 1)
        self.length += x_BTC.shape[1]
        self.rows = rows[:, 1 - WIDTH :]
        return rows


def gated_delta_net_reference(
    x_BTD: Tensor, parameters: DeltaNetParameters, part: DeltaNet, segments: Tensor | None = None
) -> Tensor:
    """Runs `gated_delta_net` in plain PyTorch, token by token; float64 stays float64."""
    (G, H, K, _), p = part.sizes, parameters
    qkv, z, b, a = (F.linear(x_BTD, weight) for weight in (p.qkv, p.z, p.b, p.a))
    q, k, v = qkv_convolution_reference(qkv, p.convolution, G, H, K, segments=segments)
    g, beta = _decay_and_strength(a, b, p)
    out, _ = delta_rule_reference(q, k, v, g, beta, segments=segments)
    normed: Any = rms_norm_reference(out, p.norm, p.eps, gate=z.view(out.shape))
    return F.linear(normed.flatten(2), p.out)


def _decay_and_strength(a: Tensor, b: Tensor, p: DeltaNetParameters) -> tuple[Tensor, Tensor]:
    """Returns g and beta [B, T, H], float32 or wider."""
    dtype = sum_dtype(a)
    g = -p.A_log.to(dtype).exp() * F.softplus(a.to(dtype) + p.dt_bias.to(dtype))
    return g, b.sigmoid().to(dtype)


def _rows_by_rank(weight: Weight, part: DeltaNet, ranks: int) -> list[Weight]:
    """Returns the rows of each rank's heads in q, k and v, of a weight with a row per channel."""
    if isinstance(weight, Adapted):
        pairs = zip(*(_rows_by_rank(rows, part, ranks) for rows in (weight.matrix, weight.b)))
        return [Adapted(matrix, weight.a, b) for matrix, b in pairs]  # type: ignore[arg-type]
    parts = (rows.chunk(ranks) for rows in weight.split(part.columns))
    return [torch.cat(rows) for rows in zip(*parts)]


def _project_to_heads(
    x_BTD: Tensor, weight: Weight, part: DeltaNet, exchange: HeadExchange, linear: Linear
) -> Callable[[], Tensor]:
    """Projects to the channels of other ranks' heads, and starts to send them.

    Returns a function that projects to this rank's channels beside that, and waits: [B, T / N, D]
    to [B, T, C / N].
    """
    rows = _rows_by_rank(weight, part, exchange.size)
    local_rows = rows[exchange.rank]
    rows[exchange.rank] = None
    parts = [None if weight is None else linear(x_BTD, weight) for weight in rows]
    receive = exchange.start_parts_to_heads(parts)
    return lambda: receive(linear(x_BTD, local_rows))


def gated_delta_net(
    x_BTD: Tensor, parameters: DeltaNetParameters, part: DeltaNet, segments: Tensor | None = None,
    *, cache: StateCache | None = None, exchange: HeadExchange | None = None,
    linear: Linear = PLAIN, impl: str = "auto",
) -> Tensor:  # fmt: skip
    """Runs a gated delta net from a layer's input to its output projection, [B, T, D] to [B, T, D].

    Args:
        segments: the documents, see `kernels.attention.documents.Documents`; None: each batch row
            is one document.
        cache: continues the tokens that it has seen, one document per row, and sees these; None:
            nothing before.
        exchange: between ranks that share each sequence. x and the result are of this rank's
            tokens, `segments` of whole sequences. None: each rank has its own sequences.
        linear: the linear map of the projections to q, k, v and z, and of the output projection.

    Raises ValueError for what `qkv_convolution` and `delta_rule` refuse, and ranks that do not
    divide the key heads.
    """
    p, exchange = parameters, exchange or HeadExchange(None)
    out = _run_heads(x_BTD, p, part, segments, cache, exchange, linear, impl)
    receive = exchange.start_to_tokens(out)
    del out
    # Beside the exchange; and backward frees its gradient before the rule's backward.
    z = linear(x_BTD, p.z)
    out = receive()
    del receive
    normed = rms_norm(out, p.norm, p.eps, gate=z.view(out.shape), read_once=True, impl=impl)
    del out
    return linear(normed.flatten(2), p.out)  # type: ignore[union-attr]


def _run_heads(
    x_BTD: Tensor, p: DeltaNetParameters, part: DeltaNet, segments: Tensor | None,
    cache: StateCache | None, exchange: HeadExchange, linear: Linear, impl: str,
) -> Tensor:  # fmt: skip
    """Returns the delta rule's output for this rank's heads of all tokens, [B, T, H / N, V]."""
    G, H, K, _ = part.of_rank(exchange.size).sizes
    convolution = p.convolution
    if is_shared := exchange.size > 1:
        receive_qkv = _project_to_heads(x_BTD, p.qkv, part, exchange, linear)
    a, b = PLAIN.maps(x_BTD, [p.a, p.b])
    g, beta = _decay_and_strength(a, b, p)
    qkv: Tensor | list[Tensor]
    if is_shared:
        receive_gates = exchange.start_to_heads(torch.stack([g, beta], -1))
        qkv = receive_qkv()
        convolution = _rows_by_rank(convolution, part, exchange.size)[exchange.rank]
        g, beta = receive_gates().unbind(-1)
        del receive_gates, receive_qkv
    elif cache is not None or has_prompts(segments):
        qkv = linear(x_BTD, p.qkv)
    else:  # apart: the largest tensor of a layer would leave holes in memory where no other fits
        qkv = linear.maps(x_BTD, p.qkv.split(part.columns))
    convolve = functools.partial(qkv_convolution, weight_CW=convolution, G=G, H=H, K=K, impl=impl)
    if has_prompts(segments):
        inputs = [qkv, g, beta]
        del qkv, g, beta
        return _with_prompts(inputs, convolve, segments, impl)
    if cache is None:
        q, k, v = convolve(qkv, segments=segments)
        del qkv
        out: Any = delta_rule(q, k, v, g, beta, segments=segments, impl=impl)
        return out
    q, k, v = (x[:, WIDTH - 1 :] for x in convolve(cache.append(qkv)))
    out, cache.state = delta_rule(
        q, k, v, g, beta, initial_state=cache.state, with_state=True, impl=impl
    )
    return out


def _with_prompts(inputs: list[Tensor], convolve: Callable, segments: Tensor, impl: str) -> Tensor:
    """Returns the delta rule's output [B, T, H, V] of documents that may go on from prompts.

    `inputs` are rows before the convolution [B, T, C], g and beta [B, T, H]; the list is emptied.
    Before each answer stand copies of its prompt's last three tokens, which the convolution reads.
    Without strength and decay they leave the state as it is: the prompt's last state, from which
    all of its answers start.
    """
    like = inputs[0].new_empty(()).expand(inputs[0].shape[:2])
    copies = copies_of(like, segments, WIDTH - 1)
    beta, g = (Expand.apply(inputs.pop(), copies, True) for _ in range(2))
    q, k, v = convolve(Expand.apply(inputs.pop(), copies), segments=copies.segments)
    documents, first = copies.segments, copies.num_before
    is_answer = documents[:, 1] >= first
    before = [x[:, :first] for x in (q, k, v, g, beta)]
    out, states = delta_rule(*before, segments=documents[~is_answer], with_state=True, impl=impl)
    answers = [x[:, first:] for x in (q, k, v, g, beta)]
    answer_out = delta_rule(
        *answers, segments=documents[is_answer] - torch.tensor([0, first, first]),
        initial_state=states[copies.prompts], impl=impl,
    )  # fmt: skip
    return Drop.apply(torch.cat([out, answer_out], 1), copies, like)
