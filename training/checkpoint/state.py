"""An optimizer's weights and state come in from tensors and files, each rank its own part, whatever
ranks wrote it.

State of the same format is read as it is, straight into the place where it lives. State of another
format is decoded and encoded, piece by piece; masters stay exact.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from training.checkpoint import pieces
from training.checkpoint.manifest import OPTIMIZER
from training.checkpoint.pieces import Entry, Piece
from training.checkpoint.ranks import failing_together
from training.checkpoint.weights import find_weights
from training.host.errors import UserError
from training.optim.adamw import MasterAdamW, State
from training.optim.formats import Kept, format_with
from training.optim.inventory import local_view
from training.parallel.fsdp import local_part


def load_weights(optimizer: MasterAdamW, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Sets weights from full tensors, the same on every rank, by parameter name.

    Float32 masters keep what bf16 rounds.
    """
    for name, full in weights:
        state = optimizer.states[name]
        local = local_part(state.parameter, full).flatten()
        for _, piece in state.pieces:
            # A matrix is quantized on the optimizer's device, alike from any device.
            state.write(piece, {"master": local[piece].to(optimizer.device)})


def read_weights(optimizer: MasterAdamW, entries: dict[str, Entry]) -> None:
    """Sets the weights of these names from files, each rank its own part."""

    def write(piece: Piece, part: Tensor, content: Tensor) -> None:
        state = optimizer.states[piece.name]
        state.write(_elements(state, part), {"master": content.to(optimizer.device).view(-1)})

    pieces.read_pieces(entries, {name: optimizer.states[name].weight for name in entries}, write)


@torch.no_grad()
def load_state(optimizer: MasterAdamW, checkpoint: Path) -> None:
    """Reads state and weights from a verified checkpoint.

    All ranks call this, as `load_optimizer_state`.
    """
    declared = {row.name: row.declared for row in optimizer.inventory}
    weights = functools.cache(lambda: find_weights(checkpoint, declared))
    states = optimizer.states
    saved = optimizer.state_dict()
    converted = set()

    def convert(name: str, stored: dict[str, Entry], done: set[str]) -> None:
        converted.add(name)
        _convert(optimizer, name, stored, stored.get("master") or weights()[name], done)

    load_optimizer_state(checkpoint, saved, convert)
    stored = [
        name for name in states if "master" not in saved.get(name, {}) and name not in converted
    ]
    quantized = [name for name in stored if states[name].format.holds_weight]
    halves = {name: states[name].weight for name in stored if name not in quantized}
    with failing_together():
        pieces.read_tensors({name: weights()[name] for name in halves}, halves)
        read_weights(optimizer, {name: weights()[name] for name in quantized})
    for state in states.values():
        if "master" in state.tensors:
            for _, piece in state.pieces:
                weight = local_view(state.weight)[piece]
                weight.copy_(state.tensors["master"][piece].to(weight.device))


def load_optimizer_state(
    path: Path,
    state: dict[str, dict[str, Tensor]],
    convert: Callable[[str, dict[str, Entry], set[str]], None] | None = None,
) -> None:
    """Reads the optimizer's state from a verified checkpoint into its tensors and DTensors, in
    place.

    All ranks call this, on a file system that all see; they may be others than at saving. Raises
    UserError, on all ranks, if the checkpoint has no optimizer state, or state of other names,
    dtypes or shapes.

    Args:
        convert: is called with (name, the file's tensors, names of tensors that were read) for each
            parameter whose state has tensors of other names or dtypes in the file. Tensors that
            both have are read as they are. None: the file must have the same tensors.
    """
    with failing_together():
        if not (path / OPTIMIZER).is_file():
            raise UserError(
                f"checkpoint {path} has no optimizer state; start from its weights with --init_from"
            )
        entries = pieces.read_entries(pieces.read_header(path / OPTIMIZER), path / OPTIMIZER)
        tensors = pieces.flat(state)
        stored: dict[str, dict[str, Entry]] = defaultdict(dict)
        for name, entry in entries.items():
            parameter, _, key = name.rpartition(".")
            stored[parameter][key] = entry
        common: dict[str, set[str]] = {}
        if convert is not None:
            common = _common_tensors(state, stored)
        for parameter, keys in common.items():
            for key in (state[parameter].keys() | stored[parameter].keys()) - keys:
                tensors.pop(f"{parameter}.{key}", None)
                entries.pop(f"{parameter}.{key}", None)
        _check_alike(path, tensors, entries)
        pieces.read_tensors(entries, tensors)
        for parameter, keys in common.items():
            assert convert is not None
            convert(parameter, stored[parameter], keys)


