"""The reader of flags: types, places, files, and refusals of one line; a command declares a
dataclass."""

import re
import subprocess
import sys
import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import ClassVar

import pytest

from kernels.attention import KINDS
from kernels.attention.libraries import BACKENDS
from kernels.common import IMPLEMENTATIONS
from kernels.mixed import linear_maps
from model import MODEL_SIZES
from training.config.__main__ import ConfigFlags
from training.data.__main__ import PrepareFlags, VerifyFlags
from training.evaluation.flags import EvaluationFlags, read_evaluation_flags
from training.export.__main__ import ExportFlags
from training.families.flags import MODEL_SIZES as SIZES
from training.flags import (
    Rule,
    answer_early,
    flag,
    given_flags,
    grouped,
    read_command,
    read_flags,
    refuse,
)
from training.generate.flags import GenerateFlags, read_generate_flags
from training.host.errors import UserError
from training.host.other_trainers import ABSENT, BY_VALUE, USUAL_NAMES, Meaning, meaning
from training.logprobs.flags import LogProbsFlags, read_logprobs_flags
from training.memory.flags import ATTENTION_TYPES, GPU_BACKENDS, LINEARS
from training.memory.flags import IMPLEMENTATIONS as WORDS_OF_KERNELS
from training.plots.__main__ import PlotsFlags
from training.run.profile_flags import FOR_ONE_STEP, ProfileFlags, read_profile_flags
from training.run.settings import TrainConfig, check_config, given_settings

ROOT = Path(__file__).parents[2]


@dataclass
class Greeting:
    """Greet somebody."""

    name: str = flag(help="whom to greet", positional=True)
    day: str | None = flag(None, "the day's name", positional=True)
    times: int = flag(1, "how often, 100% sure", least=1, most=9)
    tone: str = flag("plain", "how", ("plain", "warm"), bare="warm")
    pauses: list[float] = flag(list, "seconds between", most=60)
    file: Path | None = flag(None, "goes there", group="voice")
    aloud: bool | None = flag(None, "or not")
    softly: bool = flag(False, "in a low voice")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("pauses", "with tone warm; drop one", lambda flags: flags.tone == "warm"),
        Rule("softly file", "without aloud; drop it", lambda flags: not flags.aloud),
        Rule(
            "",
            "{times} times in tone {tone} is too often; drop one",
            lambda f: f.times > 5 and f.tone == "warm",
        ),
    )


@dataclass
class Farewell:
    """Say goodbye."""

    names: list[str] = flag(help="to whom")


def read(*argv):
    return read_flags(Greeting, [*argv], "python -m greet")


def test_flags_stand_anywhere_and_have_their_types():
    assert read("Ada") == Greeting("Ada", None, 1, "plain", [], None, None)
    given = read(
        "--times=2",
        "Ada",
        "--pauses",
        "1",
        "2.5",
        "--file",
        "a.txt",
        "Monday",
        "--aloud",
        "--no-softly",
    )
    assert given == Greeting("Ada", "Monday", 2, "plain", [1.0, 2.5], Path("a.txt"), True)
    assert read("Ada", "--tone", "--no-aloud", "--no-softly") == Greeting(
        "Ada", tone="warm", aloud=False
    )
    assert read("--tone", "plain", "Ada", "--aloud") == Greeting("Ada", aloud=True)
    assert read("Ada", "--pauses", "1", "2", "--pauses=3") == Greeting("Ada", pauses=[1, 2, 3])


def test_dashes_stand_for_underscores():
    given = given_flags(
        TrainConfig, ["--max-steps", "3", "--no-show-batch", "--init-from=a-b", "--data", "__x"], ""
    )
    assert given == {"max_steps": 3, "show_batch": False, "init_from": "a-b", "data": ["__x"]}


@pytest.mark.parametrize(("word", "ours"), [
    ("--lr", "learning_rate"),
    ("--seq-len=9", "context_length"),
    ("--num-train-epochs", "epochs"),
    ("--val-data", "validation_data"),
    ("--test_data", "validation_data"),
    ("--validation_split=0.1", "validation_fraction"),
    ("--dataset_text_field", "columns"),
    ("--out", "output_dir"),
    ("--lora_rank=8", "lora"),
    ("--val_set_size", "validation_fraction"),
    ("--eval-steps", "validation_interval"),
    ("--save_steps", "checkpoint_interval"),
    ("--save_total_limit", "keep_checkpoints"),
    ("--sample_packing", "packing"),
    ("--per_device_train_batch_size", "batch_size"),
    ("--flash_attn", "attention_backend"),
    ("--target_modules", "lora_targets"),
    ("--load_in_4bit", "lora_bits"),
    ("--resume_from_checkpoint", "resume"),
    ("--warmup_ratio", "warmup_steps"),
    ("--template", "chat_template"),
])  # fmt: skip
def test_the_flag_that_is_meant(word, ours):
    with pytest.raises(UserError, match=f"^unknown flag {word}; did you mean --{ours}\\?$"):
        given_flags(TrainConfig, [word], "train.py")


