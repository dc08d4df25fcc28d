"""A checkpoint's manifest.json: the size and checksums of each file, compared by whoever reads the
checkpoint.

    format_version
    files    name -> [bytes, CRC-32]; for a file of tensors the CRC-32 is its header's
    blocks   file of tensors -> for each piece [tensor's name, offset, shape, elements' CRC-32]
    crc32    CRC-32 of all the above

Checksums are computed from the memory that is written, as it is written. To compare them, each rank
reads some of the pieces, on a file system that all ranks see.
"""

import json
import math
import os
import zlib
from collections.abc import Collection
from pathlib import Path

from training.checkpoint.pieces import (
    Entry,
    Piece,
    check_finite,
    in_threads,
    pieces_of,
    read_entries,
    read_header,
)
from training.checkpoint.ranks import failing_together, rank_and_world_size
from training.families.lora import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BASE,
    Adapters,
    has_adapters,
    read_adapters,
    to_adapter_config,
)
from training.host.errors import UserError
from training.host.files import inside, read_file, read_json, write_file

FORMAT_VERSION = 2
MANIFEST, WEIGHTS, OPTIMIZER = "manifest.json", "model.safetensors", "optimizer.safetensors"
MODEL_FILES = WEIGHTS, "config.json", ADAPTER_WEIGHTS


def weight_files(path: Path) -> list[Path]:
    """Returns the files of a model's weights: `path` itself, or those with Hugging Face's names in
    that folder."""
    if not path.exists():
        raise UserError(f"checkpoint {path} does not exist")
    for file in (path, path / WEIGHTS):
        if file.is_file():
            return [file]
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        raise UserError(
            f"{path} has no {WEIGHTS}; "
            "give a checkpoint's step_ folder or a whole Hugging Face folder"
        )
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise UserError(f"{index} is damaged: its weight_map must name a file for each weight")
    return sorted({inside(path, shard, index) for shard in places.values()})


def write_manifest(
    folder: Path, written: list[tuple[dict[str, list[int]], dict[str, list]]]
) -> None:
    """Writes the manifest of all ranks' files, from each rank's (files, blocks)."""
    manifest: dict = {"format_version": FORMAT_VERSION, "files": {}, "blocks": {}}
    for files, blocks in written:
        manifest["files"] |= files
        for file, rows in blocks.items():
            manifest["blocks"].setdefault(file, []).extend(rows)
    manifest["crc32"] = zlib.crc32(json.dumps(manifest).encode())
    write_file(folder / MANIFEST, json.dumps(manifest).encode())


def check_files(
    path: Path, names: Collection[str] | None = None
) -> list[tuple[Entry, Piece, int | None]]:
    """Compares sizes, small files and headers of tensors with the manifest, in milliseconds.

    Looks at the files `names`; None: all. Returns (whole tensor, piece, CRC-32) of each piece,
    still to be compared. Raises UserError, one line that names the file, as all functions here do.
    """
    manifest = read_json(path / MANIFEST)
    version = manifest.get("format_version")
    crc = manifest.pop("crc32", None)
    if version != FORMAT_VERSION:
        raise UserError(
            f"checkpoint {path} has format {version!s:.20}, this code {FORMAT_VERSION}: it can "
            f"only start from its weights, with --init_from {path} and another --output_dir"
        )
    if crc != zlib.crc32(json.dumps(manifest).encode()):
        raise _corrupted(path, MANIFEST)
    pieces = []
    for name, (size, crc) in manifest["files"].items():
        if names is not None and name not in names:
            continue
        file = inside(path, name, path / MANIFEST)
        blocks = manifest["blocks"].get(name)
        if not os.path.isfile(file):
            raise UserError(
                f"checkpoint {path} is incomplete: {name} is missing; use another checkpoint"
            )
        if name == ADAPTER_CONFIG and zlib.crc32(read_file(file, "use another checkpoint")) != crc:
            _check_edited(path)
            continue
        if (file_size := file.stat().st_size) != size:
            raise UserError(
                f"checkpoint {path}: {name} is truncated or changed: {file_size} bytes, saved with "
                f"{size}; use another checkpoint"
            )
        content = read_file(file, "use another checkpoint") if blocks is None else read_header(file)
        if zlib.crc32(content) != crc:
            raise _corrupted(path, name)
        if blocks is not None:
            pieces += _checked_pieces(path, file, content, blocks)
    return pieces


def _checked_pieces(
    path: Path, file: Path, header: bytes, blocks: list[list]
) -> list[tuple[Entry, Piece, int | None]]:
    """Returns the pieces of a checkpoint's file of tensors, whose `blocks` the manifest has."""
    entries = read_entries(header, file)
    pieces: list[tuple[Entry, Piece, int | None]] = []
    missing = file.stat().st_size - len(header)
    for tensor, offset, shape, crc in blocks:
        entry = entries.get(tensor)
        if entry is None or len(entry.shape) != len(shape):
            raise _corrupted(path, file.name)
        missing -= math.prod(shape) * entry.dtype.itemsize
        pieces.append((entry, Piece(tensor, tuple(offset), tuple(shape)), crc))
    if missing:
        raise UserError(f"checkpoint {path}: {missing} bytes of {file.name} were written by nobody")
    return pieces


