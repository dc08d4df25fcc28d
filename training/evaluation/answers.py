"""Judges answers by an objective, as a validation of training: loss, accuracy, margin of pairs.

Whole weights are judged beside the reference in --reference_logprobs, and so are adapters, which
are read merged.
"""

from training.data.corpus import open_stores
from training.data.loader import count_sequences, validation_batches
from training.data.sources import Reading
from training.data.tokens import TokenStore, join
from training.evaluation.flags import EvaluationFlags
from training.generate.inference import Opened, load, warn_beyond
from training.host.errors import UserError
from training.host.progress import Progress
from training.objectives.decide import decide_aim
from training.objectives.flags import ObjectiveFlags
from training.parallel.world import World
from training.run.train_step import validate


def judge_answers(
    flags: EvaluationFlags, opened: Opened, context_length: int, reasoning: str | None, world: World
) -> dict[str, float]:
    """Returns the loss of the rows of --data, and the objective's metrics, by name.

    Args:
        reasoning: see ChatTemplate.
    """
    objective = ObjectiveFlags(
        objective=flags.objective, beta=flags.beta, reference_logprobs=flags.reference_logprobs
    )
    aim = decide_aim(objective, context_length)
    rows = aim.reader(opened.tokenizer.eos_id)
    # Log-probabilities of something else are refused before minutes of reading.
    stored = aim.read_stored(opened.tokenizer.identity, None, None)
    reading = Reading(reasoning, columns=flags.columns, bad_rows=flags.bad_rows, rows=rows)
    stores = open_stores(flags.data, opened.tokenizer, opened.shape.vocab_size, reading)
    in_memory = [store for store in stores if isinstance(store, TokenStore)]
    aim.complete(in_memory, opened.shape.vocab_size, stored)
    store = join(stores)
    longest = int(store.lengths.max())
    if longest > context_length:
        raise UserError(
            f"the longest document has {longest:,} tokens; "
            f"raise --context_length {context_length:,}"
        )
    warn_beyond(opened.shape, longest)
    model = load(opened, context_length, 0, world, flags.memory_budget)
    total = count_sequences(store, context_length)
    batches = Progress(
        validation_batches(store, context_length, 1), total=total, desc="answers", unit="sequence"
    )
    loss, metrics = validate(model, batches, world, lambda: False, aim.objective)
    return {"loss": loss, **metrics}
