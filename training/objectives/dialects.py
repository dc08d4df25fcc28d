"""Names and forms that other programs give an objective's rows.

They are TRL's, vLLM's, verl's, LLaMA-Factory's, ms-swift's, OpenRLHF's, OpenAI's and Orca's. Each
function returns a row with the names of rows.py: "prompt", "chosen" and "rejected", "completion"
and "label", "prompt_ids" and "completion_ids".
"""

import re

import numpy as np

from training.data.forms import OBJECTS, ROLES, SYSTEMS, parsed
from training.host.errors import UserError

CHATS = ("messages", "conversations")
# Fields of a question that has no "prompt", and the field that forms.py has for its answer.
QUESTIONS = {"instruction": "output", "question": "answer", "query": "response"}
BESIDE_QUESTIONS = ("system", "input", "history")
PREFERRED = ("preferred_output", "non_preferred_output")  # OpenAI's
MESSAGE = re.compile(r"""\s*\{\s*['"](role|content|from|value)['"]\s*:""")  # a text of JSON
SCORE = re.compile(r"score|rating|reward|grade|quality", re.IGNORECASE)
SUMMED = ("token_level_rewards", "token_level_scores", "rm_scores")  # numbers of tokens: verl's
POLICY = ("old_log_probs", "old_per_token_logps")  # log-probabilities that a trainer computed
ENGINE = (  # log-probabilities that the engine returned with the answer
    "logprobs", "rollout_log_probs", "rollout_logprobs", "response_logprobs",
    "sampling_per_token_logps",
)  # fmt: skip
# Names of a rollout's fields elsewhere, by ours. The first that a row has is read.
ROLLOUTS = {
    "prompt_ids": ("prompt_token_ids",),
    "completion_ids": ("token_ids", "completion_token_ids", "response_ids", "response_token_ids"),
    "advantage": ("advantages",),
    "reward": (*SUMMED, "reward_score", "score"),
    "ref_logprobs": ("ref_log_prob", "ref_log_probs", "ref_per_token_logps"),
}
MASKS = ("response_mask", "response_loss_mask", "loss_mask", "env_mask", "tool_mask")
SEVERAL = ("reward", "old_logprobs")  # fields of which a row may have several, of different values
# Names that tell rows of a .json file beside ours.
NAMES = frozenset(("kto_tag", "rejected_response", "rejected_messages", *PREFERRED)).union(
    *ROLLOUTS.values(), MASKS, POLICY, ENGINE, CHATS, QUESTIONS, QUESTIONS.values()
)


def rename_rollout(row: dict, reads_engine: bool) -> tuple[dict, dict[str, str]]:
    """Returns a rollout with our names, and the names that it had, by ours.

    Args:
        reads_engine: "old_logprobs" are the engine's rather than the policy's.

    Raises UserError: two names of one field have different values.
    """
    row, names = _with_prompts_of_verl(row)
    synonyms = ROLLOUTS | {"old_logprobs": ENGINE + POLICY if reads_engine else POLICY + ENGINE}
    if any(row.get(name) is not None for name in ("completion_ids", *ROLLOUTS["completion_ids"])):
        synonyms |= {"completion_mask": MASKS}
    for ours, theirs in synonyms.items():
        has = [name for name in (ours, *theirs) if row.get(name) is not None]
        if not has:
            continue
        first, *others = has
        if ours not in SEVERAL:
            differing = [name for name in others if row[name] != row[first]]
            if differing:
                both = f'has "{first}" and "{differing[0]}", which differ'
                raise UserError(f"{both}; leave out one")
            row = {name: value for name, value in row.items() if name not in others}
        value = row[first]
        if first in SUMMED and isinstance(value, list):
            value = sum(value) if all(isinstance(x, int | float) for x in value) else value
        row = {name: x for name, x in row.items() if name != first} | {ours: value}
        names[ours] = first
    return row, names


