"""Reads a config of another trainer: its settings by name, and which trainer's it is."""

import json
import re
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from training.flags import TOML_BYTES, flattened
from training.host.errors import UserError, import_optional
from training.host.files import read_file
from training.host.other_trainers import NAMES

MOST_VALUES = 10_000  # aliases of YAML may stand for far more than the file is long
UNSET = None, "", "none", "None", "null", "${oc.null}"


@dataclass(frozen=True)
class Theirs:
    """A config of another trainer.

    Attributes:
        values: by name; tables within tables by names with dots, as actor.optim.lr.
        trainer: a name of other_trainers.toml; "" if no trainer's settings are in it.
    """

    file: Path
    values: dict[str, Any]
    trainer: str

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the first value of a name, whatever tables it stands in."""
        ends = (
            value for key, value in self.values.items() if key == name or key.endswith(f".{name}")
        )
        return next((value for value in ends if not is_unset(value)), default)


def is_unset(value: object) -> bool:
    return value in UNSET if isinstance(value, str | None) else value in ([], {})


def read_theirs(file: Path) -> Theirs:
    """Reads a config. Raises UserError for a file of another form, or without settings."""
    raw = read_file(file, "give a config in YAML, JSON or TOML", TOML_BYTES)
    content = _parse(raw.decode("utf-8-sig", errors="replace"), file)
    if not _is_small(content):
        raise UserError(
            f"{file} has more than {MOST_VALUES} values, or one within itself; "
            "give a config of a run"
        )
    if not isinstance(content, dict) or not content:
        raise UserError(
            f"{file} holds no settings, as learning_rate: 1e-5; give a config in YAML, JSON or TOML"
        )
    values = _without_references(flattened(_spelled(content)))
    return Theirs(file, values, trainer_of(values))


def trainer_of(values: dict[str, Any]) -> str:
    """Returns the trainer with the most names among the settings; "" if no name is told."""
    counts = {}
    for trainer, patterns in NAMES["told_by"].items():
        told = [any(fnmatchcase(key, pattern) for key in values) for pattern in patterns.split()]
        counts[trainer] = sum(told)
    most = max(counts, key=lambda trainer: counts[trainer])
    return most if counts[most] else ""


def _parse(text: str, file: Path) -> Any:
    suffix = file.suffix.lower()
    try:
        if suffix == ".toml":
            return tomllib.loads(text)
        if suffix == ".json":
            return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is no {suffix[1:].upper()}: {error}") from None
    yaml = import_optional("yaml", f"{file}, which is YAML,", distribution="PyYAML")
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"{file} is no YAML: {why}") from None


def _is_small(content: Any) -> bool:
    waiting, count = [content], 0
    while waiting and count <= MOST_VALUES:
        value = waiting.pop()
        count += 1
        if isinstance(value, dict | list):
            waiting += [*value.values()] if isinstance(value, dict) else value
    return count <= MOST_VALUES


def _spelled(content: dict) -> dict:
    """Returns settings with names as texts.

    A table of rope_scaling becomes yarn:4:32768, and a list of reports switches.
    """
    spelled: dict = {}
    for key, value in content.items():
        name = str(key)
        if name in ("rope_scaling", "rope_parameters") and isinstance(value, dict):
            kind = value.get("rope_type", value.get("type"))
            numbers = value.get("factor"), value.get("original_max_position_embeddings")
            words = [f"{float(number):g}" for number in numbers if isinstance(number, int | float)]
            spelled["rope_scaling"] = ":".join([str(kind), *words])
        elif name in ("report_to", "logger"):
            reports = value if isinstance(value, list) else [value]
            spelled[name] = {str(report): True for report in reports if not is_unset(report)}
        elif isinstance(value, dict):
            spelled[name] = _spelled(value)
        else:
            spelled[name] = value
    return spelled


def _without_references(values: dict[str, Any]) -> dict[str, Any]:
    """Returns values with OmegaConf's references, such as ${trainer.project_name}, replaced."""

    def value_of(reference: re.Match) -> str:
        return str(values.get(reference[1], reference[0]))

    def resolved(value: Any) -> Any:
        for _ in range(3):  # a reference may lead to another
            if isinstance(value, str):
                value = re.sub(r"\$\{([\w.]+)\}", value_of, value)
        return value

    return {name: resolved(value) for name, value in values.items()}
