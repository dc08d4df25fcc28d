"""Low-rank adapters of a model: which projections have one, how large it is, and what peft's files
say of it.

`Adapters.prepare` freezes a model.Transformer and adds the adapters. Names of parameters are peft's
behind "base_model.model.model.", such as layers.0.self_attn.q_proj.lora_A.weight.

A folder of adapters has peft's adapter_config.json and adapter_model.safetensors. The first names
the folder of the base: the model that was adapted.

Method: Hu et al., LoRA, arXiv 2106.09685.
"""

import contextlib
import itertools
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from kernels.config import ModelConfig
from kernels.linear import PLAIN, Linear
from kernels.lora import LoRA, adapt, merged
from kernels.parts import Parameter
from training.families.config_json import from_config_json
from training.families.flags import (
    EXPERTS_TARGETS,
    LORA_BITS,
    LORA_TARGETS,
    READ_TARGETS,
    TARGETS,
)
from training.families.rows import FAMILIES, OLDER_PREFIX, PREFIX, WRAPPED_PREFIX, is_wrapper
from training.families.trained import Trained
from training.host.errors import SHOWN_OF_A_PATH, UserError, refused_as_user_error
from training.host.files import read_json
from training.host.sizes import check_sizes

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# in config.json: bits of the frozen matrices that adapters were trained beside
FROZEN_BITS = "frozen_bits"
# Settings of adapter_config.json without an effect on trained adapters, values that are taken of
# others, and settings that are read. All other settings are refused unless they are empty.
NO_EFFECT = {
    "auto_mapping",
    "ensure_weight_tying",
    "inference_mode",
    "layers_pattern",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    # of values of init_lora_weights
    "corda_config",
    "eva_config",
    "loftq_config",
    "lora_ga_config",
}
TAKEN = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),
}
# Beginnings of other values of init_lora_weights, with which peft takes a part of the base's
# matrices for the adapter.
CHANGES_BASE = "pissa", "olora", "corda", "loftq", "lora_ga"
EMPTY: tuple = None, "", [], {}
BASE = "base_model_name_or_path"
# peft's pattern of experts' gate_up_proj where it joins adapters of gate and of up
JOINED = r".*\.gate_up_proj"
PATTERNS = "rank_pattern", "alpha_pattern"
NAMES_TARGETS = "target_modules", "exclude_modules", "target_parameters"
OURS = {BASE, "r", "lora_alpha", *NAMES_TARGETS, *PATTERNS}


class _Rooted(torch.autograd.Function):
    """Returns x as a part of a graph, so that backward goes through the first block. Nothing takes
    x's gradient.

    Were x itself the graph's leaf, autograd would hold it from forward to backward.
    """

    @staticmethod
    def forward(ctx, x, root):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return None, None


