"""Trains a small mixture of experts from scratch by train.py and by transformers, and compares the
losses.

`.venv/bin/python -m benchmarks.experiments.mixture_from_scratch OUT`, in a minute per seed on an
idle CPU

For each seed both begin with transformers' random weights, and read the same batches of bytes of
this repository's pages. Both clip gradients, decay the matrices' weights, and add the auxiliary
loss. The last losses are of a page that is held out, by transformers for both: it opens what
train.py has saved. The losses should differ less than seeds do. The report is of all seeds that OUT
has.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.common import print_json, print_table
from benchmarks.experiments.learn_preferences import exits, run_train
from training.data.loader import Batch, PackedLoader

ROOT = Path(__file__).parents[2]
HELD_OUT = "docs/memory.md"
SHAPE = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True, "output_router_logits": True, "router_aux_loss_coef": 0.01,
    "max_position_embeddings": 4096,
}  # fmt: skip
PEAK, WARMUP, FINAL, DECAY, CLIP = 2e-3, 20, 0.1, 0.1, 1.0
BETAS, EPSILON = (0.9, 0.95), 1e-8
NAMES = "loss", "auxiliary_loss", "gradient_norm", "learning_rate"  # in metrics.jsonl
AVERAGED = 20  # last steps, whose mean loss is compared


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--context_length", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=2)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    pages = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
    corpus, held_out = arguments.out / "corpus.txt", ROOT / HELD_OUT
    corpus.write_text("\n".join(page.read_text() for page in pages if page != held_out))
    for seed in arguments.seeds:
        found = compare(arguments, seed, corpus, held_out.read_bytes())
        (arguments.out / f"seed_{seed}.json").write_text(json.dumps(found))
    report(
        arguments,
        [json.loads(file.read_text()) for file in sorted(arguments.out.glob("seed_*.json"))],
    )


def compare(
    arguments: argparse.Namespace, seed: int, corpus: Path, held_out: bytes
) -> dict[str, dict[str, list]]:
    """Returns for both what each step has by `NAMES`, and the loss of the page that is held out."""
    start, run = arguments.out / f"start_{seed}", arguments.out / f"run_{seed}"
    torch.manual_seed(seed)
    theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, attn_implementation="eager"))
    theirs.save_pretrained(start)
    batches = list[Batch]()
    next_step = PackedLoader.next_step

    def recorded(loader: PackedLoader, micro_batches: int = 1) -> list[Batch]:
        batches.extend(found := next_step(loader, micro_batches))
        return found

    flags = {
        "init_from": start, "data": corpus, "output_dir": run, "seed": seed,
        "max_steps": arguments.steps,
        "context_length": arguments.context_length, "batch_size": arguments.batch_size,
        "learning_rate": PEAK,
        "warmup_steps": WARMUP, "final_learning_rate_ratio": FINAL, "weight_decay": DECAY,
        "max_grad_norm": CLIP,
        "device": "cpu", "save": "model", "validation_sequences": 0, "sample_tokens": 0,
    }  # fmt: skip
    with mock.patch.object(PackedLoader, "next_step", recorded):
        exits(
            run_train([word for name, value in flags.items() for word in (f"--{name}", str(value))])
        )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    by_transformers = train_by_transformers(theirs, batches, arguments.steps)
    ours = Qwen3MoeForCausalLM.from_pretrained(
        run / f"step_{arguments.steps:08d}", dtype=torch.float32
    )
    return {
        run: {name: [step[name] for step in steps] for name in NAMES}
        | {"held_out": [held_out_loss(model, held_out, arguments.context_length)]}
        for run, steps, model in (
            ("fathom", lines, ours),
            ("transformers", by_transformers, theirs),
        )
    }


def train_by_transformers(
    model: PreTrainedModel, batches: list[Batch], steps: int
) -> list[dict[str, float]]:
    """Returns what train.py writes of each step."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=BETAS, eps=EPSILON)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_of(step, steps))
    found = []
    for batch in batches[:steps]:
        ids, positions = batch.input_ids, torch.arange(batch.input_ids.shape[1])
        assert (batch.documents.positions_BT == positions).all(), "a row has several documents"
        output = model(ids)
        loss = F.cross_entropy(
            output.logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100
        )
        auxiliary = model.router_aux_loss_coef * output.aux_loss
        (loss + auxiliary).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        values = loss.item() + auxiliary.item(), auxiliary.item(), norm.item(), rate
        found.append(dict(zip(NAMES, values, strict=True)))
    return found


def rate_of(step: int, steps: int) -> float:
    """Returns the share of the peak that a step has, counted from 0: linear, then a cosine."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    progress = (step - WARMUP) / (steps - 1 - WARMUP)
    return FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, text: bytes, context_length: int) -> float:
    """Returns the mean loss of a text's bytes, without the auxiliary loss."""
    rows = torch.tensor([*text[: len(text) // context_length * context_length]]).view(
        -1, context_length
    )
    logits = model(rows).logits[:, :-1]
    return float(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


def report(arguments: argparse.Namespace, found: list[dict[str, dict[str, list]]]) -> None:
    steps = arguments.steps
    shown = [step for step in (1, 10, 50, 100, 150, 200) if step < steps] + [steps]
    table = [
        [seed, run, *(f"{values['loss'][step - 1]:.4f}" for step in shown), f"{last(values):.4f}",
         f"{values['held_out'][0]:.4f}"]
        for seed, both in enumerate(found) for run, values in both.items()
    ]  # fmt: skip
    title = f"{steps} steps of a mixture from scratch, with the auxiliary loss"
    print_table(
        title,
        ["seed", "by", *(f"step {step}" for step in shown), f"last {AVERAGED}", "held out"],
        table,
    )
    largest = {name: largest_difference(found, name) for name in found[0]["fathom"]}
    result = {
        "largest_differences_at_one_seed": largest,
        "largest_difference_of_losses_in_50_steps": largest_difference(found, "loss", 50),
        "largest_difference_of_last_losses": max(
            abs(last(each["fathom"]) - last(each["transformers"])) for each in found
        ),
        "deviation_of_seeds": {
            run: {
                "last_losses": statistics.stdev(last(each[run]) for each in found),
                "held_out": statistics.stdev(each[run]["held_out"][0] for each in found),
            }
            for run in (found[0] if len(found) > 1 else ())
        },
    }
    settings = vars(arguments) | {"out": "", "seeds": len(found)}
    print_json("mixture_from_scratch", torch.device("cpu"), **settings, **result)


def largest_difference(
    found: list[dict[str, dict[str, list]]], name: str, steps: int | None = None
) -> float:
    """Returns the largest difference between both in the first steps at one seed."""
    pairs = [
        zip(each["fathom"][name][:steps], each["transformers"][name][:steps], strict=True)
        for each in found
    ]
    return max(abs(a - b) for pair in pairs for a, b in pair)


def last(values: dict[str, list[float]]) -> float:
    return statistics.mean(values["loss"][-AVERAGED:])


if __name__ == "__main__":
    main()
