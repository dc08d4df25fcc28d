"""Refusals of a run at its start, in one line and before it takes time."""

import hashlib
import json

import pytest

import train
from tests.runs import (
    GIB,
    SPARSE,
    arguments,
    only_resume,
    parse,
    trainer_state,
    weights_of_another_shape,
)
from tests.training.data.test_tokenizer import write_tokenizer
from training.run import decide


def test_refusals_come_before_the_data(corpus, tmp_path, monkeypatch, capsys):
    assert train.main(arguments(corpus, tmp_path / "run", steps=1)) == 0
    assert train.main(arguments(corpus, tmp_path / "weights", "--save", "model", steps=1)) == 0
    monkeypatch.setattr(
        "training.data.decide.load_corpus", lambda *_, **__: pytest.fail("the data were read")
    )
    monkeypatch.setattr(
        decide, "verify_checkpoint", lambda *_: pytest.fail("checksums were computed")
    )
    start = weights_of_another_shape(tmp_path / "start")
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps({**config, "intermediate_size": 300}))
    for folder, extra, message in (
        ("run", [], "is already there"),
        (
            "run",
            ["--resume", "--max_steps", "1", "--warmup_steps", "1"],
            "is at step 1, max_steps is 1; raise max_st",
        ),
        ("run", ["--resume", "--context_length", "32"], "context_length 64, this run 32"),
        ("run", ["--resume", "--model_size", "0.6B"], "of another size"),
        ("weights", ["--resume"], "has no optimizer state"),
        ("new", ["--resume"], "no checkpoint in"),
        ("new", ["--init_from", str(start)], "of another size"),
    ):
        assert train.main([*arguments(corpus, tmp_path / folder, steps=2), *extra]) == 1
        assert message in capsys.readouterr().err


def test_a_run_in_output_dir_hides_no_other_fault(corpus, tmp_path, capsys):
    """From the second run on the usual output_dir is taken, and what is wrong beside that is told
    first."""
    run = tmp_path / "run"
    assert train.main(arguments(corpus, run, steps=1)) == 0
    for extra, message in (
        (["--init_from", "nosuch"], "nosuch does not exist; give a checkpoint"),
        (["--data", "nosuch"], "data path nosuch does not exist; give --data"),
        (
            ["--validation_data", "nosuch"],
            "data path nosuch does not exist; give --validation_data",
        ),
        (["--tokenizer", "nosuch"], "cannot read nosuch: No such file"),
        (["--memory_budget", "24GB"], "memory_budget has no effect on a CPU"),
        (["--attention_backend", "flash"], "attention backend 'flash' needs a CUDA device"),
        (["--objective", "dpo", "--reference_logprobs", "nosuch"], "nosuch has no logprobs.json"),
        (["--lora", "4"], "without init_from, which it adapts"),
        (
            [],
            "run/step_00000001 is already there: --resume goes on from it, another --output_dir "
            "starts afresh",
        ),
    ):
        assert train.main([*arguments(corpus, run), *extra]) == 1
        assert message in capsys.readouterr().err, extra


def test_a_folder_that_is_not_for_a_run_is_refused(corpus, tmp_path, capsys):
    """The run would replace its config.json."""
    run = tmp_path / "run"
    assert train.main(arguments(corpus, run, steps=1)) == 0
    (run / "step_00000001" / "model.safetensors").rename(tmp_path / "model.safetensors")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "config.json").write_text('{"theme": "dark"}')
    for folder in (run / "step_00000001", tmp_path, tmp_path / "app"):
        before = {file: file.read_bytes() for file in folder.glob("*.json")}
        for flags in ([], ["--resume", "auto"], ["--save", "none"]):
            assert train.main(arguments(corpus, folder, *flags)) == 1
            message = f"output_dir {folder} holds weights, or a config.json that is not of a run"
            assert message in capsys.readouterr().err
        assert before == {file: file.read_bytes() for file in folder.glob("*.json")}
    (run / "config.json").write_text('{"cut')  # by a kill
    (run / "step_00000001").rename(tmp_path / "elsewhere")
    assert train.main(arguments(corpus, run, steps=1)) == 0


