"""Reads an entry of axolotl's datasets: names of fields, roles, what is trained on."""

from typing import Any

from training.config.theirs import is_unset
from training.data.forms import ROLES, SHAREGPT
from training.data.masks import FLAGS
from training.host.other_trainers import NAMES
from training.objectives.flags import PAIR_OBJECTIVES

PLACES = ("path", "data_files", "dataset")  # where an entry's rows are
NATIVE_CHATS = ("messages", "conversations")  # fields whose chats are read under their names
TURNS = "each turn of the assistant is trained on, with the token that ends it; see --show_batch"
NAMES_OF_SHAREGPT = {ours: theirs for theirs, ours in SHAREGPT.items()}
RENAME = "rename others in the rows"
NAMED_IN_MESSAGES = f"a message has role and content, or from and value: {RENAME}"
KNOWN_ROLES = f"known are user, assistant, system, tool, {', '.join(ROLES)}: {RENAME}"
TRAINED = [name for name, is_trained in FLAGS.items() if is_trained]
MASKS = f"a message's {', '.join(TRAINED)} say whether it is trained on: {RENAME}"


def entries(value: Any) -> list[dict]:
    """Returns the tables of a list of datasets; a type that is a table adds its settings."""
    listed = value if isinstance(value, list) else []
    tables = [entry for entry in listed if isinstance(entry, dict)]
    return [table | _as_table(table.get("type")) for table in tables]


def _as_table(value: Any) -> dict:
    return value if isinstance(value, dict) else {}


def column(name: str, value: Any, objective: str) -> str | None:
    """Returns the field that --columns has for a setting: "messages" of field_messages: dialogue.

    Returns "" for a field that is read under its name, and None for other settings.
    """
    names = NAMES["columns"].items()
    ours = next((ours for ours, settings in names if name in settings.split()), None)
    ours = "text" if name == "field" else ours
    if ours is None or not isinstance(value, str):
        return None
    is_native = ours == "messages" and value in NATIVE_CHATS
    if ours == "messages" and objective in (*PAIR_OBJECTIVES, "kto"):
        ours = "prompt"
    return "" if is_native or value == ours else ours


def why_left_out(name: str, value: Any) -> str | None:
    """Returns why a setting is left out: "" where rows are read so anyway; None if it is not."""
    if is_unset(value) or (name == "split" and value == "train"):
        return ""
    if name == "message_property_mappings":
        return "" if _are_native(value) else NAMED_IN_MESSAGES
    if name in ("message_field_role", "message_field_content"):
        return "" if _are_native({name.rpartition("_")[2]: value}) else NAMED_IN_MESSAGES
    if name == "message_field_training":
        return "" if value in TRAINED else MASKS
    if name == "roles":
        return "" if _are_known(value) else KNOWN_ROLES
    if name == "roles_to_train":
        return "" if _are_known({"assistant": value}) else TURNS
    if name in ("train_on_eos", "train_on_eot"):
        return "" if value == "turn" else TURNS
    return None


def _are_native(mapping: Any) -> bool:
    """Whether messages have names that are read: role or from, content or value."""
    if not isinstance(mapping, dict):
        return False
    return all(theirs in (ours, NAMES_OF_SHAREGPT.get(ours)) for ours, theirs in mapping.items())


def _are_known(roles: Any) -> bool:
    """Whether each role of theirs is read as the role that it stands for."""
    if not isinstance(roles, dict):
        return False
    for ours, theirs in roles.items():
        listed = theirs if isinstance(theirs, list) else [theirs]
        if any(ROLES.get(str(role), role) != ours for role in listed):
            return False
    return True
