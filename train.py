"""Train a decoder: `python train.py`, or `torchrun --nproc_per_node=N train.py` on N GPUs.

This file reads from top to bottom: a run from its start to its end; its parts; its data; a step;
validation, metrics and checkpoints after a step; the end. The rest is in training/run:

- settings.py joins the flags of all rooms, decide.py turns them into a recipe before the data are
  read, recipe.py holds the recipe, resume.py what a checkpoint says;
- build.py makes the model and its memory plan;
- running.py has the parts of a run, its checkpoints and its sample, train_step.py the arithmetic of
  a step;
- schedule.py counts steps, stopping.py has early ends, metrics.py what is shown and written of each
  step.
"""

import sys

from training.flags import answer_early
from training.parallel.flags import COLLECTIVE_TIMEOUT
from training.run.settings import given_settings

if __name__ == "__main__":
    answer_early(given_settings)

import contextlib
import dataclasses
import gc
import logging
import time
from functools import partial
from pathlib import Path
from statistics import mean

import torch

from model import Transformer
from training.checkpoint.files import (
    check_is_for_a_run,
    check_is_shared,
    clear_leftovers,
    delete_old,
    tokenizer_of,
)
from training.checkpoint.ranks import failing_together
from training.checkpoint.saver import Saver
from training.checkpoint.weights import (
    NO_COMPANIONS,
    Companions,
    folders_of,
    left_out,
    read_beside_weights,
    read_companions,
)
from training.data.chat import stop_ids
from training.data.decide import check_held_out, describe_data, make_loader, open_corpus
from training.data.loader import Batch, PackedLoader, prompts_of, validation_batches
from training.data.show import read_batch, show_batch
from training.data.show_html import SHOWN_ON_A_PAGE, write_batch
from training.data.tokens import Store
from training.families.rope import beyond
from training.host.errors import UserError
from training.host.files import check_paths, only_run_in
from training.host.processes import command, outliving_its_output
from training.memory.cost_model import forward_flops
from training.memory.plan import Plan
from training.memory.step import PackedDocuments
from training.objectives.stored import Stored, attention_in_words
from training.parallel.world import World, check_same_on_all_ranks, join_world
from training.plots.curves import draw_at_end
from training.plots.panels import unit_of
from training.run.build import build, check_fits, explain_out_of_memory
from training.run.decide import Launch, decide, decide_launch
from training.run.metrics import (
    Display,
    also_logged_into,
    describe,
    is_spike,
    open_metrics,
    own_amounts,
    summed_metrics,
)
from training.run.recipe import Recipe, check_is_free, check_machine, verify_start
from training.run.report import recorded_warnings
from training.run.running import (
    Run,
    check_disk,
    checkpoint_bytes,
    is_save_due,
    log_sample,
    open_report,
)
from training.run.schedule import Progress, Schedule, count_steps
from training.run.stopping import Stopped, Stopping, exit_with, stop_signals
from training.run.train_step import NoTarget, NotFinite, NotRead, train_step, validate

logger = logging.getLogger("train")


