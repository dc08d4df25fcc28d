"""Translates a config of another trainer into settings of train.py, as TOML.

It says what is left out, and why.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from training.config.rows import column, entries, why_left_out
from training.config.theirs import Theirs, is_unset
from training.config.values import (
    READERS,
    Outcome,
    adapters_of,
    alpha,
    has_nll,
    is_off,
    is_rank_stabilized,
    plain,
    rank,
)
from training.flags import as_words, given_flags, grouped, refuse
from training.host.errors import UserError, program
from training.host.other_trainers import BY_VALUE, NAMES, meaning
from training.objectives.flags import CLIPPED_OBJECTIVES, ROLLOUT_OBJECTIVES
from training.run.settings import TrainConfig

NAMES_HERE = [field.name for field in fields(TrainConfig)]
DATA = ("data", "validation_data")
SAID_BY_FALSE = {*NAMES["said_by_false"]["names"].split()}
# Zero says something of these flags.
SAID_BY_OFF = {"save_strategy": ("save", "none"), "checkpoint.enable": ("save", "none")}


@dataclass
class Translation:
    """Settings of train.py, each with a note; and theirs that are left out.

    Attributes:
        values: settings by name.
        notes: where each value comes from.
        firsts: commands to be run before train.py.
        left: reasons, each with the settings that it holds for.
        off: settings of theirs that are off or unset.
        unknown: settings that no trainer's list has.
        lost: their loss, which is none here.
        refused: the reason why train.py would refuse the settings as they are; "" if it would not.
    """

    theirs: Theirs
    values: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    firsts: list[str] = field(default_factory=list)
    left: dict[str, list[str]] = field(default_factory=dict)
    off: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    lost: str = ""
    refused: str = ""


def translate(theirs: Theirs) -> Translation:
    """Translates every setting. What our own reader would refuse is left out, with its message."""
    translation = Translation(theirs)
    for name in sorted(theirs.values, key=_rank_of_name):
        _translate_one(translation, name, theirs.values[name])
    _add_adapters(translation)
    _add_guesses(translation)
    _add_rows(translation)
    _add_defaults(translation)
    _drop_one_goal(translation)
    _drop_without_effect(translation)
    if not (translation.values or translation.left):
        raise UserError(
            f"{theirs.file} has no setting that is known here; give a config of a training run"
        )
    return translation


def _rank_of_name(name: str) -> int:
    """Returns 0 for plain settings; more for names whose value may ask for another flag."""
    end = name.rpartition(".")[2]
    by_value = " ".join(BY_VALUE.values()).split()
    return by_value.index(end) + 1 if end in by_value else 0


def _flag_of(name: str) -> tuple[str | None, str | None]:
    """Returns the flag of another trainer's setting, or the reason why it has none.

    Both are None for a setting that is unknown.
    """
    last_word = name.rpartition(".")[2]
    for flag, their_names in BY_VALUE.items():  # settings whose value may ask for another flag
        if not {name, last_word}.isdisjoint(their_names.split()):
            return flag, None
    if name in NAMES_HERE:
        return name, None
    return meaning(name, NAMES_HERE)


def _translate_one(translation: Translation, name: str, value: Any) -> None:
    flag, why = _flag_of(name)
    end = name.rpartition(".")[2]
    said = SAID_BY_OFF.get(name) or SAID_BY_OFF.get(end)
    is_of_one = "parallel" in end and value in (1, -1)
    if said and is_off(value) and value is not None:
        _set(translation, said[0], Outcome(said[1]), name, value)
    elif is_of_one or (is_off(value) and (is_unset(value) or not {name, end} & SAID_BY_FALSE)):
        translation.off.append(name)
    elif why is not None:
        why = why.format(python=program(), torchrun=program("torchrun"))
        _leave(translation, f"{name} = {_shown(value)}", why)
    elif flag is None:
        translation.unknown.append(f"{name} = {_shown(value)}")
    else:
        _translate_value(translation, flag, name, value)


def _translate_value(translation: Translation, flag: str, name: str, value: Any) -> None:
    try:
        if flag in READERS:
            outcome = READERS[flag](name, value, translation.theirs)
        else:
            outcome = plain(flag, value)
    except (TypeError, ValueError, OverflowError):
        outcome = Outcome(note=f"{flag} takes no such value")
    if outcome.value is not None:
        _set(translation, outcome.flag or flag, outcome, name, value)
    elif outcome.note:
        if flag == "objective":
            translation.lost = f"{name} = {_shown(value)}"
        _leave(translation, f"{name} = {_shown(value)}", outcome.note)
    else:
        translation.off.append(name)


def _set(translation: Translation, flag: str, outcome: Outcome, name: str, value: Any) -> None:
    """Keeps a flag's value, unless another setting said it, or our reader refuses it."""
    values, notes = translation.values, translation.notes
    setting, note = f"{name} = {_shown(value)}", f": {outcome.note}" if outcome.note else ""
    if flag in values:
        if outcome.value == values[flag]:
            notes[flag] += f", {name}"
        elif flag == "columns":
            values[flag] += f",{outcome.value}"
            notes[flag] += f"; {setting}{note}"
        elif flag in DATA:
            values[flag] = [*values[flag], *outcome.value]
            notes[flag] += f"; {setting}{note}"
        else:
            _leave(translation, setting, f"{flag} is set by {notes[flag].partition(':')[0]}")
        return
    try:
        given_flags(TrainConfig, as_words({flag: outcome.value}, NAMES_HERE), "train.py")
    except UserError as error:
        _leave(translation, setting, str(error))
        return
    values[flag] = outcome.value
    notes[flag] = (name if outcome.value == value else setting) + note
    if outcome.first and outcome.first not in translation.firsts:
        translation.firsts.append(outcome.first)