@dataclass(frozen=True)
class Adapters(Trained):
    """Adapters of all blocks of a model, on the projections `targets`, among TARGETS.

    A has `rank` rows, B as many columns, and B A is scaled by alpha / rank. Raises ValueError for a
    rank or alpha that is not positive and finite, and for targets that are none, unknown or named
    twice.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = LORA_TARGETS
    joined: int = 1  # adapters that experts' gate_up_proj has as one, of so many times the rank
    is_whole: ClassVar[bool] = False

    def __post_init__(self):
        ordered = tuple(name for name in (*TARGETS, *READ_TARGETS) if name in self.targets)
        if (
            self.rank < 1
            or not 0 < self.alpha < math.inf
            or not ordered
            or len(ordered) != len(self.targets)
        ):
            needs = f"a rank and an alpha above 0, and targets among {', '.join(TARGETS)}"
            got = (
                f"rank {self.rank}, alpha {self.alpha} and "
                f"{', '.join(map(str, self.targets)) or 'no target'}"
            )
            raise ValueError(f"adapters need {needs}, got {got}")
        object.__setattr__(self, "targets", ordered)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def prepare(self, model: nn.Module) -> None:
        model.requires_grad_(False)
        added = self.added(model.declared)
        for name, parameter in [*model.named_parameters()]:
            for factor in self.factors(name, model.declared[name]):
                module, attribute, _ = factor.rsplit(".", 2)
                projection, (rows, columns) = model.get_submodule(module), added[factor].shape
                options = {"bias": False, "device": parameter.device, "dtype": parameter.dtype}
                setattr(projection, attribute, nn.Linear(columns, rows, **options))
                projection.lora_scale = self.scale
        model.declared |= added
        for name, parameter in model.named_parameters():
            if name in added and not parameter.is_meta:
                model.initialize_parameter(name, parameter)
        for block in model.layers:
            block.mixer.linear = block.mlp.linear = self.linear(PLAIN)
        root = torch.zeros((), requires_grad=True)
        model.embed_tokens.register_forward_hook(
            lambda module, inputs, x_BTD: _Rooted.apply(x_BTD, root)
        )

    def factors(self, name: str, parameter: Parameter) -> dict[str, Parameter]:
        """Returns A and B of a parameter's adapter by their names, one pair for all experts; none
        if it has no adapter."""
        if parameter.target not in self.targets:
            return {}
        *experts, N, K = parameter.shape
        is_joined = len(parameter.matrices) > 1
        rank = math.prod(experts, start=self.rank * (self.joined if is_joined else 1))
        a = Parameter((rank, K), "uniform", role="adapter", block=parameter.block)
        b = replace(a, shape=(N, rank), start="zero", takes_lora_plus=True)
        module = name.rpartition(".")[0] + parameter.adapter_path
        return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}

    def linear(self, base: Linear) -> Linear:
        return LoRA(base)

    def elements(self, shard: ModelConfig) -> int:
        return sum(self.layer_elements(shard, layer) for layer in range(shard.num_hidden_layers))

    def layer_elements(self, shard: ModelConfig, layer: int) -> int:
        return sum(factor.numel for factor in self.added(shard.layer_parameters(layer)).values())

    def traffic(self, shard: ModelConfig, layer: int) -> tuple[dict[str, int], dict[str, int]]:
        """Forward reads x and writes y. Backward reads dy, writes dx, and reads both factors of
        each gradient.

        Products with experts' matrices write y and dx, and backward reads x once more. A token is
        in several experts.
        """
        forward = backward = 0
        for parameter in shard.layer_parameters(layer).values():
            if parameter.target in self.targets:
                *E, N, K = parameter.shape
                times = round(parameter.active * math.prod(E))
                forward += times * (K if E else N + K)
                backward += times * (2 if E else 3) * (N + K)
        return {"adapters": forward}, {"adapters": backward}

    def described(self, shard: ModelConfig) -> list[tuple[str, str]]:
        trained = f"{self.elements(shard):,} parameters of {shard.num_parameters():,}"
        return [("adapters", f"rank {self.rank}, in {', '.join(self.targets)}: {trained}")]

    def added(self, declared: dict[str, Parameter]) -> dict[str, Parameter]:
        factors = itertools.starmap(self.factors, declared.items())
        return {name: factor for pair in factors for name, factor in pair.items()}

    def merge(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Returns a matrix with its adapter, in float32."""
        return merged(adapt(weight.float(), a.float(), self.scale * b.float()))


