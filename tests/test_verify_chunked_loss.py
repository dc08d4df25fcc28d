"""verify_chunked_loss.py passes on a sound build, and fails where the loss is broken."""

import functools
import importlib
import itertools
import re
import runpy

import pytest
import torch

import verify_chunked_loss
from kernels import head_loss
from kernels.cross_entropy import cross_entropy
from verify_chunked_loss import VOCAB_SIZE, accumulation, equivalence, main, memory, switch

SMALL_VOCAB = 512


@pytest.fixture
def small_switch(monkeypatch):
    """The part `switch` with a small vocabulary, and the threshold at the same number of tokens."""
    scale = SMALL_VOCAB / verify_chunked_loss.VOCAB_SIZE
    monkeypatch.setattr(
        head_loss, "CHUNKED_LOSS_THRESHOLD_BYTES", head_loss.CHUNKED_LOSS_THRESHOLD_BYTES * scale
    )
    return functools.partial(switch, vocab_size=SMALL_VOCAB, switch_bytes=scaled(10))


def test_comparisons_pass(capsys):
    assert main((equivalence, accumulation)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("pass") for line in lines) == 13
    assert re.fullmatch(
        "this takes [0-9]+ GiB of (GPU )?memory.*", lines[1]
    )  # before a check begins
    assert lines[-1] == "13 passed, 0 failed, 0 skipped"


def test_memory_is_skipped_without_a_gpu(capsys):
    assert main((memory,)) == 0
    assert "needs a GPU  skipped\n\n0 passed, 0 failed, 1 skipped" in capsys.readouterr().out


def test_switch_is_seen_on_both_sides(small_switch, capsys):
    assert main((small_switch,)) == 0
    lines = capsys.readouterr().out.splitlines()
    test_1, test_2 = (
        next(i for i, line in enumerate(lines) if line.startswith(f"Test {n}: ")) for n in (1, 2)
    )
    assert (
        lines[test_1].endswith("should_chunk=False") and "standard loss used" in lines[test_1 + 1]
    )
    assert lines[test_2].endswith("should_chunk=True") and "chunked loss used" in lines[test_2 + 1]


def first(part, count):
    """A part of the script up to that many checks."""
    return lambda device: itertools.islice(part(device), count)


def scaled(gigabytes):
    return gigabytes * 2**30 * SMALL_VOCAB / verify_chunked_loss.VOCAB_SIZE


@pytest.mark.parametrize(("gigabytes", "checks"), [(1, 3), (12, 4)])
def test_a_switch_elsewhere_fails(monkeypatch, small_switch, capsys, gigabytes, checks):
    """A switch at 1 GB chunks the short run; at 12 GB it leaves the long run whole. The
    configuration shows both."""
    monkeypatch.setattr(head_loss, "CHUNKED_LOSS_THRESHOLD_BYTES", scaled(gigabytes))
    assert main((first(small_switch, checks),)) == 1
    assert " 3 failed" in capsys.readouterr().out


@pytest.mark.parametrize("gigabytes", [9.999, 10.001])
def test_a_switch_nearby_fails(monkeypatch, small_switch, gigabytes):
    monkeypatch.setattr(head_loss, "CHUNKED_LOSS_THRESHOLD_BYTES", scaled(gigabytes))
    assert next(small_switch(torch.device("cpu"))).verdict == "FAIL"


@pytest.mark.parametrize("num_bytes", [1, 2, 4])
def test_a_model_that_counts_other_bytes_per_logit_than_its_configuration_fails(
    monkeypatch, small_switch, num_bytes
):
    """Only the model's own call counts wrongly, always so many; the configuration alone would
    answer rightly."""
    sound = head_loss.uses_chunked_loss

    def wrong(vocab_size, num_tokens, bytes_per_logit=None, loss_impl="auto"):
        size = 2 if bytes_per_logit is None else num_bytes
        return sound(vocab_size, num_tokens, size, loss_impl)

    monkeypatch.setattr(head_loss, "uses_chunked_loss", wrong)
    borders = itertools.islice(small_switch(torch.device("cpu")), 2)
    assert [check.verdict for check in borders] == [
        "pass" if num_bytes == size else "FAIL" for size in (2, 4)
    ]


