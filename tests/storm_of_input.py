"""Generated bad input: `python -m tests.storm bad_input --count 600`.

Each case is one of COMMANDS. It has a few flags of generated values, or a file that it reads is
spoiled: bytes are changed, cut or inserted; a value of its JSON is replaced, removed or nested
deeply; or a pipe, a folder, a device or a loop of links takes its place. Half of the time a
checkpoint's manifest is made to agree, as if somebody had edited both by hand. A command must be
refused in one line, or get as far as building a model or to its end; it must not hang.
"""

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import string
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest

import profile_memory
import train
import training.data.__main__ as data
import training.evaluation.__main__ as evaluation
from model import MODEL_SIZES, Transformer
from tests.runs import ROOT, SMALL
from tests.training.data.test_tokenizer import write_tokenizer
from training.export import __main__ as export
from training.generate import __main__ as generate
from training.logprobs import __main__ as logprobs
from training.logprobs.flags import LogProbsFlags
from training.plots import __main__ as plots
from training.run.settings import TrainConfig

SECONDS = 60  # a command that takes longer hangs
WORDS = [
    "",
    " ",
    "nan",
    "inf",
    "-inf",
    "-0",
    "0",
    "-1",
    "1e400",
    "1e-400",
    "0x10",
    "1_000",
    "١٢",
    "é\n",
    "\udcff",
]
WORDS += [
    "/dev/null",
    "/dev/zero",
    "/proc/self/mem",
    "pipe",
    "loop",
    "folder",
    "folder/x",
    "corpus.txt/x",
    "a/" * 2500,
]
WORDS += [
    "[]",
    "{}",
    "true",
    "None",
    "null",
    "1,2",
    "64x4,32",
    "0x0",
    "-",
    "--",
    "~",
    ".",
    "auto",
    "yes",
]
WORDS += ["24GB", "0GB", "1e9GB", "5min"]
TOML = ["[]", "[[]]", "{}", "true", "nan", "-1", "1e400", "9" * 5000, "[1979-05-27]"]
OTHERS = [
    None,
    True,
    0,
    -1,
    2.5,
    10**30,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\0",
    "\ud800",
    [],
    [[]],
    {},
    {"a": 1},
]
DEEP = 50_000
# Values with which train.py would read a whole machine's files, or write outside of the test's
# folder.
NOT_GIVEN = {("data", "~"), ("data", "--"), ("output_dir", "~"), ("data", "/dev/null")}
STEP = "run/step_00000002"


class Command(NamedTuple):
    """A command that a case calls: its main function, the dataclass of its flags, and the flags
    that each case has."""

    main: Callable
    flags: type
    base: list[str]


COMMANDS = {
    "train": Command(
        train.main,
        TrainConfig,
        ["--data", "corpus.txt", "--output_dir", "fresh", *SMALL, "--validation_sequences", "2"],
    ),
    "profile": Command(profile_memory.main, profile_memory.ProfileFlags, ["--device=cpu"]),
    "generate": Command(
        generate.main, generate.GenerateFlags, [STEP, "a text", "--max_new_tokens=2"]
    ),
    "evaluation": Command(
        evaluation.main,
        evaluation.EvaluationFlags,
        [STEP, "--sequences=1", "--samples=1", "--context_length=64"],
    ),
    "logprobs": Command(
        logprobs.main, LogProbsFlags, [STEP, "fresh", "--data=corpus.txt", "--context_length=65536"]
    ),
    "export": Command(export.main, export.ExportFlags, [STEP, "fresh"]),
    "prepare": Command(
        data.main,
        data.PrepareFlags,
        ["prepare", "corpus.txt", "fresh", "--tokenizer=bytes", "--workers=1"],
    ),
    "verify": Command(data.main, data.VerifyFlags, ["verify", "prepared"]),
    "plots": Command(plots.main, plots.PlotsFlags, ["run"]),
}
RESUME = ["--output_dir", "run", "--resume"]
# What reads a file: a command, and flags beside its base. A folder stands for its files.
FILES: dict[str, list[tuple[str, list[str]]]] = {
    "run.toml": [("train", ["--config", "run.toml"])],
    "corpus.txt": [("train", []), ("prepare", [])],
    "chat.jsonl": [("train", ["--data", "chat.jsonl"])],
    "tokenizer.json": [("train", ["--tokenizer", "tokenizer.json"])],
    **{
        f"weights/{name}": [("train", ["--init_from", "weights", "--tokenizer", "bytes"])]
        for name in ("config.json", "manifest.json", "model.safetensors", "trainer.json")
    },
    "shards/model.safetensors.index.json": [
        ("train", ["--init_from", "shards", "--tokenizer", "bytes"])
    ],
    **{f"{STEP}/{name}": [("train", RESUME)] for name in ("rng_0.json", "optimizer.safetensors")},
    **{
        f"{STEP}/{name}": [("train", RESUME), ("generate", []), ("evaluation", []), ("export", [])]
        for name in ("config.json", "manifest.json", "trainer.json", "model.safetensors")
    },
    "run/metrics.jsonl": [("plots", [])],
    "prepared": [("verify", []), ("train", ["--data", "prepared"])],
}