def _with_prompts_of_verl(row: dict) -> tuple[dict, dict[str, str]]:
    """Returns a row whose "prompts" and "responses", or "input" and "output", have our names."""
    names = dict[str, str]()
    for theirs, ours in (("prompts", "prompt"), ("responses", "completion")):
        value = row.get(theirs)
        if value is None:
            continue
        is_ids = isinstance(value, list) and all(isinstance(x, int | float) for x in value)
        names[ours + "_ids" * is_ids] = theirs
    if row.get("response") is not None and row.get("completion") is None:
        names["completion"] = "response"
    is_dumped = row.get("prompt") is None and isinstance(row.get("output"), str)
    if is_dumped and isinstance(row.get("input"), str):
        names |= {"prompt": "input", "completion": "output"}
    is_of_verl = not row.keys().isdisjoint(("prompts", "response_ids", "response_mask"))
    if is_of_verl and isinstance(row.get("uid"), str | int):
        names["group"] = "uid"
    names = {ours: theirs for ours, theirs in names.items() if row.get(ours) is None}
    taken = {*names.values()}
    rest = {name: value for name, value in row.items() if name not in taken}
    return rest | {ours: row[theirs] for ours, theirs in names.items()}, names


def without_padding(row: dict) -> dict:
    """Returns a rollout of ids without padding, which "attention_mask" or "prompt_mask" names."""
    prompt, completion = row["prompt_ids"], row["completion_ids"]
    if not isinstance(prompt, list) or not isinstance(completion, list):
        return row
    if row.keys().isdisjoint(("attention_mask", "prompt_mask")):
        return row
    row = dict(row)
    both, of_prompt = row.pop("attention_mask", None), row.pop("prompt_mask", None)
    masks = {"attention_mask": both, "prompt_mask": of_prompt}
    lengths = {"attention_mask": len(prompt) + len(completion), "prompt_mask": len(prompt)}
    for name, mask in masks.items():
        is_mask = isinstance(mask, list) and all(bit in (0, 1) for bit in mask)
        if mask is not None and (not is_mask or len(mask) != lengths[name]):
            wanted = f"{lengths[name]} numbers, 0 for padding"
            raise UserError(f'"{name}" must be {wanted}; or remove it')
    kept = np.ones(len(prompt) + len(completion), bool)
    if both is not None:
        kept &= np.array(both, bool)
    if of_prompt is not None:
        kept[: len(prompt)] &= np.array(of_prompt, bool)
    for name, value in row.items():
        if name == "prompt_ids":
            row[name] = [x for x, is_kept in zip(value, kept) if is_kept]
        elif isinstance(value, list) and len(value) == len(completion):
            row[name] = [x for x, is_kept in zip(value, kept[len(prompt) :]) if is_kept]
    return row


def of_sampled(values, ids: list | None, row: dict, name: str):
    """Returns the log-probabilities of an answer's tokens as numbers.

    vLLM has an object of ids for each token, TRL a list of one number, OpenAI "content".
    """
    if isinstance(values, dict):
        values = values.get("token_logprobs", values.get("content"))
    if not isinstance(values, list):
        return values
    nothing = [None] * len(values)
    tokens, choices = (
        part if isinstance(part, list) and len(part) == len(values) else nothing
        for part in (ids, row.get("logprob_token_ids"))
    )
    return [_of_token(*each, name) for each in zip(values, tokens, choices)]


def _of_token(value, token, choices, name: str):
    if isinstance(value, list) and isinstance(choices, list) and token in choices[: len(value)]:
        return value[choices.index(token)]
    if isinstance(value, list):
        if len(value) == 1:
            return value[0]
        cure = "give that of the sampled one"
        raise UserError(f'"{name}" has {len(value)} numbers for a token; {cure}')
    if isinstance(value, dict):
        entry = value if "logprob" in value else value.get(str(token))
        entry = entry.get("logprob") if isinstance(entry, dict) else entry
        if entry is None:
            raise UserError(f'"{name}" has no number for the sampled token {token}')
        return entry
    return value