def targets_in(shard: ModelConfig) -> set[str]:
    """Returns the projections of a model that may have adapters."""
    return {*TARGETS} & {parameter.target for parameter in shard.parameters().values()}


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Has a model.Transformer compute as its base does."""
    had = {module: module.lora_scale for module in model.modules() if hasattr(module, "lora_scale")}
    for module in had:
        module.lora_scale = 0
    try:
        yield
    finally:
        for module, scale in had.items():
            module.lora_scale = scale


def to_adapter_config(adapters: Adapters, base: Path) -> dict:
    """Returns peft's configuration. In families with experts MLPs are named by parameter.

    peft takes gate_proj for experts' there, even if no layer of the model has any.
    """
    content = read_json(base / "config.json")
    # The words of --lora_targets by the parameters that target_parameters names.
    shape, by_parameter = from_config_json(content), dict[str, str | None]()
    if "num_experts" in FAMILIES[shape.model_type].defaults:
        words = {*adapters.targets} & {*TARGETS}
        for layer in range(shape.num_hidden_layers):
            mlp = shape.parts(layer).mlp
            by_parameter |= {
                f"{mlp.module}.{name}": parameter.target
                for name, parameter in mlp.parameters(shape.hidden_size).items()
                if parameter.target in words
            }
    parameters = [*by_parameter]
    targets: list | str = [name for name in adapters.targets if name not in by_parameter.values()]
    if targets and is_wrapper(content):  # a vision tower has projections of the same names
        targets = rf"{re.escape(WRAPPED_PREFIX)}layers\.\d+\.\w+\.({'|'.join(targets)})"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        BASE: str(base),
        "inference_mode": True,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "target_modules": targets,
        "lora_dropout": 0.0,
        "bias": "none",
        **({"target_parameters": parameters} if parameters else {}),
        **_patterns(adapters.rank, adapters.alpha, adapters.joined),
    }


def _patterns(rank: int, alpha: float, joined: int) -> dict[str, dict]:
    if joined == 1:
        return {}
    return dict(zip(PATTERNS, ({JOINED: joined * rank}, {JOINED: joined * alpha})))


def has_adapters(folder: str | Path) -> bool:
    return os.path.isfile(Path(folder, ADAPTER_CONFIG))


def read_frozen_bits(folder: str | Path) -> int:
    """Returns the bits per element of the blocks' frozen matrices beside which a folder's adapters
    were trained."""
    file = Path(folder, "config.json")  # folders of peft's have none
    bits = read_json(file).get(FROZEN_BITS, 16) if file.is_file() else 16
    if type(bits) is not int or bits not in LORA_BITS:
        raise UserError(f"{file} is damaged: {FROZEN_BITS} {bits!r:.40} is none of {LORA_BITS}")
    return bits


def adapted_matrices(content: dict, matrices: dict[str, Parameter], prefix: str) -> set[str]:
    """Returns the matrices that peft adapts by an adapter_config.json, in a model whose names begin
    with `prefix`.

    peft compares a list with the ends of full names: "q_proj" is in every block,
    "layers.0.self_attn.q_proj" in block 0 alone. Text is a regular expression for full names.
    target_parameters names parameters, the others modules.

    Raises re.error, RecursionError or OverflowError for text that is no regular expression.
    """
    targets, excluded, parameters = (content[name] for name in NAMES_TARGETS)
    every = isinstance(targets, str) and targets.lower() == "all-linear"
    adapted = set()
    for name, parameter in matrices.items():
        module = f"{prefix}{name.removesuffix('.weight')}" if name.endswith(".weight") else None
        is_named = parameter.target not in EXPERTS_TARGETS if every else _is_named(module, targets)
        if (module and is_named and not _is_named(module, excluded)) or _is_named(
            prefix + name, parameters
        ):
            adapted.add(name)
    return adapted


def _is_named(full_name: str | None, named: str | list | None) -> bool:
    """Whether a list holds an end of a full name, or text is a regular expression for it."""
    if not named or full_name is None:
        return False
    if isinstance(named, str):
        return re.fullmatch(named, full_name) is not None
    return any(f".{full_name}".endswith(f".{suffix}") for suffix in named)


def _prefixes_in(folder: Path) -> list[str]:
    """Returns prefixes that a text model's names may have, first the one that a folder's tensors
    have.

    A regular expression may match a whole model's names and not the same names of its text model
    alone.
    """
    names: list[str] = []
    with (
        contextlib.suppress(SafetensorError, OSError),
        safe_open(folder / ADAPTER_WEIGHTS, framework="np") as file,
    ):
        names = [*file.keys()]
    prefixes = [WRAPPED_PREFIX, OLDER_PREFIX, PREFIX]
    return sorted(
        prefixes,
        key=lambda prefix: not any(f"base_model.model.{prefix}layers." in name for name in names),
    )


def targets_named(content: dict, folder: Path, base: Path) -> tuple[tuple[str, ...], list[str]]:
    """Returns the targets that an adapter_config.json names in a base, and what is refused of its
    names, as text."""
    config = read_json(base / "config.json")
    with refused_as_user_error(f"cannot take {base / 'config.json'}: "):
        shape = from_config_json(config)
    values = {name: content[name] for name in NAMES_TARGETS if content[name]}
    wrong = [
        f"{name} {value!r:.80}" for name, value in values.items() if not _are_names(name, value)
    ]
    if wrong:
        return (), wrong
    matrices = {name: p for name, p in shape.parameters().items() if p.target is not None}
    adapted: set[str] = set()
    with contextlib.suppress(re.error, OverflowError, RecursionError):
        prefixes = _prefixes_in(folder) if is_wrapper(config) else [PREFIX]
        adapters = [adapted_matrices(content, matrices, prefix) for prefix in prefixes]
        adapted = adapters[0] or max(adapters, key=len)
    targets = tuple({p.target for name, p in matrices.items() if name in adapted and p.target})
    shown = [f"{name} {value!r:.80}" for name, value in values.items()] or ["no target_modules"]
    if not targets:
        return (), shown
    missed = [name for name, p in matrices.items() if p.target in targets and name not in adapted]
    if missed:
        place = missed[0].removesuffix(".weight")
        return targets, [*shown, f"no {place}.lora_A, whose like is adapted elsewhere,"]
    if is_wrapper(config):
        return targets, []  # other names may be of its vision tower
    listed = [
        (name, word) for name, value in values.items() if isinstance(value, list) for word in value
    ]
    known = {*TARGETS, *READ_TARGETS, "gate_up_proj"}
    unknown = {
        name for name, word in listed if not known & {*word.removesuffix(".weight").split(".")[-1:]}
    }
    return targets, [f"{name} {values[name]!r:.80}" for name in unknown - {"exclude_modules"}]


def _are_names(name: str, value: object) -> bool:
    """Whether a value of adapter_config.json has a type that peft takes."""
    if isinstance(value, str):
        return name != "target_parameters"
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def read_adapters(folder: str | Path) -> tuple[Adapters, Path]:
    """Returns the adapters that a folder's adapter_config.json declares, and the folder of their
    base.

    Raises UserError for adapters that this decoder does not compute, and a base that is not on this
    machine.
    """
    file = Path(folder, ADAPTER_CONFIG)
    content: dict = dict.fromkeys((*OURS, "peft_type")) | read_json(file)
    rank, alpha, named = (content[name] for name in ("r", "lora_alpha", BASE))
    patterns = {name: content[name] for name in PATTERNS if content[name]}
    joined = 2 if content["rank_pattern"] else 1
    is_read = type(rank) is int and type(alpha) in (int, float)
    refused = _refused_settings(content)
    refused += [
        f"{n} {p!r:.80}"
        for n, p in patterns.items()
        if not is_read or patterns != _patterns(rank, alpha, joined)
    ]
    if refused:
        raise _not_computed(file, refused)
    damaged = f"{file} is damaged, or not of peft"
    with refused_as_user_error(f"{damaged}: "):
        check_sizes({"r": rank} if type(rank) is int else {})
    if not is_read or not isinstance(named, str):
        numbers = f"r {rank!r:.40} must be a whole number, lora_alpha {alpha!r:.40} a number"
        raise UserError(
            f"{damaged}: {numbers}, and {BASE} {named!r:.80} a folder; give other adapters"
        )
    base = Path(named)
    shown = (
        f"{file} names {named[:SHOWN_OF_A_PATH]!r} as the folder of the weights that were adapted"
    )
    if not os.path.isfile(base / "config.json"):  # Path.is_file raises errors for long names
        raise UserError(
            f"{shown}, and it is not there; bring it back, or write its place into {BASE}"
        )
    if has_adapters(base):
        raise UserError(
            f"{shown}, and it holds adapters itself; write the folder of whole weights into {BASE}"
        )
    targets, refused = targets_named(content, Path(folder), base)
    if refused:
        raise _not_computed(file, refused)
    try:
        return Adapters(rank, float(alpha), targets, joined), base
    except (ValueError, OverflowError) as error:
        raise UserError(f"{damaged}: {error!s:.300}; give other adapters") from None


def _refused_settings(content: dict) -> list[str]:
    """Returns the settings of an adapter_config.json that adapters here do not have, as text."""
    ignored = {
        name: value
        for name, value in content.items()
        if name not in NO_EFFECT | OURS and value is not False
    }
    requested = {
        name: value for name, value in ignored.items() if name == "peft_type" or value not in EMPTY
    }
    refused = []
    for name, value in requested.items():
        text = value.lower() if name == "init_lora_weights" and isinstance(value, str) else value
        if text in TAKEN.get(name, ()):
            continue
        shown = f"{name:.60} {value!r:.60}"
        if name == "init_lora_weights" and str(text).startswith(CHANGES_BASE):
            shown += " (it changed the base's matrices too: convert them by save_pretrained's "
            shown += "path_initial_model_for_weight_conversion)"
        refused.append(shown)
    return refused


def _not_computed(file: Path, refused: list[str]) -> UserError:
    return UserError(
        f"{file} has {', '.join(refused)}, which this decoder does not compute; give other adapters"
    )