def _leave(translation: Translation, setting: str, why: str) -> None:
    translation.left.setdefault(why, []).append(setting)


def _add_adapters(translation: Translation) -> None:
    """Adds rank and alpha where adapters are asked for without them."""
    row = adapters_of(translation.theirs)
    trainer = translation.theirs.trainer
    if row is None:
        return
    if "lora" not in translation.values:
        translation.values["lora"] = rank("lora", True, translation.theirs).value
        translation.notes["lora"] = f"the default of {trainer}" if trainer else "as asked"
    has_alpha = "alpha" in row or is_rank_stabilized(translation.theirs)
    if "lora_alpha" not in translation.values and has_alpha:
        usual = row.get("alpha", 2 * translation.values["lora"])
        outcome = alpha("lora_alpha", usual, translation.theirs)
        translation.values["lora_alpha"] = outcome.value
        note = f"the default of {trainer} is {usual}; {outcome.note}"
        translation.notes["lora_alpha"] = note.removesuffix("; ")
    is_qlora = str(translation.theirs.get("adapter", "")).lower() == "qlora"
    if is_qlora and "lora_bits" not in translation.values:
        translation.values["lora_bits"], translation.notes["lora_bits"] = 4, "adapter = qlora"


def _add_guesses(translation: Translation) -> None:
    """Adds the objective that the settings are of, where TRL's script names it, not its file."""
    is_told = "objective" in translation.values or translation.lost
    if translation.theirs.trainer != "TRL" or is_told:
        return
    for objective, names in NAMES["guesses"].items():
        signs = [name for name in names.split() if not is_off(translation.theirs.get(name))]
        if signs:
            translation.values["objective"] = objective
            translation.notes["objective"] = (
                f"guessed by {signs[0]}: TRL's script says it, not its file"
            )
            return


def _add_rows(translation: Translation) -> None:
    """Adds what entries of datasets say of their rows: names of fields, and a template."""
    objective = str(translation.values.get("objective", ""))
    named: dict[str, Any] = {}
    for where, datasets in translation.theirs.values.items():
        if _flag_of(where)[0] not in DATA:
            continue
        for name, value in (item for entry in entries(datasets) for item in entry.items()):
            setting, ours = f"{where}: {name}", column(str(name), value, objective)
            columns = translation.values.get("columns", "").split(",")
            if ours and named.setdefault(ours, value) != value:
                known = f"columns has {ours}={named[ours]} already"
                _leave(translation, f"{setting} = {_shown(value)}", known)
            elif ours and f"{ours}={value}" not in columns:
                _set(translation, "columns", Outcome(f"{ours}={value}"), setting, value)
            elif name == "chat_template" and not is_off(value):
                _translate_one(translation, "chat_template", value)
            elif why := why_left_out(str(name), value):
                _leave(translation, f"{setting} = {_shown(value)}", why)