def test_usual_names_stand_for_flags_that_exist():
    names = {
        each.name for kind in (TrainConfig, ProfileFlags, GenerateFlags) for each in fields(kind)
    }
    theirs, absent = (" ".join(words).split() for words in (USUAL_NAMES.values(), ABSENT))
    assert (
        names >= USUAL_NAMES.keys() | BY_VALUE.keys()
        and not names & {*theirs}
        and len(theirs) == len({*theirs})
    )
    assert not {each.name for each in fields(TrainConfig)} & {*absent} and len(absent) == len(
        {*absent}
    )
    flags = re.findall(r"--(\w+)", " ".join(ABSENT.values()))
    assert {*flags} <= names | {"nproc_per_node"}
    by_value = " ".join(BY_VALUE.values()).split()
    assert {*by_value} <= {*absent} | {*theirs} | {"flavor"}


THEIRS = tomllib.loads(Path(__file__).with_name("settings_of_other_trainers.toml").read_text())


@pytest.mark.parametrize("trainer", THEIRS)
def test_each_setting_of_another_trainer_is_answered_by_name(trainer):
    """Each is a flag here, stands for one, or is told why there is none."""
    names = [each.name for each in fields(TrainConfig)]
    settings = THEIRS[trainer].split()
    assert len(settings) > 100
    assert [
        name for name in settings if name not in names and meaning(name, names) == Meaning()
    ] == []


@pytest.mark.parametrize(("name", "expected"), [
    ("rl_beta", "beta"), ("dpo_beta", "beta"), ("pref_beta", "beta"), ("rpo_alpha", "nll_weight"),
    ("pref_ftx", "nll_weight"), ("truncation_strategy", "overlong"),
    ("excess_length_strategy", "overlong"),
    ("truncation_mode", "overlong"), ("split_dataset_ratio", "validation_fraction"),
    ("attn_impl", "attention_backend"),
    ("enable_thinking", "a row's chat_template_kwargs"), ("ref_model", "reference_logprobs"),
    ("num_generations", "no rollouts are written"),
    ("max_completion_length", "no rollouts are written"),
    ("reward_funcs", "no rollouts are written"), ("use_vllm", "no rollouts are written"),
    ("checkpoint_dir", "output_dir"), ("ckpt_path", "init_from"),
    ("rope_theta", "config.json in the folder"),
    ("fp8", "linear"), ("warmup_ratio", "warmup_steps"), ("simpo_gamma", "margin"),
    ("epsilon_high", "clip_high"),
    ("actor_rollout_ref.actor.optim.lr", "learning_rate"),
    ("critic.optim.lr", "PPO writes its own rollouts"),
    ("actor_rollout_ref.model.lora_alpha", "lora_alpha"), ("data.truncation", "overlong"),
    ("training.seq_len", "context_length"), ("optimizer.lr", "learning_rate"),
    ("model.flavor", "config.json in the"),
    ("trl.beta", "beta"), ("log_fil", "log_file"), ("lora_alhpa", "lora_alpha"), ("colour", None),
    ("settings.colour", None),
])  # fmt: skip
def test_a_name_of_another_trainer_means_a_flag_or_has_a_reason(name, expected):
    flag, why = meaning(name, [each.name for each in fields(TrainConfig)])
    assert flag == expected if why is None else why.startswith(expected), (flag, why)


def test_all_unknown_names_are_told_at_once(tmp_path):
    (tmp_path / "run.toml").write_text(
        "lr = 1\nseed = 3\nbf16 = true\nfp16 = false\nfoo = 1\n[training]\nseq_len = 5\n"
    )
    expected = (
        r"run.toml: unknown keys 'lr' \(did you mean learning_rate\?\), 'foo', "
        r"'training.seq_len' \(did you mean context_length\?\); there is no bf16, fp16: GPUs "
        r"compute in bf16 [^;]*; "
        r"drop it; \S+ -m training.config \S+run.toml prints a config of another trainer as ours$"
    )
    with pytest.raises(UserError, match=expected):
        given_flags(TrainConfig, ["--config", str(tmp_path / "run.toml")], "train.py")
    expected = (
        r"^unknown flags --lr \(did you mean --learning_rate\?\), --foo=1; there is no --bf16: "
    )
    with pytest.raises(UserError, match=expected):
        given_flags(TrainConfig, ["--lr", "3", "--foo=1", "--bf16", "-1"], "train.py")
    with pytest.raises(UserError, match=r"^--config \S+: unknown key 'foo'$"):
        (tmp_path / "run.toml").write_text("foo = 1\n")
        given_flags(TrainConfig, ["--config", str(tmp_path / "run.toml")], "train.py")


