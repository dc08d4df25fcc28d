"""Write with a trained model: `python -m training.generate FOLDER "Once upon a time"`.

The prompt is an argument, files (each is a prompt) or standard input. Greedy unless a temperature is given.
"""

import logging
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

from training.data.chat import ChatTemplate
from training.flags import SMALLEST, Idle, flag, read_flags
from training.host.errors import UserError
from training.host.files import read_file
from training.host.processes import command
from training.inference import ModelFlags, Opened, load, mending_out_of_memory, open_folder, write
from training.parallel.world import World, join_world


@dataclass
class GenerateFlags(ModelFlags):
    """Write with a trained model."""

    prompt: str | None = flag(None, "default: what --file or standard input holds", positional=True)
    file: list[Path] = flag(list, "text files, each of which is a prompt")
    chat: bool = flag(False, "each prompt is a user's message, in the folder's chat template")
    system: str | None = flag(None, "with --chat: the system's message before it")
    max_new_tokens: int = flag(256, "tokens to write at most", least=1)
    temperature: float = flag(0.0, "0: the likeliest token each time", most=100)
    top_p: float | None = flag(
        None, "sample from the likeliest tokens of this share of the probability; default: 1", least=SMALLEST, most=1
    )
    seed: int | None = flag(None, "of sampling; default: 0", most=2**63 - 1)

    idle: ClassVar[tuple[Idle, ...]] = (
        Idle("top_p seed", "with temperature 0, which is greedy; give --temperature, or drop it",
             lambda f: f.temperature == 0),
        Idle("system", "without --chat; drop it, or give --chat", lambda f: not f.chat),
    )  # fmt: skip


def check_flags(flags: GenerateFlags) -> None:
    """Refuse two kinds of prompts at once, and a system's message that is no text."""
    if flags.system is not None:
        _decode(os.fsencode(flags.system), "--system")
    if flags.prompt is not None and flags.file:
        raise UserError("both a prompt and --file are given; drop one")


def read_prompts(flags: GenerateFlags) -> list[str]:
    """Returns the argument, the files' content, or standard input. Raises UserError for an empty text."""
    if flags.prompt is not None:
        raw = {"the prompt": os.fsencode(flags.prompt)}
    elif flags.file:
        raw = {str(file): read_file(file, "give --file a text file") for file in flags.file}
    else:
        try:
            raw = {"standard input": sys.stdin.buffer.read() if sys.stdin else b""}  # None: closed
        except OSError as error:
            raise UserError(f"cannot read standard input: {error}; give a prompt or --file") from None
    if empty := [where for where, content in raw.items() if not content]:
        raise UserError(f"{empty[0]} is empty; give at least a character to go on from")
    return [_decode(content, where) for where, content in raw.items()]


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8: byte {raw[error.start]:#04x} at offset {error.start}") from None


def decoded(tokens: Iterable[int], tokenizer) -> Iterator[str]:
    """Yields the text as it grows. A character of several tokens waits for the last of them."""
    shown: list[int] = []  # ids shown last: how a token is spelled may depend on the one before it
    waiting: list[int] = []
    for token in tokens:
        waiting.append(token)
        text = tokenizer.decode(shown + waiting)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(tokenizer.decode(shown)) :]
            shown, waiting = waiting, []
    yield tokenizer.decode(shown + waiting)[len(tokenizer.decode(shown)) :]


def generate(flags: GenerateFlags, opened: Opened, prompts: list[list[int]], world: World) -> None:
    """Print what the model writes after each prompt, token by token; several files' texts under the files' names."""
    longest = max(map(len, prompts))
    model = load(opened, longest, longest + flags.max_new_tokens, world, flags.memory_budget)
    for number, ids in enumerate(prompts):
        if len(prompts) > 1:
            print(f"{'' if number == 0 else chr(10)}==> {flags.file[number]} <==")
        generator = torch.Generator(world.device).manual_seed(flags.seed or 0)
        options = {"temperature": flags.temperature, "top_p": flags.top_p or 1.0, "generator": generator}
        tokens = write(model, ids, flags.max_new_tokens, opened.stop_ids, **options)
        for text in decoded(tokens, opened.tokenizer):
            print(text, end="", flush=True)
        print()


@command
def main(argv: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    flags = read_flags(GenerateFlags, argv, "python -m training.generate")
    check_flags(flags)
    texts = read_prompts(flags)
    with join_world(flags.device) as world, mending_out_of_memory():
        opened = open_folder(flags, world)
        if flags.chat:
            template = ChatTemplate(opened.tokenizer)
            before = [] if flags.system is None else [{"role": "system", "content": flags.system}]
            texts = [template.prompt([*before, {"role": "user", "content": text}]) for text in texts]
            opened = replace(opened, stop_ids=opened.stop_ids | template.end_ids)
        # A chat's template writes what begins a text.
        encode = opened.tokenizer.encode if flags.chat else opened.tokenizer.encode_from_start
        prompts = [encode(text).tolist() for text in texts]
        for text, ids in zip(texts, prompts):
            if not ids:
                raise UserError(f"the tokenizer makes no token of {text[:40]!r}; give another prompt")
        generate(flags, opened, prompts, world)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends as `head` does
    sys.exit(main(sys.argv[1:]))