def test_what_a_run_writes_is_not_its_data(corpus, tmp_path, capsys):
    assert train.main(arguments(str(tmp_path), tmp_path / "run")) == 1
    assert (
        f"output_dir {tmp_path}/run lies in data {tmp_path}, which would be read"
        in capsys.readouterr().err
    )
    assert train.main(arguments(corpus, tmp_path / "run", "--log_file", corpus)) == 1
    assert (
        f"log_file {corpus} lies in data {corpus}, which would be read" in capsys.readouterr().err
    )


def test_released_weights_want_their_tokenizer(released, corpus, tmp_path, capsys):
    command = ["--init_from", str(released)]
    assert train.main([*arguments(corpus, tmp_path / "run"), *command]) == 1
    assert (
        "give --tokenizer FILE, the one that its weights were trained with, or"
        in capsys.readouterr().err
    )
    assert (
        train.main(
            [*arguments(corpus, tmp_path / "bytes", steps=1), *command, "--tokenizer", "bytes"]
        )
        == 0
    )
    assert trainer_state(tmp_path / "bytes", 1)["tokenizer"] == "bytes"
    write_tokenizer(released / "tokenizer.json")
    assert train.main([*arguments(corpus, tmp_path / "file", steps=1), *command]) == 0
    state = trainer_state(tmp_path / "file", 1)
    assert (
        state["tokenizer"] == hashlib.sha256((released / "tokenizer.json").read_bytes()).hexdigest()
    )
    assert (
        train.main(only_resume(tmp_path / "file", "--max_steps", "2")) == 0
    )  # tokenizer.json is found again
    folder = arguments(corpus, tmp_path / "folder", *command, "--tokenizer", str(released), steps=1)
    assert (
        train.main(folder) == 0
        and (tmp_path / "folder" / "step_00000001" / "tokenizer.json").is_file()
    )


@pytest.mark.parametrize(("settings", "message"), [
    ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0}, "window must be from 1 to"),
    ({"rope_scaling": {"type": "longrope"}, "rope_parameters": None}, "rope_type 'longrope'"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling beside other "
                                                        "rope_parameters"),
])  # fmt: skip
def test_released_weights_that_this_decoder_cannot_compute(
    settings, message, released, corpus, tmp_path, capsys
):
    path = released / "config.json"
    config = {**json.loads(path.read_text()), "layer_types": None, **settings}
    path.write_text(json.dumps(config))
    command = arguments(
        corpus, tmp_path / "run", "--init_from", str(released), "--tokenizer", "bytes"
    )
    assert train.main(command) == 1
    error = capsys.readouterr().err.strip()
    assert (
        error.startswith(f"error: cannot take {path}: ") and message in error and "\n" not in error
    )


