"""Compare this decoder with transformers on released weights in float32: logits, loss and greedy
tokens.

`python -m benchmarks.compare_released SmolLM2-135M/ --tokens 1024`, on a CPU; the text is this
repository's model.py.

transformers forms its rotary angles in float32, this decoder in float64. The last two rows show the
effect: first transformers gets this decoder's tables, then both are compared with this decoder in
float64.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import model as model_file
from benchmarks.common import print_json, print_table
from kernels.head_loss import NextToken
from model import Transformer
from training.checkpoint.weights import load_model_weights
from training.families.config_json import from_config_json

PROMPTS = (
    "def fibonacci(n):\n",
    "The three laws of thermodynamics are",
    "import argparse\nparser = ",
)
NEW_TOKENS = 64


@torch.no_grad()
def compare(folder: Path, num_tokens: int) -> tuple[list[list[str]], float]:
    """Returns rows of (compared quantity, largest difference), and the difference of the losses."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    ours = Transformer(from_config_json(json.loads((folder / "config.json").read_text())))
    ours.load_state_dict(dict(load_model_weights(folder, ours.declared)))
    ids = torch.tensor([tokenizer(Path(model_file.__file__).read_text())["input_ids"][:num_tokens]])
    their_result = theirs(ids, labels=ids)
    our_result = ours(ids, loss=NextToken.from_labels(ids), return_logits=True)
    loss_difference = float(abs(their_result.loss - our_result.loss))
    rows = [
        ["tokens, largest logit", f"{ids.shape[1]:,}, {our_result.logits.abs().max():.1f}"],
        ["loss, transformers'", f"{their_result.loss:.6f}"],
        ["loss, difference", f"{loss_difference:.1e}"],
        ["logits, difference", difference(their_result.logits, our_result.logits)],
    ]
    for prompt in PROMPTS:
        start = tokenizer(prompt, return_tensors="pt")["input_ids"]
        written = theirs.generate(
            start, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        same = torch.equal(written, ours.generate(start, NEW_TOKENS))
        rows.append(
            [f"{NEW_TOKENS} greedy tokens after {prompt!r}", "the same" if same else "others"]
        )
    cos, sin = (
        torch.cat([table[: ids.shape[1]]] * 2, -1)[None]
        for table in ours.rotary.tables(ids.shape[1], ids.device)
    )
    theirs.base_model.rotary_emb.forward = lambda x, position_ids: (cos, sin)
    rows.append(
        [
            "logits, difference with the same cos and sin",
            difference(theirs(ids).logits, our_result.logits),
        ]
    )
    exact = ours.double()(ids, return_logits=True).logits
    from_exact = [difference(result.logits, exact) for result in (their_result, our_result)]
    rows.append(["logits, transformers' and ours from float64", " and ".join(from_exact)])
    return rows, loss_difference


def difference(first: Tensor, second: Tensor) -> str:
    return f"{(first - second).abs().max():.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=1024)
    arguments = parser.parse_args()
    rows, loss_difference = compare(arguments.folder, arguments.tokens)
    print_table(str(arguments.folder), ["", "found"], rows)
    print_json("compare_released", torch.device("cpu"), loss_difference=loss_difference)


if __name__ == "__main__":
    main()