def as_pair(row: dict) -> dict:
    """Returns a pair with "chosen" and "rejected"; a "prompt" may be a list of messages."""
    row = _of_openai(row)
    if not any(row.get(name) is not None for name in ("prompt", *CHATS, *QUESTIONS)):
        text = row.get("input")  # distilabel's name for Orca's question
        row = _without(row, "input") | {"question": text} if isinstance(text, str) and text else row
    texts = [row.get(name) for name in ("prompt", "chosen", "rejected")]
    if all(isinstance(text, str) for text in texts):
        _refuse_system(row, "instruction=prompt")
    turns = _chat_of(row) if row.get("prompt") is None else []
    rejected = row.get("rejected_response", row.get("rejected_messages"))
    if turns and rejected is not None and row.get("rejected") is None:  # ms-swift's
        return _of_swift(row, turns, rejected)
    if row.get("chosen") is None or row.get("rejected") is None:
        return row
    answers = {name: _of_table(row[name], name) for name in ("chosen", "rejected")}
    chats = [answer for answer in answers.values() if isinstance(answer, list)]
    are_whole = len(chats) == 2 and all(map(_is_whole, chats))
    prompt, left_out = row.get("prompt"), tuple[str, ...]()
    if turns and not are_whole:
        last = turns[-1].get("content", turns[-1].get("value"))
        if len(turns) > 1 and _is_assistant(turns[-1]) and last in map(_text_of, answers.values()):
            turns = turns[:-1]  # the chosen answer, or the rejected one
        prompt, left_out = turns, (*CHATS, "system")
    elif prompt is None and (chats or row.get("history")) and not are_whole:
        prompt = _chat_of_question(row) or None
        left_out = (*QUESTIONS, *BESIDE_QUESTIONS) if prompt else ()
    elif prompt is None and are_whole:  # rows.py looks for the question in both chats
        left_out = tuple(name for name in QUESTIONS if isinstance(row.get(name), str))[:1]
        prompt = row[left_out[0]] if left_out else None
    if isinstance(prompt, list):
        answers = {name: _as_message(answer) for name, answer in answers.items()}
    return _without(row, *left_out) | ({} if prompt is None else {"prompt": prompt}) | answers


def _refuse_system(row: dict, columns: str) -> None:
    """Raises UserError for a system message beside a text as "prompt"; with `columns` the row is a
    chat."""
    name = next((name for name in ("system", *SYSTEMS) if row.get(name)), None)
    if name:
        has = f'has "{name}" beside "prompt", where it would be ignored'
        system = "" if name == "system" else f",system={name}"
        raise UserError(f"{has}; give --columns {columns}{system}")


def with_label(row: dict) -> dict:
    """Returns a row with "label", which LLaMA-Factory names "kto_tag"."""
    if row.get("label") is not None or row.get("kto_tag") is None:
        return row
    return _without(row, "kto_tag") | {"label": row["kto_tag"]}


def as_answer(row: dict, fields: tuple[str, ...]) -> dict:
    """Returns a row with "completion": the last message of a chat, or the answer to a question.

    Args:
        fields: the names of questions that are read beside "prompt".
    """
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str) and fields:
        _refuse_system(row, "instruction=prompt,output=completion")
    if completion is not None:
        is_text = isinstance(prompt, list) and isinstance(completion, str)
        return row | {"completion": _as_message(completion)} if is_text else row
    turns = _chat_of(row) if prompt is None else []
    if turns:
        if not _is_assistant(turns[-1]):
            raise UserError("has a chat whose last message is not the assistant's, to be judged")
        return _without(row, *CHATS, "system") | {"prompt": turns[:-1], "completion": turns[-1:]}
    answers = [("prompt", "response"), *((name, QUESTIONS[name]) for name in fields)]
    answers += [(name, "response") for name in fields]  # OpenRLHF's
    for question, answer in answers:
        if row.get(question) is None or row.get(answer) is None:
            continue
        completion = row[answer]
        if question in QUESTIONS and row.get("history"):  # earlier answers are no targets
            prompt = {"prompt": _chat_of_question(row)}
            row = _without(row, question, *BESIDE_QUESTIONS) | prompt
        completion = _as_message(completion) if isinstance(row.get("prompt"), list) else completion
        return _without(row, answer) | {"completion": completion}
    return row


def question_of(row: dict):
    """Returns what is asked in a row: "prompt", or the fields that forms.py makes a prompt of."""
    if row.get("prompt") is not None:
        return row["prompt"]
    fields = {name: row.get(name) for name in (*QUESTIONS, *BESIDE_QUESTIONS)}
    return [fields] if any(fields.values()) else None


