"""Weights in Hugging Face's form: a folder of safetensors files, config.json and a tokenizer's
files.

The weights are in model.safetensors, or in several such files with an index. A folder of adapters
has adapter_model.safetensors (`training.families.lora`), and names the folder with all other
weights.
"""

import contextlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from kernels.parts import Parameter
from model import ModelConfig
from training.checkpoint import pieces
from training.checkpoint.carried import NOTHING, Carried
from training.checkpoint.manifest import verify_weights, weight_files
from training.checkpoint.pieces import Entry, Piece
from training.families.config_json import from_config_json
from training.families.lora import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Adapters,
    has_adapters,
    read_adapters,
    read_frozen_bits,
)
from training.families.names import NOT_WEIGHTS, Rows, in_files, name_in_file, name_of
from training.families.rows import GENERATION, TOKEN_IDS, generation_settings
from training.host.errors import UserError, printable, refused_as_user_error
from training.host.files import (
    JSON_BYTES,
    check_weights_exist,
    is_deep,
    read_file,
    read_json,
    which_weights,
    without_places,
)
from training.optim.quantized import check_library, quantize

logger = logging.getLogger(__name__)

# Files beside weights that go along into checkpoints, by name or pattern. Defaults for generation,
# and how images become tokens, without which programs open no model of text and images:
IMAGE_SETTINGS = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
GENERATION_CONFIG = "generation_config.json"
COMPANIONS_OF_MODELS = GENERATION_CONFIG, *IMAGE_SETTINGS
# A tokenizer in all forms that programs read, its chat template, and the system prompt that it was
# trained with:
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "tokenizer.model.*",
    "*.tiktoken",
    "tekken.json",
    "tokenization_*.py",
    "chat_template.jinja",
    "chat_template.json",
    "SYSTEM_PROMPT.txt",
    *COMPANIONS_OF_MODELS,
)
TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
TOKENIZER_CONFIG = "tokenizer_config.json"
# Files that are about the weights, whatever the tokenizer. params.json is Mistral's config.json.
PARAMS = "params.json"
COMPANIONS_OF_WEIGHTS = *IMAGE_SETTINGS, PARAMS, "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*"
# Files of a folder that are written anew, or are of a run alone.
WRITTEN_ANEW = (
    "config.json",
    "README.md",
    "model*.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "trainer.json",
    "manifest.json",
    "optimizer.safetensors",
    "rng_*.json",
    TEMPLATES,
)
READABLE = "make it readable, or move it elsewhere"
TOKENIZER_ADVICE = "give --tokenizer the path of a tokenizer.json"
# Entry of each weight by name, and the adapters beside it.
Located = tuple[dict[str, Entry], Adapters | None]


@dataclass(frozen=True)
class Companions:
    """Small files that go along with weights, settings of config.json that are not the model's
    shape, and tensors."""

    files: dict[str, bytes] = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    carried: Carried = NOTHING

    def joined(self, companions: "Companions") -> "Companions":
        """Returns these with files, settings and carried tensors of others, which come first."""
        return Companions(
            self.files | companions.files, self.settings | companions.settings, companions.carried
        )

    def stopping_at(self, ids: Collection[int]) -> "Companions":
        """Returns these for a model that stops at `ids`, too, and not only where these declare."""
        declared = self.stops
        return self.with_stops([*declared, *sorted({*ids}.difference(declared))])

    @property
    def stops(self) -> list[int]:
        """Returns the ids at which a model stops: generation_config.json's, else config.json's."""
        return self._stops_of(self._generation()) or self._stops_of(self.settings)

    def with_stops(self, stops: list[int]) -> "Companions":
        """Returns these with files in which programs find all of `stops`, in this order.

        transformers takes no id from config.json where there is a generation_config.json, even one
        without any.
        """
        content = self._generation()
        seen = self._stops_of(self.settings if content is None else content)
        if {*stops} <= {*seen}:
            return self
        if content is None:  # what config.json says of generation would count no more
            content = {
                name: value
                for name, value in self.settings.items()
                if name in (*TOKEN_IDS, *GENERATION)
            }
        content["eos_token_id"] = stops if len(stops) > 1 else stops[0]
        # Older transformers would make it anew from config.json.
        content.pop("_from_model_config", None)
        encoded = (json.dumps(content, indent=2) + "\n").encode()
        return replace(self, files=self.files | {GENERATION_CONFIG: encoded})

    def _generation(self) -> dict | None:
        """Returns the content of generation_config.json; None: there is none."""
        if GENERATION_CONFIG not in self.files:
            return None
        with refused_as_user_error(f"{GENERATION_CONFIG} beside the tokenizer is damaged: "):
            content = json.loads(self.files[GENERATION_CONFIG])
            if not isinstance(content, dict) or is_deep(content):
                raise ValueError("it holds no JSON object, or one that is nested too deeply")
        return content

    @staticmethod
    def _stops_of(content: dict | None) -> list[int]:
        value = (content or {}).get("eos_token_id")
        if value is None:
            return []
        stops = value if isinstance(value, list) else [value]
        if not all(type(number) is int for number in stops):
            raise UserError(
                f"eos_token_id is {value!r:.80}; it must be a token's number, or a list of "
                "numbers: mend generation_config.json or config.json"
            )
        return stops