@command
@outliving_its_output()
def main(argv: list[str]) -> int:
    """Returns the exit status: 0 at the end, 1 after an error, 128 + the signal that stopped it."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    launch = decide_launch(given_settings(argv))
    with (
        join_world(launch.device, **launch.mesh) as world,
        also_logged_into(launch.log_file if world.is_main else None),
    ):
        if not world.is_main:
            logging.disable(logging.WARNING)
        try:
            return train(launch, world)
        except KeyboardInterrupt:  # during the steps, `stop_signals` notes Ctrl-C instead
            advice = f"--resume goes on from a checkpoint in {launch.output_dir}, if there is one"
            logger.info("interrupted: %s; otherwise the same command starts anew", advice)
            raise


def train(launch: Launch, world: World) -> int:
    """Runs from the checks to the final checkpoint and a sample; returns the exit status."""
    with contextlib.ExitStack() as stack:
        if not launch.only_shows:
            if world.is_main:
                check_is_for_a_run(launch.output_dir)
                stack.enter_context(only_run_in(launch.output_dir))
                clear_leftovers(launch.output_dir)
            check_is_shared(launch.output_dir)
        warnings = stack.enter_context(recorded_warnings())
        # Refusals that take seconds come before the data, which may take minutes to tokenise.
        recipe = decide(launch.flag_values, world)
        progress = recipe.start.progress
        if progress.is_complete and not owes_validation(recipe.schedule, progress):
            finish_again(recipe, world)
            return 0
        if recipe.data.is_shown:
            show(recipe, world)
            return 0
        run = set_up(recipe, world, stack)
        open_report(run, warnings, stack)
        try:
            if owes_validation(recipe.schedule, run.progress):
                make_up_validation(run)
            while not (run.progress.is_complete or run.stopped):
                values = take_step(run)
                if values is None:
                    break
                validate_if_due(run, values)
                save_if_due(run, values)
        except Exception:
            run.save_after_error()
            raise
        return end(run)


def finish_again(recipe: Recipe, world: World) -> None:
    """Draws the curves and deletes old checkpoints, which a kill may have left undone."""
    saving, start = recipe.saving, recipe.start
    logger.info(
        "%s is of the last of %d steps: nothing is left to do",
        start.checkpoint,
        start.progress.max_steps,
    )
    if world.is_main:
        draw_at_end(saving.output_dir)
        if saving.is_on and start.checkpoint:
            delete_old(start.checkpoint, saving.kept)


def show(recipe: Recipe, world: World) -> None:
    """Prints the next batch of the run, or writes it as a page."""
    file, rows = recipe.data.show_batch, recipe.reading.rows
    loader, _ = open_data(recipe, world)
    if not world.is_main:
        return
    if isinstance(file, str):
        write_batch(Path(file), read_batch(loader, recipe.tokenizer, SHOWN_ON_A_PAGE, rows))
        print(file)
    else:
        print(show_batch(loader, recipe.tokenizer, sys.stdout.isatty(), rows))


def set_up(recipe: Recipe, world: World, stack: contextlib.ExitStack) -> Run:
    """Makes all that a run needs; what must end with the run is pushed to `stack`."""
    checkpoint_size = check_before_data(recipe, world)
    loader, held_out = open_data(recipe, world)
    progress = count_steps(
        recipe.schedule,
        recipe.start.progress,
        loader,
        recipe.batch.micro_batches,
        recipe.start.checkpoint,
    )
    companions = companions_of(recipe, loader)
    model, optimizer, plan = build(recipe, documents_of(recipe, loader, world), world)
    state_format = plan.execution.state_format
    planned_size = checkpoint_bytes(recipe, world, state_format)
    if planned_size > checkpoint_size:
        check_room_to_save(recipe, world, progress, planned_size)
    record = recipe.record(progress.max_steps, state_format)
    record["memory_budget"] = recipe.memory_budget
    first_step, metrics = progress.step, None
    if world.is_main:
        metrics = open_metrics(recipe.outputs, record, first_step, stack)
    saving = recipe.saving
    saver = Saver(saving.output_dir, saving.kept, recipe.start.checkpoint, companions)
    # An error ends the run once the checkpoint that was begun is complete.
    stack.callback(saver.wait)
    stopping = watch_signals(recipe, plan, model, world, stack)
    describe(recipe, record, plan, world)
    freeze_garbage(stack)
    # The stack ends the bar's line before an error is shown.
    display = stack.enter_context(
        Display(first_step, progress.max_steps, world.is_main, unit_of(record), recipe.aim.name)
    )
    return Run(
        recipe,
        world,
        loader,
        held_out,
        model,
        optimizer,
        plan,
        saver,
        stopping,
        metrics,
        display,
        progress=dataclasses.replace(progress, loader=loader.state_dict()),
        saved=first_step,
        saved_at=time.monotonic(),
    )


def check_before_data(recipe: Recipe, world: World) -> int:
    """Refuses what fails without the data; returns the least bytes of a checkpoint."""
    check_machine(recipe, world)
    check_fits(recipe, world)
    check_paths({"data": recipe.data.paths, "validation_data": recipe.data.held_out_paths})
    for folder in recipe.aim.folders.values():
        Stored.read(folder)  # refuses a folder without stored log-probabilities
    check_is_free(recipe.outputs)
    verify_start(recipe.start)
    size = checkpoint_bytes(recipe, world)
    check_room_to_save(recipe, world, recipe.start.progress, size)
    return size


def check_room_to_save(recipe: Recipe, world: World, progress: Progress, size: int) -> None:
    """Refuses a disk that is too full for checkpoints of `size` bytes, if this rank saves."""
    if world.is_main and recipe.saving.is_on:
        validates = recipe.schedule.validation_sequences != 0
        check_disk(recipe.saving, progress, validates, size)


def documents_of(recipe: Recipe, loader: PackedLoader, world: World) -> PackedDocuments:
    """Returns the documents of an average micro-batch."""
    documents = PackedDocuments.average(
        *loader.packing.document_lengths(),
        loader.packing.longest_document,
        recipe.batch.batch_size,
        world.data_size,
        recipe.batch.micro_batches,
    )
    return documents.with_prompts(*prompts_of(loader.store))


def watch_signals(
    recipe: Recipe, plan: Plan, model: Transformer, world: World, stack: contextlib.ExitStack
) -> Stopping:
    """Notes signals, and watches for steps that hang, until `stack` is closed."""
    received = stack.enter_context(stop_signals())
    seconds = world.min(plan.seconds)[0] if world.device.type == "cuda" else 0.0
    stopping = Stopping(received, world, model.layers, recipe.batch.micro_batches, seconds)
    stack.callback(stopping.watchdog.cancel)
    return stopping


def freeze_garbage(stack: contextlib.ExitStack) -> None:
    """Leaves all present objects out of garbage collections until `stack` is closed.

    A full collection looks at every object; all ranks would wait for the rank that collects.
    """
    gc.collect()
    gc.freeze()
    stack.callback(gc.unfreeze)


def companions_of(recipe: Recipe, loader: PackedLoader) -> Companions:
    """Returns the files and settings that go along with weights, such as the tokenizer's."""
    tokenizer, start, companions = recipe.tokenizer, recipe.start, NO_COMPANIONS
    weights = folders_of(start.source.folder) if start.source else []
    if tokenizer.name != "bytes":
        file = Path(tokenizer.name)
        companions = read_companions(file, weights if file.parent in weights else [])
        companions = companions.joined(Companions(tokenizer.changed_files()))
        companions = companions.stopping_at(stop_ids(tokenizer, loader.store.are_samples))
    elif weights:
        trained_on = ""
        with contextlib.suppress(UserError):  # the folder has no tokenizer
            trained_on = tokenizer_of(weights[0])
        if trained_on == "bytes":
            companions = read_companions(weights[0] / "tokenizer.json", weights)
    companions = companions.joined(read_beside_weights(weights, start.extends_context))
    companions = companions.joined(recipe.companions())
    if weights and not start.checkpoint and (absent := left_out(weights, companions.files)):
        logger.info("checkpoints leave out of %s: %s", weights[0], ", ".join(absent))
    return companions


