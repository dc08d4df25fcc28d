"""Fields that no template writes: names that describe a message, and names of what may be a part of
an answer.

One rule holds for every field. Its texts are looked for in a rendering that has other words in
their places; see ChatWriter. A field that is not written is counted if its name says that it
describes, and refused otherwise.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator

WORDS = re.compile(
    r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+"
)  # words of a field's name: "toolCalls" has two


def words_of(text: str) -> frozenset[str]:
    return frozenset(WORDS.findall(text))


# Last words of names whose fields describe: "prompt_id", "modelName", "created_at".
DESCRIPTIONS = words_of(
    """
    id ids uuid guid key hash checksum signature fingerprint identifier name names title author user username persona
    annotator annotators worker model models engine provider generator source sources origin dataset datasets split
    subset config version license url urls uri time times timestamp timestamps date dates datetime created updated
    modified at duration latency lang language languages locale country region state ip header headers metadata meta
    info annotation annotations label labels tag tags category categories topic topics domain domains task tasks type
    types kind format mime subject subjects field level difficulty quality rating ratings score scores rank vote votes
    reward rewards moderation toxicity detoxify toxic pii redacted safety flags status usage cost token tokens count
    counts counter length size num number index turn round step position role mode effort temperature seed logprobs
    logprob citation citations control finish agent
    sender speaker session conversation thread parent group platform device intent sentiment emotion extra extras
    attributes properties stats statistics metrics debug idx tier choice budget feedback
    """
)
REASONS = ("finish_reason", "stop_reason")  # why an answer ends
# Last words of names whose numbers say nothing about losses.
COUNTS = words_of(
    """
    id index turn round step position number num timestamp time created updated modified at date duration latency
    tokens token count counts counter length size temperature seed cost version year identifier
    """
)
SAMPLING = ("top_p", "top_k", "min_p")
TRUTHS = (
    "toxic",
    "redacted",
    "truncated",
    "synthetic",
    "cached",
)  # fields of a message that are true or false
# Words of names whose fields may be a part of an answer, or of what an answer was given to.
OF_ANSWERS = words_of(
    """
    reasoning thought thoughts thinking think cot rationale rationales analysis scratchpad reflection monologue
    deliberation call calls action actions function functions invocation invocations tool tools
    image images picture pictures photo photos audio audios video videos media attachment attachments document documents
    """
)
CALLS = words_of("call calls action actions function functions invocation invocations")
THOUGHTS = words_of(
    "reasoning thought thoughts thinking think cot rationale analysis scratchpad commentary"
)
MEDIA = words_of(
    "image images picture pictures photo photos audio audios video videos media attachment "
    "attachments "
    "document documents"
)
TOOLS = words_of("tool tools function functions")
ANSWERS = words_of("answer answers response responses output outputs completion completions reply")
EMPTY: tuple = (
    "",
    "[]",
    "{}",
    "null",
    [],
    {},
    None,
)  # values that say nothing, also as JSON of tables
LONGEST_KIND = 40  # characters: longer texts are no names
OF_MEDIA = words_of("id ids count counts size num number tokens format type")


def _words(name: str) -> list[str]:
    """Returns the words of a name: "Complex_CoT" has "cot" as well as "complex", "co" and "t"."""
    words = [word.lower() for word in WORDS.findall(name)]
    parts = [part.lower() for part in re.split(r"[\W_]+", name)]
    return [part for part in parts if part not in words] + words


def describes(name: str) -> bool:
    """Whether a field of this name describes, as "model_name". It is not a part of an answer."""
    words = _words(name)
    if not MEDIA.isdisjoint(words):  # an image's URL is the image
        return not OF_MEDIA.isdisjoint(words[-1:])
    return "_".join(words) in REASONS or not DESCRIPTIONS.isdisjoint(words[-1:])


def is_of_answers(name: str) -> bool:
    """Whether a field of this name may be a part of an answer, as "rationale" or "toolCalls"."""
    return not describes(name) and not OF_ANSWERS.isdisjoint(_words(name))


def are_names_of_tools(name: str, value: object) -> bool:
    """Whether a field of a row, such as "target_tools", has names alone. Tools, which a chat needs,
    are objects."""
    words = OF_ANSWERS.intersection(_words(name))
    return words <= TOOLS and not re.search(
        r'\{\s*"', json.dumps(value, default=str).replace("\\", "")
    )


def is_of_a_last_answer(name: str) -> bool:
    """Whether a field of this name may be the answer to a chat that ends with a question, as
    "response"."""
    return not ANSWERS.isdisjoint(_words(name)[-1:])


def says_kind(name: str) -> bool:
    """Whether a field of this name says what its message is: an answer, or a thought, as "channel"
    and "type"."""
    return not {"type", "kind", "channel", "phase"}.isdisjoint(_words(name)[-1:])


def is_thought(kind: str) -> bool:
    """Whether a message of this kind is no answer, as "analysis" or "reasoning.text"."""
    return not THOUGHTS.isdisjoint(_words(kind)) and len(kind) < LONGEST_KIND


def may_be_number(name: str, value: object) -> bool:
    """Whether a field of a message may be this number or truth: no trainer takes such a name for a
    mask."""
    if isinstance(value, bool):
        return name in TRUTHS
    return name in SAMPLING or not COUNTS.isdisjoint(_words(name)[-1:])


def cure_of(name: str) -> str:
    """Returns where the words of a field with this name belong."""
    words = {*_words(name)}
    if words & MEDIA:
        return "only texts are trained on"
    if words & CALLS:
        return 'give calls as "tool_calls"'
    if words & TOOLS:
        return 'give tools as "tools" of the row (--columns tools=NAME)'
    if words & OF_ANSWERS:
        return 'give reasoning as "reasoning_content"'
    return "write it into the content"


def texts_in(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yields the texts in a field, each with the name nearest to it. Bytes, as of an image, are
    their own text.

    {"details": [{"type": "a", "text": "b"}, "c"]} has ("type", "a"), ("text", "b") and ("details",
    "c").
    """
    if isinstance(value, dict):
        for key, part in value.items():
            yield from texts_in(str(key), part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from texts_in(name, part)
    elif isinstance(value, str | bytes) and value not in EMPTY:
        yield name, value if isinstance(value, str) else repr(value)


def texts_of_answers(value: object) -> Iterator[str]:
    """Yields the texts within a field that describes, under names of what may be a part of an
    answer.

    {"id": "a", "thinking": "b", "raw": [{"tool_calls": [{"input": "c"}]}]} has "b" and "c". So have
    the parts of a list whose types say so, as {"type": "thinking", "text": "b"}, and JSON of such
    values.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            yield from texts_of_answers(json.loads(value))
    if isinstance(value, dict) and is_thought(str(value.get("type"))):
        yield from (text for near, text in texts_in("", value) if not describes(near))
        return
    if isinstance(value, list | tuple):
        for part in value:
            yield from texts_of_answers(part)
    for name, part in value.items() if isinstance(value, dict) else ():
        is_of_one = is_of_answers(str(name)) and not TOOLS.issuperset(_words(str(name)))
        if is_of_one:
            has_media = not MEDIA.isdisjoint(
                _words(str(name))
            )  # a file's name is all that is there of it
            yield from (
                text for near, text in texts_in(str(name), part) if has_media or not describes(near)
            )
        else:
            yield from texts_of_answers(part)


def with_texts(value: object, word: Callable[[str], str]) -> object:
    """Returns the value with each of its texts replaced; see texts_in."""
    if isinstance(value, dict):
        return {key: with_texts(part, word) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [with_texts(part, word) for part in value]
    if isinstance(value, str | bytes) and value not in EMPTY:
        return word(value if isinstance(value, str) else repr(value))
    return value
