"""Measure the claims of MEMORY_REPORT.md, and write its table: `python -m benchmarks.report
--machine h200`.

The commands of benchmarks/claims.py for this kind of machine run side by side, each on GPUs of its
own; with CUDA_VISIBLE_DEVICES=0 in the environment, in turn. What they print goes to build/report/.
After each its numbers are written to benchmarks/results/report_<gpu>_<commit>.json. The same
command again goes on where it was stopped: commands that the file has numbers of do not run. With
`--seconds 560` the first commands that fill this time run, the longest of them first, and then what
still fits. The exit status is 1 while numbers are missing.

`--write` renders the table between "<!-- claims -->" and "<!-- end -->", from the latest
measurement of each claim in benchmarks/results/report_*.json. The text around it is written by
hand.
"""

import datetime
import json
import math
import os
import re
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import closing

import torch

from benchmarks.claims import CLAIMS, FIRST, Claim
from benchmarks.common import ROOT, environment
from benchmarks.side_by_side import Job, in_order, run_all
from training.host.files import replace_file
from training.host.sizes import GIB, free_host_bytes

REPORT, RESULTS, LOGS = (
    ROOT / "MEMORY_REPORT.md",
    ROOT / "benchmarks" / "results",
    ROOT / "build" / "report",
)
MARKERS = "<!-- claims -->\n.*?<!-- end -->"
COLUMNS = [
    "claim",
    "measured",
    "predicted",
    "peer or floor, measured ÷ it",
    "GPU",
    "date, commit",
    "command",
]
WHEN = COLUMNS.index("date, commit")  # left out where all claims are of one commit


def main(argv: list[str]) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--machine", choices=("h200", "cpu"), help="measure the claims for this kind of machine"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="run the commands of these claims alone"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="stop before so many have passed"
    )
    parser.add_argument("--host_gib", type=float, help="host memory; default: what is free")
    parser.add_argument("--write", action="store_true", help="render the table of MEMORY_REPORT.md")
    arguments = parser.parse_args(argv)
    claims = [claim for claim in CLAIMS if claim.machine == arguments.machine]
    if unknown := {*(arguments.only or ())} - {claim.name for claim in claims}:
        parser.error(
            f"--only takes {', '.join(claim.name for claim in claims)}; got "
            f"{', '.join(sorted(unknown))}"
        )
    if not arguments.machine and not arguments.write:
        parser.error("give --machine, or --write")
    if arguments.machine == "h200":
        here = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        if "H200" not in here:
            parser.error(f"--machine h200 measures on an H200, and here is an {here}")
    commands = {claim.command for claim in claims if claim.name in (arguments.only or claim.name)}
    claims = [claim for claim in claims if claim.command in commands]
    gib = arguments.host_gib or free_host_bytes() / GIB
    is_whole = measure_all(claims, arguments.seconds, gib) if claims else True
    if arguments.write:
        replace_file(REPORT, render(REPORT.read_text()))
    return 0 if is_whole else 1


# Measuring


def measure_all(claims: list[Claim], limit: float, gib: float) -> bool:
    """Runs the commands of claims that this commit has no number of; returns whether none is
    missing at the end."""
    on_gpu = claims[0].machine != "cpu"
    machine = environment(torch.device("cuda" if on_gpu else "cpu"))
    kind = machine["gpu"].removeprefix("NVIDIA ").partition(" ")[0]
    file = RESULTS / f"report_{kind.lower()}_{machine['commit'] or 'unknown'}.json"
    found = json.loads(file.read_text()) if file.exists() else {"claims": {}, "lines": {}}
    by_command: dict[str, list[Claim]] = {}
    for claim in sorted(claims, key=lambda claim: not claim.name.startswith(FIRST)):
        if claim.name not in found["claims"]:
            by_command.setdefault(claim.command, []).append(claim)
    jobs = [
        Job(own[0].name, command, own[0].seconds, own[0].gpus)
        for command, own in by_command.items()
    ]
    gpus = visible_gpus() if on_gpu else [""]
    with closing(run_all(in_order(jobs, len(gpus) * limit), gpus, gib, limit, LOGS)) as ended:
        for job, line, beside in ended:
            if (ran := line.get("commit", machine["commit"])) != machine["commit"]:
                print(f"left out, the code became {ran} before it ran: {job.command}", flush=True)
                continue
            about = {
                "gpu": kind + f"-x{job.gpus}" * (job.gpus > 1),
                "beside": beside,
                "command": job.command,
            }
            about["date"] = datetime.datetime.now().isoformat(timespec="minutes")
            for claim in by_command[job.command]:
                if (entry := read_claim(claim, line)) is not None:
                    found["claims"][claim.name] = {**entry, **machine, **about}
                print(f"{claim.name}: {entry}", flush=True)
            found["lines"][job.command] = line
            replace_file(file, json.dumps(found, indent=1) + "\n")
    return all(claim.name in found["claims"] for claim in claims)