@pytest.mark.parametrize(
    ("word", "why"),
    [("--deepspeed", "FSDP2 shards weights"), ("--bf16", "GPUs compute in bf16"), ("--optim=adamw", "is AdamW"),
     ("--lr_scheduler_type", "falls by a cosine"),
     ("--learning_rate_scheduler", "falls by a cosine"),
     ("--lora-dropout=0.1", "adapters are plain LoRA"),
     ("--logging_steps", "metrics.jsonl has every step"),
     ("--num_gpus", "torchrun starts the processes"), ("--push_to_hub", "nothing is uploaded")],
)  # fmt: skip
def test_what_there_is_not_is_said(word, why, tmp_path):
    name = word.partition("=")[0].replace("-", "_").lstrip("_")
    with pytest.raises(UserError, match=f"^there is no --{name}: .*{why}"):
        given_flags(TrainConfig, [word], "train.py")
    (tmp_path / "run.toml").write_text(f"{name} = 1\n")
    with pytest.raises(UserError, match=f"run.toml: there is no {name}: .*{why}"):
        given_flags(TrainConfig, ["--config", str(tmp_path / "run.toml")], "train.py")


@pytest.mark.parametrize(("kind", "words", "message"), [
    (TrainConfig, "--model_name x --packing --bf16 true --lora",
     r"^unknown flag --model_name; did you mean --init_from\?; there is no --bf16: GPUs compute"),
    (TrainConfig, "--packing", "^packing: expected one argument: best_fit, concatenate$"),
    (TrainConfig, "--lora", "^lora: expected one argument: train adapters of this rank"),
    (TrainConfig, "--compile true", "^'true' stands behind a switch, which has no value: give "
                                    "--NAME, or --no-NAME$"),
    (GenerateFlags, "--checkpoint x hi --max_tokens 5",
     r"^unknown flags --checkpoint, --max_tokens \(did you mean --max_new_tokens\?\); "
     "without a name, by their place: program checkpoint prompt$"),
    (ProfileFlags, "--vram 24GB", "did you mean --memory_budget"),
    (ProfileFlags, "--seq_len 9", "--context_length"),
    (TrainConfig, "--optimizer_state 8bit", "did you mean compact"),
    (TrainConfig, "--attention_type sdpa", "did you mean full"),
])  # fmt: skip
def test_what_is_typed_elsewhere_is_answered_in_one_pass(kind, words, message):
    with pytest.raises(UserError, match=message):
        given_flags(kind, words.split(), "program")


@pytest.mark.parametrize("word", ["--eval_data", "--test_data", "--samples", "--tokens_seen"])
def test_a_name_that_is_only_a_little_alike_is_not_meant(word):
    """A test set is not to be trained on."""
    with pytest.raises(
        UserError, match=f"^unknown flag {word}(; did you mean --validation_data\\?)?$"
    ):
        given_flags(TrainConfig, [word], "train.py")


def test_a_flag_of_another_command_is_not_meant():
    with pytest.raises(UserError, match=r"^unknown flag --eval_steps$"):
        given_flags(ProfileFlags, ["--eval_steps"], "profile_memory.py")
    with pytest.raises(UserError, match=r"did you mean --nproc\?$"):
        given_flags(ProfileFlags, ["--num_gpus"], "profile_memory.py")


