"""Parts that vary from model to model, such as kinds of attention and linear maps.

PyTorch's custom operations take tensors, numbers and strings, but no objects. A part therefore has
a number: callers pass `part.number` to an operation, and the operation calls `part_of(number)`.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

_PARTS: list["Part"] = []


class Part:
    """Base class of the frozen dataclasses that operations find by `number`.

    Equal parts have the same number.
    """

    number: int

    def __post_init__(self) -> None:
        if self not in _PARTS:
            _PARTS.append(self)
        object.__setattr__(self, "number", _PARTS.index(self))

    def __reduce__(self):
        """Pickles the fields alone: another process has other numbers."""
        names = (field.name for field in fields(self))  # type: ignore[arg-type]
        return type(self), tuple(getattr(self, name) for name in names)


def part_of(number: int):
    """Returns the part that has this number in this process."""
    return _PARTS[number]


@dataclass(frozen=True)
class Adapted:
    """A frozen matrix W [N, K] and its adapter, A [r, K] and B [N, r], which are trained: a weight
    of W + B A.

    Experts' have a dimension more in front, and are multiplied by `kernels.experts` alone.
    """

    matrix: Tensor
    a: Tensor
    b: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.matrix.shape

    def __len__(self) -> int:
        return len(self.matrix)

    def __getitem__(self, rows: slice) -> "Adapted":
        """Returns some rows of the weight."""
        return Adapted(self.matrix[rows], self.a, self.b[rows])

    def split(self, lengths: list[int]) -> list["Adapted"]:
        """Returns parts of so many rows."""
        return [
            Adapted(matrix, self.a, b)
            for matrix, b in zip(self.matrix.split(lengths), self.b.split(lengths))
        ]

    def t(self) -> "Adapted":
        """Returns the transposed weight, W^T + A^T B^T."""
        return Adapted(self.matrix.t(), self.b.t(), self.a.t())


# a linear map's; only `kernels.lora.LoRA` multiplies by adapted weights
Weight: TypeAlias = Tensor | Adapted


def tensors_of(weight: Weight) -> list[Tensor]:
    """Returns the tensors of a weight, as operations take them: its matrix, then its adapter if it
    has one."""
    return [weight] if isinstance(weight, Tensor) else [weight.matrix, weight.a, weight.b]


def weight_of(tensors: Sequence[Tensor]) -> Weight:
    """Returns the weight of these tensors: the inverse of `tensors_of`."""
    return tensors[0] if len(tensors) == 1 else Adapted(*tensors)


class Fused(NamedTuple):
    """Rows of a tensor in files that holds several parameters of a block, one below the other."""

    tensor: str  # its name in the block: self_attn.qkv_proj.weight
    num_rows: int  # the whole tensor's
    first_row: int  # the parameter's


@dataclass(frozen=True)
class Parameter:
    """A parameter of a model, with all that its name would be asked for. Parts of layers declare
    theirs, and adapters their factors."""

    shape: tuple[int, ...]  # of one rank
    # Its initial values: "normal"; "residual", normal and smaller, of matrices that write into the
    # residual stream; "neutral", with which a norm changes no scale; "zero"; "one"; "decay",
    # logarithms of 0.01 to 16; "uniform" within 1 / sqrt(columns).
    start: str = "normal"
    # the dimension that tensor-parallel ranks share; None: each rank has all of it
    shared_dim: int | None = None
    # "map": the matrix of a linear map, which FP8 applies to. "router": it scores experts.
    # "shared_gate": it weighs the expert that all tokens go through. "gate": it weighs branches of
    # attention. "adapter": a factor of an adapter. "": all others.
    role: str = ""
    block: int | None = None  # number of its transformer block; None: it is in none
    target: str | None = None  # the word in --lora_targets that adapts it; None: it has no adapter
    adapter_path: str = ""  # from its module to its adapter's, such as ".inner"
    takes_lora_plus: bool = False  # whether --lora_plus multiplies its learning rate
    is_exact: bool = False  # whether it stays float32 where the others are bf16
    is_exact_in_files: bool = False  # whether released files have it in float32 as well
    # share of its elements that one token is multiplied by, such as 8 of 128 experts'
    active: float = 1.0
    # Matrices of each expert, one below the other. Files may have a tensor for each in its place.
    matrices: tuple[str, ...] = ()
    fused: Fused | None = None  # its place in files that hold it in a larger tensor

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, or one for each expert. A convolution of channels by themselves
        has [C, 1, W]."""
        return len(self.shape) > 1 and 1 not in self.shape[1:-1]

    @property
    def decays(self) -> bool:
        """Whether weight decay applies to it: to no norm and no bias."""
        return len(self.shape) > 1

    @property
    def may_quantize(self) -> bool:
        """Whether it has fewer bits where a model's frozen matrices do. What decides between
        experts stays exact."""
        return (
            self.block is not None
            and self.is_matrix
            and self.role not in ("router", "shared_gate", "adapter")
        )