class Accepted(Exception):
    """A command got as far as to build a model, or to predict."""


def storm_of_input(folder: Path, count: int, seed: int) -> dict:
    """Run `count` cases; returns how many were refused and accepted, and under "bad" each traceback
    or hang."""
    draws, seen, bad = random.Random(seed), Counter(), []
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        files = make_files()
        loading = ((module, "load") for module in (generate, evaluation, logprobs))
        for module, name in ((train, "build"), (profile_memory, "report"), *loading):
            patch.setattr(module, name, accept)
        for _ in range(count):
            if draws.random() < 0.5:
                name = draws.choice([*COMMANDS])
                command = COMMANDS[name]
                case, argv = (
                    f"flags of {name}",
                    some_flags(["config", *(field.name for field in fields(command.flags))], draws),
                )
            else:
                file = draws.choice([*files])
                name, argv = draws.choice(files[file])
                command, case = COMMANDS[name], f"{name}, file {file}, {spoil(Path(file), draws)}"
            outcome = run(command.main, [*command.base, *argv])
            if outcome in ("refused", "accepted"):
                seen[outcome] += 1
            else:
                bad.append((case, [word[:200] for word in argv], outcome))
            restore(files)
    return {**seen, "bad": bad}


def accept(*_, **__):
    raise Accepted


def run(main, argv: list[str]) -> str:
    """Returns "accepted", "refused", or what went wrong."""

    def hang(*_):
        raise TimeoutError(f"it hangs: {''.join(traceback.format_stack(limit=8))}")

    error, before = io.StringIO(), signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            status = main(argv)
    except (Accepted, SystemExit):  # --help
        return "accepted"
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if status == 0:
        return "accepted"
    line = re.sub(r".*B/s.*[\r\n]\s*", "", error.getvalue().strip())  # without progress bars
    is_line = line.startswith("error: ") and (
        "\n" not in line or any("\n" in word for word in argv)
    )
    return (
        "refused" if status == 1 and is_line and len(line) < 12_000 else f"status {status}: {line}"
    )


def some_flags(names: list[str], draws: random.Random) -> list[str]:
    flags = []
    for name in draws.sample(names, min(len(names), draws.randint(1, 3))):
        digits = "".join(draws.choices("0123456789", k=draws.choice([1, 3, 10, 20, 400, 5000])))
        text = "".join(
            draws.choices(string.printable + "é→\U0001f600", k=draws.choice([1, 5, 300, 5000]))
        )
        value = draws.choice(
            [draws.choice(WORDS), digits, f"-{digits}", f"{digits}e{digits[:3]}", text]
        )
        if (name, value) not in NOT_GIVEN and not (
            name == "data" and value.startswith(("/", "~", "."))
        ):
            flags.append(
                draws.choice([f"--{name}={value}", f"--{name}"])
                if draws.random() < 0.9
                else f"--{text}"
            )
    return [flag.replace("\0", "") for flag in flags]


