"""Special tokens that stand beside a tokenizer.json, read as transformers reads them."""

from pathlib import Path
from typing import Any

from training.host.errors import UserError
from training.host.files import read_json

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# More of them: a list or, under the first name, an object with their names.
EXTRA, LEGACY = "extra_special_tokens", "additional_special_tokens"


def add_special_tokens(tokenizer, folder: Path) -> tuple[dict[str, str], bool]:
    """Adds to a tokenizer the tokens that the files beside it name.

    Returns special tokens by name, and whether the tokenizer has changed. The files are
    tokenizer_config.json and, if that has no added_tokens_decoder, special_tokens_map.json and
    added_tokens.json. A token gets the next free id, unless the vocabulary has it; ids in the files
    give the order.
    """
    try:
        padding = {"pad_token": tokenizer.padding["pad_token"]} if tokenizer.padding else {}
        named, tokens = _read(folder, tokenizer.get_added_tokens_decoder(), padding)
        is_changed = tokenizer.add_tokens(tokens) > 0
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        why = str(error)[:100]
        raise UserError(
            f"special tokens of {folder} are damaged: {why}; mend its JSON files"
        ) from None
    return named, is_changed


def first_stop_id(folder: Path, known) -> int | None:
    """Returns the first eos_token_id of a folder's model that is `known`, an added token's id."""
    from training.families.rows import token_ids  # imports torch, which --help need not wait for

    for name in ("generation_config.json", "config.json"):
        numbers = token_ids(_content(folder / name)).get("eos_token_id")
        for number in numbers if isinstance(numbers, list) else [numbers]:
            if isinstance(number, int) and number in known:
                return number
    return None


def _read(folder: Path, in_file: dict, defaults: dict) -> tuple[dict[str, str], list]:
    """Returns special tokens by name, and tokens to add.

    Args:
        in_file: the added tokens of tokenizer.json by their ids.
        defaults: special tokens that no file needs to name.
    """
    config, beside = _content(folder / "tokenizer_config.json"), {}
    decoder = config.get("added_tokens_decoder")
    if decoder is None:
        beside = _content(folder / "special_tokens_map.json")
    values = defaults | config | beside
    named = {name: values[name] for name in NAMES if values.get(name)}
    for name, value in values.items():
        if name.endswith("_token") and isinstance(value, str):
            named[name] = value
    named |= _named_extra(config, beside)
    unnamed, is_legacy = _unnamed(config, beside)
    listed = [_token(value) for value in unnamed]
    special = {name: _token(value) for name, value in named.items()}
    if decoder is None:
        # Objects in tokenizer_config.json do not count.
        are_special = {
            special[name].content
            for name in NAMES
            if name in special and (name in beside or isinstance(values[name], str))
        }
        if not is_legacy:
            are_special |= {token.content for token in listed}
        tokens = _added_tokens(_content(folder / "added_tokens.json"), are_special) | in_file
    else:
        tokens = {int(number): _added_token(**token) for number, token in decoder.items()}
    contents = {token.content for token in special.values()}
    added = [tokens[number] for number in sorted(tokens)]
    for token in added:
        token.special |= token.content in contents
    present = {token.content for token in [*in_file.values(), *added]}
    added += [token for token in [*special.values(), *listed] if token.content not in present]
    return {name: token.content for name, token in special.items()}, added


def _added_tokens(numbers: dict[str, int], are_special: set[str]) -> dict:
    """Returns tokens of added_tokens.json by their ids."""
    tokens = {}
    for content, number in numbers.items():
        is_special = content in are_special
        tokens[number] = _added_token(content, normalized=not is_special, special=is_special)
    return tokens


def _named_extra(config: dict, beside: dict) -> dict:
    """Returns special tokens of other names than NAMES."""
    tables = [config.get(EXTRA) or config.get(LEGACY), beside.get(EXTRA)]
    return {
        name: value for table in tables if isinstance(table, dict) for name, value in table.items()
    }


def _unnamed(config: dict, beside: dict) -> tuple[list, bool]:
    """Returns special tokens without a name, and whether they are LEGACY alone.

    A list of tokenizer_config.json, even an empty one, stands for special_tokens_map.json's LEGACY.
    """
    extra: Any = config.get(EXTRA) or config.get(LEGACY, config.get(EXTRA))
    lists = [value for value in (extra, beside.get(EXTRA)) if isinstance(value, list)]
    if not lists or isinstance(beside.get(EXTRA), dict):
        return beside.get(LEGACY, config.get(LEGACY)) or [], True
    return [token for tokens in lists for token in tokens], False


def _added_token(*arguments, **settings):
    from tokenizers import AddedToken

    return AddedToken(*arguments, **settings)


def _token(value):
    """Returns a special token that a file spells as a string or as an object."""
    if isinstance(value, str):
        return _added_token(value, special=True)
    settings = {name: setting for name, setting in value.items() if name != "__type"}
    return _added_token(**settings | {"special": True})


def _content(file: Path) -> dict:
    return read_json(file) if file.is_file() else {}
