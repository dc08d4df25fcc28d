"""Shows a run: its settings, then each step to people, metrics.jsonl and other writers."""

import contextlib
import importlib
import json
import logging
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import torch
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from training.host.errors import UserError, program
from training.host.files import check_can_write, read_file, replace_file, without_folders
from training.host.processes import line_of
from training.memory.machine import find_gpu
from training.memory.plan import Plan
from training.parallel.world import World
from training.plots.panels import loss_in_words, parse_line
from training.run.recipe import Outputs, Recipe
from training.run.settings import differing

logger = logging.getLogger(__name__)
FILE_ONLY = logging.getLogger(f"{__name__}.file_only")  # lines for --log_file alone
FILE_ONLY.propagate = False
FILE_ONLY.addHandler(logging.NullHandler())
SECONDS_BETWEEN_LINES = 1.0
Writer = Callable[[dict], None]


def describe(recipe: Recipe, record: dict, plan: Plan, world: World) -> None:
    """Logs the settings of a `record` that differ from the defaults, the model and the device."""
    logger.info("config: %s", json.dumps(differing(record)))
    logger.info(
        "model: %s, %s parameters; attention: %s, kernel: %s; device: %s x %d (data x context x "
        "tensor: %d x %d x %d)",
        recipe.model_name,
        f"{recipe.model.num_parameters():,}",
        recipe.attention_type,
        plan.execution.attention_backend,
        world.device.type,
        world.size,
        world.data_size,
        world.context_size,
        world.tensor_size,
    )
    if names := plan.execution.maps_in_words:
        logger.info("linear maps: %s", names)
    if world.device.type == "cuda":
        waits = (
            "for Triton to compile kernels that its cache lacks, "
            "and for the attention library's plans"
        )
        logger.info("the first step takes longer than others: it also waits %s", waits)


# Metrics of objectives in the line of a step, in this order, and their formats; z: no minus before
# 0.000.
SHOWN_OF_OBJECTIVES = {
    "accuracy": "z.1%",
    "margin": "z.3f",
    "reward_chosen": "z.3f",
    "reward_rejected": "z.3f",
    "kl": "z.4f",
    "clip_share": "z.1%",
    "entropy": "z.3f",
}


class Display(contextlib.ExitStack):
    """Shows each step: on a progress bar in a terminal, elsewhere as a line of the log.

    Two lines are SECONDS_BETWEEN_LINES apart at least, but the first and the last step have theirs:
    metrics.jsonl has every step. Beside a progress bar --log_file alone has the lines. Other ranks
    than the main rank show nothing.

    Args:
        unit: what the loss of next tokens is a mean of, such as "nats per token"; "": of other
            objectives.
    """

    def __init__(
        self,
        first_step: int,
        max_steps: int,
        is_main: bool,
        unit: str = "nats per token",
        objective: str = "next_token",
    ):
        super().__init__()
        self._total, self._first, self._unit = max_steps, first_step, f" {unit}" if unit else ""
        self._loss = loss_in_words(objective)
        where = None if is_main else True  # None: not without a terminal
        self._bar = self.enter_context(
            tqdm(total=self._total, initial=first_step, unit="step", disable=where)
        )
        self._lines = logger if self._bar.disable else FILE_ONLY
        if not self._bar.disable:
            self.enter_context(logging_redirect_tqdm())  # lines of the log stand above the bar
        self._began, self._shown = time.monotonic(), -math.inf

    def show(self, values: dict) -> None:
        if values["loss"] is None:
            loss = "left out"
        else:
            loss = f"{values['loss']:z.3f}" + " (spike)" * ("is_spike" in values)
        objective, speed = objectives_in_words(values), speeds_in_words(values)
        if "mfu" in values:
            speed["mfu"] = f"{values['mfu']:.1%}"
        if "peak_memory_gib" in values:
            speed["GiB"] = max(values["peak_memory_gib"])
        self._bar.set_postfix({self._loss: loss, **objective, **speed})
        self._bar.update()
        now, step = time.monotonic(), values["step"]
        if now - self._shown >= SECONDS_BETWEEN_LINES or step == self._total:
            self._shown = now
            left = (now - self._began) / (step - self._first) * (self._total - step)
            named = {self._loss: loss, **objective}
            text = [f"{name} {value}" for name, value in named.items()]
            text += [f"{value} {unit}" for unit, value in speed.items()]
            time_left, seconds = tqdm.format_interval(left), values["seconds"]
            self._lines.info(
                "step %d/%d: %s, %.1f s, ETA %s",
                step,
                self._total,
                ", ".join(text),
                seconds,
                time_left,
            )
        if "validation_loss" in values:
            self.show_validation(values)

    def show_validation(self, values: dict) -> None:
        named = {self._loss: f"{values['validation_loss']:z.4f}{self._unit}"}
        named |= objectives_in_words(values, "validation_")
        text = ", ".join(f"{name} {value}" for name, value in named.items())
        share = f"{values['validation_share']:.0%}"
        logger.info(
            "step %d: validation %s; validations take %s of the time", values["step"], text, share
        )


