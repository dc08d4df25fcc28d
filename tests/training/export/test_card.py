"""The model card of exported weights."""

import io
import json
import os
import shutil
import sys

import train
from tests.runs import arguments, metrics, weights_of_another_shape
from training.export.__main__ import main as export

RELEASED = "---\nlicense: other\nlicense_name: free\ntags: [x]\n---\n# Base\nlicense: none\n"


def test_card_says_what_a_run_has_done_and_leaves_the_users_own_alone(tmp_path):
    from huggingface_hub import ModelCard

    base = weights_of_another_shape(
        tmp_path / "models--lab--base" / "snapshots", num_hidden_layers=1
    )
    (base / "README.md").write_text(RELEASED, newline="\r\n")
    (tmp_path / "notes.txt").write_text("a text of a few words\n" * 200)
    run = tmp_path / "run"
    words = arguments(
        str(tmp_path / "notes.txt"),
        run,
        "--init_from",
        str(base),
        "--learning_rate",
        "1e-3",
        steps=3,
    )
    assert train.main([*words, "--tokenizer", "bytes", "--validation_interval", "2"]) == 0
    step, first, second = run / "step_00000003", tmp_path / "mine", tmp_path / "second"
    assert export([str(step), str(first)]) == 0
    card = ModelCard.load(first / "README.md")
    assert (card.data.license, card.data.license_name, card.data.base_model) == (
        "other",
        "free",
        "lab/base",
    )
    assert card.data.library_name == "transformers" and "fathom" in card.data.tags
    rows = metrics(run)
    for row, label in ((rows[0], "1"), (rows[2], "3, mean of 1")):
        assert f"| {label} | {row['loss']:.4f} |" in card.text
    for row in rows[1:]:
        assert f"| {row['step']}, validation | {row['validation_loss']:.4f} |" in card.text
    for part in ("# mine\n", "`notes.txt`. Held out: 2.00%", "every parameter from `lab/base`, for "
                                                             "3 steps",
                 "| learning_rate | 0.001 |", "nats per byte"):  # fmt: skip
        assert part in card.text
    assert str(tmp_path) not in card.content
    assert "| context_length |" in card.text and "| lora_" not in card.text

    assert "is the mean over at most" in card.text and "extended" not in card.text
    content = json.loads(kept := (step / "trainer.json").read_text())
    (step / "manifest.json").unlink()
    own = {"objective": "dpo", "data": ["one/b.jsonl", "/two/b.jsonl"], "data_weights": "3,1"}
    content["trainer_state"]["settings"] |= own | {"validation_sequences": 0}
    content["trainer_state"]["validation_loss"] = None
    (step / "trainer.json").write_text(json.dumps(content))
    losses = [{"step": row["step"], "loss": row["loss"]} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in losses))
    assert export([str(step), str(tmp_path / "dpo"), "--rope_scaling", "linear:2"]) == 0
    text = (tmp_path / "dpo" / "README.md").read_text()
    for part in (
        "| after step | dpo |",
        "`b.jsonl` (1 of 2), `b.jsonl` (2 of 2)",
        "| data_weights | 3,1 |",
        "by linear:2 afterwards",
    ):
        assert part in text
    assert "alidation" not in text.split("## Settings")[0] and "nats per" not in text

    again = tmp_path / "again"
    assert export([str(tmp_path / "dpo"), str(again), "--dtype", "fp16"]) == 0
    assert (again / "README.md").read_text() == text.replace("# dpo\n", "# again\n").replace(
        ", bfloat16.", ", float16."
    )
    assert export([str(again), str(tmp_path / "third"), "--rope_scaling", "linear:3"]) == 0
    text = (tmp_path / "third/README.md").read_text()
    assert (
        "# third\n" in text
        and text.count("extended by") == text.count("by linear:3 afterwards") == 1
    )

    (step / "trainer.json").write_text(kept)
    (step / "README.md").write_text("# My own\n")
    assert export([str(step), str(second)]) == 0
    assert (second / "README.md").read_text() == "# My own\n"

    (step / "README.md").write_text(
        "---\nlibrary_name: peft\n---\n"
    )  # peft's, which merged weights are not
    assert export([str(step), str(tmp_path / "peft")]) == 0
    assert "library_name: transformers" in (tmp_path / "peft" / "README.md").read_text()

    (step / "README.md").unlink()
    shutil.move(step, moved := tmp_path / "moved")  # away from metrics.jsonl
    lossless = json.loads(kept)
    del lossless["trainer_state"]["validation_loss"]
    last = f"| 3 or before, validation | {rows[2]['validation_loss']:.4f} |"
    for number, (trainer, card, has_loss) in enumerate(
        ((kept, True, True), (json.dumps(lossless), True, False), ("{}", False, False))
    ):
        (moved / "trainer.json").write_text(trainer)
        assert export([str(moved), str(target := tmp_path / f"without {number}")]) == 0
        assert (target / "README.md").is_file() == card
        assert not card or (last in (target / "README.md").read_text()) == has_loss


def test_names_that_are_no_utf_8_and_markdown_in_names_are_shown(tmp_path, monkeypatch):
    """Such a name is bytes; a card is UTF-8, and a name is one line of it."""
    alice = tmp_path / "alice"
    sources = [alice / os.fsdecode(b"da\xffta"), alice / "a`b\nc"]
    for number, folder in enumerate(sources):
        folder.mkdir(parents=True)
        (folder / os.fsdecode(b"t\xfe.txt")).write_text(f"a text of {number} words\n" * 100)
    run = tmp_path / os.fsdecode(b"r\xf0")
    first, *others = arguments(str(sources[0]), run, "--validation_sequences", "0", steps=1)
    assert train.main([first, str(sources[1]), *others]) == 0
    target, again = tmp_path / os.fsdecode(b"mine\xff"), tmp_path / os.fsdecode(b"again\xfe")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert export([str(run / "step_00000001"), str(target)]) == 0
    assert export([str(target), str(again)]) == 0
    written = (target / "README.md").read_text()
    for part in ("# mine\\udcff\n", "`a'b\\nc`, `da\\udcffta`. Held out"):
        assert part in written
    assert "alice" not in written and "# again\\udcfe\n" in (again / "README.md").read_text()