BAD_FLAGS = [
    (["--context_lenght", "64"], "unknown flag --context_lenght; did you mean --context_length?"),
    (
        ["--pipeline_parallel_size", "2"],
        "there is no --pipeline_parallel_size: the last stage would hold the loss",
    ),
    (["--context_length", "0"], "context_length must be between 2 and 134217728, got 0"),
    (["--seed", "9" * 400], "seed must be between 0 and 2147483647, got 999"),
    (["--max_grad_norm", "inf"], "max_grad_norm must be between 1e-12 and 1000000000.0, got inf"),
    (["--weight_decay", "nan"], "weight_decay must be between 0.0 and 10.0, got nan"),
    (
        ["--final_learning_rate_ratio", "1e9"],
        "final_learning_rate_ratio must be between 0.0 and 1.0, got 1000000000.0",
    ),
    (
        ["--checkpoint_interval", "often"],
        "checkpoint_interval must be a number of steps, or of minutes as 30min",
    ),
    (["--keep_checkpoints", "0"], "keep_checkpoints must be between 1 and"),
    (["--context_length", "many"], "context_length: 'many' is not a whole number"),
    (["--model_size", "5B"], "model_size: '5B' is not one of tiny, 0.6B, "),
    (["--learning_rate", "-1"], "learning_rate must be between 1e-12 and 1.0, got -1.0"),
    (["--learning_rate", "nan"], "learning_rate must be between 1e-12 and 1.0, got nan"),
    (["--data", "no/such/file.txt"], "no/such/file.txt"),
    (
        ["--attention_type", "nsa", "--dense_below", "99"],
        "dense_below has no effect with attention_type nsa; drop",
    ),
    (
        ["--attention_type", "nsa", "--selected_blocks", "3"],
        "selected_blocks must be at least 4, got 3: nsa forces 3",
    ),
    (["--selected_blocks", "16"], "selected_blocks has no effect with attention_type full"),
    (["--selected_blocks=-1", *SPARSE], "selected_blocks must be a number, 0 or more, or"),
    (
        ["--selected_blocks", "auto:16", *SPARSE],
        "selected_blocks must be a number, 0 or more, or look like",
    ),
    (
        ["--selected_blocks", "8x2,4x1", *SPARSE],
        "selected_blocks 8x2,4x1 names 3 layers, the model has 4",
    ),
    (
        ["--selected_blocks_start", "16"],
        "there is no --selected_blocks_start: chosen blocks are as",
    ),
    (["--attention_type", "sparse"], "dense_below 8192 attend to everything; raise the one"),
    (["--attention_backend", "cudnn"], "needs a CUDA device"),
    (
        ["--context_parallel_size", "0"],
        "context_parallel_size must be between 1 and 1048576, got 0",
    ),
    (
        ["--context_parallel_size", "2"],
        "context_parallel_size 2 x tensor_parallel_size 1 must divide the number of",
    ),
    (["--memory_budget", "24GB"], "memory_budget has no effect on a CPU"),
    (["--host_budget", "24GB"], "host_budget has no effect on a CPU"),
    (
        ["--collective_timeout", "5"],
        "collective_timeout has no effect on one process, which waits for nobody; drop it",
    ),
    (["--memory_budget", "24GB", "--gradient_checkpointing"], "no effect with memory_budget"),
    (
        ["--memory_budget", "auto", "--compile"],
        "compile has no effect with memory_budget; drop one",
    ),
    (
        ["--host_budget", "24GB", "--gradient_checkpointing"],
        "host_budget has no effect with gradient_checkpointing",
    ),
    (["--host_budget", "24GB", "--compile"], "host_budget has no effect with compile"),
    (["--kernels", "triton"], "needs a CUDA GPU"),
    (["--gradient_accumulation_steps", "1000000"], "lower --gradient_accumulation_steps"),
    (["--config", "no/such.toml"], "no/such.toml"),
    (["--resume"], "no checkpoint in"),
    (["--tokenizer", "no/such.json"], "no/such.json"),
    (
        ["--save", "none", "--checkpoint_interval", "5"],
        "checkpoint_interval has no effect with save none",
    ),
    (
        ["--save", "none", "--keep_checkpoints", "5"],
        "keep_checkpoints has no effect with save none",
    ),
    (
        ["--resume", "--init_from", "x"],
        "init_from has no effect with resume; drop one, or give --resume auto",
    ),
    (["--rope_scaling", "yarn:4"], "rope_scaling has no effect without init_from"),
    (
        ["--packing", "concatenate", "--overlong", "drop"],
        "overlong has no effect where documents are concatenated",
    ),
    (
        ["--validation_sequences", "0", "--validation_interval", "100"],
        "validation_interval has no effect without",
    ),
    (
        ["--max_steps", "10", "--warmup_steps", "11"],
        "warmup_steps 11 is longer than the run of 10 steps",
    ),
    (
        ["--max_steps", "10", "--warmup_steps", "10", "--final_learning_rate_ratio", "0.1"],
        "ends with its warm-up",
    ),
    (["--config="], "config is an empty string or has a NUL; give a value, or drop it"),
    (["--output_dir="], "output_dir is an empty string or has a NUL"),
    (
        ["--init_from", "no/such/folder"],
        "no/such/folder does not exist; give a checkpoint's step_ folder or one in",
    ),
    (
        ["--init_from", "README.md"],
        "README.md is a file; give the folder of config.json and model.safetensors, as .",
    ),
    (["--device", "cuda"], "PyTorch sees no CUDA GPU"),
]


