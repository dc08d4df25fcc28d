"""Shows what a trained model writes, at the end of a run."""

import logging

import torch

from training.host.sizes import GIB
from training.memory.placement import products_in_bf16
from training.run.parts import Run

logger = logging.getLogger(__name__)
PROMPT_TOKENS = 64


def log_sample(run: Run) -> None:
    """Log what the model writes after the beginning of a held-out text, until a signal comes. All ranks call this."""
    length = min(PROMPT_TOKENS, int(run.held_out.lengths[0]) - 1)  # without the document's end
    prompt, written = run.held_out.read(0, 0, length), []
    homes = run.optimizer.homes.values()
    if fetched := sum(home.nbytes for home in homes if home.device.type != run.world.device.type) / GIB:
        logger.info("sample: each token fetches %.1f GiB of weights from the host; --sample_tokens 0: none", fetched)
    generator = torch.Generator(run.world.device).manual_seed(run.config.seed)
    ids_BT = torch.from_numpy(prompt).to(run.world.device)[None]
    # Each layer and length would be compiled anew.
    with torch.compiler.set_stance("force_eager"), products_in_bf16(run.model):
        for next_B1 in run.model.next_tokens(ids_BT, run.config.sample_tokens, temperature=0.8, generator=generator):
            written.append(int(next_B1))
            if run.stopping.is_asked():
                break
    before, after = run.tokenizer.decode(prompt.tolist()), run.tokenizer.decode(written)
    logger.info("sample, after a held-out prompt:\n%s<<<the prompt ends here>>>%s", before, after)
