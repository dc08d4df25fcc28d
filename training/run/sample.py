"""Shows what a trained model writes, at the end of a run."""

import logging

import numpy as np
import torch

from training.data.chat import stop_ids
from training.host.sizes import GIB
from training.memory.placement import products_in_bf16
from training.run.parts import Run

logger = logging.getLogger(__name__)
TEXT_TOKENS = 64  # of a text, that the model goes on from
PROMPT_TOKENS = 1024  # at most, the last of a prompt: a chat may be as long as a sequence


def log_sample(run: Run) -> None:
    """Log what the model writes for a held-out document, until its end or a signal. All ranks call this.

    A text is continued from its beginning. A sample or a chat is from its first target, as an assistant's turn.
    """
    ids, masked = run.held_out.read_masked(0, 0, int(run.held_out.lengths[0]))
    start = min(TEXT_TOKENS, len(ids) - 1)  # without the document's end
    if is_sample := bool(masked.any()):
        start = 1 + int(np.argmin(masked[1:]))
    prompt, written = ids[max(0, start - PROMPT_TOKENS) : start], list[int]()
    stops = stop_ids(run.recipe.tokenizer, is_sample)
    homes = run.optimizer.homes.values()
    if fetched := sum(home.nbytes for home in homes if home.device.type != run.world.device.type) / GIB:
        logger.info("sample: each token fetches %.1f GiB of weights from the host; --sample_tokens 0: none", fetched)
    generator = torch.Generator(run.world.device).manual_seed(run.config.seed)
    ids_BT = torch.from_numpy(prompt).to(run.world.device)[None]
    # Each layer and length would be compiled anew.
    with torch.compiler.set_stance("force_eager"), products_in_bf16(run.model):
        for next_B1 in run.model.next_tokens(ids_BT, run.config.sample_tokens, temperature=0.8, generator=generator):
            if any(run.world.sum(int(next_B1) in stops)):
                break
            written.append(int(next_B1))
            if run.stopping.is_asked():
                break
    before, after = (run.recipe.tokenizer.decode(part, with_special=is_sample) for part in (prompt.tolist(), written))
    cut = f"the last {len(prompt):,} tokens of " if len(prompt) < start else ""
    logger.info("sample, after %sa held-out prompt:\n%s<<<the prompt ends here>>>%s", cut, before, after)