@pytest.mark.parametrize(
    ("name", "text"),
    [("run.yaml", "max_steps: 20\n"), ("run.yml", ""), ("run.toml", "# settings\nmax_steps: 20\n"),
     ("run", "data:\n  - corpus\n"), ("run.json", '{"max_steps": 20}')],
)  # fmt: skip
def test_a_file_of_another_language_is_named(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(
        UserError,
        match=f"--config .*{name}: it is YAML or JSON, and settings are TOML: for max_steps",
    ) as error:
        given_flags(TrainConfig, ["--config", str(tmp_path / name)], "train.py")
    assert (
        f"-m training.config {tmp_path / name} prints a config of another trainer as ours"
        in str(error.value)
    )


@pytest.mark.parametrize(("name", "text", "message"), [
    ("run.toml", "", "it has no settings; write some, such as max_steps = 20, or drop --config"),
    ("run.toml", "# max_steps = 20\n", "it has no settings"),
    ("chats.jsonl", '{"messages": []}\n', "it is a file of rows, and settings are TOML; to train "
                                          "on it, give --data "),
    ("chats.csv", "prompt,completion\nA,B\n", "it is a file of rows, .*give --data "),
    ("chats.jsonl", "", "it is a file of rows"),
])  # fmt: skip
def test_a_config_that_says_nothing_is_refused(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=f"^--config .*{name}: {message}"):
        given_flags(TrainConfig, ["--config", str(tmp_path / name)], "train.py")


@pytest.mark.parametrize(("read", "words", "message"), [
    (given_settings, "--data nosuch.jsonl", "data path nosuch.jsonl does not exist; give --data a "
                                            "file or a folder"),
    (given_settings, "--data there --validation_data no", "data path no does not exist; give "
                                                          "--validation_data a file"),
    (given_settings, "--init_from There", "There does not exist; give a checkpoint's .*; did you "
                                          "mean there?"),
    (read_profile_flags, "--init_from Qwen/Qwen3-0.6B", ".* does not exist; .*hf download "
                                                        "Qwen/Qwen3-0.6B"),
    (read_profile_flags, "--data a/b --context_length 9", ".*if it is a dataset of the .*, then "
                                                          "--data DIR"),
    (read_generate_flags, "no", "no does not exist; give a checkpoint's step_ folder"),
    (read_evaluation_flags, "no --data none", "no does not exist; give a checkpoint's step_ "
                                              "folder"),
    (read_logprobs_flags, "there out --data there,none", "data path .*; several stand apart: "
                                                         "--data there none"),
])  # fmt: skip
def test_paths_that_lead_nowhere_are_refused_before_torch_is_imported(
    read, words, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "there").mkdir()
    monkeypatch.setattr(sys, "argv", ["command", *words.split()])
    with pytest.raises(SystemExit, match=f"^error: {message}"):
        answer_early(read)


@pytest.mark.parametrize("name", ["run.toml", "run.yaml", "run.json"])
def test_a_file_without_config_is_meant_for_it(name):
    with pytest.raises(UserError, match=f"^unknown flag {name}; did you mean --config {name}\\?$"):
        given_flags(TrainConfig, [name], "train.py")


def test_a_card_and_a_machine_do_not_stand_below_several_gpus():
    titles = {
        each.name: title for title, members in grouped(ProfileFlags).items() for each in members
    }
    assert [
        titles[name] for name in ("nproc", "gpu", "host_memory", "objective", "beta", "data")
    ] == [
        "several GPUs",
        "machine",
        "machine",
        "objective",
        "objective",
        "data",
    ]


def test_a_field_declared_anew_keeps_its_title():
    @dataclass
    class Shout(Greeting):
        file: Path | None = flag(None, "there")
        twice: bool = flag(False, "and again", group="more")

    titles = {title: [each.name for each in members] for title, members in grouped(Shout).items()}
    assert titles == {
        "": ["name", "day", "times", "tone", "pauses"], "voice": ["file", "aloud", "softly"],
        "more": ["twice"],
    }  # fmt: skip
    assert all(grouped(TrainConfig)) and len(grouped(TrainConfig)) > 5


def test_words_of_flags_without_torch_are_those_of_the_code():
    assert tuple(linear_maps()) == LINEARS
    assert tuple(MODEL_SIZES) == SIZES and IMPLEMENTATIONS == WORDS_OF_KERNELS
    assert tuple(name for name in BACKENDS if name != "cpu") == GPU_BACKENDS
    assert tuple(name for name in KINDS if name in ATTENTION_TYPES) == ATTENTION_TYPES


@pytest.mark.parametrize("words", [["train.py", "--help"], ["train.py", "--lr", "3"], ["training.generate", "--help"],
                                   ["training.evaluation", "--help"],
                                   ["training.data", "prepare", "--help"],
                                   ["training.plots", "--help"],
                                   ["profile_memory.py", "--help"]])  # fmt: skip
def test_help_and_wrong_flags_are_answered_without_torch(words):
    script = (
        "import atexit, runpy, sys, time\n"
        "atexit.register(lambda: print('torch' in sys.modules, time.process_time()))\n"
        "run = runpy.run_path if sys.argv[1].endswith('.py') else runpy.run_module\n"
        "sys.argv.pop(0)\n"
        "run(sys.argv[0], run_name='__main__')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=ROOT, capture_output=True, text=True
    )
    torch_is_there, seconds = ended.stdout.splitlines()[-1].split()
    if "--lr" in words:
        assert (ended.returncode, ended.stderr) == (
            1,
            "error: unknown flag --lr; did you mean --learning_rate?\n",
        )
    else:
        assert ended.returncode == 0 and ended.stdout.startswith("usage: ")
    assert torch_is_there == "False" and float(seconds) < 1


@pytest.mark.parametrize(("word", "tokens"), [
    ("128k", 131_072), ("128K", 131_072), ("131_072", 131_072), ("1M", 1_048_576),
    ("1m", 1_048_576), ("1.5k", 1536),
    ("0.5M", 524_288), ("32Ki", 32_768), ("100k", 102_400), ("512", 512), ("1024k", 1_048_576),
    ("131k", "'131k' is 134,144 tokens, as k is 1,024; did you mean 128k, which is 131,072?"),
    ("262k", "did you mean 256k, which is 262,144?"), ("33k", "did you mean 32k"),
    ("65K", "did you mean 64k"),
    ("1.05M", "did you mean 1024k, which is 1,048,576?"),
    ("1.3k", "no whole number of tokens, as k is 1,024"),
    ("131,072", "not a whole number, such as 512; did you mean 131072?"),
    ("1e5", "did you mean 100000?"),
    ("128kb", "'128kb' is not a whole number"), ("1T", "not a whole number"),
    ("0k", "must be between 2 and"),
    ("1000M", "must be between 2 and"),
])  # fmt: skip
def test_numbers_of_tokens_may_end_with_k_or_m(word, tokens, tmp_path):
    (tmp_path / "run.toml").write_text(f'context_length = "{word}"')
    for words in (["--context_length", word], ["--config", str(tmp_path / "run.toml")]):
        try:
            assert given_flags(TrainConfig, words, "train.py") == {"context_length": tokens}
        except UserError as error:
            assert str(tokens) in str(error)


def test_each_number_of_tokens_may_end_with_k():
    counts = {
        (name, each.name)
        for name, kind in COMMANDS.items()
        for each in fields(kind)
        if each.metadata["tokens"]
    }
    of_models = {(name, "dense_below") for name in ("generate", "evaluation", "logprobs")}
    assert {(name.removeprefix("training."), each) for name, each in counts} == of_models | {
        ("train.py", "context_length"), ("train.py", "dense_below"), ("train.py", "sample_tokens"),
        ("profile_memory.py", "context_length"), ("profile_memory.py", "dense_below"),
        ("generate", "max_new_tokens"),
        ("evaluation", "context_length"), ("evaluation", "short_context"),
        ("evaluation", "lengths"),
        ("logprobs", "context_length"),
    }  # fmt: skip
    assert given_flags(EvaluationFlags, ["x", "--lengths", "4k", "9"], "")["lengths"] == [4096, 9]


@pytest.mark.parametrize(("words", "message"), [
    ("--warmup_steps 0.1", "10% of 300 steps are 30; give warmup_steps 30$"),
    ("--warmup_steps 3% --max_steps 1000", "3% of 1000 steps are 30; give warmup_steps 30$"),
    ("--max_steps 5 --warmup_steps 0.01", "1% of 5 steps are 1; give warmup_steps 1$"),
    ("--warmup_steps 0.1 --epochs 3", "how many steps the run has, its data or its checkpoint "
                                      "settle"),
    ("--warmup_steps 0.1 --resume", "how many steps the run has, its data or its checkpoint "
                                    "settle"),
    ("--warmup_steps 2.5", "'2.5' is not a whole number, such as 512$"),
    ("--max_steps 0.5", "'0.5' is not a whole number, such as 512$"),
    ("--max_steps 10k", "'10k' is not a whole number, such as 512; did you mean 10000"),
    ("--validation_fraction 5%", "'5%' is not a number, such as 0.5; did you mean 0.05"),
    ("--device gpu", "did you mean cuda"), ("--packing bfd", "did you mean best_fit"),
    ("--overlong delete", "did you mean drop"), ("--objective sigmoid", "did you mean dpo"),
    ("--optimizer_state adamw_8bit", "did you mean compact"),
    ("--model_size Qwen/Qwen3-4B", "did you mean 4B"),
])  # fmt: skip
def test_a_value_of_another_form_is_told_the_one_that_is_meant(words, message):
    with pytest.raises(UserError, match=message):
        given_flags(TrainConfig, words.split(), "train.py")


def test_two_dashes_are_a_word_or_refused():
    """Older versions of argparse take them for nothing, an empty list."""
    for words in (["--output_dir=--"], ["--data=--"]):
        try:
            given = given_flags(TrainConfig, words, "train.py")
        except UserError as error:
            assert "is --" in str(error)
        else:
            assert next(iter(given.values())) in ("--", ["--"])


def test_a_file_gives_way_to_flags(tmp_path):
    file = tmp_path / "greeting.toml"
    file.write_text('times = 3\npauses = [1, 2.5]\nfile = "a.txt"\naloud = true\n')
    given = read("--config", str(file), "Ada", "--times", "4")
    assert given == Greeting("Ada", None, 4, "plain", [1, 2.5], Path("a.txt"), True)


@pytest.mark.parametrize(("argv", "message"), [
    ([], "name is missing: whom to greet"),
    (["Ada", "--time", "2"], "unknown flag --time; did you mean --times?"),
    (["Ada", "--name", "Ada"], "unknown flag --name"),
    (["Ada", "Monday", "noon"], "'noon' has no flag before it; give python -m greet name day "
                                "[--flag value ...]"),
    (["Ada", "--times", "0"], "times must be between 1 and 9, got 0"),
    (["Ada", "--times", "2.5"], "times: '2.5' is not a whole number, such as 512"),
    (["Ada", "--tone", "cold"], "tone: 'cold' is not one of plain, warm"),
    (["Ada", "--tone", "WARM"], "tone: 'WARM' is not one of plain, warm; did you mean warm?"),
    (["Ada", "--pauses", "1", "nan"], "pauses must be between 0 and 60, got nan"),
    (["Ada", "--pauses"], "pauses: expected at least one argument"),
    ([""], "name is an empty string or has a NUL; give a value, or drop it"),
    (["Ada", "--aloud", "--file", ""], "file is an empty string or has a NUL; give a value, or "
                                       "drop it"),
    (["Ada", "--config", ""], "config is an empty string or has a NUL; give a value, or drop it"),
    (["Ada", "--pauses", "0", "--tone"], "pauses has no effect with tone warm; drop one"),
    (["Ada", "--times", "6", "--tone"], "6 times in tone warm is too often; drop one"),
    (["Ada", "--softly"], "softly has no effect without aloud; drop it"),
    (["Ada", "--no-aloud", "--file", "a.txt"], "file has no effect without aloud; drop it"),
])  # fmt: skip
def test_flags_that_are_refused(argv, message):
    with pytest.raises(UserError) as refused:
        read(*argv)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("text", "message"), [
    ("times = true", "times: expected one argument"),
    ("times = 10", "times must be between 1 and 9, got 10"),
    ("pauses = ['a']", "pauses: 'a' is not a number, such as 0.5"),
    ("pauses = [[1]]", r"pauses must be a word, a number, true, false or a list, got \[\[1\]\]"),
    ("pauses = []", "pauses: expected at least one argument"),
    ("tone = 'cold'", "tone: 'cold' is not one of plain, warm"),
    ("file = 1979-05-27", "file must be a word, a number, true, false or a list, got"),
    ("time = 3", "unknown key 'time'; did you mean times?"),
    ("name = 'Ada'", "unknown key 'name'"),
    ("help = true", "unknown key 'help'"),
    ("times =", "Invalid value"),
])  # fmt: skip
def test_files_that_are_refused(text, message, tmp_path):
    (tmp_path / "greeting.toml").write_text(text)
    with pytest.raises(
        UserError, match=message if "between" in message else f"greeting.toml: {message}"
    ):
        read("Ada", "--config", str(tmp_path / "greeting.toml"))


