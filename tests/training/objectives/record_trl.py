"""Writes trl.json anew: `python -m tests.training.objectives.record_trl`, with trl 1.16.0, datasets
and kernels.

The methods are TRL's own, called on an object with the attributes that they read. The model is
transformers' Qwen3.
"""

import contextlib
import functools
import json
from collections import defaultdict
from types import SimpleNamespace

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.utils import add_fused_lm_head

from tests.training.objectives.trl_cases import (
    CONFIG,
    CONTEXT_LENGTH,
    KTOS,
    LABELS,
    OBJECTIVES,
    PAIRS,
    RECORDED,
    ROLLOUTS,
    TRUNCATION,
    Row,
    rows,
    set_weights,
)
from training.families.config_json import to_config_json
from training.families.names import name_in_file

OUTPUTS = "log_probs", "entropy", "mean_logits", "is_top1"


def build():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_config_json(CONFIG))).eval()
    theirs = dict(model.named_parameters())
    set_weights({ours: theirs[name_in_file(ours)] for ours in CONFIG.parameters()})
    add_fused_lm_head(model, outputs=OUTPUTS)
    return model


def trainer(**attributes) -> SimpleNamespace:
    """An object with the attributes that TRL's methods read."""
    same = lambda x, **_: x  # noqa: E731
    accelerator = SimpleNamespace(
        gather=same, gather_for_metrics=same, reduce=same, autocast=contextlib.nullcontext,
        num_processes=1,
        device=torch.device("cpu"), is_main_process=False,
    )  # fmt: skip
    metrics = {mode: defaultdict(list) for mode in ("train", "eval")}
    model = SimpleNamespace(training=False)
    return SimpleNamespace(
        accelerator=accelerator, _metrics=metrics, model=model, aux_loss_enabled=False,
        _total_train_tokens=0,
        _tp_size=1, **attributes,
    )  # fmt: skip


def padded(values, left: bool = False) -> torch.Tensor:
    """[rows, longest] of rows of numbers, 0 behind or before them."""
    length = max(map(len, values))
    whole = [
        [*[0] * (length - len(row)), *row] if left else [*row, *[0] * (length - len(row))]
        for row in values
    ]
    return torch.tensor(whole)


def of_pairs(given: list[Row]) -> dict[str, torch.Tensor]:
    """Inputs as TRL's collator makes them: the chosen answers, then the rejected ones."""
    given = given[::2] + given[1::2]
    ids = padded([[*row.prompt.tolist(), *row.completion.tolist()] for row in given])
    masks = [[0] * len(row.prompt) + [1] * len(row.completion) for row in given]
    attention = padded([[1] * len(mask) for mask in masks])
    reference = torch.tensor([float(row.reference.sum()) for row in given])
    chosen, rejected = reference.chunk(2)
    return {
        "input_ids": ids, "attention_mask": attention, "completion_mask": padded(masks),
        "ref_chosen_logps": chosen, "ref_rejected_logps": rejected,
    }  # fmt: skip


def loss_of_pairs(name: str, model, given: list[Row]) -> torch.Tensor:
    """DPOTrainer's loss, CPOTrainer's of SimPO and of smoothed labels, or ORPOTrainer's, each of a
    whole batch."""
    ours, settings = PAIRS[name]
    if settings:
        defaults = {
            "ld_alpha": None, "precompute_ref_logps": True, "f_divergence_type": "reverse_kl",
            "loss_weights": [1.0],
            "label_smoothing": 0.0, "beta": ours.beta, "use_weighting": False,
        }  # fmt: skip
        own = trainer(**defaults | settings)
        return DPOTrainer._compute_loss(own, model, of_pairs(given), False)
    is_orpo = name == "orpo"
    kind = ORPOTrainer if is_orpo else CPOTrainer
    own = trainer(
        beta=ours.beta, alpha=0.0, cpo_alpha=0.0, simpo_gamma=ours.margin,
        label_smoothing=ours.label_smoothing,
        loss_type="simpo" if name == "simpo" else "sigmoid", is_encoder_decoder=False,
        padding_value=0, pad_token_id=0,
        concatenated_inputs=kind.concatenated_inputs, get_batch_logps=kind.get_batch_logps,
    )  # fmt: skip
    own.concatenated_forward = functools.partial(kind.concatenated_forward, own)
    if is_orpo:
        own.odds_ratio_loss = functools.partial(ORPOTrainer.odds_ratio_loss, own)
    else:
        own.cpo_loss = functools.partial(CPOTrainer.cpo_loss, own)
    loss, metrics = kind.get_batch_loss_metrics(own, model, of_pairs_apart(given))
    NLL[name] = float(metrics["nll_loss"])
    return loss


NLL: dict[str, float] = {}  # the likelihood's part of a loss, by TRL's own metrics