def test_the_border_with_the_whole_vocabulary_takes_no_memory():
    borders = [*itertools.islice(switch(torch.device("cpu")), 2)]
    assert [check.verdict for check in borders] == ["pass", "pass"]
    assert [check.name.split("at ")[1] for check in borders] == [
        "35335 and 35336 tokens",
        "17667 and 17668 tokens",
    ]


def test_sizes_of_the_switch_are_the_owners():
    uses_chunked_loss = functools.partial(head_loss.uses_chunked_loss, VOCAB_SIZE)
    sizes = {
        n: f"{head_loss.projected_logits_bytes(VOCAB_SIZE, n) / 2**30:.2f}"
        for n in (4096, 40_000, 131_072)
    }
    assert sizes == {4096: "1.16", 40_000: "11.32", 131_072: "37.09"}
    assert [uses_chunked_loss(n) for n in sizes] == [False, True, True]
    borders = ((35_335, 2), (17_667, 4))
    assert not any(uses_chunked_loss(n, size) for n, size in borders)
    assert all(uses_chunked_loss(n + 1, size) for n, size in borders)
    assert uses_chunked_loss(1, loss_impl="chunked")
    assert head_loss.uses_chunked_loss(100_278, 1)  # OLMo 3's words, which 8 does not divide
    assert not uses_chunked_loss(10**6, loss_impl="standard")


@pytest.mark.parametrize("broken", ["hidden gradient", "head gradient"])
def test_a_gradient_off_by_one_percent_fails(monkeypatch, capsys, broken):
    """Only the check of that gradient, of three in float32."""
    sound = verify_chunked_loss.linear_cross_entropy

    def off(hidden, head, targets, **options):
        (head if broken == "head gradient" else hidden).register_hook(
            lambda gradient: 1.01 * gradient
        )
        return sound(hidden, head, targets, **options)

    monkeypatch.setattr(verify_chunked_loss, "linear_cross_entropy", off)
    assert main((first(equivalence, 3),)) == 1
    [failed] = [line for line in capsys.readouterr().out.splitlines() if line.endswith("FAIL")]
    assert failed.startswith(f"float32: error of the {broken}")


def test_a_head_gradient_summed_in_bf16_fails(monkeypatch, capsys):
    """The check with many chunks fails, and it alone."""
    loss = importlib.import_module("kernels.linear_cross_entropy")
    sound = loss._empty_outputs

    def in_the_inputs_dtype(input, *rest):
        outputs = sound(input, *rest)
        return outputs._replace(d_weight=outputs.d_weight.to(input.dtype))

    monkeypatch.setattr(loss, "_empty_outputs", in_the_inputs_dtype)
    assert main((equivalence,)) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.endswith("FAIL")]
    assert [line.split("  ")[0] for line in failed] == [
        "bfloat16: error of the head gradient, chunks of 16"
    ]


def test_a_mean_of_means_fails(monkeypatch, capsys):
    """The broken accumulation forgets `num_valid_tokens`: each micro-batch divides by its own
    count."""
    sound = head_loss.linear_cross_entropy
    monkeypatch.setattr(
        head_loss, "linear_cross_entropy", lambda *a, denominator, **options: sound(*a, **options)
    )
    assert main((accumulation,)) == 1
    assert "FAIL" in capsys.readouterr().out


def test_full_logits_behind_the_chunked_loss_fail(monkeypatch, small_switch, capsys):
    def full_logits(hidden, head, targets, linear, num_valid_tokens, **options):
        return cross_entropy(linear(hidden, head), targets, **options)

    monkeypatch.setattr(head_loss, "linear_cross_entropy", full_logits)
    assert main((small_switch,)) == 1
    out = capsys.readouterr().out
    assert "should_chunk=True\n  standard loss used" in out and "FAIL" in out


def test_flags_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["verify_chunked_loss.py", "--vocab_size", "3"])
    with pytest.raises(SystemExit):
        runpy.run_path(verify_chunked_loss.__file__, run_name="__main__")
    assert "unrecognized arguments: --vocab_size 3" in capsys.readouterr().err
