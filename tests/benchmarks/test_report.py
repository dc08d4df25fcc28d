"""benchmarks.report: a claim's command runs once, whatever stops the report; its number is read and
written."""

import json
import math
import subprocess
from dataclasses import replace

import pytest

from benchmarks import common, report
from benchmarks.claims import CLAIMS, Claim
from training.host import sizes

LINE = {
    "operation": "fake",
    "results": {"ours": {"ms": 3.0}, "theirs": {"ms": 4.0}},
    "predicted": 3.3,
}
TABLE = "before\n<!-- claims -->\nold\n<!-- end -->\nafter\n"


@pytest.fixture
def two_claims(tmp_path, monkeypatch):
    """Returns a file to which the first command writes each time it runs. The second command takes
    an hour."""
    runs = tmp_path / "runs"
    program = tmp_path / "program.py"
    program.write_text(
        f"import json, pathlib, sys\nprint('not JSON')\nprint(json.dumps({LINE!r}))\n"
        f"open({str(runs)!r}, "
        f"'a').write(sys.argv[1])\npathlib.Path(sys.argv[2]).write_text('{{\"most\": 12}}')\n"
    )
    command = f"python {program} 1 FILE"
    paths = "results > ours > ms", "ms", "predicted", "theirs", "results > theirs > ms"
    claims = [
        Claim("fast", "a number", "cpu", command, 1, *paths),
        Claim("most", "of a file", "cpu", command, 1, "most", "tokens"),
        Claim("slow", "another", "cpu", f"python {program} 2 FILE", 3600, "most", "tokens"),
        Claim("elsewhere", "a third", "h200", "python nothing.py", 1, "most", "tokens"),
    ]
    monkeypatch.setattr(report, "CLAIMS", claims)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(report, "REPORT", tmp_path / "MEMORY_REPORT.md")
    report.REPORT.write_text(TABLE)
    return runs


def test_a_report_that_was_stopped_goes_on(two_claims, capsys, monkeypatch):
    assert report.main(["--machine", "cpu", "--seconds", "60", "--write"]) == 1
    assert two_claims.read_text() == "1" and "left out, " in capsys.readouterr().out
    before, *rows = report.REPORT.read_text().split("\n| ")
    fast, most, slow, elsewhere = [row.split(" | ") for row in rows[2:]]
    assert before.startswith("before\n<!-- claims -->\n4 claims, 2 of commit ")
    assert (
        fast[:4] == ["a number", "3.00 ms", "3.30 (+10.0%)", "theirs 4.00 (0.75)"]
        and fast[4] == "CPU"
    )
    assert (
        most[1] == "12.00 tokens"
        and most[-1] == "same run |"
        and slow[1] == elsewhere[1].strip() == "not measured"
    )
    assert elsewhere[-1] == "`python nothing.py` |\n<!-- end -->\nafter\n"

    assert report.main(["--machine", "cpu"]) == 0  # the second command alone
    assert two_claims.read_text() == "12"
    assert (
        report.main(["--machine", "cpu", "--only", "slow"]) == 0 and two_claims.read_text() == "12"
    )
    assert report.main(["--write"]) == 0 and report.REPORT.read_text().count("not measured") == 1
    assert "| date, commit |" in report.REPORT.read_text()

    monkeypatch.setattr(report, "CLAIMS", report.CLAIMS[:3])  # all of one commit
    assert report.main(["--write"]) == 0
    text = report.REPORT.read_text()
    assert (
        "3 claims, 3 of commit " in text
        and "date, commit" not in text
        and "| CPU | same run |" in text
    )


def test_a_command_that_fails_or_takes_too_long_has_no_number(
    two_claims, tmp_path, monkeypatch, capsys
):
    fails = tmp_path / "fails.py"
    fails.write_text(
        "import sys, time\nprint('{\"most\": 1}', "
        "flush=True)\ntime.sleep(float(sys.argv[1]))\nsys.exit(3)"
    )
    for seconds, says in (("0", "most: None"), ("100", "killed after ")):
        claim = Claim("most", "a number", "cpu", f"python {fails} {seconds}", 0, "most", "")
        monkeypatch.setattr(report, "CLAIMS", [claim])
        assert report.main(["--machine", "cpu", "--seconds", "0.7"]) == 1
        assert says in capsys.readouterr().out and not report.latest()


def test_a_command_that_ran_another_commit_has_no_number(two_claims, monkeypatch, capsys):
    for commit, is_measured in (("another", False), (common.commit(), True)):
        monkeypatch.setattr(
            report,
            "run_all",
            lambda jobs, *_, commit=commit: (
                (job, {"most": 1, "commit": commit}, 0) for job in jobs
            ),
        )
        report.main(["--machine", "cpu", "--only", "most"])
        assert ("most" in report.latest()) == is_measured
        assert ("left out, the code became another" in capsys.readouterr().out) != is_measured


def test_the_latest_measurement_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    for name, date in (("report_a", "2026-11-26T10:00"), ("report_b", "2026-11-25")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"claims": {"one": {"date": date}}}))
    assert report.latest() == {"one": {"date": "2026-11-26T10:00"}}
    numbers = 0.9494, 1.0132, 39.47, 129.646, 82_944, 7.4e-6, float("nan")
    assert [*map(report.shown, numbers)] == [
        "0.949",
        "1.013",
        "39.47",
        "129.6",
        "82,944",
        "7.4e-06",
        "out of memory",
    ]


