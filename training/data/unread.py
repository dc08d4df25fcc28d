"""Fields that nobody reads: of rows, of messages, of calls and of parts of a content.

One rule holds for all of them. A field is passed over if its words stand elsewhere in what is read.
It is refused if it may be a mask, see masks.py, or if its words may be a part of an answer, such as
"reasoning" or "toolCalls". Any other field is named once in the log, with the number of its rows.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import NamedTuple

WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")  # of a name: "toolCalls" has two


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Last words of names whose fields describe: "prompt_id", "modelName", "created_at".
DESCRIPTIONS = words("""
    id ids uuid guid key hash checksum signature fingerprint identifier name names title author user
    username persona annotator annotators worker model models engine provider generator source
    sources origin dataset datasets split subset config version license url urls uri time times
    timestamp timestamps date dates datetime created updated modified at duration latency lang
    language languages locale country region state ip header headers metadata meta info annotation
    annotations label labels tag tags category categories topic topics domain domains task tasks
    type types kind format mime subject subjects field level difficulty quality rating ratings score
    scores rank vote votes reward rewards moderation toxicity detoxify toxic pii redacted safety
    flags status usage cost token tokens count counts counter length size num number index turn
    round step position role mode effort temperature seed logprobs logprob citation citations
    control finish agent sender speaker session conversation thread parent group platform device
    intent sentiment emotion extra extras attributes properties stats statistics metrics debug idx
    tier choice budget feedback
    """)
REASONS = ("finish_reason", "stop_reason")  # why an answer ends
# Words of names whose fields may be a part of an answer, or of what an answer was given to.
CALLS = words("call calls action actions function functions invocation invocations")
TOOLS = words("tool tools function functions")
THOUGHTS = words("""
    reasoning thought thoughts thinking think cot rationale rationales analysis scratchpad
    reflection monologue deliberation
    """)
MEDIA = words("""
    image images picture pictures photo photos audio audios video videos media attachment
    attachments document documents
    """)
PARTS_OF_ANSWERS = CALLS | TOOLS | THOUGHTS | MEDIA
# Last words of names whose fields may be the answer itself.
ANSWERS = words("answer answers response responses output outputs completion completions reply")
DESCRIPTIONS_OF_MEDIA = words("id ids count counts size num number tokens format type")
KINDS = ("type", "kind", "channel", "phase")  # last words of names whose fields say what a text is
PLAIN = {"channel": "final", "recipient": "all"}  # fields of answers that are as others
SETTINGS = words("true false yes no on off none auto enabled disabled low medium high")
EMPTY: tuple = ("", "[]", "{}", "null", [], {}, None)  # say nothing, also as JSON of tables
LONGEST_KIND = 40  # characters: longer texts are no names
LONG = 16  # characters of a text that another has by no accident


class Lost(NamedTuple):
    """A field whose words stand nowhere else."""

    text: str  # its first such text
    is_answer: bool  # whether it may be a part of an answer


def words_of(name: str) -> list[str]:
    """Returns the words of a name: "Complex_CoT" has "cot" as well as "complex", "co" and "t"."""
    inner = [word.lower() for word in WORD.findall(name)]
    outer = [part.lower() for part in re.split(r"[\W_]+", name)]
    return [part for part in outer if part not in inner] + inner


def describes(name: str) -> bool:
    """Whether a field of this name describes, as "model_name". It is not a part of an answer."""
    parts = words_of(name)
    if not MEDIA.isdisjoint(parts):  # an image's URL is the image
        return parts[-1] in DESCRIPTIONS_OF_MEDIA
    return "_".join(parts) in REASONS or parts[-1] in DESCRIPTIONS


def is_of_answers(name: str) -> bool:
    """Whether a field of this name may be a part of an answer, as "rationale" or "toolCalls"."""
    return not describes(name) and not PARTS_OF_ANSWERS.isdisjoint(words_of(name))


def is_of_a_last_answer(name: str) -> bool:
    """Whether a field of this name may be the answer to a chat that ends with a question."""
    return words_of(name)[-1] in ANSWERS


def find_lost(name: str, value: object, said: list[str]) -> Lost | None:
    """Returns the words of a row's field that are not `said`; None if there are none.

    Args:
        said: texts after `squeeze`, which takes time that each field would take anew.
    """
    texts = texts_in(name, value)
    may_answer = is_of_answers(name) and not _is_setting(name, value)
    content = [text for key, text in texts if not describes(key)]
    text = _first_lost(content or [text for _, text in texts], said)
    return Lost(text, may_answer) if text else None


def find_lost_of_message(name: str, value: object, said: list[str]) -> Lost | None:
    """Returns the words of a message's field that are not `said`; None if there are none.

    Parts of an answer are looked for within it, too, however deep they stand.
    """
    text = _first_lost([*parts_of_answers(name, value)], said)
    return Lost(text, True) if text else find_lost(name, value, said)


def said_by(message: dict) -> list[str]:
    """Returns the words of a message that are read, squeezed: content, reasoning and calls."""
    names = ("content", "reasoning_content", "reasoning", "thinking")
    values: list = [message.get(name) for name in names]
    for call in message.get("tool_calls") or ():
        function, arguments = call["function"], call["function"].get("arguments")
        values += [function["name"], arguments, json.dumps(arguments, ensure_ascii=False)]
    return [squeeze(text) for _, text in texts_in("", values)]


def parts_of_answers(name: str, value: object) -> Iterator[str]:
    """Yields texts of a message's field that may be a part of an answer.

    {"id": "a", "thinking": "b", "raw": [{"tool_calls": [{"input": "c"}]}]} has "b" and "c". A part
    whose type says so has them, too: {"type": "thinking", "text": "b"}; and so has JSON of them.
    """
    is_thought = words_of(name)[-1] in KINDS and _is_thought(str(value))
    if isinstance(value, str) and (is_thought or PLAIN.get(name, value) != value):
        yield value
    else:
        yield from _parts_within(name, value)


def _parts_within(name: str, value: object) -> Iterator[str]:
    """Yields all texts of a field that its name or its type makes a part of an answer.

    The fields within any other field are looked at in the same way, also in JSON.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if is_of_answers(name):
        if not _is_setting(name, value):
            texts = texts_in(name, value)
            # A medium may have only fields that describe, such as its URL.
            is_medium = not MEDIA.isdisjoint(words_of(name))
            content = [text for key, text in texts if is_medium or not describes(key)]
            yield from content or [text for _, text in texts]
    elif isinstance(value, dict) and _is_thought(str(value.get("type"))):
        yield from (text for key, text in texts_in("", value) if not describes(key))
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _parts_within(str(key), part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _parts_within("", part)


def _is_thought(kind: str) -> bool:
    """Whether a message of this kind is no answer, as "analysis" or "reasoning.text"."""
    is_name = len(kind) < LONGEST_KIND
    return is_name and not THOUGHTS.union(["commentary"]).isdisjoint(words_of(kind))


def _is_setting(name: str, value: object) -> bool:
    """Whether a field such as "reasoning" only sets something, or names tools, as "target_tools".

    Tools that a chat needs, and calls, are objects.
    """
    if all(text.strip().lower() in SETTINGS for _, text in texts_in(name, value)):
        return True
    text = json.dumps(value, default=str).replace("\\", "")
    names_tools = PARTS_OF_ANSWERS.intersection(words_of(name)) <= TOOLS
    return names_tools and not re.search(r'\{\s*"', text)


def _first_lost(texts: list[str], said: list[str]) -> str:
    """Returns the first of the texts that is not `said`, alone or joined; "" if all are."""

    def is_said(text: str) -> bool:
        text = squeeze(text)
        return any(text == part or (len(text) >= LONG and text in part) for part in said)

    if is_said("".join(texts)):
        return ""
    return next((text for text in texts if not is_said(text)), "")


def squeeze(text: str) -> str:
    """Returns a text without white space, which JSON may write in another way."""
    return "".join(text.split())


def cure_of(name: str) -> str:
    """Returns where the words of a field with this name belong."""
    parts = frozenset(words_of(name))
    if parts & MEDIA:
        return "only texts are trained on"
    if parts & CALLS:
        return 'give calls as "tool_calls"'
    if parts & TOOLS:
        return 'give tools as "tools" of the row (--columns tools=NAME)'
    if parts & PARTS_OF_ANSWERS:
        return 'give reasoning as "reasoning_content"'
    return "write it into the content"


def texts_in(name: str, value: object) -> list[tuple[str, str]]:
    """Returns the texts in a field, each behind the name nearest to it.

    {"details": [{"type": "a", "text": "b"}, "c"]} has ("type", "a"), ("text", "b") and ("details",
    "c"). Bytes, as of an image, are their own text.
    """
    if isinstance(value, dict):
        return [text for key, part in value.items() for text in texts_in(str(key), part)]
    if isinstance(value, list | tuple):
        return [text for part in value for text in texts_in(name, part)]
    if not isinstance(value, str | bytes) or value in EMPTY:
        return []
    return [(name, value if isinstance(value, str) else repr(value))]