def _add_defaults(translation: Translation) -> None:
    """Adds their trainer's defaults, where the file says nothing and train.py has others."""
    values, theirs = translation.values, translation.theirs
    trainer, objective = theirs.trainer, values.get("objective", "")
    by_objective = NAMES["defaults_of_objectives"].get(trainer, {})
    defaults = NAMES["defaults"].get(trainer, {}) | by_objective.get(objective, {})
    if trainer and objective in CLIPPED_OBJECTIVES:  # theirs has one limit for both sides
        defaults |= {"clip_low": 0.2, "clip_high": values.get("clip_low", 0.2)}
    if trainer == "TRL" and has_nll(theirs):
        defaults["nll_weight"] = 1.0
    if trainer == "TRL" and "lora" in values:
        defaults["lora_targets"] = "q_proj,v_proj"  # peft's for every family that is read here
    if trainer == "axolotl" and "max_steps" in values:
        defaults["warmup_steps"] = min(3 * values["max_steps"] // 100, 100)
    peaks = NAMES["learning_rates"].get(trainer)
    if peaks and (objective or not translation.lost):
        kinds = (objective, "adapters" if "lora" in values else "weights", "weights")
        defaults["learning_rate"] = next(peaks[kind] for kind in kinds if kind in peaks)
    said = {*values}
    if "max_steps" in values:
        said.add("epochs")
    if any("warmup" in name for name in theirs.values):  # a share of steps may be left out
        said.add("warmup_steps")
    if "max_length" in theirs.values or objective in ROLLOUT_OBJECTIVES:
        said.add("context_length")  # rollouts' lengths are settings of their own
    for flag, value in defaults.items():
        if flag not in said:
            values[flag] = value
            translation.notes[flag] = f"the default of {trainer}"


def _drop_without_effect(translation: Translation) -> None:
    """Leaves out settings that train.py refuses beside others, or notes why it refuses all."""
    while True:
        try:
            flags = given_flags(TrainConfig, as_words(translation.values, NAMES_HERE), "train.py")
            refuse(TrainConfig(**flags), flags, TrainConfig.rules)
            return
        except UserError as error:
            flag = str(error).partition(" has no effect ")[0]
            # Without its objective a run would train another one.
            if flag not in translation.values or flag == "objective":
                translation.refused = str(error)
                return
            value, note = translation.values.pop(flag), translation.notes.pop(flag)
            _leave(translation, f"{flag} = {_shown(value)} ({note})", str(error))


def _drop_one_goal(translation: Translation) -> None:
    if {"max_steps", "epochs"} <= translation.values.keys():
        epochs = translation.values.pop("epochs")
        _leave(translation, f"epochs = {epochs:g}", "max_steps ends the run")
        del translation.notes["epochs"]


# As text


def as_toml(translation: Translation, target: str) -> str:
    """Returns the settings as TOML, with comments on their origin and on what is left out."""
    head, settings = _head(translation, target), _settings(translation)
    return "\n".join([*head, "", *settings, *_rest(translation)]) + "\n"


def _head(translation: Translation, target: str) -> Iterator[str]:
    theirs = translation.theirs
    trainer = theirs.trainer or "no trainer that is known here"
    command = f"{program()} train.py --config {target}"
    yield f"# From {theirs.file}, a config of {trainer}. Train: {command}"
    for command in translation.firsts:
        yield f"# First: {command}"
    if not {"init_from", "model_size"} & translation.values.keys():
        yield "# No model is named: give init_from or model_size; else a tiny one is trained"
    if "data" not in translation.values:
        yield "# No data are named: give data; else the sources of Python's library are read"
    if "context_length" not in translation.values:
        length = f"{TrainConfig.context_length} tokens by default"
        yield f"# No length is named: give context_length; {length}"
    if translation.lost and "objective" not in translation.values:
        lost = _one_line(translation.lost)
        cure = "next tokens are trained, or give objective"
        yield f"# Their loss is none of these here: {lost}; {cure}"
    if translation.refused:
        yield f"# train.py refuses these settings as they are: {_one_line(translation.refused)}"


def _settings(translation: Translation) -> Iterator[str]:
    for members in grouped(TrainConfig).values():
        for name in (member.name for member in members if member.name in translation.values):
            note = _one_line(translation.notes[name])
            yield f"{name} = {_toml(translation.values[name])}  # {note}"


def _rest(translation: Translation) -> Iterator[str]:
    if translation.left:
        yield "\n# Left out:"
    for why, settings in translation.left.items():
        yield f"# {_one_line(', '.join(settings))}: {_one_line(why)}"
    if translation.unknown:
        yield f"\n# Unknown here: {_one_line(', '.join(translation.unknown))}"
    if translation.off:
        yield f"\n# Off, unset, or as it is here: {_one_line(', '.join(translation.off))}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _one_line(text: str) -> str:
    """Returns a text that a comment of TOML may hold: no other line, no control characters."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):  # JSON's escapes are TOML's, but for one character
        return json.dumps(value).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)