class LayerPart(Protocol):
    """Description of a part of a layer, such as attention or an MLP: its sizes on one rank.

    A frozen dataclass.
    """

    module: str  # its module's name in a block

    @property
    def kept_whole(self) -> str | None:
        """Name of what tensor-parallel ranks cannot share; None: they can share all matrices."""

    def __hash__(self) -> int:
        """Hashes by value: descriptions are keys of caches."""

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        """Returns the part's parameters by their names in it, in the order of the module's."""

    def shared_sizes(self) -> dict[str, int]:
        """Returns the sizes that tensor-parallel ranks must divide, by their config.json names."""

    def shard(self, ranks: int) -> "LayerPart":
        """Returns the part of each of `ranks` that share the matrices."""

    def linear_work(
        self,
        num_tokens: int,
        hidden_size: int,
        element_size: int,
        *,
        tile_size: int | None = None,
        is_skippable: bool = True,
    ) -> "Work":
        """Returns the work of linear maps, the MLP in tiles; `is_skippable`: no gradient depends on
        its result."""


class MLPPart(LayerPart, Protocol):
    """Description of the part in which each token is alone; products are efficient in tiles of
    `tile_size` tokens."""

    tile_size: ClassVar[int]
    # Whether a router chooses experts for each token, once:
    # a second forward takes the first one's choice.
    routes: ClassVar[bool]

    @property
    def active_width(self) -> int:
        """Elements between the products of the MLPs that one token goes through."""

    def measure_rates(
        self, hidden_size: int, seconds: Callable[..., float], device: torch.device
    ) -> dict[str, float]:
        """Measures the rates that only this part has, in FLOP/s by their names in `linear_work`."""

    def choice_bytes(self, num_tokens: int) -> int:
        """Returns the bytes of choices, such as of experts, which every block keeps."""


class MixerPart(LayerPart, Protocol):
    """Description of the part in which tokens read other tokens, in the way of its `kind`."""

    kind: "MixerKind"

    @property
    def heads(self) -> tuple[int, int, int]:
        """Heads of queries and of the output, heads of keys and values, width of the output's."""

    @property
    def rotary_width(self) -> int:
        """Elements of each head that are rotated; 0: none."""

    @property
    def works_in_groups(self) -> bool:
        """Whether it obeys `heads_at_a_time`."""

    def with_kind(self, kind: "MixerKind") -> "MixerPart":
        """Returns the part with another kind of attention; itself if it does not attend."""

    def heads_to_share(self) -> dict[str, int]:
        """Returns the numbers of heads that ranks that share each sequence must divide, by their
        names for people."""

    def results_bytes(self, num_tokens: int, element_size: int) -> tuple[int, int]:
        """Returns the bytes of results that a block can keep, and of choices that it must keep."""

    def inside_bytes(
        self,
        num_tokens: int,
        element_size: int,
        *,
        backend: str,
        context_length: int,
        longest: int | None = None,
        heads_at_a_time: int | None = None,
        num_ranks: int = 1,
        prompts: Iterable[tuple[float, float, float, float]] = (),
    ) -> dict[str, int]:
        """Returns the bytes that operations take inside, where tensors do not show them, by the
        operation's name.

        `prompts` are as in `MixerKind.work`, `context_length` and `longest` as in
        `kernels.attention.full.backward_workspace`. The tokens are a rank's, of `num_ranks` that
        share each sequence.
        """


class Work(NamedTuple):
    """Work of a part of a layer in forward."""

    matrix_flops: float  # floating-point operations of matrix products
    repeated_flops: float  # operations that backward runs again, where activations were not kept
    elementwise_bytes: int  # read and written outside of matrix products and attention
    # whether a second forward leaves the part out, see `kernels.common.operation`
    is_skipped: bool = False
    rate: str | None = None  # name of the measured rate of its products; None: the linear map's


