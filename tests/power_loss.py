"""Records a program's calls on files, and rebuilds the states in which a disk may be left.

Method: ALICE (Pillai et al., OSDI 2014). A call that changes files is followed by a
snapshot of the whole tree, so that bytes are seen however they were written: by threads, past the
page cache or by a library. A sync of a file makes its bytes durable, a sync of a folder its names.
After any call the power may go. Of what is not durable,

- a change of names (a rename is one change) may be kept or dropped, whatever becomes of the others;
- a file's bytes may be of any version since its last sync, or sector by sector of two versions, or
  zeros.

Syncing a file does not make its name durable, nor syncing a folder the names of the folder above.
"""

import builtins
import contextlib
import io
import itertools
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

SECTOR = 512
PATIENCE = 20  # times as many states in a row as are asked for are known already: there are no more
CHANGING = (
    "open", "write", "pwrite", "truncate", "ftruncate", "rename", "replace", "link", "symlink",
    "unlink", "remove",
    "mkdir", "rmdir",
)  # fmt: skip
SYNCING = "fsync", "fdatasync"
MAKING = os.O_CREAT | os.O_TRUNC  # flags with which opening a file changes something


class Snapshot(NamedTuple):
    """A tree: bytes of files and names in folders, by number of the inode."""

    files: dict[int, bytes]
    folders: dict[int, dict[str, int]]


class Change(NamedTuple):
    """Names that change together: (folder, name, inode; None: the name is gone)."""

    time: int
    names: tuple[tuple[int, str, int | None], ...]


@dataclass
class Recording:
    """Snapshots after each call, times of syncs, and what a program had promised by when."""

    root: int  # inode
    snapshots: list[Snapshot] = field(default_factory=list)
    syncs: list[tuple[int, int]] = field(
        default_factory=list
    )  # (inode, time of the snapshot before)
    promises: list[tuple[int, object]] = field(default_factory=list)

    def promise(self, what: object) -> None:
        """Note that from now on, also after a loss of power, `what` holds."""
        self.promises.append((len(self.snapshots) - 1, what))

    def promised(self, time: int) -> list:
        return [what for at, what in self.promises if at <= time]

    def changes(self) -> list[Change]:
        changes = []
        for time in range(1, len(self.snapshots)):
            before, after = self.snapshots[time - 1].folders, self.snapshots[time].folders
            by_inode: dict[int, list[tuple[int, str, int | None]]] = {}
            for folder in before.keys() | after.keys():
                earlier, later = before.get(folder, {}), after.get(folder, {})
                for name in sorted(earlier.keys() | later.keys()):
                    if earlier.get(name) != later.get(name):
                        inode = later.get(name)
                        moved = earlier[name] if inode is None else inode
                        by_inode.setdefault(moved, []).append((folder, name, inode))
            changes += [Change(time, tuple(names)) for names in by_inode.values()]
        return changes

    def versions(self, inode: int, time: int) -> list[bytes]:
        """Returns the bytes that a file may have, from its last sync on; a file that never had one
        may be empty."""
        synced = max((at for each, at in self.syncs if each == inode and at <= time), default=None)
        versions = [b""] if synced is None else [self.snapshots[synced].files.get(inode, b"")]
        for snapshot in self.snapshots[synced or 0 : time + 1]:
            content = snapshot.files.get(inode, versions[-1])
            if content is not versions[-1] and content != versions[-1]:
                versions.append(content)
        return versions