NO_COMPANIONS = Companions()


def find_weights(
    path: str | Path, expected: Mapping[str, Parameter], *, may_lack: Collection[str] = ()
) -> dict[str, Entry]:
    """Returns a model's weights in their files by our names; checks names and shapes in headers.

    Nothing larger is read, but for the copy of a tied head; `verify_weights` compares the bytes.
    Parts of the model that are not trained are passed over (`carried`).

    Args:
        path: a checkpoint, a folder from Hugging Face (one file or shards), a folder of adapters,
            or a .safetensors file.
        expected: whole parameters by our names. Without lm_head.weight the model is tied: a copy of
            the embedding under that name is accepted and dropped.
        may_lack: roles, such as "gate", whose weights the files may be all without.

    Raises:
        UserError: one line naming the file that is missing or truncated, or the first weight that
            does not fit.
    """
    path = Path(path)
    entries = _trained_entries(path)
    for role in may_lack:
        names = {name for name, parameter in expected.items() if parameter.role == role}
        if names.isdisjoint(entries):
            expected = {name: expected[name] for name in expected if name not in names}
    places: dict[str, list[Rows]] = {}  # of each weight in these files
    tensors: dict[str, Parameter] = {}  # that the files should have
    for name, parameter in expected.items():
        rows = in_files(name, parameter, by_expert=True)
        if not any(part.tensor in entries for part in rows):
            rows = in_files(name, parameter, by_expert=False)
        places[name] = rows
        tensors |= {part.tensor: replace(parameter, shape=part.shape) for part in rows}
    tied_copy = None
    if "lm_head.weight" not in expected:
        tied_copy = entries.pop("lm_head.weight", None)
    _check_shapes(path, entries, tensors)
    if tied_copy and not _are_equal(tied_copy, entries["embed_tokens.weight"]):
        raise UserError(
            f"checkpoint {path} has an lm_head.weight of its own, this model ties it to the "
            "embedding; set tie_word_embeddings to false in its config.json, or give other weights"
        )
    weights = {}
    for name, parameter in expected.items():
        in_file = name_in_file(name, is_adapter=parameter.role == "adapter")
        weights[name] = Entry.joined(in_file, parameter.shape, places[name], entries)
    return weights


def _trained_entries(path: Path) -> dict[str, Entry]:
    """Returns where files have the tensors of the text model and its adapters, by model.py's names.

    Tensors of parts that are not trained, such as an image encoder, are left out.

    Raises UserError for a tensor that stands twice, or holds no floating-point numbers.
    """
    entries: dict[str, Entry] = {}
    for file in _weight_files(path):
        for key, entry in pieces.open_entries(file).items():
            name = name_of(key)
            if name is None:
                continue
            if name in entries:
                raise UserError(
                    f"{path} has {key} twice, also in {entries[name].file.name}; "
                    "give another folder"
                )
            if not entry.dtype.is_floating_point:
                dtypes = pieces.DTYPE_NAMES.items()
                fitting = ", ".join(shown for dtype, shown in dtypes if dtype.is_floating_point)
                raise UserError(
                    f"{file}: {key} is of dtype {pieces.DTYPE_NAMES[entry.dtype]}, weights must be "
                    f"of {fitting}"
                )
            if not name.endswith(NOT_WEIGHTS):
                entries[name] = entry
    return entries


def _check_shapes(path: Path, entries: dict[str, Entry], expected: dict[str, Parameter]) -> None:
    """Raises UserError unless files have the expected tensors, by our names, and no others."""
    another = f"checkpoint {path} is of another size"
    hint = "choose a folder whose tensors are those that its config.json declares"
    if has_adapters(path):
        hint = (
            "choose adapters of the text model's blocks alone, all alike, and the base that "
            f"{ADAPTER_CONFIG} names"
        )
    for name, parameter in expected.items():
        if name not in entries:
            lacking = name_in_file(name, is_adapter=parameter.role == "adapter")
            raise UserError(f"{another}: it has no {lacking}, this model needs it; {hint}")
        entry = entries[name]
        if entry.shape != parameter.shape:
            raise UserError(
                f"{another}: {entry.name} has shape {list(entry.shape)}, this model needs "
                f"{list(parameter.shape)}; {hint}"
            )
    for name, entry in entries.items():
        if name not in expected:
            raise UserError(f"{another}: it has {entry.name}, this model does not; {hint}")


