"""profile_memory.py: its predictions are the cost model's; flags; measured beside predicted,
without data."""

import bisect
import contextlib
import functools
import json
import math
import re
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import profile_memory
from kernels.attention.full import FULL
from model import MODEL_SIZES
from profile_memory import main
from tests.training.memory.test_profiler import dry_run, run_dry  # noqa: F401
from tests.training.memory.test_profiler import step_of as step_of_format
from tests.wrappers import not_trained, release
from training.checkpoint.weights import shape_of_weights
from training.families.config_json import to_config_json
from training.host.sizes import budget_of_machine
from training.memory import reports
from training.memory.cost_model import forward_flops, fullest_stage, pinned_bytes, step_seconds
from training.memory.execution import WHOLE, Execution, Placement
from training.memory.machine import GPUS, H200, scale_rates
from training.memory.planner import find_max_context, has_plan, make_plan
from training.memory.profiler import GIB
from training.memory.stages import Stages
from training.objectives.scored import TOKEN_BYTES
from training.parallel.world import World
from training.run.build import step_on_meta
from training.run.decide import recipe_of
from training.run.running import checkpoint_bytes
from training.run.settings import TrainConfig


def run_main(tmp_path, *flags, status=0):
    """Runs the command, and returns what it wrote to --json."""
    path = tmp_path / "memory.json"
    assert main([*flags, "--json", str(path)]) == status
    return json.loads(path.read_text())


step_of = functools.partial(step_of_format, state_format="auto")


def cudnn_step(size, context_length, **options):
    return step_of(size, context_length, backend="cudnn", **options)


CONTEXTS = (32_768, 65_536)


@pytest.fixture
def small(monkeypatch):
    """Comparisons that take little time: six layers of the 0.6B, two contexts."""
    monkeypatch.setattr(
        profile_memory, "MODEL_SIZES", {"0.6B": replace(MODEL_SIZES["0.6B"], num_hidden_layers=6)}
    )
    monkeypatch.setattr(reports, "COMPARED_CONTEXTS", CONTEXTS)


@pytest.fixture
def nine_layers(monkeypatch):
    """Models of nine layers: the time of a search for a plan grows with the square of their
    number."""
    sizes = {name: replace(config, num_hidden_layers=9) for name, config in MODEL_SIZES.items()}
    monkeypatch.setattr(profile_memory, "MODEL_SIZES", sizes)


def test_without_a_gpu_the_plan_for_an_h200_is_shown(tmp_path, capsys):
    written = run_main(tmp_path, "--device", "cpu")
    plan = make_plan(cudnn_step("4B", 131_072), GPUS["H200"].memory_bytes - GIB, math.inf)
    out = capsys.readouterr().out
    assert (
        str(plan) in out
        and "no GPU in use, so an H200; its speed was measured on another H200" in out
    )
    assert out.startswith(
        f"fits: predicted {plan.peak.bytes / GIB:.2f} of 139.40 GiB of GPU memory, "
    )
    tokens_per_second = 131_072 / plan.seconds
    assert f"\nstep: {plan.seconds:.2f} s, {tokens_per_second:,.0f} tokens/s, MFU " in out
    assert written["answer"]["tokens_per_second"] == tokens_per_second and written["answer"]["fits"]
    assert written["answer"]["hours_per_billion_tokens"] == pytest.approx(
        1e9 / tokens_per_second / 3600
    )
    flops = 3 * forward_flops(MODEL_SIZES["4B"], [131_072])
    assert written["answer"]["mfu"] == pytest.approx(flops / plan.seconds / 989e12)
    assert written["plan"] == str(plan) and written["measured"] is None
    assert written["execution"]["placements"] == [asdict(p) for p in plan.execution.placements]
    assert (
        written["execution"]["gpu_state_bytes"] is None
        and written["environment"]["host_bytes"] is None
    )
    assert written["summary"]["predicted_peak"] == plan.peak.bytes
    assert written["summary"]["predicted_seconds"] == plan.seconds
    assert len(written["predicted"]) == 4 + 3 * 36 and written["settings"]["model_size"] == "4B"


def test_stages_are_shown_on_demand_and_equal_layers_share_rows_unless_all_are_asked_for(
    tmp_path, capsys
):
    flags = (
        "--gpu",
        "H200",
        "--memory_budget",
        "24GB",
        "--host_budget",
        "102GB",
        "--optimizer_state",
        "float32",
    )
    assert main([*flags]) == 0 and "layer 5" not in capsys.readouterr().out
    folded, short = run_main(tmp_path, *flags, "--stages"), capsys.readouterr().out
    every, long = run_main(tmp_path, *flags, "--stages", "all"), capsys.readouterr().out
    assert folded["predicted"] == every["predicted"] and len(every["predicted"]) == 4 + 3 * 36
    assert (
        all(f"\n{stage['name']}  " in long for stage in every["predicted"])
        and "of layers" not in long
    )
    assert (
        "\nbackward of layers 25 to 1, attention  " in short
        and "\nforward of layer 5 " not in short
    )
    assert f"\n{folded['summary']['predicted_peak_stage']}  " in short


