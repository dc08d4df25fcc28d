"""Translates a value of another trainer's setting into a flag's value, or says why not.

A function per flag whose value differs from theirs; other values are taken as they are, in the
flag's own type.
"""

import math
import re
from collections.abc import Callable
from dataclasses import fields
from os.path import expanduser
from pathlib import Path
from typing import Any, NamedTuple, get_args

from training.config.rows import PLACES, column, why_left_out
from training.config.theirs import Theirs, is_unset
from training.families.flags import MODEL_SIZES, TARGETS
from training.host.errors import hub_download, program
from training.host.other_trainers import NAMES
from training.run.settings import TrainConfig

ON, OFF = ("true", "yes", "on"), ("false", "no", "off")
TYPES = {field.name: next(iter(get_args(field.type)), field.type) for field in fields(TrainConfig)}
FILES = (".json", ".jsonl", ".parquet", ".csv", ".txt", ".jinja")  # no names on the Hub
MOST_RANK = 2**13  # that lora takes
MEASURED = "the fastest attention kernel is measured; attention_backend names one"
PLANNED = "a plan decides what is computed again; gradient_checkpointing = true takes its place"
UNPLANNED = "without effect on a plan's fused kernels; compile = true takes the place of the plan"


class Outcome(NamedTuple):
    """A value of a flag here; without one the setting is left out, and `note` says why."""

    value: Any = None
    note: str = ""
    first: str = ""  # a command to be run before train.py
    flag: str = ""  # the flag, where the value asks for another than the name


def is_off(value: object) -> bool:
    return value is False or (isinstance(value, str) and value.lower() in OFF) or is_unset(value)


def is_on(value: object) -> bool:
    return value is True or (isinstance(value, str) and value.lower() in ON)


def plain(flag: str, value: Any) -> Outcome:
    """Returns a value in the flag's type: YAML reads 1e-5 as a text."""
    kind = TYPES[flag]
    try:
        if kind is float:
            return Outcome(float(value))
        if kind is int:
            number = float(str(value).replace("_", ""))
            if number == int(number):
                return Outcome(int(number))
            return Outcome(note=f"{flag} is a whole number")
    except (TypeError, ValueError, OverflowError):
        return Outcome(note=f"{flag} is a number")
    if kind is bool:
        return Outcome(is_on(value))
    return Outcome(value if isinstance(value, list) else str(value))


def in_words(flag: str, value: Any) -> str | None:
    """Returns the flag's value for a word of theirs, by other_trainers.toml."""
    words = NAMES["words"][flag].items()
    return next((ours for ours, theirs in words if str(value).lower() in theirs.split()), None)


def word(flag: str, why: str) -> Callable[[str, Any, Theirs], Outcome]:
    """Returns a function that reads a word of theirs, and leaves others out with a reason."""

    def read(name: str, value: Any, theirs: Theirs) -> Outcome:
        meant = in_words(flag, value)
        if meant is None:
            return Outcome(note=f"{why}: {', '.join(NAMES['words'][flag])}")
        return Outcome(meant)

    return read


# The model and the data


def folder(name: str, value: Any, theirs: Theirs) -> Outcome:
    """Reads a model's folder; a name on the Hugging Face Hub is downloaded into a folder."""
    outcome = _downloaded(str(value), "")
    if name.endswith("hf_assets_path") and not is_on(theirs.get("initial_load_in_hf")):
        note = "torchtitan draws the weights; init_from reads this folder's"
        return outcome._replace(flag="tokenizer", note=note)
    return outcome


def size(name: str, value: Any, theirs: Theirs) -> Outcome:
    if str(theirs.get("model.name")).lower() == "qwen3" and value in MODEL_SIZES:
        return Outcome(value)
    return Outcome(note=f"model_size is one of {', '.join(MODEL_SIZES)}; init_from has any other")


def written(name: str, value: Any, theirs: Theirs) -> Outcome:
    return Outcome(_expanded(str(value)))


def _expanded(path: str) -> str:
    """Returns a path without ~, which a shell would replace and a file of settings does not."""
    return expanduser(path)


def _downloaded(path: str, option: str) -> Outcome:
    """Returns a path; a name on the Hub with the command that downloads it."""
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith(".")
    if not is_name or Path(path).exists() or Path(path).suffix in FILES:
        return Outcome(_expanded(path))
    local = path.split("/")[1]
    return Outcome(local, first=hub_download(f"{path} {option}--local-dir {local}"))


