"""Names and forms that other programs give an objective's rows.

They are TRL's, vLLM's, verl's, LLaMA-Factory's, ms-swift's, OpenRLHF's, OpenAI's and Orca's. Each
function returns a row with the names of rows.py and rollout_rows.py: "prompt", "chosen" and
"rejected", "completion" and "label", "prompt_ids" and "completion_ids".
"""

import itertools
import math
import re

import numpy as np

from training.data.forms import (
    OBJECTS,
    SYSTEMS,
    chat_of_question,
    message_of,
    parsed,
    role_of,
    system_of,
)
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
    "logprobs",
    "rollout_log_probs",
    "rollout_logprobs",
    "response_logprobs",
    "sampling_per_token_logps",
)
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
        present = [name for name in (ours, *theirs) if row.get(name) is not None]
        if not present:
            continue
        first, *doubles = present
        value = row[first]
        if ours in SEVERAL:
            doubles = []
        for name in doubles:
            if row[name] != value:
                raise UserError(f'has "{first}" and "{name}", which differ; leave out one')
        are_summed = first in SUMMED and isinstance(value, list)
        if are_summed and all(isinstance(number, int | float) for number in value):
            value = sum(value)
        row = _without(row, first, *doubles) | {ours: value}
        names[ours] = first
    return row, names


def _with_prompts_of_verl(row: dict) -> tuple[dict, dict[str, str]]:
    """Returns a row whose "prompts" and "responses", or "input" and "output", have our names."""
    names: dict[str, str] = {}
    for theirs, ours in (("prompts", "prompt"), ("responses", "completion")):
        value = row.get(theirs)
        if isinstance(value, list) and all(isinstance(x, int | float) for x in value):
            names[f"{ours}_ids"] = theirs
        elif value is not None:
            names[ours] = theirs
    if row.get("response") is not None and row.get("completion") is None:
        names["completion"] = "response"
    is_dumped = isinstance(row.get("input"), str) and isinstance(row.get("output"), str)
    if is_dumped and row.get("prompt") is None:
        names |= {"prompt": "input", "completion": "output"}
    is_of_verl = not row.keys().isdisjoint(("prompts", "response_ids", "response_mask"))
    if is_of_verl and isinstance(row.get("uid"), str | int):
        names["group"] = "uid"
    names = {ours: theirs for ours, theirs in names.items() if row.get(ours) is None}
    renamed = {ours: row[theirs] for ours, theirs in names.items()}
    return _without(row, *names.values()) | renamed, names


def without_padding(row: dict) -> dict:
    """Returns a rollout of ids without padding, which "attention_mask" or "prompt_mask" names."""
    prompt, completion = row["prompt_ids"], row["completion_ids"]
    if not isinstance(prompt, list) or not isinstance(completion, list):
        return row
    if row.keys().isdisjoint(("attention_mask", "prompt_mask")):
        return row
    kept = np.ones(len(prompt) + len(completion), bool)
    for name, length in (("attention_mask", len(kept)), ("prompt_mask", len(prompt))):
        mask = row.get(name)
        if mask is None:
            continue
        is_mask = isinstance(mask, list) and all(bit in (0, 1) for bit in mask)
        if not is_mask or len(mask) != length:
            raise UserError(f'"{name}" must be {length} numbers, 0 for padding; or remove it')
        kept[:length] &= np.array(mask, bool)
    kept_of_prompt, kept_of_completion = np.split(kept, [len(prompt)])
    row = _without(row, "attention_mask", "prompt_mask")
    for name, value in row.items():
        if name == "prompt_ids":
            row[name] = [*itertools.compress(value, kept_of_prompt)]
        elif isinstance(value, list) and len(value) == len(completion):
            row[name] = [*itertools.compress(value, kept_of_completion)]
    return row


def log_probs_of_sampled(values, ids: list | None, row: dict, name: str):
    """Returns the log-probabilities of an answer's tokens as numbers.

    vLLM has an object of ids for each token, TRL a list of one number, OpenAI "content".
    """
    if isinstance(values, dict):
        values = values.get("token_logprobs", values.get("content"))
    if not isinstance(values, list):
        return values
    choices = row.get("logprob_token_ids")
    if not isinstance(choices, list) or len(choices) != len(values):
        choices = [None] * len(values)
    if not isinstance(ids, list) or len(ids) != len(values):
        ids = [None] * len(values)
    return [_log_prob_of_token(*entry, name) for entry in zip(values, ids, choices)]