def test_a_reader_that_stops_reading_is_no_error():
    command = [sys.executable, profile_memory.__file__, "--device", "cpu", "--model_size", "tiny"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == -signal.SIGPIPE


@pytest.mark.parametrize(("flag", "placement"), [("--", Placement()), ("--no-", WHOLE)])
def test_classic_choices(tmp_path, flag, placement):
    flags = [
        "--model_size",
        "0.6B",
        "--context_length",
        "8192",
        "--gradient_accumulation_steps",
        "2",
    ]
    written = run_main(tmp_path, "--device", "cpu", f"{flag}gradient_checkpointing", *flags)
    step = cudnn_step("0.6B", 8192, micro_batches=2)
    stages = Stages(step, Execution((placement,) * 28))
    assert [stage["categories"] for stage in written["predicted"]] == [
        stage.categories for stage in stages
    ]


def test_another_gpu(nine_layers, tmp_path, capsys):
    flags = "--model_size", "0.6B", "--context_length", "49152"
    written = run_main(tmp_path, *flags, "--gpu", "RTX3090", "--host_budget", "32GB")
    step = step_of("0.6B", 49_152, backend="flash", num_hidden_layers=9)
    rates, slowest = (scale_rates(GPUS[name], "flash", [FULL]) for name in ("RTX3090", "RTX3060"))
    plan = make_plan(step, GPUS["RTX3090"].memory_bytes - GIB, 32 * GIB, rates)
    assert written["plan"] == str(plan) and written["environment"]["rates"] == rates
    assert "RTX3090" in capsys.readouterr().out
    written = run_main(tmp_path, *flags, "--gpu", "8GB")
    assert (
        written["environment"]["gpu_bytes"] == 7 * GIB
        and written["environment"]["rates"] == slowest
    )
    assert (
        "8GB (assumed: RTX3060, the slowest known GPU with as much); its speed is an"
        in capsys.readouterr().out
    )
    written = run_main(tmp_path, *flags, "--gpu", "RTX3090", "--memory_budget", "8GB")
    assert (
        written["environment"]["gpu_bytes"] == 8 * GIB and written["environment"]["rates"] == rates
    )


def test_the_longest_context(tmp_path, capsys):
    flags = "--model_size", "0.6B", "--memory_budget", "6GB", "--host_budget", "16GB"
    written = run_main(tmp_path, "--device", "cpu", "--find_max_context", *flags)
    step = cudnn_step("0.6B", 1024)
    assert written["predicted_context"] == find_max_context(step, 6 * GIB, 16 * GIB)
    assert (
        f"predicted: {written['predicted_context']:,} tokens in 6.00 GiB of GPU and 16.00"
        in capsys.readouterr().out
    )


@pytest.fixture
def nothing_is_faster(monkeypatch):
    """Answers where a step fits take a third of their time: `test_what_would_be_faster` asks for
    the rest."""
    monkeypatch.setattr(profile_memory, "find_faster", lambda *arguments: {})


def answer_of(tmp_path, capsys, *flags):
    """Runs the command where the step does not fit; returns the first line, and what would fit by
    the flags to give."""
    path = tmp_path / "memory.json"
    assert main([*flags, "--json", str(path)]) == 1
    answer = json.loads(path.read_text())["answer"]
    out, err = capsys.readouterr()
    assert not answer["fits"] and not err and out.index("machine: ") > 0
    rows = {row["flags"]: row for row in answer["would_fit"]}
    for words, row in rows.items():
        speed = f"{row['seconds']:.1f} s per step, {row['tokens_per_second']:,.0f} tokens/s"
        disk = f"{row['checkpoint_bytes'] / GIB:.2f} GiB per checkpoint"
        assert re.search(rf"\n  {words} +{speed}, {'; '.join([disk, *row['costs']])}\n", out)
    return out.splitlines()[0], rows


def test_a_step_that_does_not_fit_names_the_changes_that_would(
    nine_layers, nothing_is_faster, tmp_path, capsys
):
    budgets = "--memory_budget", "15GB", "--host_budget", "8GB"
    flags = "--gpu", "4090", "--optimizer_state", "float32", *budgets
    first, rows = answer_of(tmp_path, capsys, *flags)
    assert first == "does not fit: 131,072 tokens into 15.00 GiB of GPU and 8.00 GiB of host memory"
    gpu, rates = 15 * GIB, scale_rates(GPUS["RTX4090"], "flash")
    step = step_of("4B", 131_072, backend="flash", state_format="float32", num_hidden_layers=9)
    host = 8 + bisect.bisect_left(
        range(8, 50), True, key=lambda size: has_plan(step, gpu, size * GIB)
    )
    longest = find_max_context(step, gpu, 8 * GIB)
    sharing = "--nproc 2 --context_parallel_size 2 --host_budget 4GB"
    compact = "--optimizer_state compact"
    adapters = ["--lora 16", "--lora 16 --lora_bits 4"]
    assert [*rows] == [
        compact,
        *adapters,
        f"--host_budget {host}GB",
        sharing,
        f"--context_length {longest}",
    ]
    assert (
        rows[f"--host_budget {host}GB"]["seconds"]
        == make_plan(step, gpu, host * GIB, rates).seconds
    )
    for words in rows:  # the command says that it fits
        given = (
            [*flags[:-2], *words.split()] if "--host_budget" in words else [*flags, *words.split()]
        )
        given = [*flags[:2], *flags[4:], *words.split()] if words == compact else given
        assert run_main(tmp_path, *given)["answer"]["seconds"] == rows[words]["seconds"]
    assert capsys.readouterr().out.count("fits: predicted ") == len(rows)


def test_adapters_are_offered_where_every_weight_does_not_fit(nothing_is_faster, tmp_path, capsys):
    """An 8B at 102,400 tokens, on a card that trains its adapters alone."""
    flags = (
        "--gpu",
        "4090",
        "--host_memory",
        "64GB",
        "--model_size",
        "8B",
        "--context_length",
        "102400",
    )
    _, rows = answer_of(tmp_path, capsys, *flags)
    of_adapters, of_bits, *others = rows
    assert (of_adapters, of_bits) == ("--lora 16", "--lora 16 --lora_bits 4")
    assert others[0].startswith("--host_memory") and not rows[others[0]]["costs"]
    assert rows[of_adapters]["costs"] == ["trains adapters alone, which costs some loss"]
    assert rows[of_bits]["costs"] == [*rows[of_adapters]["costs"], "fewer bits cost some loss"]
    answer = run_main(tmp_path, *flags, *of_adapters.split())["answer"]
    assert answer["seconds"] == rows[of_adapters]["seconds"] < 175
    assert 50 * answer["checkpoint_bytes"] < rows[others[0]]["checkpoint_bytes"]
    assert "optimizer state        host\n" in capsys.readouterr().out


def test_adapters_are_offered_without_the_flag_that_extends_the_base(
    nothing_is_faster, tmp_path, capsys
):
    shape = replace(MODEL_SIZES["8B"], max_position_embeddings=40_960)
    (tmp_path / "config.json").write_text(json.dumps(to_config_json(shape)))
    flags = (
        "--gpu",
        "4090",
        "--host_memory",
        "64GB",
        "--init_from",
        str(tmp_path),
        "--context_length",
        "65536",
    )
    _, rows = answer_of(tmp_path, capsys, *flags, "--rope_scaling", "yarn:2:32768")
    words, *_ = rows
    assert words == "--lora 16, drop --rope_scaling"
    assert rows[words]["costs"][1:] == ["training.export extends the base first"]
    assert run_main(tmp_path, *flags, "--lora", "16")["answer"]["seconds"] == rows[words]["seconds"]
    assert "; training.export --rope_scaling yarn:2:32768 stretches it" in capsys.readouterr().out


def test_adapters_with_a_shorter_context_are_offered_where_no_one_change_is_enough(
    nothing_is_faster, tmp_path, capsys
):
    flags = (
        "--gpu",
        "4060",
        "--model_size",
        "8B",
        "--context_length",
        "131072",
        "--host_memory",
        "64GB",
    )
    _, rows = answer_of(tmp_path, capsys, *flags)
    assert [words.rpartition(" ")[0] for words in rows] == ["--lora 16 --context_length"]
    [(words, row)] = rows.items()
    assert row["costs"] == ["trains adapters alone, which costs some loss"]
    assert run_main(tmp_path, *flags, *words.split())["answer"]["seconds"] == row["seconds"]
    longer = str(int(words.split()[-1]) + 1024)
    assert main([*flags, "--lora", "16", "--context_length", longer]) == 1


@pytest.mark.parametrize(
    ("words", "settings", "num_gpus"),
    [("--optimizer_state compact", {"optimizer_state": "compact"}, 1), ("--lora 4", {"lora": 4}, 1),
     ("--optimizer_state float32 --nproc 2", {"optimizer_state": "float32"}, 2),
     ("--nproc 2 --lora 4", {"lora": 4}, 2),
     ("--gradient_checkpointing", {"optimizer_state": "float32"}, 1)],
)  # fmt: skip
def test_a_checkpoint_takes_what_a_run_has_room_for(
    words, settings, num_gpus, nine_layers, tmp_path, capsys
):
    flags = "--gpu", "H200", "--model_size", "0.6B", "--context_length", "1024", *words.split()
    taken = run_main(tmp_path, *flags)["answer"]["checkpoint_bytes"]
    world = World(0, num_gpus, torch.device("cuda"))
    recipe = recipe_of(TrainConfig(**settings), profile_memory.MODEL_SIZES["0.6B"], world)
    assert taken == checkpoint_bytes(recipe, world)
    assert (
        f"\ndisk: {taken / GIB:.2f} GiB per checkpoint; a run needs room for two\n"
        in capsys.readouterr().out
    )


def test_a_checkpoint_takes_what_it_carries_untrained(tmp_path):
    folder = release("gemma3", tmp_path / "released")
    flags = "--gpu", "H200", "--init_from", str(folder), "--context_length", "64"
    carried = sum(len(content) for _, _, content in not_trained(folder).values())
    found = run_main(tmp_path, *flags)["answer"]["checkpoint_bytes"]
    adapters = run_main(tmp_path, *flags, "--lora", "4")["answer"]["checkpoint_bytes"]
    world = World(0, 1, torch.device("cuda"))
    recipe = recipe_of(TrainConfig(optimizer_state="float32"), shape_of_weights(folder), world)
    assert carried and found == checkpoint_bytes(recipe, world) + carried
    recipe = recipe_of(TrainConfig(lora=4), shape_of_weights(folder), world)
    assert adapters == checkpoint_bytes(recipe, world)


@pytest.mark.parametrize(("flags", "first"), [
    ("--gpu 20GB --host_budget 36GB --batch_size 8", "--batch_size 2 --gradient_accumulation_steps "
                                                     "4"),
    ("--gpu 12GB --host_budget 8GB --batch_size 2", "--batch_size 1 --lora 16"),
    ("--gpu 16GB --host_budget 6GB --attention_type nsa", "--attention_type full"),
    ("--gpu 12GB --host_budget 12GB --batch_size 2 --optimizer_state float32",
     "--batch_size 1 --optimizer_state compact"),
    ("--gpu 12GB --host_memory 10GB", "--lora 16"),
    ("--gpu 14GB --host_memory 10GB --linear fp8-all", "--lora 16"),
    ("--gpu 12GB --no-gradient_checkpointing", "drop --gradient_checkpointing"),
    ("--gpu 4GB --no-gradient_checkpointing", r"--context_length \d+, drop "
                                              r"--gradient_checkpointing"),
])  # fmt: skip
def test_cheaper_changes_come_first(flags, first, nine_layers, tmp_path, capsys):
    _, rows = answer_of(tmp_path, capsys, *flags.split())
    assert re.match(first, next(iter(rows)))


@pytest.mark.parametrize(("flags", "first"), [
    ("--gpu 12GB --attention_type sparse", "--attention_type full"),
    ("--gpu 16GB --memory_budget 15GB --model_size 8B --lora 16 --host_memory 32GB", "--lora_bits 8"),
])  # fmt: skip
def test_cheaper_changes_of_whole_models_come_first(flags, first, tmp_path, capsys):
    _, rows = answer_of(tmp_path, capsys, *flags.split())
    assert next(iter(rows)).startswith(first)


def test_what_would_be_faster(tmp_path, capsys):
    [row] = run_main(tmp_path, "--gpu", "H200")["answer"]["faster"]
    assert (row["flags"], row["costs"]) == ("--attention_type sparse", ["costs some loss"])
    assert re.search(
        r"\nfaster, predicted:\n  --attention_type sparse .*; costs some loss\n",
        capsys.readouterr().out,
    )
    flags = "--gpu", "4090", "--attention_type", "sparse", "--optimizer_state", "float32"
    rows = run_main(tmp_path, *flags, "--host_budget", "60GB")["answer"]["faster"]
    assert [row["flags"] for row in rows] == ["--optimizer_state compact", "--host_budget 110GB"]
    readme = (Path(profile_memory.__file__).parent / "README.md").read_text()
    command, shown = re.search(r"\$ .*profile_memory\.py (.*)\n((?:.+\n)+)```", readme).groups()
    capsys.readouterr()
    rows = run_main(tmp_path, *command.split())["answer"]["faster"]
    assert [row["flags"] for row in rows] == ["--host_memory 96GB", "--attention_type sparse"]
    printed, shown = (
        [*map(split_numbers, text.splitlines())] for text in (capsys.readouterr().out, shown)
    )
    for (words, numbers), (shown_words, shown_numbers) in zip(
        printed[: len(shown)], shown, strict=True
    ):
        assert words == shown_words and numbers == pytest.approx(shown_numbers, rel=0.02)


def test_smaller_micro_batches_are_named_where_they_are_faster(nine_layers, tmp_path):
    """More blocks of the 4B are kept whole in smaller ones; all of the 0.6B's are in any."""
    flags = "--gpu", "H200", "--host_memory", "256GB", "--context_length", "16384"
    little = "--batch_size", "8", "--memory_budget", "36GB"
    [row] = run_main(tmp_path, *flags, *little)["answer"]["faster"]
    assert row["flags"] == "--batch_size 2 --gradient_accumulation_steps 4"
    assert not run_main(tmp_path, *flags, "--batch_size", "2", "--model_size", "0.6B")["answer"][
        "faster"
    ]


def split_numbers(line: str) -> tuple[list[str], list[float]]:
    """split_numbers("step: 1,269.65 s") is (["step:", "s"], [1269.65])."""
    number = r"\d[\d,]*(?:\.\d+)?"
    return re.sub(number, "", line).split(), [
        float(each.replace(",", "")) for each in re.findall(number, line)
    ]


def test_the_size_of_the_machine_limits_its_processes(nine_layers, tmp_path, capsys):
    flags = "--gpu", "4090", "--nproc", "2", "--host_memory", "16GB"
    written = run_main(tmp_path, *flags)
    assert written["environment"]["host_bytes"] == budget_of_machine(16 * GIB, 2)
    pinned = written["answer"]["host_bytes"] / GIB
    line = f"{pinned:.2f} GiB pinned, about {pinned + 2:.2f} GiB of the whole process"
    line = f"\nhost memory: {line}, {2 * pinned + 6:.2f} of 16.00 GiB of the machine\n"
    out = capsys.readouterr().out
    assert line in out and f"predicted host memory        {pinned:.2f} GiB, pinned\n" in out
    run_main(tmp_path, *flags, "--find_max_context")
    out = capsys.readouterr().out
    assert "\nhost memory: " in out and "\ndisk: " in out
    run_main(tmp_path, "--gpu", "4090", "--host_budget", "6GB")
    assert "\nhost memory: " not in capsys.readouterr().out


def test_an_objective_takes_what_train_would_plan_for_it(
    nine_layers, tmp_path, monkeypatch, capsys
):
    """A forward pass, the head's second pass, columns of numbers, and prompts of --data computed
    once."""
    rows = [{"prompt": f"{i:900}", "chosen": "c" * 20, "rejected": "r" * 20} for i in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = (
        "--gpu",
        "H100",
        "--model_size",
        "0.6B",
        "--context_length",
        "2048",
        "--loss_impl",
        "chunked",
    )
    plain = run_main(tmp_path, *flags)["answer"]
    for own, forward_passes in (("dpo",), 0), (("grpo", "--beta", "0.1"), 0), (("kto",), 1):
        found = run_main(tmp_path, *flags, "--objective", *own)["answer"]
        assert found["peak"] - plain["peak"] == TOKEN_BYTES * 2048
        more = found["seconds"] / plain["seconds"] - 1 - 0.25 * forward_passes
        assert 0.02 < more < 0.2
    data = *flags, "--data", str(tmp_path / "pairs.jsonl"), "--objective", "dpo"
    shared, said = run_main(tmp_path, *data)["answer"], capsys.readouterr().err
    assert "tokenizing" in said and "prepared set" not in said  # prepared sets have no rows
    monkeypatch.setattr(profile_memory, "prompts_of", lambda _: (0.0, 0.0))
    whole = run_main(tmp_path, *data)["answer"]
    assert shared["sequences"] == 20 and shared["mfu"] != whole["mfu"]


def test_texts_are_tokenized_once_though_a_shorter_context_is_planned(tmp_path, capsys):
    (tmp_path / "long.txt").write_text("some words of a text " * 40_000)
    flags = "--model_size tiny --gpu 2GB --host_budget 1GB --context_length 400000 --data"
    assert main([*flags.split(), str(tmp_path / "long.txt")]) == 1
    out = capsys.readouterr()
    assert "--context_length 2" in out.out and out.err.count("tokenizing") == 1


def test_an_epoch_of_the_data_is_timed_for_its_documents(nine_layers, tmp_path, capsys, caplog):
    samples = [{"prompt": "p" * 700, "completion": "c" * (99 + i)} for i in range(40)]
    (tmp_path / "samples.jsonl").write_text(
        "".join(json.dumps(sample) + "\n" for sample in samples)
    )
    data = (
        "--data", str(tmp_path / "samples.jsonl"), "--context_length", "2048", "--gpu", "H100",
        "--model_size", "0.6B",
    )  # fmt: skip
    answer = run_main(tmp_path, *data, "--batch_size", "4")["answer"]
    out = capsys.readouterr()
    assert (
        "a prepared set" in out.err and answer["sequences"] == 20 and "in 20 sequences, " in out.out
    )
    assert 0.75 < answer["filled"] < 0.85 and answer["tokens"] == pytest.approx(
        answer["filled"] * 20 * 2048
    )
    assert answer["hours_per_epoch"] == pytest.approx(5 * answer["seconds"] / 3600)
    whole = run_main(tmp_path, "--batch_size", "4", *data[2:])["answer"]
    assert answer["seconds"] != whole["seconds"]  # sequences of one document each
    shared = run_main(tmp_path, *data, "--nproc", "2")["answer"]
    assert shared["hours_per_epoch"] == pytest.approx(10 * shared["seconds"] / 3600)
    too_large = "--model_size", "14B", "--gpu", "4090", "--host_memory", "16GB"
    row = run_main(tmp_path, *data, *too_large, status=1)["answer"]["would_fit"][0]
    assert row["hours_per_epoch"] == pytest.approx(20 * row["seconds"] / 3600)
    assert f" {60 * row['hours_per_epoch']:.1f} minutes per epoch, " in capsys.readouterr().out
    assert main([*data, "--batch_size", "64"]) == 1
    assert "the corpus has 20" in capsys.readouterr().err
    assert main([*data, "--context_length", "512"]) == 1
    assert "choose --overlong drop or split" in capsys.readouterr().err
    cut = "--context_length", "512", "--overlong", "split", "--batch_size", "4"
    assert run_main(tmp_path, *data, *cut)["answer"]["fits"]
    assert (
        caplog.text.count("are longer than context_length 512: split") == 1
    )  # though changes are planned as well
    rows = [json.dumps({"q": sample["prompt"], "a": sample["completion"]}) for sample in samples]
    (tmp_path / "samples.jsonl").write_text("\n".join([*rows, "{"]))
    data += "--columns", "prompt=q,completion=a"
    assert main([*data]) == 1 and "samples.jsonl:41: not JSON" in capsys.readouterr().err
    assert (
        run_main(tmp_path, *data, "--batch_size", "4", "--bad_rows", "drop")["answer"]["tokens"]
        == answer["tokens"]
    )


MESHES = [(2, 1), (8, 2), (4, 4)]


@pytest.mark.parametrize(("nproc", "sharing"), MESHES)
def test_several_gpus_are_predicted(nproc, sharing, nine_layers, tmp_path, capsys):
    flags = (
        "--nproc",
        str(nproc),
        "--context_parallel_size",
        str(sharing),
        "--gpu",
        "H100",
        "--host_budget",
        "40GB",
    )
    flags += "--context_length", "524288"
    written = run_main(
        tmp_path, *flags, "--batch_size", "2", "--timeline", str(tmp_path / "step.png")
    )
    given, rates = (
        Execution(attention_backend="cudnn", state_format="auto"),
        scale_rates(GPUS["H100"], "cudnn"),
    )
    shape = profile_memory.MODEL_SIZES["4B"]
    step = step_on_meta(
        shape, 524_288, 2, given=given, num_gpus=nproc, context_parallel_size=sharing
    )
    plan = make_plan(step, GPUS["H100"].memory_bytes - GIB, 40 * GIB, rates)
    assert written["plan"] == str(plan) and written["summary"]["predicted_seconds"] == plan.seconds
    assert written["settings"]["nproc"] == nproc and written["measured"] is None
    out = capsys.readouterr().out
    assert f"{nproc} GPUs, predicted only" in out
    assert re.search(
        rf"GPUs, data x context +{nproc // sharing} x {sharing}; below, of each\n", out
    )


def test_a_picture_shows_every_context_to_the_longest(nine_layers, nothing_is_faster, tmp_path):
    flags = (
        "--gpu",
        "4090",
        "--host_memory",
        "16GB",
        "--model_size",
        "8B",
        "--context_length",
        "2048",
    )
    contexts = run_main(tmp_path, *flags, "--picture", str(tmp_path / "card.svg"))["contexts"]
    step = step_of("8B", 2048, backend="flash", num_hidden_layers=9)
    limits = GPUS["RTX4090"].memory_bytes - GIB, budget_of_machine(16 * GIB, 1)
    longest = find_max_context(step, *limits)
    *doubled, last = [int(tokens) for tokens in contexts]
    assert (
        doubled == [4096 * 2**i for i in range(len(doubled))]
        and doubled[-1] < last == longest < 3 * doubled[-1]
    )
    plan = make_plan(step.at(doubled[2]), *limits, scale_rates(GPUS["RTX4090"], "flash", [FULL]))
    expected = {"peak": plan.peak.bytes, "host_bytes": plan.host_bytes, "seconds": plan.seconds}
    assert contexts[str(doubled[2])] == expected
    small = (
        "--gpu",
        "4090",
        "--host_memory",
        "5GB",
        "--model_size",
        "14B",
        "--picture",
        str(tmp_path / "none.svg"),
    )
    assert main([*small, "--json", str(tmp_path / "none.json")]) == 1
    assert (
        json.loads((tmp_path / "none.json").read_text())["contexts"] == {}
        and not (tmp_path / "none.svg").exists()
    )
    drawn = (tmp_path / "card.svg").read_text()
    assert f"<!-- {longest:,} -->" in drawn and f"<!-- {expected['seconds']:.3g} s -->" in drawn


def test_several_machines_are_predicted(nine_layers, tmp_path, capsys):
    flags = (
        "--nproc",
        "1",
        "--nnodes",
        "2",
        "--gpu",
        "H100",
        "--host_budget",
        "40GB",
        "--context_length",
        "131072",
    )
    written = run_main(tmp_path, *flags)
    shape, given = (
        profile_memory.MODEL_SIZES["4B"],
        Execution(attention_backend="cudnn", state_format="auto"),
    )
    step = step_on_meta(shape, 131_072, given=given, num_gpus=2, num_machines=2)
    plan = make_plan(
        step, GPUS["H100"].memory_bytes - GIB, 40 * GIB, scale_rates(GPUS["H100"], "cudnn")
    )
    assert written["plan"] == str(plan) and written["summary"]["predicted_seconds"] == plan.seconds
    out = capsys.readouterr().out
    assert (
        "2 GPUs, predicted only" in out
        and "over 2 machines, 25.0 GB/s per GPU between them, assumed" in out
    )
    copies = run_main(tmp_path, *flags, "--replicate", "2")
    assert copies["plan"] != written["plan"]
    for answer in (written["answer"], copies["answer"]):
        assert answer["seconds"] * answer["tokens_per_second"] == pytest.approx(2 * 131_072)
    assert re.search(r"copies of the weights +2, each sharded over 1\n", capsys.readouterr().out)


@pytest.mark.parametrize(("nproc", "sharing"), MESHES)
def test_the_longest_context_of_several_gpus(nproc, sharing, tmp_path):
    mesh = "--nproc", str(nproc), "--context_parallel_size", str(sharing)
    flags = (
        "--model_size",
        "0.6B",
        "--gpu",
        "RTX4090",
        "--memory_budget",
        "6GB",
        "--host_budget",
        "8GB",
    )
    flags += "--optimizer_state", "float32"
    given = Execution(attention_backend="flash")
    step = step_on_meta(
        MODEL_SIZES["0.6B"], 1024, given=given, num_gpus=nproc, context_parallel_size=sharing
    )
    longest = run_main(tmp_path, "--find_max_context", *flags, *mesh)["predicted_context"]
    assert longest == find_max_context(step, 6 * GIB, 8 * GIB)
    assert longest > run_main(tmp_path, "--find_max_context", *flags)["predicted_context"]


def test_with_and_without_on_several_gpus(small, tmp_path):
    flags = (
        "--device",
        "cpu",
        "--model_size",
        "0.6B",
        "--nproc",
        "4",
        "--context_parallel_size",
        "2",
    )
    written = run_main(tmp_path, "--compare", *flags)
    shape = profile_memory.MODEL_SIZES["0.6B"]
    step = step_on_meta(shape, CONTEXTS[1], num_gpus=4, context_parallel_size=2)
    [row] = [row for row in written["compared"] if row["way"] == "checkpointing, chunked loss"][1:]
    execution = Execution((Placement(),) * 6, loss_impl="chunked", attention_backend="cudnn")
    assert row["peak"] == fullest_stage(step, execution).bytes
    assert row["logits"] == CONTEXTS[1] // 2 * 2 * 151_936


def test_with_and_without(small, tmp_path, capsys):
    flags = "--device", "cpu", "--model_size", "0.6B", "--memory_budget", "4GB"
    written = run_main(tmp_path, "--compare", *flags)
    rows = {(row["way"], row["context_length"]): row for row in written["compared"]}
    assert len(rows) == 5 * len(CONTEXTS)
    for context_length in CONTEXTS:
        step = cudnn_step("0.6B", context_length, num_hidden_layers=6)
        ways = {
            "no checkpointing, standard loss": Execution((WHOLE,) * 6, loss_impl="standard"),
            "no checkpointing, chunked loss": Execution((WHOLE,) * 6, loss_impl="chunked"),
            "checkpointing, standard loss": Execution((Placement(),) * 6, loss_impl="standard"),
            "checkpointing, chunked loss": Execution((Placement(),) * 6, loss_impl="chunked"),
            "planned for 4GB": make_plan(step, 4 * GIB, math.inf).execution,
        }
        for way, choices in ways.items():
            row = rows[way, context_length]
            assert row["peak"] == fullest_stage(step, choices).bytes and row[
                "host"
            ] == pinned_bytes(step, choices)
            assert row["predicted_seconds"] == step_seconds(step, choices, H200)
            assert row["logits"] == 2 * context_length * 151_936
    out = capsys.readouterr().out
    for context_length, size in written["smallest_gpu_gib"].items():
        assert f"{int(context_length):,} tokens: {size:.1f} GiB" in out


@pytest.mark.parametrize(("flags", "message"), [
    ("--attention_type nsa --dense_below 4096", "dense_below has no effect with attention_type "
                                                "nsa"),
    ("--selected_blocks 16", "selected_blocks has no effect with attention_type full"),
    ("--attention_type sparse --dense_below 0", "dense_below must be between 1 and 2147483647, got "
                                                "0"),
    ("--context_length 0", "context_length must be between 2 and 134217728, got 0"),
    ("--context_length 2147483647", "context_length must be between 2 and 134217728, got "
                                    "2147483647"),
    ("--batch_size 2147483647", "batch_size must be between 1 and 1048576, got 2147483647"),
    ("--gpu 999999999999999T --find_max_context", "no GPU '999999999999999T' in the table"),
    ("--memory_budget 999999999999999T --find_max_context --device cpu", "between 1MB and 1023TB"),
    ("--context_length 64q", "context_length: '64q' is not a whole number, such as 512"),
    ("--batch_size 0", "batch_size must be between 1 and"),
    ("--num_layers 37", "num_layers must be at most 36, got 37"),
    ("--model_size Qwen3.5-4B", "qwen3.5-35B-A3B; did you mean qwen3.5-4B?"),
    ("--model_size Qwen3-8B", "qwen3.5-35B-A3B; did you mean 8B?"),
    ("--ram 64GB", "unknown flag --ram; did you mean --host_memory?"),
    ("--epochs 3", "there is no --epochs: it is train.py's alone; drop it"),
    ("--contextlength 5", "unknown flag --contextlength; did you mean --context_length?"),
    ("--attention_backend slow", "attention_backend: 'slow' is not one of auto, "),
    ("--json nowhere/memory.json", "--json 'nowhere/memory.json' cannot be written to: No such "
                                   "file"),
    ("--json /", "--json '/' cannot be written to: Is a directory; give another file"),
    ("--timeline /proc/step.png", "--timeline '/proc/step.png' cannot be written to: "),
    ("--timeline step.jpeg", "draws .png, .svg or .pdf"),
    ("--picture card.jpeg", "--picture draws .png, .svg or .pdf, got card.jpeg"),
    ("--gpu MI300X", "error: gpu MI300X: AMD's GPUs and accelerators are not supported; give one "
                     "of NVIDIA's"),
    ("--gpu RTX4091", "no GPU 'RTX4091' in the table, did you mean RTX4090;"),
    ("--gpu RTX4090 --memory_budget 30GB", "memory_budget 30GB is more than the 23.99 GiB of "
                                           "RTX4090; lower it"),
    ("--gpu RTX4090 --device cuda", "device has no effect with gpu, which predicts for another"),
    ("--memory_budget 24", "memory_budget is between 1MB and 1023TB and looks like \"24GB\", got "
                           "'24'"),
    ("--host_memory 100", "host_memory is between 1MB and 1023TB and looks like \"24GB\", got "
                          "'100'"),
    ("--host_memory 4GB --gpu H100", "host_memory 4GB: the system and nproc 1 take 4GB before any "
                                     "is pinned; give"),
    ("--host_budget 100", "host_budget is between 1MB and 1023TB and looks like \"24GB\", got "
                          "'100'"),
    ("--gpu 24", "no GPU '24' in the table; give one of RTX3060, RTX3060Ti, RTX3070"),
    ("--tokenizer bytes", "tokenizer has no effect without data"),
    ("--data nowhere", "data path nowhere does not exist"),
    ("--data README.md --num_layers 4", "num_layers needs a GPU in this machine, and no --gpu, "
                                        "--nproc, --nnodes"),
    ("--compare --data README.md", "data has no effect with compare"),
    ("--gpu 3GB --model_size 8B", "the model does not fit into 2.00 GiB of GPU and any amount of "
                                  "host memory"),
    ("--memory_budget much", 'looks like "24GB"'),
    ("--compare --find_max_context", "find_max_context has no effect with compare"),
    ("--compare --loss_impl chunked", "loss_impl has no effect with compare"),
    ("--compare --context_length 4096", "context_length has no effect with compare"),
    ("--find_max_context --no-gradient_checkpointing", "gradient_checkpointing has no effect with "
                                                       "find_max_context"),
    ("--compare --stages", "stages has no effect with compare"),
    ("--find_max_context --stages", "stages has no effect with find_max_context"),
    ("--find_max_context --measure", "there is no --measure: find_max_context and compare predict"),
    ("--num_layers 4 --gpu H100", "num_layers needs a GPU"),
    ("--num_layers 4 --nnodes 2", "num_layers needs a GPU"),
    ("--nnodes 2 --context_parallel_size 2", "context_parallel_size 2 x tensor_parallel_size 1 "
                                             "must divide nproc 1"),
    ("--nnodes 99999", "nnodes must be between 1 and 65536, got 99999"),
    ("--nproc 0", "nproc must be between 1 and"),
    ("--nproc 2 --context_parallel_size 0", "context_parallel_size must be between 1 and"),
    ("--context_parallel_size 2", "context_parallel_size 2 x tensor_parallel_size 1 must divide "
                                  "nproc 1; give other"),
    ("--nproc 6 --tensor_parallel_size 4", "context_parallel_size 1 x tensor_parallel_size 4 must "
                                           "divide nproc 6"),
    ("--replicate 2", "replicate 2 x tensor_parallel_size 1 must divide the number of processes, "
                      "1; start another"),
    ("--nproc 2 --nnodes 3 --replicate 2", "replicate 2 must be a multiple or a divisor of the 3 "
                                           "machines"),
    ("--nproc 3 --tensor_parallel_size 3", "tensor_parallel_size 3 must divide the model's "
                                           "num_key_value_heads 8"),
    ("--nproc 6 --context_parallel_size 6", "must divide the model's 32 query heads; give one of "
                                            "1, 2, 4, 8, 16"),
    ("--nproc 16 --context_parallel_size 16", "no plan counts copies of 8 key/value heads on 16 "
                                              "ranks; lower"),
    ("--nproc 16 --context_parallel_size 16 --attention_type sparse",
     "context_parallel_size 16 must divide the model's 8 key/value heads"),
    ("--lora 16 --lora_bits 4 --nproc 2", "lora_bits 4 on 2 GPUs is not supported: FSDP2 shards "
                                          "bf16; give lora_bits"),
    ("--lora 16 --lora_bits 4 --compare", "--compare keeps blocks whole, which lora_bits 4 cannot; "
                                          "drop one"),
    ("--lora 16 --lora_bits 8 --no-gradient_checkpointing", "--no-gradient_checkpointing keeps "
                                                            "blocks whole, which"),
    ("--gradient_checkpointing --memory_budget 24GB", "memory_budget has no effect with "
                                                      "gradient_checkpointing"),
    ("--no-gradient_checkpointing --host_budget 24GB", "host_budget has no effect with "
                                                       "gradient_checkpointing"),
    ("--compare --memory_budget 200GB --gpu H100", "memory_budget 200GB is more than the 78.65 "
                                                   "GiB"),
    ("--gpu RTX4090 --attention_backend flash-attn-4", "flash-attn-4 needs compute capability 9.0, "
                                                       "which RTX4090"),
    ("--gpu A100 --linear fp8-all", "linear fp8-all: FP8 needs compute capability 8.9 (Ada, Hopper) "
                                    "or newer, A100-80GB is"),
    ("--find_max_context --memory_budget 1GB --gpu 24GB", "does not fit into 1.00 GiB of GPU and "
                                                          "any amount"),
    ("--device cuda", "error: --device cuda"),
])  # fmt: skip
def test_bad_flags_are_one_line(flags, message, capsys):
    assert main(flags.split()) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("error: ") and message in error


def test_layers_by_the_thousand_are_refused_before_they_are_built(tmp_path, capsys, monkeypatch):
    content = to_config_json(replace(MODEL_SIZES["tiny"], num_hidden_layers=4096))
    (tmp_path / "config.json").write_text(json.dumps(content))
    monkeypatch.setattr(profile_memory, "step_on_meta", None)
    assert main(["--init_from", str(tmp_path), "--gpu", "H100"]) == 1
    assert f"error: {tmp_path} has 4096 layers; up to 256 are profiled" in capsys.readouterr().err


class DryBench:
    """Measures on tensors without data, up to a limit of memory; every bench that is built."""

    built, limit = 0, math.inf

    def __init__(self, step, execution, world):
        DryBench.built += 1

    def measure(self, step, execution):
        if fullest_stage(step, execution).bytes > DryBench.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
        return run_dry(step, replace(execution, attention_backend="cpu"))[0]


@pytest.fixture
def pretended_gpu(monkeypatch, dry_run):  # noqa: F811
    """Answers everything that a GPU is asked; returns the caps that its memory gets."""
    world = World(0, 1, torch.device("cuda", 0))
    monkeypatch.setattr(profile_memory, "join_world", lambda device: contextlib.nullcontext(world))
    monkeypatch.setattr("training.memory.decide.choose_backend", lambda requested, device: "cudnn")
    monkeypatch.setattr(profile_memory, "measure_rates", lambda *_: H200)
    monkeypatch.setattr(profile_memory, "available_host_bytes", lambda: 100 * GIB)
    monkeypatch.setattr(profile_memory, "build_bench", DryBench)
    monkeypatch.setattr(DryBench, "built", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "pretended")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    caps = []
    monkeypatch.setattr(profile_memory, "cap_gpu_memory", lambda size, device: caps.append(size))
    return caps


def test_measured_is_printed_beside_predicted(pretended_gpu, tmp_path, capsys):
    flags = "--model_size", "tiny", "--context_length", "512", "--memory_budget", "2GB", "--stages"
    written = run_main(tmp_path, *flags)
    out = capsys.readouterr().out
    assert (
        "machine: pretended" in out
        and "measured peak: " in out
        and "fragmented" in out
        and "differs" in out
    )
    assert [stage["name"] for stage in written["measured"]] == [
        stage["name"] for stage in written["predicted"]
    ]
    summary = written["summary"]
    assert summary["measured_peak"] == max(
        sum(stage["categories"].values()) for stage in written["measured"]
    )
    assert {"reserved", "fragmentation", "host", "measured_seconds", "num_alloc_retries"} < set(
        summary
    )
    assert pretended_gpu == [2 * GIB]


def test_some_layers_are_measured_and_all_predicted(nine_layers, pretended_gpu, tmp_path, capsys):
    written = run_main(
        tmp_path, "--model_size", "0.6B", "--context_length", "4096", "--num_layers", "2"
    )
    assert "2 of the 9 layers" in capsys.readouterr().out and len(written["measured"]) == 4 + 3 * 2
    step = cudnn_step("0.6B", 4096, num_hidden_layers=9)
    seconds = make_plan(step, 79 * GIB, 100 * GIB).seconds
    assert written["summary"]["predicted_seconds_of_all_layers"] == seconds
    assert "extrapolated_seconds" in written["summary"] and pretended_gpu == []


def test_several_gpus_of_this_machine_are_predicted_by_the_rates_of_one(
    nine_layers, pretended_gpu, tmp_path
):
    written = run_main(tmp_path, "--model_size", "0.6B", "--nproc", "4", "--memory_budget", "8GB")
    assert DryBench.built == 0 and written["measured"] is None and pretended_gpu == []
    assert (
        written["environment"]["gpu_bytes"] == 8 * GIB
        and written["environment"]["host_bytes"] == 25 * GIB
    )


def test_out_of_memory_prints_the_prediction_and_one_line(
    nine_layers, pretended_gpu, monkeypatch, capsys
):
    monkeypatch.setattr(DryBench, "limit", 0)
    assert main(["--context_length", "524288"]) == 1
    captured = capsys.readouterr()
    assert "predicted, not measured" in captured.out and "backward of layer 8, MLP" in captured.out
    assert captured.err.count("\n") == 1 and "of 79.00 GiB that are free" in captured.err


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--memory_budget auto", marks=pytest.mark.gpu(alone=True)),
        pytest.param("--memory_budget 8GB", marks=pytest.mark.gpu(gib=10)),
        pytest.param("--gradient_checkpointing", marks=pytest.mark.gpu(gib=16)),
        pytest.param("--no-gradient_checkpointing", marks=pytest.mark.gpu(gib=32)),
    ],
)
def test_measured_and_predicted_peaks_agree(tmp_path, flags):
    summary = run_main(
        tmp_path, "--model_size", "0.6B", "--context_length", "16384", *flags.split()
    )["summary"]
    assert summary["predicted_peak"] == pytest.approx(summary["measured_peak"], rel=0.05)
