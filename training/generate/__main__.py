"""Write with a trained model: `python -m training.generate FOLDER "Once upon a time"`.

The prompt is an argument, files (each is a prompt) or standard input. Greedy unless a temperature
is given.
"""

import sys

from training.flags import answer_early
from training.generate.flags import GenerateFlags, read_generate_flags

if __name__ == "__main__":
    answer_early(read_generate_flags)

import logging
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from training.checkpoint.weights import shape_of_weights
from training.data.chat import ChatTemplate
from training.data.tokenizer import check_ids
from training.generate.inference import (
    Opened,
    load,
    mending_out_of_memory,
    open_folder,
    warn_beyond,
    write,
)
from training.host.errors import UserError
from training.host.files import read_file
from training.host.processes import command
from training.parallel.world import World, join_world


def read_prompts(flags: GenerateFlags) -> list[str]:
    """Returns the argument, the files' content, or standard input.

    Raises UserError for an empty text.
    """
    if flags.prompt is not None:
        raw = {"the prompt": os.fsencode(flags.prompt)}
    elif flags.file:
        raw = {str(file): read_file(file, "give --file a text file") for file in flags.file}
    else:
        try:
            raw = {"standard input": sys.stdin.buffer.read() if sys.stdin else b""}  # None: closed
        except OSError as error:
            raise UserError(
                f"cannot read standard input: {error}; give a prompt or --file"
            ) from None
    if empty := [where for where, content in raw.items() if not content]:
        raise UserError(f"{empty[0]} is empty; give at least a character to go on from")
    return [_decode(content, where) for where, content in raw.items()]


def _decode(raw: bytes, where: str) -> str:
    try:
        # a mark of Windows' editors, which no model is trained on
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where} is not UTF-8: byte {raw[error.start]:#04x} at offset {error.start}"
        ) from None


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
    """Prints what the model writes after each prompt, token by token.

    The texts of several files stand under the files' names.
    """
    longest = max(map(len, prompts))
    warn_beyond(opened.shape, longest + flags.max_new_tokens)
    model = load(opened, longest, longest + flags.max_new_tokens, world, flags.memory_budget)
    for number, ids in enumerate(prompts):
        if len(prompts) > 1:
            print(f"{'' if number == 0 else chr(10)}==> {flags.file[number]} <==")
        tokens = write(
            model,
            ids,
            flags.max_new_tokens,
            opened.stop_ids,
            temperature=flags.temperature,
            top_p=flags.top_p or 1.0,
            generator=torch.Generator(world.device).manual_seed(flags.seed or 0),
        )
        for text in decoded(tokens, opened.tokenizer):
            print(text, end="", flush=True)
        print()


@command
def main(argv: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    flags = read_generate_flags(argv)
    if flags.system is not None:
        _decode(os.fsencode(flags.system), "--system")
    # refuses a folder without a model, before standard input is waited for
    shape_of_weights(flags.checkpoint)
    texts = read_prompts(flags)
    with join_world(flags.device) as world, mending_out_of_memory():
        opened = open_folder(flags, world)
        if flags.chat:
            template = ChatTemplate(opened.tokenizer)
            before = [] if flags.system is None else [{"role": "system", "content": flags.system}]
            texts = [
                template.prompt([*before, {"role": "user", "content": text}]) for text in texts
            ]
            opened = replace(opened, stop_ids=opened.stop_ids | template.end_ids)
        # A chat's template writes what begins a text.
        encode = opened.tokenizer.encode if flags.chat else opened.tokenizer.encode_from_start
        prompts = [encode(text).tolist() for text in texts]
        for text, ids in zip(texts, prompts):
            if not ids:
                raise UserError(
                    f"the tokenizer makes no token of {text[:40]!r}; give another prompt"
                )
            check_ids(max(ids), opened.tokenizer, opened.shape.vocab_size, f"prompt {text[:40]!r}")
        generate(flags, opened, prompts, world)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends as `head` does
    sys.exit(main(sys.argv[1:]))