COMMANDS = {
    "train.py": TrainConfig, "profile_memory.py": ProfileFlags,
    "training.evaluation": EvaluationFlags,
    "training.generate": GenerateFlags, "training.logprobs": LogProbsFlags,
    "training.plots": PlotsFlags,
    "training.data prepare": PrepareFlags, "training.data verify": VerifyFlags,
    "training.export": ExportFlags, "training.config": ConfigFlags,
}  # fmt: skip


def words_with(kind, name, value):
    """A command line that gives one flag, and "x" for what the command cannot do without."""
    words = []
    for each in fields(kind):
        word = value if each.name == name else "x"
        if each.name == name or each.default is each.default_factory is MISSING:
            words.append(word if each.metadata["positional"] else f"--{each.name}={word}")
    return words


@pytest.mark.parametrize("kind", COMMANDS.values(), ids=COMMANDS)
def test_no_flag_of_any_command_takes_an_empty_word_or_a_number_without_bounds(kind):
    huge = [
        "9" * 400,
        "-" + "9" * 400,
        "9" * 5000,
        "9" * 400 + ".5",
        "1e400",
        "-1e400",
        "inf",
        "nan",
    ]
    for each in fields(kind):
        for value in ["", "\0", "a\0b", *(huge if re.search("int|float", str(each.type)) else [])]:
            with pytest.raises(UserError) as refused:
                given_flags(kind, words_with(kind, each.name, value), "program")
            assert each.name in str(refused.value) and "\n" not in str(refused.value)


