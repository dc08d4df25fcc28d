"""Flags of objectives, and which of them have no effect.

No torch is imported here: --help is to be quick.
"""

from dataclasses import dataclass

from training.flags import SMALLEST, Rule, flag

PAIR_OBJECTIVES = ("dpo", "ipo", "simpo", "orpo")
CLIPPED_OBJECTIVES = ("grpo", "dapo", "dr_grpo", "gspo")
ROLLOUT_OBJECTIVES = (*CLIPPED_OBJECTIVES, "cispo", "importance_sampling")
REFERENCE_OBJECTIVES = ("dpo", "ipo", "kto")  # whatever their beta is
OBJECTIVES = ("next_token", "weighted", "distill", *PAIR_OBJECTIVES, "kto", *ROLLOUT_OBJECTIVES)


@dataclass
class ObjectiveFlags:
    """What a step minimises."""

    objective: str = flag(
        "next_token",
        "what is minimised: the loss of next tokens, with weights of rows, or of pairs or rollouts",
        OBJECTIVES,
        group="objective",
    )
    beta: float | None = flag(
        None,
        "weight of the reference, in rollouts of the KL to it; default: 0.1, simpo 2.0, rollouts 0",
        least=0.0,
        most=1e6,
    )
    label_smoothing: float = flag(
        0.0, "dpo, simpo: share of pairs that are taken to be swapped", least=0.0, most=0.5
    )
    nll_weight: float = flag(
        0.0, "dpo, ipo, simpo: weight of the chosen answers' mean loss", least=0.0, most=1e6
    )
    desirable_weight: float = flag(
        1.0, "kto: weight of the loss of desirable answers", least=0.0, most=1e6
    )
    undesirable_weight: float = flag(
        1.0, "kto: weight of the loss of the others", least=0.0, most=1e6
    )
    margin: float | None = flag(
        None, "simpo: rewards' difference that is asked for; default: 0.5", least=0.0, most=1e6
    )
    clip_low: float | None = flag(
        None,
        "rollouts: ratios are cut below 1 less this; default: 0.2, gspo 3e-4",
        least=0.0,
        most=1.0,
    )
    clip_high: float | None = flag(
        None,
        "rollouts: ratios are cut above 1 and this; default: 0.2, dapo 0.28, gspo 4e-4, cispo 4",
        least=0.0,
        most=1e6,
    )
    reference_logprobs: str | None = flag(
        None, "log-probabilities of a reference, made by training.logprobs"
    )
    old_logprobs: str | None = flag(
        None,
        "rollouts: the old policy's, made by training.logprobs; default: the rows' old_logprobs",
    )
    teacher_logprobs: str | None = flag(
        None, "distill: a teacher's, made by training.logprobs with --top_k"
    )
    truncation: float | None = flag(
        None,
        "with old_logprobs: most weight of a token for old over the rows' own; "
        "default: rows' are not read",
        least=SMALLEST,
        most=1e6,
    )


def _is_beside(names: tuple[str, ...]):
    return lambda s: s.objective not in names


def _lacks_teacher(s) -> bool:
    return s.objective == "distill" and not s.teacher_logprobs and not s.show_batch


def _lacks_reference(s) -> bool:
    has_reference = s.lora or s.reference_logprobs
    return s.objective in REFERENCE_OBJECTIVES and not has_reference and not s.show_batch


def _reads_no_reference(s) -> bool:
    return s.objective not in REFERENCE_OBJECTIVES and not (
        s.objective in ROLLOUT_OBJECTIVES and s.beta
    )


CHUNKED_DISTILL = Rule(
    "loss_impl",
    "with objective distill, whose loss is always chunked; drop it",
    lambda s: s.objective == "distill",
)
# Rules of a run whose start is known.
RULES = (
    Rule(
        "objective",
        "without data; give rows that it reads",
        lambda s: s.objective != "next_token" and not s.data,
    ),
    Rule(
        "beta",
        "with objective {objective}; drop it",
        _is_beside((*PAIR_OBJECTIVES, "kto", *ROLLOUT_OBJECTIVES)),
    ),
    Rule(
        "label_smoothing",
        "with objective {objective}; drop it, or give dpo or simpo",
        _is_beside(("dpo", "simpo")),
    ),
    Rule(
        "nll_weight",
        "with objective {objective}; drop it, or give dpo, ipo or simpo",
        _is_beside(("dpo", "ipo", "simpo")),
    ),
    Rule(
        "desirable_weight undesirable_weight",
        "with objective {objective}; drop it, or give kto",
        _is_beside(("kto",)),
    ),
    Rule("margin", "with objective {objective}; drop it, or give simpo", _is_beside(("simpo",))),
    Rule("clip_low", "with objective {objective}; drop it", _is_beside(CLIPPED_OBJECTIVES)),
    Rule(
        "clip_high",
        "with objective {objective}; drop it",
        _is_beside((*CLIPPED_OBJECTIVES, "cispo")),
    ),
    Rule(
        "teacher_logprobs",
        "with objective {objective}; drop it, or give distill",
        _is_beside(("distill",)),
    ),
    Rule(
        "",
        "objective distill needs a teacher's log-probabilities: make them by {program} -m "
        "training.logprobs, with "
        "--top_k 16, and give --teacher_logprobs",
        _lacks_teacher,
    ),
    Rule(
        "",
        "objective distill with tensor_parallel_size is not supported: ranks have parts of "
        "the head; "
        "give context_parallel_size",
        lambda s: s.objective == "distill" and s.tensor_parallel_size > 1,
    ),
    Rule("old_logprobs", "with objective {objective}; drop it", _is_beside(ROLLOUT_OBJECTIVES)),
    Rule(
        "truncation",
        "without old_logprobs, to which rows' own are compared; drop it, or give those",
        lambda s: s.old_logprobs is None,
    ),
    Rule(
        "reference_logprobs",
        "with objective {objective} and beta {beta}, which read no reference; drop it",
        _reads_no_reference,
    ),
    Rule(
        "",
        "objective {objective} needs a beta above 0",
        lambda s: s.beta == 0 and s.objective in (*PAIR_OBJECTIVES, "kto"),
    ),
    Rule(
        "packing",
        "as concatenate with objective {objective}, whose answers are not cut; drop it",
        lambda s: s.packing == "concatenate" and s.objective != "next_token",
    ),
    Rule(
        "overlong",
        "as split with objective {objective}, whose answers are not cut; drop it, or give drop",
        lambda s: s.overlong == "split" and s.objective != "next_token",
    ),
    Rule(
        "",
        "objective {objective} needs log-probabilities of a reference: make them by {program} "
        "-m "
        "training.logprobs, and give --reference_logprobs; or train adapters with lora, whose "
        "base is the reference",
        _lacks_reference,
    ),
    CHUNKED_DISTILL,
)
