"""Special tokens that stand beside a tokenizer.json, read from its folder as transformers reads
them."""

from pathlib import Path
from typing import Any

from training.families.rows import token_ids
from training.host.errors import UserError
from training.host.files import read_json

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# More of them: a list or, under the first name, an object with their names.
EXTRA, LEGACY = "extra_special_tokens", "additional_special_tokens"


def add_special_tokens(tokenizer, folder: Path) -> tuple[dict[str, str], bool]:
    """Add to a tokenizer the tokens that the files beside it name; returns (special tokens by name,
    if it changed).

    The files are tokenizer_config.json and, if that has no added_tokens_decoder,
    special_tokens_map.json and added_tokens.json. A token gets the next free id, unless the
    vocabulary has it; ids in the files give the order.
    """
    try:
        padding = {"pad_token": tokenizer.padding["pad_token"]} if tokenizer.padding else {}
        named, tokens = _read(folder, tokenizer.get_added_tokens_decoder(), padding)
        is_changed = tokenizer.add_tokens(tokens) > 0
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise UserError(
            f"special tokens of {folder} are damaged: {str(error)[:100]}; mend its JSON files"
        ) from None
    return named, is_changed


def first_stop_id(folder: Path, known) -> int | None:
    """Returns the first `eos_token_id` of a folder's model that is in `known`, the ids of added
    tokens."""
    for name in ("generation_config.json", "config.json"):
        given = token_ids(_content(folder / name)).get("eos_token_id")
        for number in given if isinstance(given, list) else [given]:
            if isinstance(number, int) and number in known:
                return number
    return None


def _read(folder: Path, own: dict, defaults: dict) -> tuple[dict[str, str], list]:
    """Returns (special tokens by name, tokens to add).

    `own` are the added tokens of tokenizer.json by their ids, `defaults` special tokens that no
    file needs to name.
    """
    from tokenizers import AddedToken

    config, beside = _content(folder / "tokenizer_config.json"), {}
    if (decoder := config.get("added_tokens_decoder")) is None:
        beside = _content(folder / "special_tokens_map.json")
    values = defaults | config | beside
    of_other_names, unnamed, is_legacy = _extra(config, beside)
    named = {name: values[name] for name in NAMES if values.get(name)}
    named |= {
        name: token
        for name, token in values.items()
        if name.endswith("_token") and isinstance(token, str)
    }
    named |= of_other_names
    listed = [_token(each) for each in unnamed]
    special = {name: _token(value) for name, value in named.items()}
    contents = {token.content for token in special.values()}
    if decoder is None:
        numbers = _content(folder / "added_tokens.json")
        # Objects in tokenizer_config.json do not count here.
        texts = [
            name
            for name in NAMES
            if name in special and (name in beside or isinstance(values[name], str))
        ]
        are_special = {special[name].content for name in texts}
        are_special |= {token.content for token in listed if not is_legacy}
        tokens = {
            number: AddedToken(
                content, normalized=content not in are_special, special=content in are_special
            )
            for content, number in numbers.items()
        } | own
    else:
        tokens = {int(number): AddedToken(**token) for number, token in decoder.items()}
    added = [tokens[number] for number in sorted(tokens)]
    for token in added:
        token.special |= token.content in contents
    present = {token.content for token in [*own.values(), *added]}
    added += [token for token in [*special.values(), *listed] if token.content not in present]
    return {name: token.content for name, token in special.items()}, added


def _extra(config: dict, beside: dict) -> tuple[dict, list, bool]:
    """Returns special tokens of other names, those without a name, and whether these are LEGACY
    alone.

    A list of tokenizer_config.json, even an empty one, stands for special_tokens_map.json's LEGACY.
    """
    extra: Any = config.get(EXTRA) or config.get(LEGACY, config.get(EXTRA))
    more: Any = beside.get(EXTRA)
    named = {
        **(extra if isinstance(extra, dict) else {}),
        **(more if isinstance(more, dict) else {}),
    }
    lists = [each for each in (extra, more) if isinstance(each, list)]
    if not lists or isinstance(more, dict):
        return named, beside.get(LEGACY, config.get(LEGACY)) or [], True
    return named, [token for each in lists for token in each], False


def _token(value):
    """Returns a special token that a file spells as a string or as an object."""
    from tokenizers import AddedToken

    if isinstance(value, str):
        return AddedToken(value, special=True)
    return AddedToken(
        **{name: each for name, each in value.items() if name not in ("__type", "special")},
        special=True,
    )


def _content(file: Path) -> dict:
    return read_json(file) if file.is_file() else {}