# The data


def open_data(recipe: Recipe, world: World) -> tuple[PackedLoader, Store]:
    """Returns the loader of training batches and the held-out documents.

    The loader of a resumed run stands at the checkpoint's next batch.
    """
    data, start = recipe.data, recipe.start
    vocab_size = recipe.model.vocab_size
    stored: dict[str, Stored] = {}
    if data.only_shows:  # all of the tokenizer's tokens may be shown, whatever the model's size
        vocab_size = max(vocab_size, recipe.tokenizer.vocab_size)
    else:  # refuses log-probabilities of another model or corpus before minutes of reading
        stored = read_stored(recipe)
    # Gives the documents what their rows lack, such as stored log-probabilities.
    finish = partial(
        recipe.aim.complete, vocab_size=vocab_size, stored=stored, is_shown=data.is_shown
    )
    corpus = open_corpus(data, recipe.tokenizer, vocab_size, recipe.reading, finish)
    loader = make_loader(data, corpus, world)
    # A whole model's context is extended by this command. Adapters need a base whose context
    # training.export has extended.
    extends = "" if recipe.trained.is_whole else "training.export "
    longest = corpus.packing.longest_document
    if text := beyond(recipe.model, start.declared_context, longest, extends):
        logger.warning("positions: %s", text)
    check_held_out(data, corpus.held_out)
    check_same_on_all_ranks(recipe.settings | loader.state_dict(), world)
    if start.checkpoint:
        loader.load_state_dict(start.progress.loader)
    describe_data(data, loader, corpus.held_out)
    return loader, corpus.held_out


