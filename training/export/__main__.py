"""Writes weights for other programs to open.

`python -m training.export runs/default/step_00000300 OUT`
"""

import sys

from training.flags import answer_early, flag, read_flags

if __name__ == "__main__":
    answer_early()

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from model import ModelConfig
from training.checkpoint import pieces
from training.checkpoint.carried import Carried, read_carried
from training.checkpoint.manifest import WEIGHTS
from training.checkpoint.weights import (
    folders_of,
    left_out,
    load_model_weights,
    read_beside_weights,
    read_companions,
    shape_of_weights,
)
from training.export.card import card_of
from training.families.config_json import to_config_json
from training.families.lora import has_adapters
from training.families.names import name_in_file
from training.families.rope import extend
from training.families.rows import MTP_LAYERS
from training.host.errors import UserError, printable
from training.host.files import making, naming, write_file
from training.host.processes import command

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}


@dataclass
class ExportFlags:
    """Write a folder in Hugging Face's form."""

    source: Path = flag(
        help="a step_ folder of a run, or a folder in Hugging Face's form", positional=True
    )
    target: Path = flag(help="the folder to make", positional=True)
    dtype: str = flag("bf16", "of the weights", DTYPES)
    rope_scaling: str | None = flag(None, "extend the context: yarn:4, yarn:4:32768 or linear:4")
    merge: bool = flag(False, "add adapters to the weights that they adapt")


@command
def main(argv: list[str]) -> None:
    flags = read_flags(ExportFlags, argv, "python -m training.export")
    print(export(flags.source, flags.target, DTYPES[flags.dtype], flags.rope_scaling, flags.merge))


def export(
    source: Path,
    target: Path,
    dtype: torch.dtype,
    rope_scaling: str | None = None,
    merge: bool = False,
) -> str:
    """Writes config.json, model.safetensors and their companions; returns a line about them.

    Raises UserError if `target` is not empty or is being made by another process, the weights are
    damaged or not finite in `dtype`, no other program computes this model, or `merge` is not as the
    source needs it.
    """
    if has_adapters(source) and not merge:
        raise UserError(
            f"{source} holds adapters, as peft reads them; --merge writes whole weights with them"
        )
    if merge and not has_adapters(source):
        raise UserError(f"--merge has no effect on {source}, which holds no adapters; drop it")
    target, config = Path(os.path.abspath(target)), shape_of_weights(source)
    for kind in config.kinds:
        if kind.gates_per_head:
            raise UserError(
                f"{source} attends by {kind.name}, which neither transformers nor vLLM computes; "
                "give others"
            )
    if rope_scaling is not None:
        config = extend(config, rope_scaling)
    folders = folders_of(source)
    has_tokenizer = (folder for folder in folders if (folder / "tokenizer.json").is_file())
    tokenizer = next(has_tokenizer, folders[-1]) / "tokenizer.json"
    companions = read_companions(tokenizer, folders)
    companions = companions.joined(read_beside_weights(folders, rope_scaling is not None))
    carried = carried_of(folders[-1], rope_scaling)
    with making(target) as folder:
        size = _write_weights(folder / WEIGHTS, source, config, carried, dtype)
        content = carried.config_json(to_config_json(config), companions.settings, dtype)
        files = {
            **reaching(config.max_position_embeddings, companions.files),
            **card_of(source, target.name, config, dtype, rope_scaling),
            "config.json": (json.dumps(content, indent=2) + "\n").encode(),
        }
        for name, companion in files.items():
            write_file(folder / name, companion)
    weights = f"{config.num_parameters():,} parameters of {config.model_type}, {dtype}"
    if carried.tensors:
        weights += f", and {len(carried.tensors)} tensors that are not trained, as they were"
    written = ", ".join(map(printable, sorted(files)))
    if content.get("text_config", content).get(MTP_LAYERS) == 0:
        written += f"; no tensors of mtp: {MTP_LAYERS} is 0, and a GGUF is made with --no-mtp"
    if carried.settings:
        written += f"; settings that are not read, as they were: {', '.join(carried.settings)}"
    absent = left_out(folders, files)
    if absent:
        written += f"; left out: {', '.join(absent)}"
    return f"{printable(target)}: {weights}, {size / 1e9:.2f} GB in {WEIGHTS}; {written}"


def _write_weights(
    path: Path, source: Path, config: ModelConfig, carried: Carried, dtype: torch.dtype
) -> int:
    """Writes model.safetensors, a parameter at a time; returns its bytes.

    Raises UserError if a weight is not finite in `dtype`.
    """
    declared = config.parameters()
    tensors: dict = {}  # dtype and shape of each tensor of the file
    places, dtypes = {}, {}
    for name, parameter in declared.items():
        places[name] = carried.in_files(name, parameter)
        dtypes[name] = torch.float32 if parameter.is_exact_in_files else dtype
        tensors |= {rows.tensor: (dtypes[name], rows.shape) for rows in places[name]}
    for name, tensor in carried.tensors.items():
        tensors[name] = tensor.dtype, tuple(tensor.shape)
    header = pieces.header_of(pieces.aligned(tensors))
    entries = pieces.read_entries(header, path)
    weights = load_model_weights(source, declared)  # verifies the source, and reads no tensor yet
    with naming(path), path.open("wb") as file:
        file.write(header)
        for name, weight in weights:
            if not weight.to(dtype).isfinite().all():
                theirs = name_in_file(name, carried.prefix)
                raise UserError(f"{theirs} is not finite in {dtype}; choose another --dtype")
            content = weight.to(dtypes[name])
            for rows, part in zip(places[name], content.view(len(places[name]), -1)):
                file.seek(entries[rows.tensor].start + rows.first * content[0].nbytes)
                file.write(pieces.bytes_of(part))
        for name, tensor in carried.tensors.items():
            file.seek(entries[name].start)
            file.write(pieces.bytes_of(tensor))
        return file.seek(0, os.SEEK_END)


def carried_of(folder: Path, rope_scaling: str | None) -> Carried:
    carried = read_carried(folder)
    return carried.extended() if rope_scaling else carried


def reaching(length: int, files: dict[str, bytes]) -> dict[str, bytes]:
    """Returns companions whose tokenizer_config.json declares texts of `length` tokens at least.

    vLLM takes no longer texts than are declared. A file that declares nothing, or cannot be read,
    stays as it is.
    """
    name = "tokenizer_config.json"
    with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
        content = json.loads(files[name])
        if 0 < content["model_max_length"] < length:
            content["model_max_length"] = length
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            return files | {name: text.encode()}
    return files


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