def of_pairs_apart(given: list[Row]) -> dict[str, torch.Tensor]:
    """Inputs as the collators of CPO and ORPO make them: chosen and rejected answers under names of
    their own."""
    inputs = {}
    for prefix, answers in (("chosen", given[::2]), ("rejected", given[1::2])):
        ids = [[*row.prompt.tolist(), *row.completion.tolist()] for row in answers]
        labels = [[-100] * len(row.prompt) + row.completion.tolist() for row in answers]
        longest = max(map(len, ids))
        inputs[f"{prefix}_input_ids"] = padded(ids)
        inputs[f"{prefix}_attention_mask"] = padded([[1] * len(row) for row in ids])
        inputs[f"{prefix}_labels"] = torch.tensor(
            [row + [-100] * (longest - len(row)) for row in labels]
        )
    return inputs


def loss_of_labels(name: str, model, given: list[Row]) -> torch.Tensor:
    ours = KTOS[name]
    own = trainer(
        beta=ours.beta, desirable_weight=ours.desirable_weight,
        undesirable_weight=ours.undesirable_weight,
        loss_type="kto", calculate_KL=True, precompute_ref_logps=True,
    )  # fmt: skip
    own._compute_kl_logps = functools.partial(KTOTrainer._compute_kl_logps, own)
    others = [
        row._replace(completion=before.completion)
        for row, before in zip(given, given[-1:] + given[:-1])
    ]
    inputs = {
        "label": torch.tensor(LABELS),
        "ref_logps": torch.tensor([float(row.reference.sum()) for row in given]),
    }
    inputs["ref_KL_logps"] = inputs["ref_logps"].roll(1)
    for prefix, each in (("", given), ("KL_", others)):
        inputs[f"{prefix}input_ids"] = padded(
            [[*row.prompt.tolist(), *row.completion.tolist()] for row in each]
        )
        masks = [[0] * len(row.prompt) + [1] * len(row.completion) for row in each]
        inputs[f"{prefix}completion_mask"] = padded(masks)
        inputs[f"{prefix}attention_mask"] = padded([[1] * len(mask) for mask in masks])
    return KTOTrainer._compute_loss(own, model, inputs, False)


def loss_of_rollouts(name: str, model, given: list[Row]) -> torch.Tensor:
    ours, settings = ROLLOUTS[name]
    is_cispo, has_written = name == "cispo", name == "dapo"
    own = trainer(
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=ours.beta,
        epsilon_low=ours.clip_low,
        epsilon_high=ours.clip_high + is_cispo, use_vllm=has_written,
        vllm_importance_sampling_correction=True,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None),
        max_completion_length=CONTEXT_LENGTH,
        _entropy_bonus_enabled=False, **{"importance_sampling_level": "token", **settings},
    )  # fmt: skip
    own._get_per_token_logps_and_entropies = functools.partial(
        GRPOTrainer._get_per_token_logps_and_entropies, own
    )
    old, written = padded([row.old for row in given]), padded([row.written for row in given])
    inputs = {
        "prompt_ids": padded([row.prompt for row in given], left=True),
        "prompt_mask": padded([[1] * len(row.prompt) for row in given], left=True),
        "completion_ids": padded([row.completion for row in given]),
        "completion_mask": padded([[1] * len(row.completion) for row in given]),
        "tool_mask": padded([row.mask.astype(int) for row in given]),
        "advantages": torch.tensor([row.advantage for row in given]),
        "old_per_token_logps": old, "ref_per_token_logps": padded([row.reference for row in given]),
        "num_items_in_batch": torch.tensor(sum(int(row.mask.sum()) for row in given)),
        "importance_sampling_ratio": (old - written).exp().clamp(max=TRUNCATION),
    }  # fmt: skip
    return GRPOTrainer._compute_loss(own, model, inputs)


def main() -> None:
    loss = loss_of_pairs("orpo", build(), rows())
    found = {"orpo of unlike rows": {"loss": loss.item(), "nll": NLL["orpo"]}}
    for name in OBJECTIVES:
        model, given = build(), rows(name)
        if name in PAIRS:
            loss = loss_of_pairs(name, model, given)
        else:
            loss = (loss_of_labels if name in KTOS else loss_of_rollouts)(name, model, given)
        loss.backward()
        theirs = dict(model.named_parameters())
        gradients = {
            ours: theirs[name_in_file(ours)].grad.flatten().tolist() for ours in CONFIG.parameters()
        }
        gradients = {
            ours: [float(f"{x:.7g}") for x in values] for ours, values in gradients.items()
        }
        found[name] = {"loss": float(f"{loss.item():.8g}"), "gradients": gradients}
        print(name, loss.item())
    lines = (
        f"{json.dumps(name)}: {json.dumps(each, separators=(',', ':'))}"
        for name, each in found.items()
    )
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
