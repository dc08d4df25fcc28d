"""Long documents of real text, on any machine: each installed Python package is a document.

`python -m benchmarks.experiments.package_corpus corpus` writes corpus/train.jsonl and
corpus/held_out.jsonl, a line of JSON with a `text` for each package: its source files in the order
of their names, each after a line with its name. One package in ten, by the CRC of its name, is held
out. Evidence about long contexts needs such documents: names defined in one file are used tens of
thousands of tokens later.
"""

import argparse
import json
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

LEAST_CHARACTERS = 20_000  # per package: about 6,000 tokens of a vocabulary of 50,000


def package_texts(most_characters: int) -> Iterator[tuple[str, str]]:
    """(name, text) of each package of the standard library and of site-packages, sorted by name."""
    folders = {Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")}
    packages = {
        found.parent.name: found.parent
        for folder in sorted(folders)
        for found in folder.glob("*/__init__.py")
    }
    for name, package in sorted(packages.items()):
        parts, size = [], 0
        for path in sorted(package.rglob("*.py")):
            if size >= most_characters:
                break
            parts.append(
                f"# {path.relative_to(package.parent)}\n{path.read_text(errors='ignore')}\n"
            )
            size += len(parts[-1])
        if size >= LEAST_CHARACTERS:
            yield name, "".join(parts)[:most_characters]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--most_characters", type=int, default=1_000_000, help="limit per package")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    counts, characters = [0, 0], [0, 0]
    with (
        (arguments.folder / "train.jsonl").open("w") as train,
        (arguments.folder / "held_out.jsonl").open("w") as held,
    ):
        for name, text in package_texts(arguments.most_characters):
            is_held = zlib.crc32(name.encode()) % 10 == 0
            (held if is_held else train).write(json.dumps({"text": text}) + "\n")
            counts[is_held] += 1
            characters[is_held] += len(text)
    for kind, count, size in zip(("train", "held out"), counts, characters):
        print(f"{kind}: {count} packages, {size:,} characters")


if __name__ == "__main__":
    main()