def _log_prob_of_token(value, token, choices, name: str):
    if isinstance(value, list):
        if isinstance(choices, list) and token in choices[: len(value)]:
            return value[choices.index(token)]
        if len(value) != 1:
            raise UserError(
                f'"{name}" has {len(value)} numbers for a token; give that of the sampled one'
            )
        return value[0]
    if not isinstance(value, dict):
        return value
    entry = value if "logprob" in value else value.get(str(token))
    entry = entry.get("logprob") if isinstance(entry, dict) else entry
    if entry is None:
        raise UserError(f'"{name}" has no number for the sampled token {token}')
    return entry


def as_pair(row: dict) -> dict:
    """Returns a pair with "chosen" and "rejected"; a "prompt" may be a list of messages."""
    row = _of_openai(row)
    text = row.get("input")  # distilabel's name for Orca's question
    has_question = any(row.get(name) is not None for name in ("prompt", *CHATS, *QUESTIONS))
    if isinstance(text, str) and text and not has_question:
        row = _without(row, "input") | {"question": text}
    if all(isinstance(row.get(name), str) for name in ("prompt", "chosen", "rejected")):
        _refuse_system(row, "instruction=prompt")
    turns = _chat_of(row) if row.get("prompt") is None else []
    rejected = row.get("rejected_response", row.get("rejected_messages"))
    if turns and rejected is not None and row.get("rejected") is None:  # ms-swift's
        return _of_swift(row, turns, rejected)
    if row.get("chosen") is None or row.get("rejected") is None:
        return row
    answers = {name: _of_table(row[name], name) for name in ("chosen", "rejected")}
    row = _with_prompt_of_chats(row, turns, answers)
    if isinstance(row.get("prompt"), list):
        answers = {name: _as_message(answer) for name, answer in answers.items()}
    return row | answers


def _with_prompt_of_chats(row: dict, turns: list[dict], answers: dict) -> dict:
    """Returns a pair's row with a "prompt", if its answers or its question are messages.

    Args:
        turns: the row's chat beside its answers; [] if there is none.
        answers: "chosen" and "rejected", each a text or a list of messages.
    """
    chats = [answer for answer in answers.values() if isinstance(answer, list)]
    if len(chats) == 2 and all(map(_is_whole, chats)):
        if row.get("prompt") is None:  # rows.py looks for the question in both chats
            for name in QUESTIONS:
                if isinstance(row.get(name), str):
                    return _without(row, name) | {"prompt": row[name]}
        return row
    if turns:
        last = turns[-1].get("content", turns[-1].get("value"))
        is_answered = len(turns) > 1 and role_of(turns[-1]) == "assistant"
        if is_answered and last in map(_text_of, answers.values()):
            turns = turns[:-1]  # the chosen answer, or the rejected one
        return _without(row, *CHATS, "system") | {"prompt": turns}
    if row.get("prompt") is None and (chats or row.get("history")):
        question = _chat_of_question(row)
        if question:
            return _without(row, *QUESTIONS, *BESIDE_QUESTIONS) | {"prompt": question}
    return row


def _refuse_system(row: dict, columns: str) -> None:
    """Refuses a system message beside a text as "prompt"; with `columns` the row is a chat."""
    for name in ("system", *SYSTEMS):
        if row.get(name):
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
        return row | {"completion": _beside(prompt, completion)}
    turns = _chat_of(row) if prompt is None else []
    if turns:
        if role_of(turns[-1]) != "assistant":
            raise UserError("has a chat whose last message is not the assistant's, to be judged")
        return _without(row, *CHATS, "system") | {"prompt": turns[:-1], "completion": turns[-1:]}
    answers = [("prompt", "response"), *((name, QUESTIONS[name]) for name in fields)]
    answers += [(name, "response") for name in fields]  # OpenRLHF's
    for question, answer in answers:
        if row.get(question) is None or row.get(answer) is None:
            continue
        completion = row[answer]
        if question in QUESTIONS and row.get("history"):  # earlier answers are no targets
            chat = _chat_of_question(row)
            row = _without(row, question, *BESIDE_QUESTIONS) | {"prompt": chat}
        return _without(row, answer) | {"completion": _beside(row.get("prompt"), completion)}
    return row