def visible_gpus() -> list[str]:
    """Returns the names of this process's GPUs for CUDA_VISIBLE_DEVICES."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [*map(str, range(torch.cuda.device_count()))]


def read_claim(claim: Claim, line: dict) -> dict | None:
    """Returns the number of a claim, its prediction and its peer's; None where the line has no
    number."""
    number = read(line, claim.number)
    if number is None:
        return None
    return {
        "number": number,
        "predicted": read(line, claim.predicted),
        "peer": read(line, claim.peer_number),
    }


def read(line: dict, path: str) -> float | None:
    """Returns the value at a path such as "results > 24GB > seconds"; None where there is none."""
    value: object = line
    for key in path.split(" > "):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, (int, float)) else None


# Writing


def latest() -> dict[str, dict]:
    """Returns the latest measurement of each claim, by the claim's name."""
    found: dict[str, dict] = {}
    for file in sorted(RESULTS.glob("report_*.json")):
        for name, entry in json.loads(file.read_text())["claims"].items():
            if name not in found or found[name]["date"] <= entry["date"]:
                found[name] = entry
    return found


def latest_line(name: str) -> dict:
    """Returns the keys of what the command printed that last measured a claim."""
    files = [json.loads(file.read_text()) for file in RESULTS.glob("report_*.json")]
    file = max(
        (file for file in files if name in file["claims"]),
        key=lambda file: file["claims"][name]["date"],
    )
    return file["lines"][file["claims"][name]["command"]]


def render(report: str) -> str:
    """Returns the report with the table between its markers written anew."""
    found, rows, above = latest(), [COLUMNS, ["---"] * len(COLUMNS)], None
    for claim in CLAIMS:
        rows.append(row_of(claim, entry := found.get(claim.name), above))
        above = entry
    measured = [found[claim.name] for claim in CLAIMS if claim.name in found]
    newest = max(measured, key=lambda entry: entry["date"], default={"commit": "", "date": ""})
    count = sum(entry["commit"] == newest["commit"] for entry in measured)
    counts = f"{len(CLAIMS)} claims, {count} of commit {newest['commit']}"
    if count == len(CLAIMS):
        counts, rows = (
            f"{counts}, {newest['date'][:10]}",
            [row[:WHEN] + row[WHEN + 1 :] for row in rows],
        )
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return re.sub(
        MARKERS,
        lambda _: f"<!-- claims -->\n{counts}.\n\n{table}\n<!-- end -->",
        report,
        flags=re.DOTALL,
    )


def row_of(claim: Claim, entry: dict | None, above: dict | None) -> list[str]:
    """Returns the cells of a claim. Its command is "same run" below a row of the same run."""
    if entry is None:
        return [claim.says, "not measured", "", "", "", "", f"`{claim.command}`"]
    number, predicted, peer, beside = (
        entry.get(key) for key in ("number", "predicted", "peer", "beside")
    )
    is_same = above is not None and all(
        entry[name] == above[name] for name in ("date", "commit", "command")
    )
    return [
        claim.says,
        f"{shown(number)} {'' if math.isnan(number) else claim.unit}".strip(),
        f"{shown(predicted)} {ratio(predicted, number, '({:+.1%})', 1)}".strip()
        if predicted
        else "",
        f"{claim.peer} {shown(peer)} {ratio(number, peer, '({:.2f})')}".strip() if peer else "",
        entry["gpu"] + (f" ({beside} beside)" if beside else ""),
        f"{entry['date'][:10]}, {entry['commit']}",
        "same run" if is_same else f"`{entry['command']}`",
    ]


def ratio(number: float, other: float, form: str, less: float = 0) -> str:
    """Returns number / other - less in this form; "" if either ran out of memory, or `other` is
    0."""
    return "" if math.isnan(number + other) or not other else form.format(number / other - less)


def shown(number: float) -> str:
    """Returns a number with three digits or more, as 0.949, 39.47, 129.6 and 82,944; "out of
    memory" for NaN."""
    if math.isnan(number):
        return "out of memory"
    if abs(number) < 1:
        return f"{number:.3g}"
    digits = next(
        (digits for digits, most in ((3, 2), (2, 100), (1, 1000)) if abs(number) < most), 0
    )
    return f"{number:,.{digits}f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