# Flags that always have an effect, and flags whose effect depends on more than flags: the machine,
# the model or the data. A new flag stands here, or in a row of its command's table `rules`.
ALWAYS = {
    "train.py": """model_size context_length batch_size gradient_accumulation_steps attention_backend linear
        device kernels data tokenizer show_batch epochs learning_rate warmup_steps weight_decay max_grad_norm
        skip_nonfinite_steps seed output_dir resume save validation_sequences sample_tokens tensorboard wandb trackio
        log_file""",
    "training.logprobs": """checkpoint tokenizer memory_budget device out objective top_k data validation_data
        context_length columns bad_rows rope_scaling""",
    "profile_memory.py": """init_from batch_size gradient_accumulation_steps attention_backend linear lora nproc nnodes
        gpu objective compare json context_parallel_size tensor_parallel_size replicate""",
    "training.evaluation": "checkpoint tokenizer memory_budget device output_dir objective",
    "training.generate": """checkpoint tokenizer memory_budget device prompt file chat max_new_tokens temperature""",
    "training.plots": "run",
    "training.config": "file out",
    "training.data prepare": "source out tokenizer workers suffixes columns bad_rows",
    "training.data verify": "out",
    "training.export": "source target dtype rope_scaling merge",
}
ONE_STEP = (
    "--context_length 9 --no-gradient_checkpointing --num_layers 1 --stages --timeline x --picture "
    "x --data x "
    "--rope_scaling x"
)
OF_ATTENTION = "attention_type selected_blocks dense_below"  # refused by kinds_of
ELSEWHERE = {
    "train.py": f"""{OF_ATTENTION} memory_budget context_parallel_size tensor_parallel_size replicate
        collective_timeout data_weights chat_template optimizer_state""",
    "profile_memory.py": f"{OF_ATTENTION} optimizer_state",
    "training.evaluation": OF_ATTENTION,
    "training.generate": OF_ATTENTION,
    "training.logprobs": f"{OF_ATTENTION} chat_reasoning chat_template",
    "training.data prepare": "chat_reasoning chat_template",
}