def answer_field(row: dict) -> str:
    """Returns the name that forms.py has for the answer to a row's question."""
    if row.get("prompt") is not None:
        return "completion"
    return next((QUESTIONS[name] for name in QUESTIONS if row.get(name) is not None), "completion")


def compare_scores(row: dict) -> str:
    """Returns what a pair's scores say against its order, in words for the log: "" if nothing."""
    for name in row:
        if "chosen" not in name or not SCORE.search(name):
            continue
        value, worse = (
            _score_of(row.get(field)) for field in (name, name.replace("chosen", "rejected"))
        )
        if value is not None and worse is not None and worse >= value:
            if worse == value:
                return " whose scores are equal"
            return " whose rejected answer has the higher score"
    return ""


def _score_of(value) -> float | None:
    """Returns a score as a number, "4" as well; None if it is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _of_openai(row: dict) -> dict:
    asked = row.get("input")
    if any(row.get(name) is None for name in PREFERRED) or not isinstance(asked, dict):
        return row
    tools = {"tools": asked["tools"]} if asked.get("tools") else {}
    answers = dict(zip(("chosen", "rejected"), (row[name] for name in PREFERRED)))
    return _without(row, "input", *PREFERRED) | tools | {"prompt": asked.get("messages")} | answers


def _of_swift(row: dict, turns: list[dict], rejected) -> dict:
    """Returns a pair of a chat, whose last message was chosen, and another answer or chat."""
    row = _without(row, "rejected_response", "rejected_messages", "system", *CHATS)
    rejected = _as_message(_of_table(rejected, "rejected"))
    if _is_whole(rejected):
        return row | {"chosen": turns, "rejected": rejected}
    return row | {"prompt": turns[:-1], "chosen": turns[-1:], "rejected": rejected}


def _of_table(answer, name: str):
    """Returns an answer as a text or a list of messages. In tables messages are JSON."""
    is_json = isinstance(answer, str) and (OBJECTS.match(answer) or MESSAGE.match(answer))
    answer = parsed(answer, f'"{name}"') if is_json else answer
    answer = [answer] if isinstance(answer, dict) else answer
    is_chat = isinstance(answer, list) and all(isinstance(turn, dict) for turn in answer)
    if not is_chat and not isinstance(answer, str):
        raise UserError(f'"{name}" must be a text, a message, or a list of messages')
    return answer


def _is_whole(chat: list[dict]) -> bool:
    """Whether a chat has its question."""
    return len(chat) > 1 and not _is_assistant(chat[0])


def _chat_of_question(row: dict) -> list[dict]:
    """Returns a question of Alpaca or Orca as messages, with its history; [] if a row has none."""
    asked = next((name for name in QUESTIONS if isinstance(row.get(name), str)), None)
    if asked is None:
        return []
    history = parsed(row.get("history"), '"history"') or []
    pairs = history if isinstance(history, list) else [history]
    if any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        what = "a list of pairs, each of a question and an answer"
        raise UserError(f'has a "history" that is not {what}')
    said = [turn for pair in history for turn in zip(("user", "assistant"), pair)]
    if not isinstance(row.get("input") or "", str):
        raise UserError('needs a string "input", if it has one')
    question = "\n".join(filter(None, (row[asked], row.get("input"))))
    messages = [{"role": role, "content": text} for role, text in (*said, ("user", question))]
    return [*_system_of(row), *messages]


def _chat_of(row: dict) -> list[dict]:
    """Returns the messages of a row's chat, with its system message; [] if it has none."""
    for name in CHATS:
        turns = parsed(row.get(name), f'"{name}"')
        if isinstance(turns, list) and turns and all(isinstance(turn, dict) for turn in turns):
            return [*_system_of(row), *turns]
    return []


def _system_of(row: dict) -> list[dict]:
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


def _is_assistant(turn: dict) -> bool:
    role = str(turn.get("role", turn.get("from")))
    return ROLES.get(role, role) == "assistant"


def _as_message(answer):
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def _text_of(answer):
    if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], dict):
        return answer[0].get("content", answer[0].get("value"))
    return answer


def _without(row: dict, *names: str) -> dict:
    return {name: value for name, value in row.items() if name not in names}
