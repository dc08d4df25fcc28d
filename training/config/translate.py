"""Translates a config of another trainer into settings of train.py, as TOML, with what is left out
and why."""

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

NAMES_HERE = [each.name for each in fields(TrainConfig)]
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
    """Returns 1 for names whose value may ask for another flag than usual: plain settings come
    first."""
    end = name.rpartition(".")[2]
    by_value = [each for names in BY_VALUE.values() for each in names.split()]
    return by_value.index(end) + 1 if end in by_value else 0


def _flag_of(name: str) -> tuple[str | None, str | None]:
    """Returns (flag, reason why there is none) of a setting's name; a name that decides by its
    value has a flag."""
    end = name.rpartition(".")[2]
    for flag, names in BY_VALUE.items():
        if {name, end} & {*names.split()}:
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
        _leave(
            translation,
            f"{name} = {_shown(value)}",
            why.format(python=program(), torchrun=program("torchrun")),
        )
    elif flag is None:
        translation.unknown.append(f"{name} = {_shown(value)}")
    else:
        try:
            outcome = (
                READERS[flag](name, value, translation.theirs)
                if flag in READERS
                else plain(flag, value)
            )
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
    if flag in translation.values:
        joined = (
            flag in ("data", "validation_data", "columns")
            and outcome.value != translation.values[flag]
        )
        if flag == "columns" and joined:
            translation.values[flag] += f",{outcome.value}"
        elif joined:
            translation.values[flag] = [*translation.values[flag], *outcome.value]
        if joined:
            translation.notes[flag] += f"; {name} = {_shown(value)}" + (
                f": {outcome.note}" if outcome.note else ""
            )
        elif outcome.value != translation.values[flag]:
            said = f"{flag} is set by {translation.notes[flag].partition(':')[0]}"
            _leave(translation, f"{name} = {_shown(value)}", said)
        else:
            translation.notes[flag] += f", {name}"
        return
    try:
        given_flags(TrainConfig, as_words({flag: outcome.value}, NAMES_HERE), "train.py")
    except UserError as error:
        _leave(translation, f"{name} = {_shown(value)}", str(error))
        return
    translation.values[flag] = outcome.value
    shown = "" if outcome.value == value else f" = {_shown(value)}"
    translation.notes[flag] = f"{name}{shown}" + (f": {outcome.note}" if outcome.note else "")
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
    if "lora_alpha" not in translation.values and (
        "alpha" in row or is_rank_stabilized(translation.theirs)
    ):
        usual = row.get("alpha", 2 * translation.values["lora"])
        outcome = alpha("lora_alpha", usual, translation.theirs)
        translation.values["lora_alpha"] = outcome.value
        translation.notes["lora_alpha"] = (
            f"the default of {trainer} is {usual}; {outcome.note}".removesuffix("; ")
        )
    if (
        str(translation.theirs.get("adapter", "")).lower() == "qlora"
        and "lora_bits" not in translation.values
    ):
        translation.values["lora_bits"], translation.notes["lora_bits"] = 4, "adapter = qlora"


def _add_guesses(translation: Translation) -> None:
    """Adds the objective that the settings are of, where the trainer's script names it and not its
    file."""
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
    """Adds what entries of datasets say of their rows: names of fields, a template, and why the
    rest is left out."""
    objective = str(translation.values.get("objective", ""))
    named: dict[str, Any] = {}
    lists = [
        (name, value)
        for name, value in translation.theirs.values.items()
        if _flag_of(name)[0] in DATA
    ]
    for where, entry in ((name, entry) for name, value in lists for entry in entries(value)):
        for name, value in entry.items():
            setting, ours = f"{where}: {name}", column(str(name), value, objective)
            if ours and named.setdefault(ours, value) != value:
                _leave(
                    translation,
                    f"{setting} = {_shown(value)}",
                    f"columns has {ours}={named[ours]} already",
                )
            elif ours and f"{ours}={value}" not in translation.values.get("columns", "").split(","):
                _set(translation, "columns", Outcome(f"{ours}={value}"), setting, value)
            elif name == "chat_template" and not is_off(value):
                _translate_one(translation, "chat_template", value)
            elif why := why_left_out(str(name), value):
                _leave(translation, f"{setting} = {_shown(value)}", why)


