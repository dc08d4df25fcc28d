"""Carries what a run does not train from its starting folder into its checkpoints and exports.

The files of a model of text and images hold a text model and others: a vision tower, a projector,
heads that predict several tokens. A run trains the text model. What it writes is the whole model:
the other tensors keep their names, dtypes and bytes, the text model's tensors keep their prefix,
and its settings stay in `text_config` of config.json.

The other tensors are never in memory of their own: they are mapped from the file, which a deletion
does not take away.
"""

import logging
import math
import warnings
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from kernels.parts import Parameter
from training.checkpoint.manifest import weight_files
from training.checkpoint.pieces import Entry, Piece, bytes_of, open_entries
from training.families.config_json import (
    DTYPE_SETTINGS,
    LOCAL_SETTINGS,
    from_config_json,
    to_config_json,
    unread_settings,
)
from training.families.names import Rows, in_files, name_in_file, name_of
from training.families.rope import ROTARY_SETTINGS
from training.families.rows import (
    HAVE_MTP,
    MTP_LAYERS,
    PREFIX,
    TOKEN_IDS,
    WRAPPED_PREFIX,
    WRAPPERS,
    generation_settings,
    is_wrapper,
)
from training.host.files import read_json, without_places

logger = logging.getLogger(__name__)
EMBEDDING = "embed_tokens.weight"
MTP = "mtp.", "model.mtp."  # before the names of layers that predict further tokens
# Settings by which vLLM attends otherwise than transformers and this decoder do. They hold lengths
# of the context.
ATTENTION_OF_VLLM = (
    "dual_chunk_attention_config",
    "interleaved_sliding_window",
    "sparse_attention_config",
)


@dataclass(frozen=True)
class Carried:
    """Tensors that are not trained, and the form of the files that hold them."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # by name in the file
    prefix: str = PREFIX  # before the text model's names in files
    # config.json of the whole model; empty: it is the text model's.
    config: dict = field(default_factory=dict)
    # The text model's settings that this decoder does not read.
    settings: dict = field(default_factory=dict)
    # Whether files have one tensor for all experts of a layer, not one for each.
    joins_experts: bool = False
    # The open file of each tensor, and the tensor's place in it.
    places: dict[str, tuple[IO[bytes], Entry]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def read(self, piece: Piece) -> Tensor:
        """Returns a piece of a tensor as its file has it now. Raises UserError or OSError if that
        cannot be read.

        A mapped file that was cut short in the meantime would end the process by SIGBUS.
        """
        file, entry = self.places[piece.name]
        content = torch.empty(piece.shape, dtype=entry.dtype)
        piece.read_from(file, entry, bytes_of(content))
        return content

    def in_files(self, name: str, parameter: Parameter) -> list[Rows]:
        """Returns where files have a parameter, in the order of its elements."""
        is_adapter = parameter.role == "adapter"
        return [
            rows._replace(tensor=name_in_file(rows.tensor, self.prefix, is_adapter))
            for rows in in_files(name, parameter, by_expert=not self.joins_experts)
        ]

    def beside_adapters(self) -> "Carried":
        """Returns the same for adapters, whose base keeps its tensors. peft has names of
        transformers' modules."""
        prefix = WRAPPED_PREFIX if self.config else PREFIX
        return replace(self, tensors={}, places={}, prefix=prefix)

    def extended(self) -> "Carried":
        """Returns the same for a model whose context was extended, without settings made for the
        earlier context."""
        settings = _without(self.settings, ATTENTION_OF_VLLM)
        for name in self.settings.keys() - settings.keys():
            logger.warning("config.json: %s was made for the context before: left out", name)
        return replace(self, settings=settings)

    def config_json(self, model_config: dict, settings: dict, dtype: torch.dtype) -> dict:
        """Returns config.json with `settings`; the source's `text_config` stays if `model_config`
        says the same."""
        content = {**self.settings, **model_config}
        if self.config:
            text = self.config["text_config"]
            known = generation_settings(self.config)
            settings = {name: value for name, value in settings.items() if known.get(name) != value}
            if to_config_json(from_config_json(self.config)) != model_config:
                text = _without(text, ROTARY_SETTINGS) | _without(model_config, TOKEN_IDS)
            if {*DTYPE_SETTINGS} & {*text}:
                text = _in_dtype(text, dtype)
            content = {**self.config, "text_config": text}
        return _in_dtype({**content, **settings}, dtype)


NOTHING = Carried()


def read_carried(folder: Path) -> Carried:
    """Returns what a folder of whole weights holds beside a text model.

    Reads headers and config.json.
    """
    tensors: dict[str, Tensor] = {}
    places: dict[str, tuple[IO[bytes], Entry]] = {}
    prefix, names = PREFIX, set[str | None]()
    for file in weight_files(folder):
        entries = open_entries(file)
        untrained = {name: entry for name, entry in entries.items() if name_of(name) is None}
        if untrained:
            opened = file.open("rb", buffering=0)
            content = np.memmap(file, mode="r")
            places |= {name: (opened, entry) for name, entry in untrained.items()}
            tensors |= {name: _view(content, entry) for name, entry in untrained.items()}
        prefix = next(
            (key.removesuffix(EMBEDDING) for key in entries if name_of(key) == EMBEDDING), prefix
        )
        names |= {name_of(name) for name in entries}
    config = without_places(read_json(folder / "config.json"))
    text = config["text_config"] if is_wrapper(config) else config
    parameters = from_config_json(config).parameters().items()
    joins_experts = any(parameter.matrices and name in names for name, parameter in parameters)
    if not any(name.startswith(MTP) for name in tensors) and _has_mtp(config):
        text[MTP_LAYERS] = 0
    if "auto_map" in config:
        logger.info(
            "auto_map of %s, which names code in files of that folder, is left out",
            folder / "config.json",
        )
    if is_wrapper(config):
        config["text_config"] = _without(text, LOCAL_SETTINGS)
        return Carried(tensors, prefix, _without(config, LOCAL_SETTINGS), {}, joins_experts, places)
    settings = unread_settings(config)
    for name in settings.keys() & {*ATTENTION_OF_VLLM}:
        logger.warning(
            "%s of %s goes along and is not computed here, nor by transformers: vLLM attends by it",
            name,
            folder,
        )
    return Carried(tensors, PREFIX, {}, settings, joins_experts, places)


def _has_mtp(config: dict) -> bool:
    """Whether models of this family may have layers that predict further tokens."""
    model_type = str(config.get("model_type"))
    return WRAPPERS.get(model_type, model_type) in HAVE_MTP


def _without(content: dict, names: Collection[str]) -> dict:
    return {name: value for name, value in content.items() if name not in names}


def _view(content: np.memmap, entry: Entry) -> Tensor:
    """Returns a tensor's elements in a mapped file, wherever they start."""
    size = math.prod(entry.shape) * entry.dtype.itemsize
    # PyTorch has no tensors that are read-only; nobody writes to it.
    with warnings.catch_warnings(action="ignore"):
        elements = torch.from_numpy(content[entry.start : entry.start + size])
    return elements.view(entry.dtype).view(entry.shape)


def _in_dtype(content: dict, dtype: torch.dtype) -> dict:
    kept = _without(content, DTYPE_SETTINGS)
    return {**kept, "torch_dtype": str(dtype).removeprefix("torch.")}