def test_commands_run_side_by_side_and_their_rows_say_so(two_claims, tmp_path, monkeypatch):
    """Checks that each visible GPU has a command, and that rows of two GPUs name both."""
    claims = [
        replace(claim, machine="h200", gpus=1 + (claim.name == "slow")) for claim in report.CLAIMS
    ]
    claims = [
        replace(claim, name=f"{claim.name} {i}", command=claim.command + f" {i}")
        for i in "ab"
        for claim in claims
    ]
    monkeypatch.setattr(
        report, "CLAIMS", [claim for claim in claims if "elsewhere" not in claim.name]
    )
    monkeypatch.setattr(
        report, "environment", lambda device: {"gpu": "NVIDIA H200", "commit": "abc"}
    )
    monkeypatch.setattr(report.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(report.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    assert report.main(["--machine", "h200", "--host_gib", "99", "--write"]) == 0
    found = json.loads((tmp_path / "report_h200_abc.json").read_text())["claims"]
    assert {name: entry["gpu"] for name, entry in found.items()} == {
        f"{name} {i}": "H200-x2" if name == "slow" else "H200"
        for i in "ab"
        for name in ("fast", "most", "slow")
    }
    assert {found[name]["beside"] for name in ("slow a", "fast a")} == {1}
    assert "| H200 (1 beside) |" in report.REPORT.read_text()

    (tmp_path / "report_h200_abc.json").unlink()
    monkeypatch.setattr(
        sizes, "_bytes_left_in_groups", lambda: iter([11 * 2**30])
    )  # a container's, for one command
    assert report.main(["--machine", "h200", "--only", "fast a", "fast b"]) == 0
    found = json.loads((tmp_path / "report_h200_abc.json").read_text())["claims"]
    assert {entry["beside"] for entry in found.values()} == {0}
    assert {*found} == {"fast a", "most a", "fast b", "most b"}  # all that a command says


def test_a_row_whose_peer_or_whose_own_step_ran_out_of_memory():
    claim = Claim("one", "a step", "cpu", "python a", 1, "", "s", "", "TRL")
    about = {"gpu": "CPU", "date": "2026-11-27", "commit": "a", "command": "python a"}
    for (number, predicted, peer), cells in {
        (2.0, 3.0, math.nan): ["2.00 s", "3.00 (+50.0%)", "TRL out of memory"],
        (math.nan, 3.0, 4.0): ["out of memory", "3.00", "TRL 4.00"],
        (0.0, 3.0, 4.0): ["0 s", "3.00", "TRL 4.00 (0.00)"],
    }.items():
        assert (
            report.row_of(
                claim, about | {"number": number, "predicted": predicted, "peer": peer}, None
            )[1:4]
            == cells
        )


def test_what_the_report_writes_is_no_change_of_the_code(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "ROOT", tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    files = [
        tmp_path / name
        for name in ("MEMORY_REPORT.md", "benchmarks/results/report_a.json", "code.py")
    ]
    assert common.commit() == ""
    for file in files:
        file.write_text("1")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    found = common.commit()
    for file in files[:2]:
        file.write_text("2")
    assert len(found) == 7 and common.commit() == found
    files[2].write_text("2")
    assert common.commit() == f"{found}-dirty"


def test_the_report_holds_what_its_command_writes():
    written = report.REPORT.read_text()
    assert report.render(written) == written and len({claim.name for claim in CLAIMS}) == len(
        CLAIMS
    )


@pytest.mark.parametrize(("words", "says"), [
    ("--machine cpu --only nothing", "--only takes released, prepare; got nothing"),
    ("--machine h200", "--machine h200 measures on an H200, and here is an NVIDIA H100 80GB HBM3"),
    ("--seconds 9", "give --machine, or --write"),
])  # fmt: skip
def test_what_is_refused(words, says, monkeypatch, capsys):
    monkeypatch.setattr(report.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(report.torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    with pytest.raises(SystemExit):
        report.main(words.split())
    assert says in capsys.readouterr().err


def test_readme_has_the_numbers_of_the_claims():
    found = report.latest()
    seconds, peaks = (
        [found[name + what]["number"] for name in ("dense", "24gb")] for what in ("", "_memory")
    )
    peers = [f"{found[name]['peer']:.1f}" for name in ("dense", "dense_memory")]
    rows = (
        (report.ROOT / "README.md")
        .read_text()
        .split("## Measured")[1]
        .split("| --- | --- |\n")[1]
        .splitlines()[:4]
    )
    cells = [
        [cell.strip(" *").removesuffix(" GiB") for cell in row.split("|")[2:5]] for row in rows
    ]
    assert cells[0][:2] == peers and [row[0] for row in cells[1:3]] == [
        f"{number:.1f}" for number in seconds
    ]
    assert [row[1] for row in cells[1:3]] == [f"{number:.1f}" for number in peaks]
    assert cells[2][2] == f"{found['24gb_host']['number']:.0f}"
    assert [cells[3][0], cells[3][2]] == [
        f"{found['64gb']['number']:.1f}",
        f"{found['64gb_host']['number']:.0f}",
    ]