@dataclass(frozen=True)
class LayerParts(Part):
    """Descriptions of what a block is made of, beside its norms. Its number is its hash, which is
    quick: plans are searched by it."""

    # a MixerPart: kernels.qkv_attention.AttentionPart or kernels.gated_delta_net.DeltaNet
    mixer: Any
    mlp: Any  # an MLPPart: kernels.gated_mlp.GatedMLPPart or kernels.experts.part.ExpertsPart

    def __iter__(self) -> Iterator[LayerPart]:
        return iter((self.mixer, self.mlp))

    def __hash__(self) -> int:
        return self.number

    def shard(self, ranks: int) -> "LayerParts":
        """Returns the parts of each of `ranks` that share the matrices."""
        return LayerParts(self.mixer.shard(ranks), self.mlp.shard(ranks))

    def with_kind(self, kind: "MixerKind") -> "LayerParts":
        return LayerParts(self.mixer.with_kind(kind), self.mlp)


@dataclass(frozen=True)
class BlockForm:
    """RMSNorms of a block, and how its parts add to the residual stream. The final norm multiplies
    by its weight as a block's norms do.

    Raises ValueError for a block without norms.
    """

    before: bool = True  # norms of what attention and the MLP read
    after: bool = False  # norms of what they add to the residual stream
    offset: float = 0.0  # added to norms' weights; Gemma's is 1
    cast: bool = True  # norms round before they multiply by the weight, as Llama's do
    multiplier: float = (
        1.0  # factor of what attention and MLP add to the residual stream; Granite's
    )

    def __post_init__(self):
        if not (self.before or self.after):
            raise ValueError("a block must have norms before or after its parts")


class AttentionBytes(NamedTuple):
    """Memory of attention alone, from q, k and v to its output."""

    results: int  # bytes per token of the outputs and log-sum-exps, which backward needs
    choices: int  # bytes per token of the lists of key blocks, which backward needs
    forward: int  # bytes at the fullest moment of forward, on top of results and choices
    backward: int  # bytes at the fullest moment of backward, on top of its arguments, dq, dk and dv


class AttentionFlops(NamedTuple):
    """Floating-point operations of attention to one document, from q, k and v to its output."""

    forward: float  # without the choice
    choice: float  # choosing key blocks: once per step, because the lists are kept
    backward: float


class AttentionWork(NamedTuple):
    """Amounts of work by the name of a measured rate (`training.memory.machine.Rates`): amount /
    rate is seconds."""

    forward: dict[str, float]
    choice: dict[str, float]
    backward: dict[str, float]