@contextlib.contextmanager
def recording(root: Path) -> Iterator[Recording]:
    """Records the calls in here that change files below `root`, which is durable as it is."""
    lock, pinned, within = threading.RLock(), dict[int, int](), threading.local()
    recorded = Recording(root.stat().st_ino)
    usual = {name: getattr(os, name) for name in (*CHANGING, *SYNCING)}
    open_file = io.open

    def look() -> None:
        files, folders = dict[int, bytes](), dict[int, dict[str, int]]()
        last = recorded.snapshots[-1].files if recorded.snapshots else {}
        waiting = [root]
        while waiting:
            folder = waiting.pop()
            names = folders.setdefault(os.lstat(folder).st_ino, {})
            for entry in os.scandir(folder):
                inode = names[entry.name] = entry.inode()
                if (
                    inode not in pinned
                ):  # a file that is held open keeps its inode's number to itself
                    pinned[inode] = usual["open"](entry.path, os.O_PATH | os.O_NOFOLLOW)
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    with open_file(entry.path, "rb") as stream:
                        content = stream.read()
                    files[inode] = last[inode] if last.get(inode) == content else content
        snapshot = Snapshot(files, folders)
        if not recorded.snapshots or snapshot != recorded.snapshots[-1]:
            recorded.snapshots.append(snapshot)

    def watched(
        call: Callable, syncs: bool = False, changes: Callable = lambda *_, **__: True
    ) -> Callable:
        def run(*arguments, **named):
            if getattr(within, "is_in", False) or not changes(*arguments, **named):
                return call(*arguments, **named)
            with lock:
                within.is_in = True
                try:
                    if syncs:
                        look()
                        result = call(*arguments, **named)
                        recorded.syncs.append(
                            (os.fstat(arguments[0]).st_ino, len(recorded.snapshots) - 1)
                        )
                        return result
                    result = call(*arguments, **named)
                    look()
                    return result
                finally:
                    within.is_in = False

        return run

    with pytest.MonkeyPatch.context() as patch:
        look()
        for name in (*CHANGING, *SYNCING):
            patch.setattr(os, name, watched(usual[name], name in SYNCING))
        patch.setattr(
            os, "open", watched(usual["open"], changes=lambda _, flags, *__, **___: flags & MAKING)
        )
        for module in (io, builtins):
            patch.setattr(
                module,
                "open",
                watched(open_file, changes=lambda _, mode="r", *__, **___: mode[0] != "r"),
            )
        for inode in (*recorded.snapshots[0].files, *recorded.snapshots[0].folders):
            recorded.syncs.append((inode, 0))
        try:
            yield recorded
            look()
        finally:
            for descriptor in pinned.values():
                os.close(descriptor)


Tree = dict[str, bytes | None]  # path -> bytes; None: a folder


def states(recorded: Recording, draws: random.Random, count: int) -> Iterator[tuple[int, Tree]]:
    """Yields (time, tree) of different states, at most `count`: states of one fault come first,
    then random ones."""
    changes, seen = recorded.changes(), set[tuple[int, int]]()
    plans, times = [], range(len(recorded.snapshots))
    times = (
        times if count >= len(times) else draws.sample(times, count)
    )  # plans of all times take seconds
    for make in (_whole_folders, _single_changes):
        some = [(time, plan) for time in times for plan in make(recorded, changes, time)]
        draws.shuffle(some)
        plans += some
    without_new = 0
    for number in itertools.count():
        time, plan = (
            plans[number]
            if number < len(plans)
            else (draws.randrange(len(recorded.snapshots)), None)
        )
        tree = _rebuild(recorded, changes, time, plan, draws)
        key = (
            len(recorded.promised(time)),
            hash(tuple(sorted(tree.items(), key=lambda item: item[0]))),
        )
        without_new = 0 if key not in seen else without_new + 1
        if key not in seen:
            seen.add(key)
            yield time, tree
        if len(seen) == count or without_new == max(1000, PATIENCE * count):
            return


class Plan(NamedTuple):
    """Numbers of the loose changes to keep, and the bytes of files: the oldest, the newest, or a
    mixture."""

    kept: frozenset[int]
    content: str