def objectives_in_words(values: dict, prefix: str = "") -> dict[str, str]:
    """Returns an objective's metrics of a step by the words of its line.

    A margin stands for both rewards.
    """
    shown = dict[str, str]()
    for name, spec in SHOWN_OF_OBJECTIVES.items():
        value = values.get(prefix + name)
        is_in_margin = name.startswith("reward_") and f"{prefix}margin" in values
        if value is not None and not is_in_margin:
            shown[name.replace("_", " ")] = format(value, spec)
    return shown


def speeds_in_words(values: dict) -> dict[str, str]:
    """Returns tokens per second by their unit: without padding, and with it where there is some."""
    padded = f"{values['tokens_per_second']:,.0f}"
    if "text_tokens_per_second" not in values:
        return {"tokens/s with padding": padded}
    texts = f"{values['text_tokens_per_second']:,.0f}"
    return {"tokens/s": texts} if texts == padded else {"tokens/s": texts, "with padding": padded}


@contextlib.contextmanager
def also_logged_into(log_file: str | None) -> Iterator[None]:
    """Appends what is logged to a file, with times, and the error that ends the run.

    None: does nothing.
    """
    if log_file is None:
        yield
        return
    with contextlib.suppress(OSError):  # the next check says what is wrong
        Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    check_can_write(Path(log_file), "--log_file")
    handler = logging.FileHandler(log_file, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    # A full disk ends no run.
    handler.handleError = lambda record: None  # type: ignore[method-assign]
    loggers = logging.getLogger(), FILE_ONLY
    for log in loggers:
        log.addHandler(handler)
    try:
        yield
    except Exception as error:
        FILE_ONLY.error("%s", line_of(error) or "".join(traceback.format_exception(error)).rstrip())
        raise
    finally:
        for log in loggers:
            log.removeHandler(handler)
        handler.close()


def own_amounts(forward_flops: float, text_tokens: int, world: World) -> list[float]:
    """Returns this rank's part of a sum that `summed_metrics` takes.

    It is FLOPs of its forwards, tokens of its texts without padding, and [ranks] peaks, 0 but its
    own.
    """
    peaks = [0.0] * world.size
    if world.device.type == "cuda":
        peaks[world.rank] = torch.cuda.max_memory_allocated(world.device) / 2**30
        torch.cuda.reset_peak_memory_stats(world.device)
    return [forward_flops, text_tokens, *peaks]


def summed_metrics(amounts: list[float], seconds: float, world: World) -> dict:
    """Returns a step's tokens without padding, and on GPUs each rank's peak of memory in GiB and
    the FLOP utilisation.

    `amounts` are sums over ranks of `own_amounts`. A backward takes twice the FLOPs of a forward.
    """
    flops, text_tokens, *peaks = amounts
    ranks_of_a_sequence = world.context_size * world.tensor_size  # each has the whole sequence
    text_tokens /= ranks_of_a_sequence
    summed: dict = {
        "text_tokens": round(text_tokens),
        "text_tokens_per_second": text_tokens / seconds,
    }
    if world.device.type == "cuda":
        summed["peak_memory_gib"] = [round(peak, 2) for peak in peaks]
    if (most := peak_flops(world.device)) is not None:
        summed["mfu"] = 3 * flops / world.size / ranks_of_a_sequence / seconds / most
    return summed


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of the GPU, FLOP/s; None on a CPU or a GPU that the table does not know."""
    gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if gpu is None else gpu.flops


def is_spike(loss: float, recent: Sequence[float]) -> bool:
    """Whether a loss is over 6 standard deviations above the mean of 20 or more recent losses."""
    return len(recent) >= 20 and loss > statistics.mean(recent) + 6 * statistics.pstdev(recent)


def set_aside(path: Path) -> None:
    """Renames an earlier run's metrics.jsonl to metrics.1.jsonl, or the first free number."""
    if path.exists() and path.stat().st_size:
        earlier = next(
            p for n in count(1) if not (p := path.with_suffix(f".{n}{path.suffix}")).exists()
        )
        path.rename(earlier)
        logger.info("%s of an earlier run is kept as %s", path, earlier.name)


def open_metrics(
    outputs: Outputs, record: dict, from_step: int, stack: contextlib.ExitStack
) -> "Metrics":
    """Writes the settings of a run into its folder, and opens metrics.jsonl beside them, and what
    else gets metrics.

    The end of `stack` ends the runs of trackers. Raises UserError.
    """
    folder = outputs.folder
    try:
        replace_file(folder / "config.json", json.dumps(record, indent=2) + "\n")
        if not outputs.goes_on:
            set_aside(folder / "metrics.jsonl")
        writers = {"metrics.jsonl": jsonl_writer(folder / "metrics.jsonl", from_step)}
    except OSError as error:
        raise UserError(
            f"output_dir {folder} cannot be written to: {error}; choose another"
        ) from None
    for name in outputs.trackers:
        tracker = TRACKERS[name]
        writers[tracker.title] = tracker.open(outputs, record, from_step, stack)
    return Metrics(writers)


class Metrics:
    """Gives metrics to writers, on one rank. The run is worth more than its log: a writer that
    fails is a warning.

    Args:
        writers: by name; each takes the metrics of a step. A writer that fails by more than an
            OSError gets no more. Of failures in a row the first is said.
    """

    def __init__(self, writers: dict[str, Writer]):
        self._writers, self._failing = dict(writers), set[str]()

    def add(self, name: str, writer: Writer) -> None:
        self._writers[name] = writer

    def write(self, **values) -> None:
        for name, write in [*self._writers.items()]:
            try:
                write(values)
                self._failing.discard(name)
            except Exception as error:
                # such as a full disk, which may have room later
                may_end = isinstance(error, OSError)
                if name not in self._failing or not may_end:
                    logger.warning(
                        "step %s cannot be written to %s: %s", values["step"], name, error
                    )
                self._failing.add(name)
                if not may_end:
                    logger.warning("nothing more is written to %s", name)
                    del self._writers[name]


def jsonl_writer(path: Path, from_step: int) -> Writer:
    """Appends metrics to metrics.jsonl, a line at a time, flushed.

    Drops lines past `from_step`, which a run has written after its last checkpoint, and lines that
    a kill or a full disk cut short.
    """
    content = read_file(path, "move it elsewhere") if path.exists() else b""
    lines = content.decode(errors="replace").splitlines()
    rows = [parse_line(line) for line in lines]
    if damaged := rows.count(None):
        logger.warning("%s: %d of %d lines are damaged and were dropped", path, damaged, len(lines))
    kept = (line for line, row in zip(lines, rows) if row and row["step"] <= from_step)
    replace_file(path, "".join(f"{line}\n" for line in kept))
    file = path.open("a")

    def write(values: dict) -> None:
        file.write(json.dumps(values) + "\n")
        file.flush()

    return write


def tensorboard_writer(
    outputs: Outputs, record: dict, from_step: int, stack: contextlib.ExitStack
) -> Writer:
    """Writes TensorBoard's event files.

    A resumed run takes the place of the steps after `from_step`.
    """
    # needs the package tensorboard, which is optional
    from torch.utils.tensorboard import SummaryWriter

    events = SummaryWriter(str(outputs.folder / "tensorboard"), purge_step=from_step + 1)

    def write(values: dict) -> None:
        for name, number in numbers(values).items():
            events.add_scalar(name, number, values["step"])
        events.flush()

    return write


def tracker_writer(
    package: str, outputs: Outputs, record: dict, from_step: int, stack: contextlib.ExitStack
) -> Writer:
    """Sends metrics, and settings without folders, to wandb or trackio.

    A resumed run goes on in its run, which output_dir/*_id names.

    Raises UserError if the package cannot be imported or started, as without a login, or that file
    cannot be read.
    """
    folder, project, is_wandb = outputs.folder, outputs.trackers[package], package == "wandb"
    name, file = "id" if is_wandb else "name", folder / f"{package}_id"  # names a run
    earlier = None
    if outputs.goes_on and file.exists():
        earlier = read_file(file, "delete it").decode(errors="replace").strip() or None
    options: dict = {"project": project, name: earlier, "resume": "allow"}
    if is_wandb:
        options |= {"dir": str(folder), "allow_val_change": True}
    try:
        tracker = importlib.import_module(package)  # optional
        config = {key: without_folders(value) for key, value in record.items()}
        run = tracker.init(config=config, **options)
        if is_wandb:  # its own count of steps would drop what a resumed run repeats
            run.define_metric("*", step_metric="step")
        replace_file(file, f"{getattr(run, name)}\n")
    except Exception as error:
        login = ""
        if is_wandb:
            login = f"log in with `{program('wandb')} login`, set WANDB_MODE=offline, or "
        raise UserError(f"--{package} {project}: {error}; {login}drop it") from None

    def write(values: dict) -> None:
        if is_wandb:
            run.log({"step": values["step"], **numbers(values)})
        else:
            run.log(numbers(values), step=values["step"])

    def finish(error_type, *_) -> None:
        """Ends the tracker's run with the stack; `error_type` is None unless an error ended it."""
        exit_code, advice = {}, ""
        if is_wandb:
            exit_code["exit_code"] = int(error_type is not None)
            advice = f"; `{program('wandb')} sync` sends what is in {folder}/wandb"
        try:
            run.finish(**exit_code)
        except Exception as error:
            logger.warning("%s: %s%s", TRACKERS[package].title, error, advice)

    stack.push(finish)
    return write


@dataclass(frozen=True)
class Tracker:
    """A program that gets metrics beside metrics.jsonl.

    `open` takes the arguments of `open_metrics`, and returns a writer.
    """

    title: str
    open: Callable[[Outputs, dict, int, contextlib.ExitStack], Writer]


# By the names of their flags. The flag's value is in `Outputs.trackers`.
TRACKERS = {
    "tensorboard": Tracker("TensorBoard", tensorboard_writer),
    "wandb": Tracker("Weights & Biases", partial(tracker_writer, "wandb")),
    "trackio": Tracker("Trackio", partial(tracker_writer, "trackio")),
}


def numbers(values: dict) -> dict[str, float]:
    """Returns a step's numbers but the step.

    A list, such as memory by rank, is its largest number.
    """
    largest = {
        name: max(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return {
        name: value
        for name, value in largest.items()
        if name != "step" and isinstance(value, int | float)
    }