def _common_tensors(
    state: dict[str, dict[str, Tensor]], stored: dict[str, dict[str, Entry]]
) -> dict[str, set[str]]:
    """Returns, for each parameter of another format in the file, the tensors that both have."""
    common = {}
    for name, tensors in state.items():
        entries = stored.get(name, {})
        dtypes = {key: tensor.dtype for key, tensor in tensors.items()}
        if entries and dtypes != {key: entry.dtype for key, entry in entries.items()}:
            common[name] = {
                key
                for key in tensors.keys() & entries.keys()
                if _is_alike(tensors[key], entries[key])
            }
    return common


def _is_alike(tensor: Tensor, entry: Entry) -> bool:
    return (tensor.dtype, tuple(tensor.shape)) == (entry.dtype, entry.shape)


def _check_alike(path: Path, tensors: dict[str, Tensor], entries: dict[str, Entry]) -> None:
    """Raises UserError unless a file has the tensors of these names, dtypes and shapes."""
    if differing := tensors.keys() ^ entries.keys():
        raise UserError(
            f"checkpoint {path} is of another model or optimizer: {min(differing)} is only in one "
            "of them"
        )
    for name, tensor in tensors.items():
        if not _is_alike(tensor, entries[name]):
            raise UserError(
                f"checkpoint {path} is of another model: {name} has shape "
                f"{list(entries[name].shape)}, this model needs {list(tensor.shape)}"
            )


def _elements(state: State, part: Tensor) -> slice:
    """Returns the elements of a parameter's weight that `part`, some of its rows, is a view of."""
    start = part.storage_offset() - local_view(state.weight).storage_offset()
    return slice(start, start + part.numel())


def _convert(
    optimizer: MasterAdamW, name: str, stored: dict[str, Entry], weight: Entry, done: set[str]
) -> None:
    """Sets a parameter's values but those in `done`, from the weight and state in `stored`."""
    state = optimizer.states[name]
    parameter = state.weight
    master = Kept(torch.float32 if "master" in stored else torch.bfloat16)
    dtypes = {key: entry.dtype for key, entry in stored.items() if key not in ("master", "step")}
    source = format_with(dtypes, master.dtype)
    if source is None:
        shown = ", ".join(f"{key} in {dtype}" for key, dtype in dtypes.items())
        raise UserError(
            f"{weight.file.parent} is of another model or optimizer: {name} has {shown}"
        )
    kept = {"master": master, **source.kept}
    entries = {"master": weight} | {key: stored[key] for key in source.kept}
    for key, entry in entries.items():
        shape = kept[key].shape(parameter.shape)
        if (entry.dtype, entry.shape) != (kept[key].dtype, shape):
            raise UserError(
                f"{entry.file.parent} is of another model: {entry.name} has shape "
                f"{list(entry.shape)} and dtype {entry.dtype}, "
                f"this model needs {list(shape)} and {kept[key].dtype}"
            )

    def read(piece_and_part: tuple[Piece, Tensor]) -> None:
        piece, part = piece_and_part
        # The file's groups, of which this rank may have a part.
        groups = piece.in_groups(source.group, 1)
        tensors = {}
        for key, entry in entries.items():
            content = piece.in_groups(source.group, kept[key].group).content(entry)
            pieces.check_finite(content, entry)
            tensors[key] = content.to(optimizer.device).view(-1)
        values = source.read(tensors, tensors.pop("master"))
        start = piece.offset[-1] - groups.offset[-1]
        cut = {
            key: value.view(groups.shape).narrow(-1, start, piece.shape[-1]).reshape(-1)
            for key, value in values.items()
            if key not in done
        }
        state.write(_elements(state, part), cut)

    pieces.in_threads(read, pieces.local_pieces({name: parameter}, pieces.CONVERTED_BYTES))