def _whole_folders(recorded: Recording, changes: list[Change], time: int) -> Iterator[Plan]:
    """Yields plans that keep no change, or all, or changes of one folder alone, or of all
    others."""
    loose = _loose(recorded, changes, time)
    chosen = {frozenset(), frozenset(loose)}
    for folder in {folder for number in loose for folder, *_ in changes[number].names}:
        inside = frozenset(
            number for number in loose if any(folder == each for each, *_ in changes[number].names)
        )
        chosen |= {inside, frozenset(loose) - inside}
    for kept in sorted(chosen, key=sorted):
        yield from (Plan(kept, content) for content in ("oldest", "newest", "mixed"))


def _single_changes(recorded: Recording, changes: list[Change], time: int) -> Iterator[Plan]:
    """Yields plans that keep all changes but one, one alone, the first ones, or the last ones."""
    loose = _loose(recorded, changes, time)
    chosen = {frozenset(loose) - {each} for each in loose} | {frozenset({each}) for each in loose}
    chosen |= {frozenset(some) for end in range(len(loose)) for some in (loose[:end], loose[end:])}
    for kept in sorted(chosen, key=sorted):
        yield from (Plan(kept, content) for content in ("oldest", "newest", "mixed"))


def _loose(recorded: Recording, changes: list[Change], time: int) -> list[int]:
    """Returns the numbers of changes that a loss of power at this time may drop: a folder of theirs
    was not synced."""
    synced = dict[int, int]()
    for inode, at in recorded.syncs:
        if at <= time:
            synced[inode] = max(at, synced.get(inode, -1))
    return [
        number
        for number, change in enumerate(changes)
        if change.time <= time
        and any(synced.get(folder, -1) < change.time for folder, *_ in change.names)
    ]


def _rebuild(
    recorded: Recording, changes: list[Change], time: int, plan: Plan | None, draws: random.Random
) -> Tree:
    loose = _loose(recorded, changes, time)
    if plan is None:
        share = draws.random()
        plan = Plan(frozenset(each for each in loose if draws.random() < share), "mixed")
    names = {folder: dict(entries) for folder, entries in recorded.snapshots[0].folders.items()}
    for number, change in enumerate(changes):
        if change.time <= time and (number in plan.kept or number not in loose):
            for folder, name, inode in change.names:
                if inode is None:
                    names.setdefault(folder, {}).pop(name, None)
                else:
                    names.setdefault(folder, {})[name] = inode
    folders = {inode for snapshot in recorded.snapshots[: time + 1] for inode in snapshot.folders}
    tree: Tree = {}
    waiting = [("", recorded.root)]
    while waiting:
        path, folder = waiting.pop()
        for name, inode in names.get(folder, {}).items():
            below = f"{path}{name}"
            if inode in folders:
                tree[below] = None
                waiting.append((f"{below}/", inode))
            else:
                tree[below] = _content(recorded.versions(inode, time), plan.content, draws)
    return tree


def _content(versions: list[bytes], which: str, draws: random.Random) -> bytes:
    if which != "mixed" or len(versions) == 1:
        return versions[0 if which == "oldest" else -1]
    how = draws.choice(["a version", "zeros", "cut", "sectors", "sectors"])
    older, newer = (
        versions[draws.randrange(len(versions) - 1)],
        versions[draws.randrange(1, len(versions))],
    )
    if how == "a version":
        return draws.choice(versions)
    if how == "zeros":
        return older[: len(newer)].ljust(len(newer), b"\0")
    if how == "cut":
        return newer[: draws.randrange(len(newer) + 1)]
    mixed = bytearray(older[: len(newer)].ljust(len(newer), b"\0"))
    for start in range(0, len(newer), SECTOR):
        if draws.random() < 0.5:
            mixed[start : start + SECTOR] = newer[start : start + SECTOR]
    return bytes(mixed)


def write_tree(tree: Tree, root: Path) -> None:
    root.mkdir()
    for path, content in sorted(tree.items(), key=lambda item: item[0].count("/")):
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)


def read_tree(root: Path) -> Tree:
    paths = {str(path.relative_to(root)): path for path in root.rglob("*")}
    return {
        name: path.read_bytes() if stat.S_ISREG(path.lstat().st_mode) else None
        for name, path in paths.items()
    }