def verify_checkpoint(path: Path) -> None:
    """Compares every byte of a checkpoint with its manifest. All ranks call this."""
    with failing_together():
        _compare(path, check_files(path))


def verify_weights(path: str | Path, entries: dict[str, Entry] | None = None) -> None:
    """Compares weights and config.json with the manifest beside them, if there is one.

    All ranks call this. The other files of a checkpoint may change. Adapters are verified together
    with the weights that they adapt. `path` is a folder, or a file of weights in it. Without a
    manifest the weights `entries` must be finite.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    entries = entries or {}
    if has_adapters(folder):
        verify_base(folder, entries)
        entries = {name: entry for name, entry in entries.items() if entry.file.parent == folder}
    with failing_together():
        _compare(
            folder,
            check_beside(folder, MODEL_FILES) or [(*item, None) for item in pieces_of(entries)],
        )


def verify_base(folder: Path, entries: dict[str, Entry]) -> None:
    """Compares the weights that a folder's adapters adapt with their manifest and with config.json.

    All ranks call this. Folders of peft's have nothing to compare.
    """
    adapters, base = read_adapters(folder)
    verify_weights(
        base, {name: entry for name, entry in entries.items() if entry.file.parent == base}
    )
    _check_settings(folder, adapters, base)


def _check_edited(folder: Path) -> None:
    """Refuses an adapter_config.json that differs from the saved file beyond its base's path."""
    adapters, base = read_adapters(folder)
    _check_settings(folder, adapters, base)
    saved = to_adapter_config(adapters, base)
    if read_json(folder / ADAPTER_CONFIG) | {BASE: saved[BASE]} != saved:
        raise _corrupted(folder, ADAPTER_CONFIG)


def _check_settings(folder: Path, adapters: Adapters, base: Path) -> None:
    """Compares adapters and base with what the run saved of them in config.json."""
    saved = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    for name, setting in settings_beside(adapters, base).items():
        if saved.get(name) not in (None, setting):
            raise UserError(
                f"{folder} was trained with {name} {saved[name]!s:.150}, and now has {setting}: "
                f"{ADAPTER_CONFIG} or the weights in {base} have changed; "
                "bring back those that it was trained with"
            )


def settings_beside(adapters: Adapters, base: Path) -> dict:
    """Returns settings that config.json has beside a run's adapters, to notice a change of them or
    of their base."""
    named = {"rank": adapters.rank, "alpha": adapters.alpha, "targets": [*adapters.targets]}
    return {"adapters": named, "base_crc32": fingerprint(base)}


def fingerprint(folder: Path) -> int:
    """Returns a CRC-32 of the headers of a model's weights, and of two rows of each tensor: 8 GB
    take milliseconds."""
    crc = 0
    for file in weight_files(folder):
        header = read_header(file)
        crc = zlib.crc32(header, crc)
        for entry in read_entries(header, file).values():
            rows, *row_shape = entry.shape or (0,)
            for row in sorted({0, rows // 2}) if rows else ():
                piece = Piece(entry.name, (row, *[0] * len(row_shape)), (1, *row_shape))
                crc = zlib.crc32(piece.crc32(entry).to_bytes(4, "little"), crc)
    return crc


def check_beside(folder: Path, names: Collection[str]) -> list[tuple[Entry, Piece, int | None]]:
    """Does `check_files` for the `names` that exist, if there is a manifest beside them.

    A manifest of another program, or of a checkpoint from before 2026-11-22, is passed over.
    """
    manifest = read_json(folder / MANIFEST) if (folder / MANIFEST).exists() else {}
    if manifest.keys().isdisjoint(("format_version", "crc32")):
        return []
    return check_files(folder, [name for name in names if (folder / name).exists()])


def _compare(path: Path, pieces: list[tuple[Entry, Piece, int | None]]) -> None:
    """Compares each piece with its CRC-32; None: its elements must be finite.

    Each rank compares some pieces.
    """
    rank, world_size = rank_and_world_size()

    def compare(item: tuple[Entry, Piece, int | None]) -> None:
        entry, piece, crc = item
        if crc is None:
            check_finite(piece.content(entry), entry)
        elif piece.crc32(entry) != crc:
            raise _corrupted(path, entry.file.name)

    in_threads(compare, pieces[rank::world_size])


def _corrupted(path: Path, name: str) -> UserError:
    return UserError(
        f"checkpoint {path}: {name} is corrupted (its CRC-32 differs); use another checkpoint"
    )