def read_stored(recipe: Recipe) -> dict[str, Stored]:
    """Returns the stored log-probabilities that the objective reads, by the data's columns."""
    start = recipe.start
    folder = str(start.source.folder) if start.source and not start.checkpoint else None
    attention = attention_in_words(recipe.model, recipe.kinds)
    return recipe.aim.read_stored(recipe.tokenizer.identity, folder, attention)


# A step


def take_step(run: Run) -> dict | None:
    """Takes the next step; returns its metrics, or None if a signal ended it before its update."""
    step, began = run.progress.step + 1, time.perf_counter()
    run.stopping.watch()
    batches: list[Batch] = []
    read_error = None
    try:
        batches = run.loader.next_step(run.recipe.batch.micro_batches)
    except Exception as error:
        # Without batches, `train_step` raises NotRead on all ranks.
        read_error = error
    rate = run.recipe.optim.learning_rate.at(step, run.progress.cosine_steps)
    values = {"step": step, "learning_rate": rate, "epoch": run.loader.epoch, "loss": None}
    try:
        values |= update_weights(run, batches, step, rate)
    except Stopped:
        run.stopped = True
        return None
    except NoTarget:
        logger.warning(
            "step %d has no token to predict, as in the middle of a prompt, and is left out", step
        )
    except NotFinite as error:
        run.leave_out(step, error)
    except NotRead:
        run.save()
        with failing_together():
            if read_error is not None:
                raise read_error from None
    except torch.OutOfMemoryError as error:
        error.add_note(explain_out_of_memory(run.recipe, run.plan, run.world.device))
        raise
    values |= count_step(run, step, time.perf_counter() - began)
    run.amounts = amounts_of(run, batches)
    return values


def update_weights(run: Run, batches: list[Batch], step: int, rate: float) -> dict:
    """Trains on the batches of a step; returns its loss and the metrics beside it."""
    recipe = run.recipe
    with run.stopping.looking():
        loss, norm, metrics = train_step(
            run.model,
            run.optimizer,
            batches,
            run.world,
            rate,
            recipe.optim.max_grad_norm,
            run.before_update,
            recipe.objective,
        )
    values = {"loss": loss, "gradient_norm": norm, **metrics}
    if is_spike(loss, run.recent_losses):
        values["is_spike"], usual = True, mean(run.recent_losses)
        logger.warning("step %d: loss %.3f is a spike above a mean of %.3f", step, loss, usual)
    run.recent_losses.append(loss)
    return values


def count_step(run: Run, step: int, seconds: float) -> dict:
    """Adds a step that took `seconds` to the run's progress; returns its tokens and its speed."""
    run.stopping.note_step(seconds)
    if step == run.recipe.start.progress.step + 1:
        run.world.limit_waits(60 * (run.recipe.wait_minutes or COLLECTIVE_TIMEOUT))
    tokens = run.progress.tokens + run.step_tokens
    run.progress = dataclasses.replace(
        run.progress, step=step, tokens=tokens, loader=run.loader.state_dict()
    )
    run.is_updating = False
    return {
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": run.step_tokens / seconds,
    }


def amounts_of(run: Run, batches: list[Batch]) -> list[float]:
    """Returns this rank's amounts, such as of operations, which ranks sum after a step."""
    recipe = run.recipe
    text_tokens, flops = 0, 0.0
    for batch in batches:
        text_tokens += sum(batch.text_lengths)
        flops += forward_flops(
            recipe.model,
            batch.text_lengths,
            recipe.kinds,
            batch.num_valid_tokens,
            recipe.linear.trains_matrices,
            batch.documents.prompts,
        )
    return own_amounts(flops, text_tokens, run.world)


