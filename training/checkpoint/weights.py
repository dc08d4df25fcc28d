"""Weights in Hugging Face's form: safetensors files, read one weight at a time.

In a file a weight's name is ours behind "model.": model.norm.weight for norm.weight. Only lm_head.weight has one name.
A folder holds config.json, and either model.safetensors or several such files with an index.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from training.errors import UserError, read_file


def load_model_weights(
    path: str | Path, expected: dict[str, tuple[int, ...]], *, may_lack: str | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a checkpoint, of a Hugging Face folder (one file or shards) or of a .safetensors file.

    Names and shapes are checked from the files' headers, in this call; tensors are then read one at a time.

    Args:
        path: the folder or file.
        expected: our parameter name -> full shape. Without lm_head.weight the model is tied: a copy of the embedding
            under that name is accepted and dropped.
        may_lack: a part of names, such as ".g_proj.": if no weight has it, those expected are left out.

    Returns:
        Iterator of (our name, CPU tensor in the file's dtype).

    Raises:
        UserError: one line naming the file that is missing or truncated, or the first weight that does not fit.
    """
    path = Path(path)
    places = {}  # our name -> (file, its name there, shape)
    for file in _weight_files(path):
        with _open_safetensors(file) as weights:
            for key in sorted(weights.keys()):
                places[key.removeprefix("model.")] = file, key, tuple(weights.get_slice(key).get_shape())
    if may_lack is not None and not any(may_lack in name for name in places):
        expected = {name: shape for name, shape in expected.items() if may_lack not in name}
    another = f"checkpoint {path} is of another size"
    hint = "choose the matching --model_size, or another checkpoint"
    for name, shape in expected.items():
        if name not in places:
            raise UserError(f"{another}: it has no {name_in_file(name)}, this model needs it; {hint}")
        if places[name][2] != tuple(shape):
            raise UserError(f"{another}: {name_in_file(name)} has shape {list(places[name][2])}, "
                             f"this model needs {list(shape)}; {hint}")  # fmt: skip
    tied_copy = places.pop("lm_head.weight", None) if "lm_head.weight" not in expected else None
    for name in places:
        if name not in expected:
            raise UserError(f"{another}: it has {name_in_file(name)}, this model does not; {hint}")
    if tied_copy and not torch.equal(_read_weight(tied_copy), _read_weight(places["embed_tokens.weight"])):
        raise UserError(f"checkpoint {path} has an lm_head.weight of its own, this model ties it to the embedding")
    return ((name, _read_weight(places[name])) for name in expected)


def read_json(file: Path) -> dict:
    """The object that a JSON file holds. Raises UserError, naming the file, where there is none that can be read."""
    try:
        content = json.loads(read_file(file, "give another folder"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is missing or damaged: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} is damaged: it holds no JSON object")
    return content


def name_in_file(name: str) -> str:
    """A weight's name in Hugging Face's files."""
    return name if name == "lm_head.weight" else f"model.{name}"


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if not path.exists():
        raise UserError(f"checkpoint {path} does not exist")
    if path.is_file():
        return [path]
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    if index.is_file():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
            raise UserError(f"{index} is damaged: its weight_map must name a file for each weight")
        return sorted({path / shard for shard in places.values()})
    raise UserError(f"{path} has no model.safetensors; give a checkpoint's step_ folder or a Hugging Face folder")


@contextmanager
def _open_safetensors(file: Path):
    try:
        if not file.is_file():  # a pipe would be waited for
            raise FileNotFoundError("no such file")
        with safe_open(file, framework="pt") as weights:
            yield weights
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is missing, truncated or no safetensors file: {error}") from None


def _read_weight(place: tuple[Path, str, tuple[int, ...]]) -> torch.Tensor:
    file, key, _ = place
    with _open_safetensors(file) as weights:
        return weights.get_tensor(key)