def paths(name: str, value: Any, theirs: Theirs) -> Outcome:
    """Reads files and folders of data: a name, names, or tables with a path or data_files."""
    if name.rpartition(".")[2] == "dataset_dir":
        return Outcome(note="the folder in which names of datasets are looked up")
    if theirs.trainer == "torchtitan" and "/" not in str(value):
        note = "a name that torchtitan knows; data are files and folders of this machine"
        return Outcome(note=note)
    datasets: list[Outcome] = []
    unread: dict[str, None] = {}
    for entry in value if isinstance(value, list) else str(value).split(","):
        table = entry if isinstance(entry, dict) else {"path": str(entry).strip()}
        files = table.get("data_files") or table.get("path") or table.get("dataset")
        unread |= dict.fromkeys(str(name) for name in table if _is_unread(table, name))
        for file in files if isinstance(files, list) else [files]:
            datasets.append(_dataset(str(file), theirs))
    notes = dict.fromkeys(dataset.note for dataset in datasets if dataset.note)
    if unread:
        names = ", ".join(unread)
        notes[f"rows are told by their fields, and all are read: {names} left out"] = None
    firsts = dict.fromkeys(dataset.first for dataset in datasets if dataset.first)
    paths = [dataset.value for dataset in datasets]
    return Outcome(paths, "; ".join(notes), " && ".join(firsts))


def _is_unread(entry: dict, name: str) -> bool:
    """Whether neither this file nor translate.py reads a setting of an entry."""
    if name in PLACES or name == "chat_template":
        return False
    return column(name, entry[name], "") is None and why_left_out(name, entry[name]) is None


def _dataset(name: str, theirs: Theirs) -> Outcome:
    """Reads a dataset: its file, a name on the Hub, or a name of LLaMA-Factory's."""
    name, _, count = name.partition("#") if theirs.trainer == "ms-swift" else (name, "", "")
    note = f"all of {name}, not {count} rows" if count else ""
    if theirs.trainer == "LLaMA-Factory" and "/" not in name and not Path(name).exists():
        where = str(theirs.get("dataset_dir", "data"))
        note = f"{where}/dataset_info.json names the file of {name}"
        return Outcome(f"{where}/{name}.json", note)
    downloaded = _downloaded(name, "--repo-type dataset ")
    return downloaded._replace(note=note)


def rope(name: str, value: Any, theirs: Theirs) -> Outcome:
    if re.fullmatch(r"(yarn|linear):[\d.]+(:[\d.]+)?", str(value)):
        return Outcome(str(value))
    return Outcome(
        note="a way and a factor are asked for: yarn:4:32768 or linear:4; config.json says any "
        "other"
    )


def template(name: str, value: Any, theirs: Theirs) -> Outcome:
    text = str(value)
    if text == "jinja" and theirs.get("chat_template_jinja"):
        return Outcome()
    if text == "chatml":
        return Outcome("chatml")
    if "{%" in text or "{{" in text:
        return Outcome(note="a template as text: write it to a file, and give chat_template = FILE")
    if text.endswith((".jinja", ".j2")):
        return Outcome(text)
    return Outcome(
        note="the template in init_from's folder is read, whatever its name; else chatml, or a "
        "Jinja file"
    )


def columns(name: str, value: Any, theirs: Theirs) -> Outcome:
    end = name.rpartition(".")[2]
    ours = next((ours for ours, names in NAMES["columns"].items() if end in names.split()), None)
    if ours is None:
        return Outcome(
            note="fields of usual names are read, docs/data.md lists them; columns names others"
        )
    return Outcome(note=f"rows have {ours} anyway") if value == ours else Outcome(f"{ours}={value}")


def share_held_out(name: str, value: Any, theirs: Theirs) -> Outcome:
    number = float(value) / (100 if name.endswith("percentage") else 1)
    if number == 0:
        return Outcome(0, "nothing is validated", flag="validation_sequences")
    if number >= 1:
        return Outcome(
            note=f"{number:g} rows; validation_fraction is a share of the tokens, 0.02 by default"
        )
    return Outcome(number)


# Adapters