# After a step


def validate_if_due(run: Run, values: dict) -> None:
    """Adds a validation loss to a step's metrics if a validation is due."""
    schedule = run.recipe.schedule
    is_due = run.progress.is_complete or schedule.validates_after(run.progress.step)
    if is_due and schedule.validation_sequences:
        try:
            add_validation(run, values)
        except Exception:
            if run.metrics is not None:
                run.metrics.write(**values)
            raise


def add_validation(run: Run, values: dict) -> None:
    """Validates, and adds the loss to `values`.

    If a signal or an error cuts the validation short, the next checkpoint says that it is owed.
    """
    world, step, began = run.world, run.progress.step, time.monotonic()
    batch = run.recipe.batch
    run.progress.unvalidated = step
    batches = validation_batches(
        run.held_out,
        batch.context_length,
        batch.batch_size,
        world.data_rank,
        world.data_size,
        limit=run.recipe.schedule.validation_sequences,
    )
    try:
        with run.stopping.looking():
            read = run.read_together(batches)
            loss, metrics = validate(
                run.model, read, world, run.stopping.is_asked, run.recipe.objective
            )
    except Stopped:
        run.stopped = True
        logger.warning("the validation of step %d is cut short; --resume makes up for it", step)
        return
    run.progress.unvalidated, run.progress.validation_loss = None, loss
    now = time.monotonic()
    run.validation_seconds += now - began
    share = run.validation_seconds / (now - run.began)
    values |= {
        "validation_loss": loss,
        "validation_seconds": now - began,
        "validation_share": share,
    }
    values |= {f"validation_{name}": value for name, value in metrics.items()}


def owes_validation(schedule: Schedule, progress: Progress) -> bool:
    """Whether a validation was cut short, and this run still validates."""
    return progress.unvalidated is not None and bool(schedule.validation_sequences)


def make_up_validation(run: Run) -> None:
    """Validates the step that the run goes on from.

    The checkpoint of the last step is written anew, with the loss.
    """
    values: dict = {"step": run.progress.step}
    add_validation(run, values)
    if "validation_loss" in values:
        if run.metrics is not None:
            run.metrics.write(**values)
            run.display.show_validation(values)
        if run.progress.is_complete:
            run.saved = None
            run.save()


def save_if_due(run: Run, values: dict) -> None:
    """Writes and shows a step's metrics; begins a checkpoint if one is due, or the run ends.

    The main rank's clock says what is due, and all ranks agree on it.
    """
    step, seconds = run.progress.step, values["seconds"]
    since_save, has_failed = time.monotonic() - run.saved_at, run.saver.error is not None
    is_due = is_save_due(run.recipe.saving.interval, step, since_save, has_failed)
    run.stopped, saves, amounts = run.stopping.agree(is_due, seconds, run.amounts)
    values |= summed_metrics(amounts, seconds, run.world)
    if run.metrics is not None:
        run.metrics.write(**values)
        run.promise_shutdown_once(seconds)
        run.display.show(values)
    if saves or run.stopped or run.progress.is_complete:
        run.save()


# The end


def end(run: Run) -> int:
    """Saves the last checkpoint and logs a sample; returns the process's exit status."""
    schedule, step = run.recipe.schedule, run.progress.step
    run.display.close()
    if run.stopped:
        run.save()
    elif schedule.sample_tokens:
        log_sample(run)
    run.stopping.watchdog.cancel()
    signals = run.stopping.num_signals()
    run.saver.finish(lambda: run.stopping.num_signals() > signals)
    if run.world.is_main and not run.stopped:
        draw_at_end(run.recipe.saving.output_dir)
    if run.stopped and (not run.progress.is_complete or owes_validation(schedule, run.progress)):
        number = run.stopping.first_signal()
        last_step = run.progress.max_steps
        logger.info("%s: stopped after step %d of %d", number.name, step, last_step)
        logger.info(run.after_a_stop(run.saver.last))
        return 128 + number
    return 0


if __name__ == "__main__":
    exit_with(main(sys.argv[1:]))