def question_of(row: dict):
    """Returns what is asked in a row: "prompt", or the fields that forms.py makes a prompt of."""
    if row.get("prompt") is not None:
        return row["prompt"]
    fields = {name: row.get(name) for name in (*QUESTIONS, *BESIDE_QUESTIONS)}
    return [fields] if any(fields.values()) else None


def answer_field(row: dict) -> str:
    """Returns the name that forms.py has for the answer to a row's question."""
    names = [name for name in QUESTIONS if row.get(name) is not None]
    return "completion" if row.get("prompt") is not None or not names else QUESTIONS[names[0]]


def compare_scores(row: dict) -> str:
    """Returns what a pair's scores say against its order, in words for the log: "" if nothing."""
    for name in row:
        if "chosen" not in name or not SCORE.search(name):
            continue
        chosen = _score_of(row[name])
        rejected = _score_of(row.get(name.replace("chosen", "rejected")))
        if chosen == rejected:
            return " whose scores are equal"
        if chosen < rejected:
            return " whose rejected answer has the higher score"
    return ""


def _score_of(value) -> float:
    """Returns a score as a number, "4" as well; NaN if it is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _of_openai(row: dict) -> dict:
    fields = row.get("input")
    if any(row.get(name) is None for name in PREFERRED) or not isinstance(fields, dict):
        return row
    answers = {"chosen": row[PREFERRED[0]], "rejected": row[PREFERRED[1]]}
    tools = {"tools": fields["tools"]} if fields.get("tools") else {}
    rest = _without(row, "input", *PREFERRED)
    return rest | tools | {"prompt": fields.get("messages")} | answers


def _of_swift(row: dict, turns: list[dict], rejected) -> dict:
    """Returns a pair of a chat, whose last message was chosen, and another answer or chat."""
    row = _without(row, "rejected_response", "rejected_messages", "system", *CHATS)
    rejected = _as_message(_of_table(rejected, "rejected"))
    if _is_whole(rejected):
        return row | {"chosen": turns, "rejected": rejected}
    return row | {"prompt": turns[:-1], "chosen": turns[-1:], "rejected": rejected}


def _of_table(answer, name: str):
    """Returns an answer as a text or a list of messages. In tables messages are JSON."""
    if isinstance(answer, str) and (OBJECTS.match(answer) or MESSAGE.match(answer)):
        answer = parsed(answer, f'"{name}"')
    answer = [answer] if isinstance(answer, dict) else answer
    is_chat = isinstance(answer, list) and all(isinstance(turn, dict) for turn in answer)
    if not is_chat and not isinstance(answer, str):
        raise UserError(f'"{name}" must be a text, a message, or a list of messages')
    return answer


def _is_whole(chat: list[dict]) -> bool:
    """Whether a chat has its question."""
    return len(chat) > 1 and role_of(chat[0]) != "assistant"


def _chat_of_question(row: dict) -> list[dict]:
    """Returns a question of Alpaca or Orca as messages, with its history; [] if a row has none."""
    names = [name for name in QUESTIONS if isinstance(row.get(name), str)]
    if names and not isinstance(row.get("input") or "", str):
        raise UserError('needs a string "input", if it has one')
    return chat_of_question(row, names[0]) if names else []


def _chat_of(row: dict) -> list[dict]:
    """Returns the messages of a row's chat, with its system message; [] if it has none."""
    for name in CHATS:
        turns = parsed(row.get(name), f'"{name}"')
        if isinstance(turns, list) and turns and all(isinstance(turn, dict) for turn in turns):
            return [*system_of(row), *turns]
    return []


def _as_message(answer):
    return [message_of("assistant", answer)] if isinstance(answer, str) else answer


def _beside(prompt, answer):
    """Returns an answer beside a prompt: as a message where the prompt is one of messages."""
    return _as_message(answer) if isinstance(prompt, list) else answer


def _text_of(answer):
    if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], dict):
        return answer[0].get("content", answer[0].get("value"))
    return answer


def _without(row: dict, *names: str) -> dict:
    return {name: value for name, value in row.items() if name not in names}