def adapters_of(theirs: Theirs) -> dict | None:
    """Returns the row of the trainer's adapters; None: the settings ask for none."""
    row = NAMES["adapters"].get(theirs.trainer, {})
    if "switch" not in row:
        asks = is_on(theirs.get("use_peft")) or theirs.get("lora_rank") or theirs.get("lora.rank")
        return row if asks else None
    values = [theirs.get(name) for name in row["switch"].split()]
    value = next((value for value in values if value is not None), row.get("default", ""))
    word = str(value).lower()
    return row if "lora" in word or word in ("true", "dora") else None


def rank(name: str, value: Any, theirs: Theirs) -> Outcome:
    row = adapters_of(theirs)
    if row is None:
        return Outcome(note="every weight is trained" if str(value).isdecimal() else "")
    if not isinstance(value, bool | str) or str(value).isdecimal():
        return Outcome(int(value))
    for setting in ("lora_r", "lora_rank", "lora_dim"):
        number = theirs.get(setting)
        if type(number) is int and 0 < number <= MOST_RANK:
            return Outcome(number)
    return Outcome(row.get("rank", 8))


def alpha(name: str, value: Any, theirs: Theirs) -> Outcome:
    if adapters_of(theirs) is None:
        return Outcome(note="every weight is trained")
    number, rank_of_adapters = float(value), rank("lora", True, theirs).value
    if is_rank_stabilized(theirs):
        scaled = number * math.sqrt(rank_of_adapters)
        return Outcome(scaled, "of rsLoRA: theirs x the root of the rank")
    return Outcome(number)


def is_rank_stabilized(theirs: Theirs) -> bool:
    return is_on(theirs.get("use_rslora")) or is_on(theirs.get("peft_use_rslora"))


def targets(name: str, value: Any, theirs: Theirs) -> Outcome:
    if adapters_of(theirs) is None:
        return Outcome(note="every weight is trained")
    if is_on(value) or value in ("all", "all-linear", ["all-linear"], ["all"]):
        return Outcome("all-linear")
    listed = value if isinstance(value, list) else str(value).split(",")
    names = [str(name).strip() for name in listed]
    known = [name for name in names if name in TARGETS]
    unknown = ", ".join(name for name in names if name not in TARGETS)
    if not known:
        return Outcome(note=f"lora_targets are of {', '.join(TARGETS)}; default: all-linear")
    return Outcome(",".join(known), f"without {unknown}, of no block" if unknown else "")


def bits(name: str, value: Any, theirs: Theirs) -> Outcome:
    end = name.rpartition(".")[2]
    number = {"load_in_4bit": 4, "load_in_8bit": 8, "qlora": 4}.get(end, value)
    if number not in (4, 8):
        return Outcome(note="lora_bits is 16, 8 or 4")
    if adapters_of(theirs) is None:
        return Outcome(note="weights that are trained are bf16 beside float32 masters")
    return Outcome(number)


# The optimizer


def steps(name: str, value: Any, theirs: Theirs) -> Outcome:
    number = int(float(value))
    return Outcome(number) if number > 0 else Outcome(note="")


def warmup(name: str, value: Any, theirs: Theirs) -> Outcome:
    number = float(value)
    if number < 0:
        return Outcome()
    if number == int(number) and not ("ratio" in name and number > 0):
        return Outcome(int(number))
    total = theirs.get("max_steps", theirs.get("total_training_steps"))
    if total is None or float(total) <= 0:
        return Outcome(
            note=f"{number:.3g} of the run's steps, which the data settle: give warmup_steps; 20 "
            "by default"
        )
    share = number * float(total)
    count = int(share) if theirs.trainer == "axolotl" else math.ceil(share)
    return Outcome(max(1, count), f"{number:.3g} of {int(float(total))} steps")


def schedule(name: str, value: Any, theirs: Theirs) -> Outcome:
    end = name.rpartition(".")[2]
    if end == "min_lr":
        peak = theirs.get("learning_rate", theirs.get("lr"))
        if not peak:
            return Outcome(note="a share of learning_rate is to be given")
        return Outcome(float(value) / float(peak))
    if end.startswith(("min_", "cosine_min")):
        return Outcome(float(value))
    kind = str(value).lower()
    if kind.startswith("cosine_") and "min_lr" in kind:  # settings of their own say where it ends
        return Outcome()
    for ratio, kinds in NAMES["schedules"].items():
        if kind in kinds.split():
            is_said = float(ratio) or kind == "cosine"
            return Outcome(float(ratio), "" if is_said else "by a cosine here")
    return Outcome(note="the learning rate rises for warmup_steps and falls by a cosine")