class MixerKind(Part, ABC):
    """A way in which tokens of a layer read the tokens before them: its work, rates and limits. A
    frozen dataclass.

    What a token reads depends on its document alone, not on the documents that are packed with it.

    """

    name: ClassVar[str]  # in flags
    takes: ClassVar[tuple[str, ...]] = ()  # names of the flags that it obeys
    branches: ClassVar[int] = 1  # outputs that are kept for backward, each with a log-sum-exp
    # gate logits per token and query head, which the model computes
    gates_per_head: ClassVar[int] = 0
    has_keys: ClassVar[bool] = True  # whether generation keeps keys and values of earlier tokens
    # blocks of keys per token, as flags count them; 0: the kind chooses none
    selected_blocks: int = 0
    gpu_head_dims: ClassVar[tuple[int, ...]] = ()  # head widths that its GPU kernels take; (): any
    h200_rates: ClassVar[dict[str, float]]  # its rates on an H200, by the names that `work` uses
    # Whether `forward` and `backward` take segments with prompts.
    # If not, see `kernels.attention.prompts.Copies`.
    reads_prompts: ClassVar[bool] = False
    # whether answers attend to what is not copied of their prompts as well
    sees_uncopied: ClassVar[bool] = False
    # Whether its kernels need as much power as matrix products. If not, they run at a lower clock
    # between products.
    draws_full_power: ClassVar[bool] = False

    @property
    def list_length(self) -> int:
        """Blocks of keys in a list, without blocks that every token has anyway."""
        return self.selected_blocks

    @property
    def reach(self) -> int | None:
        """Tokens that a token sees in `decode`, itself included; None: all."""
        return None

    @property
    def longest_document(self) -> float:
        """Tokens of the longest document that it takes."""
        return math.inf

    def check_heads(self, head_dim: int) -> None:
        """Raises ValueError if a GPU has no kernels for attention's heads of `head_dim`."""
        if self.gpu_head_dims and head_dim not in self.gpu_head_dims:
            has = f"attention_type {self.name} has GPU kernels for head_dim {self.gpu_head_dims}"
            raise ValueError(f"{has}, not for {head_dim}; use full")

    @abstractmethod
    def describe(self, selected_blocks: str) -> str:
        """Returns a line for people; `selected_blocks` is the number of blocks in each layer, such
        as "64x2,32"."""

    def for_longest(self, longest: int) -> "MixerKind":
        """Returns the cheapest kind with equal results for documents of up to `longest` tokens."""
        return self

    @abstractmethod
    def flops(self, length: int, H: int, G: int, K: int) -> AttentionFlops:
        """Returns the floating-point operations of one document of `length` tokens."""

    def copied(self, prompt: int) -> int:
        """Returns the tokens of a prompt of so many that are copied before each of its answers."""
        if self.reads_prompts:
            return 0
        if self.reach is None:
            return prompt
        return min(prompt, self.reach - 1)

    def with_copies(
        self,
        lengths: Iterable[tuple[float, float]],
        prompts: Iterable[tuple[float, float, float, float]],
    ) -> list[tuple[float, float]]:
        """Returns the documents of `work`, with documents that stand for prompts and answers."""
        documents = [*lengths]
        for prompt, answers, tokens, count in prompts:
            answer, copied = tokens / answers, self.copied(round(prompt))
            seen = prompt - copied if self.sees_uncopied else 0.0
            documents += [(prompt + answer, count), (seen + copied + answer, (answers - 1) * count)]
            documents += [(prompt, -count), (answer, -answers * count)]
            documents += [(seen, (1 - answers) * count)] * (seen > 0)
        return documents

    def prompt_flops(
        self, prompt: int, answers: int, tokens: int, H: int, G: int, K: int
    ) -> AttentionFlops:
        """Returns the FLOP of a prompt's answers beyond documents of these lengths."""
        documents = self.with_copies((), [(prompt, answers, tokens, 1)])
        flops = (
            [count * n for n in self.flops(round(length), H, G, K)] for length, count in documents
        )
        return AttentionFlops(*map(sum, zip((0, 0, 0), *flops)))

    def forward_flops(
        self,
        lengths: Iterable[int],
        H: int,
        G: int,
        K: int,
        prompts: Iterable[tuple[int, int, int]] = (),
    ) -> float:
        """Returns forward's FLOP without choices of blocks.

        `prompts` are as in `Documents`.
        """
        flops = {length: self.flops(length, H, G, K).forward for length in {*lengths}}
        prompt_terms = (self.prompt_flops(*prompt, H, G, K).forward for prompt in prompts)
        return sum(flops[length] for length in lengths) + sum(prompt_terms)

    def work(
        self,
        lengths: Iterable[tuple[float, float]],
        H: int,
        G: int,
        K: int,
        *,
        backend: str,
        steps: int,
        is_packed: bool = True,
        prompts: Iterable[tuple[float, float, float, float]] = (),
    ) -> AttentionWork:
        """Returns the work of attention to documents: `lengths` has pairs of tokens and a number of
        such documents.

        `steps` groups of heads attend one after the other, each in calls of its own. With
        `is_packed`, a batch row may hold several documents. `prompts` are as in
        `kernels.attention.documents.Documents`, and a number of each; `lengths` has prompts and
        answers as well.
        """
        totals = [0.0, 0.0, 0.0]
        for length, count in self.with_copies(lengths, prompts):
            flops = self.flops(max(1, round(length)), H, G, K)
            totals = [total + count * amount for total, amount in zip(totals, flops)]
        return AttentionWork(
            *({f"{self.name} {part}": n} for part, n in zip(AttentionWork._fields, totals))
        )

    def rates_with(self, backend: str, native: str, head_dim: int) -> dict[str, float]:
        """Returns rates of `backend` for a GPU whose best backend is `native`, but that has an
        H200's peak FLOP/s.

        Attention has heads of width `head_dim`.
        """
        return self.h200_rates

    @abstractmethod
    def measure_rates(
        self,
        H: int,
        G: int,
        K: int,
        context_length: int,
        backend: str,
        seconds: Callable[..., float],
        device: torch.device,
    ) -> dict[str, float]:
        """Measures the rates of this GPU, in FLOP/s or calls per second, by the names that `work`
        uses.

        `seconds` returns the seconds of a call of a function between a layer's products, or
        `in_a_row` with others.
        """