@pytest.mark.parametrize(("extra", "message"), BAD_FLAGS, ids=[" ".join(e) for e, _ in BAD_FLAGS])
def test_bad_input_is_one_line_before_any_model(
    extra, message, corpus, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        "training.run.build.build_model", lambda *_: pytest.fail("a model was built")
    )
    status = train.main([*arguments(corpus, tmp_path / "run"), *extra])
    error = capsys.readouterr().err.strip()
    assert status == 1 and error.startswith("error: ") and "\n" not in error and message in error
    assert [file.name for file in (tmp_path / "run").glob("*")] in ([], [".lock"])


def test_a_validation_without_a_token_to_predict_is_refused(tmp_path, capsys):
    line = json.dumps({"prompt": "long " * 100, "completion": "yes"}) + "\n"
    (tmp_path / "a.jsonl").write_text(line * 20)
    flags = "--validation_fraction", "0.1", "--overlong", "split"
    flags = arguments(str(tmp_path / "a.jsonl"), tmp_path / "run", *flags)
    assert train.main([*flags, "--validation_sequences", "2"]) == 1
    assert (
        "the first 2 held-out sequences have no token to be predicted; raise"
        in capsys.readouterr().err
    )
    assert train.main([*flags, "--validation_sequences", "20"]) == 0


def test_a_plan_that_cannot_be_is_refused_before_the_data_are_read(
    corpus, tmp_path, monkeypatch, capsys
):
    """A 4B on a pretended GPU of 24 GiB: the error names the longest context for documents of any
    length."""
    monkeypatch.setattr("training.run.decide.decide_memory_budget", lambda config, device: "24GB")
    monkeypatch.setattr(train, "check_machine", lambda recipe, world: None)
    monkeypatch.setattr("training.run.build.gpu_budget", lambda text, device: 24 * GIB)
    monkeypatch.setattr(
        "training.data.decide.load_corpus", lambda *_, **__: pytest.fail("the data were read")
    )
    flags = [
        "--model_size", "4B", "--context_length", str(2**21), "--host_budget", "64GB",
        "--attention_backend", "cpu",
    ]  # fmt: skip
    assert train.main(arguments(corpus, tmp_path / "run", *flags)) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "error: context_length 2097152 with batch_size 2 does not fit into 24.00 GiB of GPU and 64"
    )


@pytest.mark.parametrize(("text", "message"), [
    ("context_lenght = 5", r"bad.toml: unknown key 'context_lenght'; did you mean "
                           r"context_length\?"),
    ("context_length = 'long'", "bad.toml: context_length: 'long' is not a whole number"),
    ("context_length = true", "bad.toml: context_length: expected one argument"),
    ("data = 1979-05-27", "bad.toml: data must be a word, a number, true, false or a list"),
    ("model_size = '5B'", "bad.toml: model_size: '5B' is not one of tiny"),
    ("context_length =", "bad.toml: Invalid value"),
])  # fmt: skip
def test_bad_toml_is_refused(text, message, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        parse(["--config", str(path)])


def test_paths_that_are_no_folders_are_one_line(corpus, tmp_path, capsys):
    loop, file = tmp_path / "loop", tmp_path / "file"
    loop.symlink_to(loop), file.touch()
    for command, message in (
        (arguments(corpus, loop), f"{loop}"), (arguments(corpus, loop / "run"), f"{loop}"),
        (arguments(str(loop), tmp_path / "run"), f"data path {loop} does not exist"),
        ([*arguments(corpus, loop), "--resume", "auto"], f"{loop}"),
        (arguments(corpus, file / "run"), "file/run cannot be written to: "),
    ):  # fmt: skip
        assert train.main(command) == 1
        error = capsys.readouterr().err.strip()
        assert error.startswith("error: ") and "\n" not in error and message in error


def test_a_run_whose_only_checkpoint_is_damaged_is_refused(corpus, tmp_path, capsys):
    run = tmp_path / "run"
    assert train.main(arguments(corpus, run, steps=1)) == 0
    file = run / "step_00000001" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for how in ("yes", "auto"):  # never from the start where there is something to lose
        assert train.main(arguments(corpus, run, "--resume", how, steps=2)) == 1
        error = capsys.readouterr().err
        assert (
            "can be used; of the newest: checkpoint" in error
            and "model.safetensors is truncated" in error
        )