OF_STEP = [
    (
        "--init_from x --lora 4 --tensor_parallel_size 2",
        "lora with tensor_parallel_size is not supported: ranks have ",
    ),
    ("--init_from x --lora 4 --freeze_routers", "freeze_routers"),
    ("--rope_scaling yarn:4", "rope_scaling"),
    (
        "--init_from x --lora 4 --rope_scaling yarn:4",
        "rope_scaling yarn:4 with lora: peft would compute without ",
    ),
    (
        "--init_from x --lora 4 --optimizer_state compact",
        "optimizer_state compact has no effect with lora, whose ",
    ),
]
# A command line for each row of `rules`, and the flags that have no effect there, or the beginning
# of the message.
REFUSED = {
    "train.py": [
        *OF_STEP,
        ("--resume --init_from x", "init_from"),
        (
            "--lora 4 --lora_alpha 8 --lora_targets q_proj --lora_bits 4 --lora_plus 4",
            "lora lora_alpha lora_targets lora_bits lora_plus",
        ),
        (
            "--init_from x --lora 4 --lora_bits 8 --compile",
            "lora_bits 8 with compile is not supported: weights come",
        ),
        (
            "--save none --checkpoint_interval 5 --keep_checkpoints 5",
            "checkpoint_interval keep_checkpoints",
        ),
        (
            "--resume auto --save model",
            "a run that goes on with resume auto needs checkpoints of save full; drop one",
        ),
        (
            "--suffixes .rs --columns text=a --bad_rows drop --chat_reasoning keep",
            "suffixes columns bad_rows chat_reasoning",
        ),
        ("--packing concatenate --overlong drop", "overlong"),
        ("--validation_data x --validation_fraction 0.02", "validation_fraction"),
        (
            "--memory_budget auto --gradient_checkpointing --compile",
            "gradient_checkpointing compile",
        ),
        ("--host_budget 1GB --gradient_checkpointing", "host_budget"),
        ("--host_budget 1GB --compile", "host_budget"),
        (
            "--validation_sequences 0 --validation_interval 100 --validation_data x",
            "validation_interval validation_data",
        ),
        ("--max_steps 300 --epochs 3", "max_steps"),
        ("--max_steps 20 --final_learning_rate_ratio 0.1", "final_learning_rate_ratio"),
        ("--objective dpo", "objective"),
        ("--beta 0.1", "beta"),
        ("--objective ipo --label_smoothing 0.1", "label_smoothing"),
        ("--objective orpo --nll_weight 1", "nll_weight"),
        (
            "--objective dpo --desirable_weight 2 --undesirable_weight 2",
            "desirable_weight undesirable_weight",
        ),
        ("--objective dpo --margin 1", "margin"),
        ("--objective cispo --clip_low 0.1", "clip_low"),
        ("--objective dpo --clip_high 0.1", "clip_high"),
        ("--objective dpo --teacher_logprobs x", "teacher_logprobs"),
        (
            "--objective distill --data x",
            "objective distill needs a teacher's log-probabilities: make them by ",
        ),
        (
            "--objective distill --data x --teacher_logprobs x --tensor_parallel_size 2",
            "objective distill with tensor_parallel_size is not supported",
        ),
        ("--objective dpo --old_logprobs x", "old_logprobs"),
        ("--objective grpo --truncation 2", "truncation"),
        ("--objective grpo --reference_logprobs x", "reference_logprobs"),
        ("--objective dpo --beta 0 --data x", "objective dpo needs a beta above 0"),
        ("--objective dpo --packing concatenate", "packing"),
        ("--objective dpo --overlong split", "overlong"),
        (
            "--objective dpo --data x",
            "objective dpo needs log-probabilities of a reference: make them by ",
        ),
        ("--objective distill --loss_impl standard --data x --teacher_logprobs x", "loss_impl"),
        (
            "--init_from x --lora_alpha 8 --lora_targets q_proj --lora_bits 8 --lora_plus 4",
            "lora_alpha lora_targets lora_bits lora_plus",
        ),
    ],
    "profile_memory.py": [
        *OF_STEP,
        ("--objective distill --loss_impl standard", "loss_impl"),
        ("--model_size 4B --init_from x", "model_size"),
        ("--compare --find_max_context --loss_impl auto", "find_max_context loss_impl"),
        (f"--find_max_context {ONE_STEP}", FOR_ONE_STEP),
        (f"--compare {ONE_STEP}", FOR_ONE_STEP),
        ("--picture x --data x", "picture"),
        ("--host_memory 64GB --host_budget 1GB", "host_memory"),
        (
            "--no-gradient_checkpointing --memory_budget 1GB --host_budget 1GB --host_memory 64GB",
            "memory_budget host_budget host_memory",
        ),
        ("--gpu H100 --device cuda", "device"),
        (
            "--tokenizer x --chat_template x --suffixes .rs --columns text=a --bad_rows drop "
            "--overlong drop",
            "tokenizer chat_template suffixes columns bad_rows overlong",
        ),
        ("--beta 0.1", "beta"),
        ("--lora_targets q_proj --lora_bits 8", "lora_targets lora_bits"),
        (
            "--lora 4 --lora_bits 8 --compare",
            "--compare keeps blocks whole, which lora_bits 8 cannot; drop one",
        ),
        (
            "--lora 4 --lora_bits 4 --no-gradient_checkpointing",
            "--no-gradient_checkpointing keeps blocks whole, which",
        ),
    ],
    "training.plots": [("x --out y.png", "out")],
    "training.evaluation": [
        (
            "x --objective simpo --data x --sequences 3 --samples 3 --suffixes .x --short_context "
            "9 --margin 3 "
            "--ceiling 3 --evaluator x --lengths 9 --seed 1 --beside x",
            "sequences samples suffixes short_context margin ceiling evaluator lengths seed beside",
        ),
        ("x --beta 1", "beta"),
        ("x --objective orpo --data x --reference_logprobs x", "reference_logprobs"),
        ("x --objective orpo", "objective orpo needs data"),
        (
            "x --objective kto --data x",
            "objective kto needs log-probabilities of a reference: make them by ",
        ),
        (
            "x --sequences 0 --data x --suffixes .x --columns text=a --bad_rows drop "
            "--short_context 9 --margin 2 "
            "--ceiling 2 --evaluator x",
            "data suffixes columns bad_rows short_context margin ceiling evaluator",
        ),
        ("x --suffixes .rs --columns text=a --bad_rows drop", "suffixes columns bad_rows"),
        ("x --samples 0 --lengths 9 --seed 0", "lengths seed"),
        ("x --sequences 0 --lengths 9 --context_length 9", "context_length"),
    ],
    "training.generate": [
        ("x --top_p 1 --seed 0", "top_p seed"),
        ("x --system x", "system"),
        ("x hello --file x", "both a prompt and --file are given; drop one"),
    ],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_without_effect_is_known_and_every_rule_refuses(command):
    kind = COMMANDS[command]
    rules = getattr(kind, "rules", ())
    in_rows, elsewhere = (
        {name for rule in rules for name in rule.idle.split()},
        ELSEWHERE.get(command, "").split(),
    )
    known = {*in_rows, *elsewhere, *ALWAYS[command].split()}
    assert known == {each.name for each in fields(kind)} and not in_rows & {
        *ALWAYS[command].split()
    }
    for rule, (words, expected) in zip(rules, REFUSED.get(command, []), strict=True):
        given = given_flags(kind, words.split(), command)
        assert rule.idle in ("", expected)
        for name in rule.idle.split():
            with pytest.raises(UserError, match=f"^{name} has no effect "):
                refuse(kind(**given), [name], [rule])
        with pytest.raises(
            UserError, match="has no effect " if rule.idle else f"^{re.escape(expected)}"
        ):
            if kind is TrainConfig:
                check_config(kind(**given), given, rules)
            else:
                read_flags(kind, words.split(), "")


@pytest.mark.parametrize(
    "words",
    [
        "--validation_interval 7 --max_steps 21 --final_learning_rate_ratio 0.2 --packing best_fit "
        "--overlong drop",
        # the run before says how many steps there are
        "--resume --warmup_steps 400 --final_learning_rate_ratio 0.2",
        "--init_from x --rope_scaling yarn:4 --resume auto --keep_checkpoints 3 "
        "--checkpoint_interval 5",
        "--gradient_checkpointing --compile --no-show_batch",
        "--validation_data x --suffixes .rs --epochs 0.5",
        "--init_from x --lora 4 --lora_alpha 8 --lora_targets q_proj --lora_bits 4 --lora_plus 4",
        "--resume --lora_plus 4",
        "--memory_budget auto --host_budget 8GB --no-gradient_checkpointing --no-compile "
        "--overlong split",
    ],
)
def test_flags_with_an_effect_are_taken(words):
    given = given_flags(TrainConfig, words.split(), "train.py")
    check_config(TrainConfig(**given), given)


def test_a_huge_file_of_settings_takes_no_memory(tmp_path):
    with (tmp_path / "run.toml").open("wb") as file:
        file.truncate(3 * 2**30)  # the disk stores nothing of it
    with pytest.raises(
        UserError, match=r"run\.toml: it has 3221225472 bytes, at most 1048576 are read"
    ):
        read_flags(TrainConfig, ["--config", str(tmp_path / "run.toml")], "train.py")


def test_a_setting_of_the_run_before_may_have_no_effect():
    config = TrainConfig(
        resume="yes", validation_sequences=0, validation_interval=7, max_steps=9, warmup_steps=20
    )
    check_config(config, ["resume", "validation_sequences", "max_steps"])


def test_a_program_of_several_commands(capsys):
    commands = {"greet": Greeting, "part": Farewell}
    assert read_command(commands, ["part", "--names", "Ada", "Bob"], "python -m say") == Farewell(
        ["Ada", "Bob"]
    )
    for argv, message in (
        (["shout"], "invalid choice: 'shout'"),
        (["part"], "names is missing: to whom"),
        ([], "a command is missing: give python -m say greet or part"),
    ):
        with pytest.raises(UserError, match=message):
            read_command(commands, argv, "python -m say")
    for argv, words in (
        (["--help"], ["greet", "Say goodbye."]),
        (
            ["greet", "--help"],
            [
                "python -m say greet",
                "--times INT",
                "how often, 100% sure; default: 1",
                "--no-aloud",
            ],
        ),
    ):
        with pytest.raises(SystemExit) as exit:
            read_command(commands, argv, "python -m say")
        out = capsys.readouterr().out
        assert exit.value.code == 0 and all(word in out for word in words)