def make_files() -> dict[str, list[tuple[str, list[str]]]]:
    """Write the files of FILES as they should be, and files that no command can read; returns FILES
    without folders."""
    Path("corpus.txt").write_text((ROOT / "model.py").read_text())
    assert (
        train.main(
            [
                *COMMANDS["train"].base,
                "--output_dir",
                "run",
                "--max_steps",
                "2",
                "--sample_tokens",
                "0",
            ]
        )
        == 0
    )
    assert data.main(["prepare", "corpus.txt", "prepared", "--tokenizer=bytes", "--workers=1"]) == 0
    Path("run.toml").write_text(
        'max_steps = 3\nlearning_rate = 0.1\ndata = ["corpus.txt"]\n[table]\nkey = 1979-05-27\n'
    )
    line = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    lines = [{"text": "c" * 9000}, {"prompt": "a", "completion": "b" * 500}, line]
    Path("chat.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    write_tokenizer(Path("tokenizer.json"))
    shutil.copytree("run/step_00000002", "weights")
    shutil.copytree("weights", "shards")
    names = list(Transformer(MODEL_SIZES["tiny"]).state_dict())
    os.rename("shards/model.safetensors", "shards/one.safetensors")
    index = {"metadata": {}, "weight_map": {f"model.{name}": "one.safetensors" for name in names}}
    Path("shards/model.safetensors.index.json").write_text(json.dumps(index))
    os.mkfifo("pipe")
    os.symlink("loop", "loop")
    os.mkdir("folder")
    files = {
        str(path): readers
        for name, readers in FILES.items()
        for path in sorted(Path(name).glob("*")) or [name]
    }
    for name in files:
        shutil.copyfile(name, Path("folder") / name.replace("/", "_"))
    return files


def restore(files: Iterable[str]) -> None:
    """Write the files anew, and delete what a command wrote."""
    for name in files:
        path = Path(name)
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            path.rmdir()
        shutil.copyfile(Path("folder") / name.replace("/", "_"), path)
    shutil.rmtree("fresh", ignore_errors=True)


def spoil(path: Path, draws: random.Random) -> str:
    """Change a file in one way; returns the name of the way."""
    content = path.read_bytes()
    how = draws.choice(["bytes", "bytes", "value", "value", "value", "value", "deep", "other kind"])
    if how == "other kind":
        path.unlink()
        how = draws.choice(["pipe", "loop", "folder", "device", "nothing"])
        {"pipe": os.mkfifo, "folder": os.mkdir, "nothing": str}.get(how, str)(path)
        if how in ("loop", "device"):
            os.symlink({"loop": path.name, "device": "/dev/zero"}[how], path)
        return how
    header = int.from_bytes(content[:8], "little") if path.suffix == ".safetensors" else 0
    text = content[8 : 8 + header] if header else content
    if how == "value" and path.suffix in (".json", ".safetensors"):
        text = json.dumps(replaced(json.loads(text), draws)).encode()
    elif how == "value" and path.suffix == ".jsonl":
        text = b"".join(
            json.dumps(replaced(json.loads(line), draws)).encode() + b"\n"
            for line in text.splitlines()
        )
    elif how == "value" and path.suffix == ".toml":
        name = draws.choice([field.name for field in fields(TrainConfig)])
        text = f"{name} = {draws.choice(TOML)}".encode()
    elif how == "deep":
        opening = draws.choice(['{"a":', "[", '{"text":[', "a = [", "[a."])
        place = draws.choice([0, len(text) // 2])
        text = text[:place] + opening.encode() * DEEP + text[place:]
    else:
        how, place = "bytes", draws.randrange(len(text))
        inserted = draws.choice(
            [b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"9" * 5000, draws.randbytes(20)]
        )
        text = text[:place] + inserted + text[place + draws.choice([0, 0, 1, 100, len(text)]) :]
    if header:
        size = draws.choice([len(text)] * 4 + [0, 2**63, 2**64 - 1, len(content)])
        text = size.to_bytes(8, "little") + text + content[8 + header :]
    path.write_bytes(text)
    if path.name != "manifest.json" and draws.random() < 0.5:
        agree(path)
        how += ", and the manifest agrees"
    return how


def replaced(value, draws: random.Random):
    """A copy of `value` in which one part is replaced, removed or renamed."""
    if isinstance(value, dict | list) and value and draws.random() < 0.85:
        parts = dict(value) if isinstance(value, dict) else dict(enumerate(value))
        key = draws.choice([*parts])
        change = draws.random()
        if change < 0.1:
            del parts[key]
        elif change < 0.15 and isinstance(value, dict):
            parts["renamed"] = parts.pop(key)
        else:
            parts[key] = replaced(parts[key], draws)
        return parts if isinstance(value, dict) else [*parts.values()]
    return draws.choice(OTHERS)


def agree(path: Path) -> None:
    """Make the manifest of the run's checkpoint describe the file as it is now."""
    file = path.with_name("manifest.json")
    if path.parts[0] != "run" or not file.is_file():
        return
    manifest, content = json.loads(file.read_text()), path.read_bytes()
    manifest.pop("crc32")
    header = (
        content[: 8 + int.from_bytes(content[:8], "little")]
        if path.suffix == ".safetensors"
        else content
    )
    manifest["files"][path.name] = [len(content), zlib.crc32(header)]
    file.write_text(json.dumps({**manifest, "crc32": zlib.crc32(json.dumps(manifest).encode())}))