def _add_defaults(translation: Translation) -> None:
    """Adds what their trainer does where the file says nothing, and train.py would do something
    else."""
    trainer, objective = translation.theirs.trainer, translation.values.get("objective", "")
    defaults = NAMES["defaults"].get(trainer, {}) | NAMES["defaults_of_objectives"].get(
        trainer, {}
    ).get(objective, {})
    if (
        trainer and objective in CLIPPED_OBJECTIVES
    ):  # theirs has one limit for both sides, and for every objective
        defaults |= {"clip_low": 0.2, "clip_high": translation.values.get("clip_low", 0.2)}
    if trainer == "TRL" and has_nll(translation.theirs):
        defaults |= {"nll_weight": 1.0}
    if trainer == "TRL" and "lora" in translation.values:
        defaults |= {"lora_targets": "q_proj,v_proj"}  # peft's for every family that is read here
    if trainer == "axolotl" and "max_steps" in translation.values:
        defaults |= {"warmup_steps": min(3 * translation.values["max_steps"] // 100, 100)}
    if (peaks := NAMES["learning_rates"].get(trainer)) and not (translation.lost and not objective):
        kinds = [objective, "adapters" if "lora" in translation.values else "weights"]
        defaults["learning_rate"] = next(
            peaks[kind] for kind in (*kinds, "weights") if kind in peaks
        )
    for flag, value in defaults.items():
        is_said = flag in translation.values or (
            flag == "epochs" and "max_steps" in translation.values
        )
        if (
            flag == "warmup_steps"
        ):  # a share of steps that the data settle is among what is left out
            is_said = is_said or any("warmup" in name for name in translation.theirs.values)
        if flag == "context_length":  # rollouts' lengths are settings of their own
            is_unlimited = "max_length" in translation.theirs.values
            is_said = is_said or is_unlimited or objective in ROLLOUT_OBJECTIVES
        if not is_said:
            translation.values[flag] = value
            translation.notes[flag] = f"the default of {trainer}"


def _drop_without_effect(translation: Translation) -> None:
    """Leaves out settings that train.py would refuse beside others, or notes why it would refuse
    them all."""
    while True:
        try:
            given = given_flags(TrainConfig, as_words(translation.values, NAMES_HERE), "train.py")
            refuse(TrainConfig(**given), given, TrainConfig.rules)
            return
        except UserError as error:
            flag = str(error).partition(" has no effect ")[0]
            if (
                flag not in translation.values or flag == "objective"
            ):  # another one would be trained
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
    """Returns the settings as TOML, below comments that say where they come from, and above what is
    left out."""
    return (
        "\n".join([*_head(translation, target), "", *_settings(translation), *_rest(translation)])
        + "\n"
    )


def _head(translation: Translation, target: str) -> Iterator[str]:
    theirs = translation.theirs
    told = (
        f"a config of {theirs.trainer}"
        if theirs.trainer
        else "a config of no trainer that is known here"
    )
    yield f"# From {theirs.file}, {told}. Train: {program()} train.py --config {target}"
    for command in translation.firsts:
        yield f"# First: {command}"
    if not {"init_from", "model_size"} & translation.values.keys():
        yield "# No model is named: give init_from or model_size; else a tiny one is trained"
    if "data" not in translation.values:
        yield "# No data are named: give data; else the sources of Python's library are read"
    if "context_length" not in translation.values:
        yield f"# No length is named: give context_length; {TrainConfig.context_length} tokens by default"
    if translation.lost and "objective" not in translation.values:
        lost = _one_line(translation.lost)
        yield f"# Their loss is none of these here: {lost}; next tokens are trained, or give objective"
    if translation.refused:
        yield f"# train.py refuses these settings as they are: {_one_line(translation.refused)}"


def _settings(translation: Translation) -> Iterator[str]:
    in_order = (each.name for members in grouped(TrainConfig).values() for each in members)
    for name in in_order:
        if name in translation.values:
            yield f"{name} = {_toml(translation.values[name])}  # {_one_line(translation.notes[name])}"


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
    if isinstance(
        value, str
    ):  # JSON's escapes are TOML's, but for the one character that JSON leaves as it is
        return json.dumps(value).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)