def optimizer(name: str, value: Any, theirs: Theirs) -> Outcome:
    meant = in_words("optimizer_state", value)
    if meant is None:
        return Outcome(note="the optimizer is AdamW with betas of 0.9 and 0.95")
    if meant != "compact":
        return Outcome()
    if adapters_of(theirs) is None:
        return Outcome("compact")
    return Outcome(note="adapters' state is small, and float32")


def all_sequences(name: str, value: Any, theirs: Theirs) -> Outcome:
    """Reads sequences in a step of all GPUs, as micro-batches of one GPU."""
    total = int(value)
    local = theirs.get("local_batch_size", theirs.get("micro_batch_size_per_gpu"))
    if total < 1:
        return Outcome()
    gpus = int(theirs.get("n_gpus_per_node", 1)) * int(theirs.get("nnodes", 1))
    if local is None:
        return Outcome(note=f"{total} / (batch_size x GPUs) is gradient_accumulation_steps")
    count = max(1, total // (int(local) * gpus))
    note = f"on {gpus} GPU{'s' * (gpus > 1)}: {total} / ({local} x {gpus})"
    return Outcome(count, note, flag="gradient_accumulation_steps")


def sequences(name: str, value: Any, theirs: Theirs) -> Outcome:
    is_whole = theirs.trainer == "verl" and name.rpartition(".")[2] == "train_batch_size"
    return all_sequences(name, value, theirs) if is_whole else plain("batch_size", value)


def micro_batches(name: str, value: Any, theirs: Theirs) -> Outcome:
    if name.rpartition(".")[2] == "global_batch_size":
        return all_sequences(name, value, theirs)
    return plain("gradient_accumulation_steps", value)


def length(name: str, value: Any, theirs: Theirs) -> Outcome:
    question, answer = theirs.get("max_prompt_length"), theirs.get("max_response_length")
    if name.rpartition(".")[2] in ("max_prompt_length", "max_response_length"):
        if question is None or answer is None:
            return Outcome(note="context_length is of a prompt with its answer")
        note = f"{question} of a prompt and {answer} of an answer"
        return Outcome(int(question) + int(answer), note)
    return plain("context_length", value)


def objective(name: str, value: Any, theirs: Theirs) -> Outcome:
    is_detail = name.rpartition(".")[2] in ("importance_sampling_level", "stage")
    if is_detail and str(value) in ("token", "sft", "pt"):
        return Outcome()
    kinds = [kind for kind in value if kind != "sft"] if isinstance(value, list) else [value]
    meant = in_words("objective", kinds[0]) if len(kinds) == 1 else None
    if meant is None:
        return Outcome(note=f"objective is one of {', '.join(NAMES['words']['objective'])}")
    return Outcome(meant) if meant != "next_token" else Outcome()


def has_nll(theirs: Theirs) -> bool:
    """Whether TRL's loss is of two terms, of which one is the loss of the chosen answers."""
    kinds = theirs.get("loss_type")
    return isinstance(kinds, list) and len(kinds) == 2 and "sft" in kinds


def nll(name: str, value: Any, theirs: Theirs) -> Outcome:
    """Reads the weight of the chosen answers' loss.

    It is 0.5 of loss_type [sigmoid, sft] with loss_weights [1.0, 0.5].
    """
    if name.rpartition(".")[2] != "loss_weights":
        return plain("nll_weight", value)
    if not has_nll(theirs) or len(value) != 2:
        return Outcome(
            note="one loss is trained on, with the chosen answers' loss beside it as nll_weight"
        )
    index = theirs.get("loss_type").index("sft")
    return Outcome(float(value[index]) / float(value[1 - index]), "over the other's weight")


def clip_high(name: str, value: Any, theirs: Theirs) -> Outcome:
    is_cap = theirs.trainer in ("TRL", "ms-swift") and theirs.get("loss_type") == "cispo"
    return Outcome(float(value) - 1, "of 1 and this here") if is_cap else plain("clip_high", value)


def beta(name: str, value: Any, theirs: Theirs) -> Outcome:
    is_unused = name.rpartition(".")[2] == "kl_loss_coef" and not is_on(theirs.get("use_kl_loss"))
    return Outcome(note="use_kl_loss is off") if is_unused else plain("beta", value)


# While it runs


def interval(flag: str, why: str) -> Callable[[str, Any, Theirs], Outcome]:
    """Returns a function that reads steps between validations or checkpoints.

    Theirs may be words, or a share.
    """

    def read(name: str, value: Any, theirs: Theirs) -> Outcome:
        if str(value).lower() == "steps":
            return Outcome()
        try:
            number = float(value)
        except (TypeError, ValueError):
            return Outcome(note=why)
        if number < 0:
            return Outcome()
        if number != int(number) or name.endswith("_per_epoch"):
            return Outcome(note=why)
        return Outcome(str(int(number)) if TYPES[flag] is str else int(number))

    return read


def saves(name: str, value: Any, theirs: Theirs) -> Outcome:
    return Outcome() if name.endswith(".enable") or not is_on(value) else Outcome("model")


def going_on(name: str, value: Any, theirs: Theirs) -> Outcome:
    meant = in_words("resume", value)
    if not meant:
        return Outcome(note="checkpoints of other trainers: init_from takes their weights")
    return Outcome(meant)


def project(name: str, value: Any, theirs: Theirs) -> Outcome:
    if not is_on(value):
        return Outcome(str(value))
    names = map(theirs.get, ("wandb_project", "trackio_project_name", "project_name"))
    return Outcome(str(next(filter(None, names), "fathom")))


def switch(name: str, value: Any, theirs: Theirs) -> Outcome:
    if is_on(value):
        return Outcome(True)
    return Outcome(note="event files go to output_dir/tensorboard")


def minutes(name: str, value: Any, theirs: Theirs) -> Outcome:
    return Outcome(max(1, math.ceil(float(value) / 60)), f"{value} seconds")


def left(why: str) -> Callable[[str, Any, Theirs], Outcome]:
    return lambda name, value, theirs: Outcome(note=why)


def ranks(name: str, value: Any, theirs: Theirs) -> Outcome:
    return Outcome(int(value)) if int(value) > 1 else Outcome()


def weights(name: str, value: Any, theirs: Theirs) -> Outcome:
    return Outcome(",".join(map(str, value)) if isinstance(value, list) else str(value))


MAKE_LOGPROBS = f"{program()} -m training.logprobs makes its log-probabilities of your data, for"
READERS: dict[str, Callable[[str, Any, Theirs], Outcome]] = {
    "init_from": folder,
    "model_size": size,
    "tokenizer": folder,
    "output_dir": written,
    "data": paths,
    "validation_data": paths,
    "columns": columns,
    "chat_template": template,
    "rope_scaling": rope,
    "validation_fraction": share_held_out,
    "lora": rank,
    "lora_alpha": alpha,
    "lora_targets": targets,
    "lora_bits": bits,
    "max_steps": steps,
    "warmup_steps": warmup,
    "final_learning_rate_ratio": schedule,
    "optimizer_state": optimizer,
    "batch_size": sequences,
    "gradient_accumulation_steps": micro_batches,
    "context_length": length,
    "objective": objective,
    "nll_weight": nll,
    "clip_high": clip_high,
    "beta": beta,
    "save": saves,
    "resume": going_on,
    "wandb": project,
    "trackio": project,
    "tensorboard": switch,
    "collective_timeout": minutes,
    "data_weights": weights,
    "validation_interval": interval(
        "validation_interval", "validation_interval is a number of steps"
    ),
    "checkpoint_interval": interval(
        "checkpoint_interval", "checkpoint_interval is steps, or minutes as 30min"
    ),
    "context_parallel_size": ranks,
    "tensor_parallel_size": ranks,
    "replicate": ranks,
    "packing": word("packing", "documents share a sequence and do not see each other"),
    "overlong": word("overlong", "no document is cut short"),
    "bad_rows": word("bad_rows", "rows that cannot be read are refused, or dropped"),
    "device": word("device", "devices are"),
    "linear": word("linear", "products of 8 bits are"),
    "attention_backend": left(MEASURED),
    "gradient_checkpointing": left(PLANNED),
    "compile": left(UNPLANNED),
    "reference_logprobs": left(f"{MAKE_LOGPROBS} reference_logprobs"),
    "teacher_logprobs": left(f"{MAKE_LOGPROBS} teacher_logprobs"),
}