class AttentionKind(MixerKind):
    """A kind of causal attention, and everything that is its own.

    Arguments with one meaning in all methods:
        q [B, T, H, K], k and v [B, T, G, K]: queries, keys and values after rotary positions.
        segments: the documents, int64 [S, 3] on the CPU, rows (batch row, first token, one past the
            last token); None: each batch row is one document.
        lists: the blocks of keys that each token chose, int16 [B, T, G, `list_length`], by index in
            their document.
        backend: a name in `kernels.attention.libraries.BACKENDS`, but not "auto".
        on_triton: whether Triton's kernels run.
    """

    @abstractmethod
    def check(self, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, impl: str) -> bool:
        """Returns `on_triton`, see `kernels.common.use_triton`.

        Raises ValueError for what no kernel takes.
        """

    @abstractmethod
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: Tensor | None,
        lists: Tensor | None,
        backend: str,
        on_triton: bool,
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """Returns outputs [B, T, H, K] and log-sum-exps [B, T, H] float32 per branch, and lists, if
        it has any."""

    @abstractmethod
    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Tensor | None,
        outs: Sequence[Tensor],
        lses: Sequence[Tensor],
        lists: Tensor | None,
        segments: Tensor | None,
        backend: str,
        on_triton: bool,
    ) -> Sequence[Tensor]:
        """Returns dq, dk, dv and, if there are gates, their gradient, from `forward`'s results."""

    def normalise_lists(self, lists: Tensor, q: Tensor, segments: Tensor | None) -> Tensor:
        """Returns a caller's lists for `backward`, without blocks that a token cannot choose."""
        raise ValueError(f"{self.name} attention chooses no blocks of keys; give no lists")

    def output(self, outs: Sequence[Tensor], gates: Tensor | None, on_triton: bool) -> Tensor:
        """Returns attention's output [B, T, H, K] from its branches' outputs.

        Gates are [B, T, H, gates_per_head].
        """
        return outs[0]

    @abstractmethod
    def decode(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None) -> Tensor:
        """Returns the output for q [B, 1, H, K] of one new token, the last of S, with cached k and
        v [B, S, G, K]."""

    @abstractmethod
    def footprint(
        self,
        T: int,
        H: int,
        G: int,
        K: int,
        *,
        element_size: int = 2,
        backend: str = "auto",
        context_length: int | None = None,
        longest: int | None = None,
    ) -> AttentionBytes:
        """Returns the bytes that T tokens take.

        `context_length` (None: T) and `longest` are as in `backward_workspace`.
        """

    def rates_at(
        self,
        T: int,
        H: int,
        G: int,
        K: int,
        backend: str,
        seconds: Callable[..., float],
        device: torch.device,
    ) -> dict[str, float]:
        """Measures the FLOP/s of forward and backward over one document of T tokens.

        Args:
            H, G, K: query heads, key/value heads, and the width of a head.
            backend: the attention backend, such as "cudnn".
            seconds: calls a function and returns the seconds of one call.

        Returns the rates by name, such as "full forward" and "full backward".
        """
        flops, taken = self.flops(T, H, G, K), self.time(T, H, G, K, backend, seconds, device)
        return {
            f"{self.name} {part}": getattr(flops, part) / s
            for part, s in zip(("forward", "backward"), taken)
        }

    def time(
        self,
        T: int,
        H: int,
        G: int,
        K: int,
        backend: str,
        seconds: Callable[..., float],
        device: torch.device,
        segments: Tensor | None = None,
    ) -> tuple[float, float]:
        """Returns the seconds of a forward, without the choice, and a backward over T tokens."""
        q, k, v = (torch.randn(1, T, n, K, device=device, dtype=torch.bfloat16) for n in (H, G, G))
        gates = None
        if self.gates_per_head:
            gates = torch.randn(1, T, H, self.gates_per_head, device=device, dtype=q.dtype)
        outs, lses, lists = self.forward(q, k, v, segments, None, backend, True)
        seconds = functools.partial(seconds, in_a_row=self.draws_full_power)
        forward = seconds(lambda: self.forward(q, k, v, segments, lists, backend, True))
        kept = gates, outs, lses, lists, segments
        return forward, seconds(lambda: self.backward(q, q, k, v, *kept, backend, True))


def sum_to(n: int, most: int | None = None) -> int:
    """Returns the sum of the integers 0 to n - 1, each cut to `most`: sum_to(4) is 6, sum_to(4, 2)
    is 0 + 1 + 2 + 2."""
    n = max(0, n)
    return n * (n - 1) // 2 - (0 if most is None else sum_to(n - most))