def find_all(path: str | Path, expected: dict[str, Parameter]) -> Located:
    """Returns a folder's weights and its adapters. Raises what `find_weights` does."""
    adapters = read_adapters(path)[0] if has_adapters(path) else None
    return find_weights(path, expected | (adapters.added(expected) if adapters else {})), adapters


def load_model_weights(
    path: str | Path, expected: dict[str, Parameter], located: Located | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields (our name, whole CPU tensor in the file's dtype) of each weight, read one at a time.

    All ranks call this. Weights of a folder of adapters are merged, in float32. Adapters that were
    trained beside matrices in 8 or 4 bits are added to these, which are bf16. This call itself does
    `verify_weights`, and `find_all` if its result `located` is not given, and raises what they do.
    """
    entries, adapters = located or find_all(path, expected)
    bits = read_frozen_bits(path) if adapters else 16
    if bits < 16:
        check_library(f"{path}, whose adapters were trained beside {bits} bits per weight,")
        logger.info(
            "%s: adapters are added to weights in %d bits, beside which they were trained",
            path,
            bits,
        )
    verify_weights(path)
    return (
        (name, _read_merged(name, parameter, entries, adapters, bits))
        for name, parameter in expected.items()
    )


def shape_of_weights(folder: str | Path) -> ModelConfig:
    """Returns the model that the config.json of a checkpoint or a Hugging Face folder declares.

    Raises UserError for other folders.
    """
    path = Path(folder) / "config.json"
    if has_adapters(folder) and not path.is_file():
        return shape_of_weights(read_adapters(folder)[1])
    checkpoints = sorted(Path(folder).glob("step_[0-9]*[0-9]"))
    if checkpoints:
        raise UserError(
            f"{folder} is the output_dir of a run; give a checkpoint in it, as {checkpoints[-1]}"
        )
    if path.with_name("metrics.jsonl").is_file():
        raise UserError(f"{folder} is the output_dir of a run; it has no checkpoint yet")
    if Path(folder).is_file():
        raise UserError(
            f"{folder} is a file; "
            f"give the folder of config.json and model.safetensors, as {path.parents[1]}"
        )
    check_weights_exist(Path(folder))
    if not path.is_file():
        raise UserError(f"{folder} has no config.json; {which_weights(Path(folder))}")
    with refused_as_user_error(f"cannot take {path}: "):
        return from_config_json(read_json(path))


def read_companions(tokenizer: Path, weights: Sequence[Path] = ()) -> Companions:
    """Returns the files of a tokenizer and the files and settings of a model.

    Args:
        tokenizer: the path of tokenizer.json, beside the tokenizer's other files; it may be
            missing.
        weights: folders of weights, such as adapters and their base; the tokenizer's folder is one
            of them. (): the tokenizer's folder alone.

    If several folders have a file, a setting or ids that stop a text, the first folder gives it.
    """
    folders = weights or [tokenizer.parent]
    companions = [_read_from(folder, folder == tokenizer.parent) for folder in folders]
    files: dict[str, bytes] = {}
    settings: dict = {}
    for companion in reversed(companions):  # the first folder overwrites the others
        files |= companion.files
        settings |= companion.settings
    if tokenizer.is_file():
        files["tokenizer.json"] = read_file(tokenizer, TOKENIZER_ADVICE, JSON_BYTES)
    stops = next((companion.stops for companion in companions if companion.stops), [])
    return Companions(files, settings).with_stops(stops)


def _read_from(folder: Path, has_tokenizer: bool) -> Companions:
    files = _read_files(folder, COMPANIONS if has_tokenizer else COMPANIONS_OF_MODELS)
    if has_tokenizer:
        files = _with_all_templates(folder, files)
    config = folder / "config.json"
    return Companions(files, generation_settings(read_json(config)) if config.is_file() else {})


def _with_all_templates(folder: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    """Returns files whose tokenizer_config.json has the chat templates of a folder beside it, as of
    "tool_use".

    transformers reads them from either, and a checkpoint has no folders.
    """
    sources = _read_files(folder / TEMPLATES, ["*.jinja"])
    if not sources:
        return files
    named = {name.removesuffix(".jinja"): source for name, source in sources.items()}
    kept = {name: content for name, content in files.items() if name != TEMPLATE}
    if TEMPLATE in files:
        named = {"default": files[TEMPLATE]} | named
    with refused_as_user_error(f"{TOKENIZER_CONFIG} or a chat template in {folder} is damaged: "):
        config = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
        if not isinstance(config, dict) or is_deep(config):
            raise ValueError("it holds no JSON object, or one that is nested too deeply")
        config["chat_template"] = [
            {"name": name, "template": source.decode()} for name, source in named.items()
        ]
    return kept | {TOKENIZER_CONFIG: (json.dumps(config, indent=2) + "\n").encode()}


def read_beside_weights(weights: Sequence[Path], is_extended: bool = False) -> Companions:
    """Returns the files that are about weights. The first folder that has a file gives it, with any
    tokenizer.

    Weights of an extended context have no PARAMS, which declares the context before.
    """
    patterns = [name for name in COMPANIONS_OF_WEIGHTS if not (is_extended and name == PARAMS)]
    files: dict[str, bytes] = {}
    for folder in reversed(weights):
        files |= _read_files(folder, patterns)
    return Companions(files)


def left_out(weights: Sequence[Path], written: Collection[str]) -> list[str]:
    """Returns what weights' folders have beside written files, such as onnx/."""
    names = set()
    for path in (path for folder in weights for path in folder.iterdir()):
        is_written = path.name in written or _is_among(path.name, [".*", *WRITTEN_ANEW])
        if not is_written:
            names.add(printable(path.name) + "/" * path.is_dir())
    return sorted(names)


def _read_files(folder: Path, patterns: Sequence[str]) -> dict[str, bytes]:
    paths = folder.iterdir() if folder.is_dir() else ()
    files = {}
    for path in sorted(path for path in paths if _is_among(path.name, patterns)):
        if path.is_file() and (path.name in patterns or path.stat().st_size <= JSON_BYTES):
            content = read_file(path, READABLE, JSON_BYTES)
            has_places = path.name.endswith("_config.json")
            files[path.name] = _without_places(content) if has_places else content
    return files


def _without_places(file: bytes) -> bytes:
    """Returns a JSON file without settings that say where it once was on a machine, as
    "name_or_path": "/home/me".

    A file without such settings, or with damage, stays as it is.
    """
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(file)
        kept = without_places(content)
        if kept != content:
            return (json.dumps(kept, indent=2, ensure_ascii=False) + "\n").encode()
    return file


def _is_among(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def folders_of(path: Path) -> list[Path]:
    """Returns the folder, and for adapters the folder of the weights that they adapt."""
    return [path, read_adapters(path)[1]] if has_adapters(path) else [path]


def _weight_files(path: Path) -> list[Path]:
    """Returns a model's files as `weight_files`, adapters behind the weights that they adapt."""
    adapters = [path / ADAPTER_WEIGHTS] if has_adapters(path) else []
    return weight_files(folders_of(path)[-1]) + adapters


def _are_equal(left: Entry, right: Entry) -> bool:
    """Whether two tensors in files are equal, read a piece at a time.

    Refuses elements that are not finite.
    """

    def equal(entry_and_piece: tuple[Entry, Piece]) -> bool:
        _, piece = entry_and_piece
        contents = [piece.content(entry) for entry in (left, right)]
        for content, entry in zip(contents, (left, right)):
            pieces.check_finite(content, entry)
        return torch.equal(*contents)

    if left.shape != right.shape:
        return False
    return all(pieces.in_threads(equal, pieces.pieces_of({left.name: left})))


def _read_weight(entry: Entry) -> Tensor:
    weight = torch.empty(entry.shape, dtype=entry.dtype)
    pieces.read_tensors({"weight": entry}, {"weight": weight})
    return weight


def _read_merged(
    name: str, parameter: Parameter, entries: dict[str, Entry], adapters: Adapters | None, bits: int
) -> Tensor:
    """Returns a weight, with its adapter merged in float32, if it has an adapter.

    A block's matrix is rounded to `bits` before.
    """
    weight = _read_weight(entries[name])
    if bits < 16 and parameter.may_quantize:
        quantized = quantize(weight.float().view(-1), bits)
        weight = weight.bfloat16()
        quantized.write_into(weight)
    factors = adapters.factors(name, parameter) if adapters else {}
    if adapters is None or not factors:
        return weight
    return adapters.merge(weight, *(_read_weight(entries[key]) for key in factors))
