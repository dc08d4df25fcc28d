"""Memory that runs out and files that cannot be written are shown in one line."""

import ast
import errno
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from training.host.errors import (
    UserError,
    hub_download,
    import_optional,
    pip_install,
    program,
    whole_number,
)
from training.host.files import check_can_write
from training.host.memory import PinnedArena
from training.host.processes import command, line_of
from training.plots import __main__ as plots


def test_hints_call_programs_as_the_pages_do(tmp_path, monkeypatch):
    """Programs of the environment that runs, by the path from the working directory."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    assert pip_install("matplotlib") == ".venv/bin/python -m pip install matplotlib"
    install = ".venv/bin/python -m pip install huggingface_hub && "
    assert (
        hub_download("a/b --local-dir DIR") == f"{install}.venv/bin/hf download a/b --local-dir DIR"
    )
    (programs / "hf").touch()
    assert hub_download("a/b --local-dir DIR") == ".venv/bin/hf download a/b --local-dir DIR"
    monkeypatch.chdir(programs)
    assert program("hf") == "hf"
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "executable", "/opt/my env/bin/python")
    assert program() == "'opt/my env/bin/python'"


@pytest.mark.parametrize(
    "program", [["train.py"], ["profile_memory.py"], ["-m", "training.export", "a", "b"]]
)
def test_a_python_without_the_packages_is_said_in_one_line(program):
    """As `python3 train.py` beside an environment in .venv; -S -E leaves out all packages."""
    ended = subprocess.run(
        [sys.executable, "-S", "-E", *program],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    what = (
        f"error: the Python at {sys.executable} has no package tqdm; give .venv/bin/python, which "
        "`make environment`"
    )
    assert ended.returncode == 1 and ended.stderr.startswith(what) and ended.stderr.count("\n") == 1


def test_no_hint_names_a_program_without_its_environment():
    """A user's shell may not find it, or may find another environment's."""
    bare = re.compile(
        r"(?<!-m)(^|[:;,`({ \"'])(pip install|hf download|python -m training|wandb (login|sync)) ?"
    )
    program = re.compile(r"python -m training\.\w+")  # as a key of tables
    root = Path(__file__).parents[3]
    sources = [*root.glob("*.py"), *root.glob("kernels/**/*.py"), *root.glob("training/**/*.py")]
    hints = []
    for path in sources:
        tree = ast.parse(path.read_text())
        names = set()  # a program's own name, of which its errors speak
        for node in ast.walk(tree):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if is_call and node.func.id in ("read_flags", "read_command"):
                names |= {argument for argument in node.args if isinstance(argument, ast.Constant)}
            if isinstance(node, ast.Expr):
                names.add(node.value)  # a docstring, which is for readers of the code
        strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        texts = [node.value for node in strings if node not in names]
        texts = [text for text in texts if isinstance(text, str) and not program.fullmatch(text)]
        hints += [(path.name, text) for text in texts if bare.search(text)]
    assert not hints


@pytest.mark.parametrize("make", [torch.empty, np.empty, lambda size: bytearray(size * 2**6)])
def test_host_memory_that_runs_out_is_a_line(make):
    with pytest.raises((MemoryError, RuntimeError)) as raised:
        make(2**55)
    pattern = (
        r"error: out of host memory, of which \d+\.\d GB are left to this process \(.+\); lower "
        r"--host_budget .+"
    )
    assert re.fullmatch(pattern, line_of(raised.value))
    assert line_of(RuntimeError("out of luck")) is None


def test_pages_that_cannot_be_had_are_told_with_what_there_is():
    pattern = (
        r"cannot pin 1073741824\.0 GB of host memory \(.+\): \d+\.\d GB are left .*, and ulimit -l "
        r".+; lower"
    )
    for device in ("cpu", "cuda"):  # the pages are asked for before the GPU
        with pytest.raises(UserError, match=pattern):
            PinnedArena(2**60, torch.device(device))


def test_files_that_cannot_be_written_are_refused_and_others_left_as_they_are(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for file in (
        tmp_path,
        tmp_path / "pipe",
        tmp_path / "a" / "b",
        tmp_path / ("a" * 5000),
        "a\0b",
    ):
        with pytest.raises(
            UserError, match=r"^--json .+ cannot be written to: .+; give another file$"
        ):
            check_can_write(type(tmp_path)(file), "--json")
    (tmp_path / "old").write_text("old")
    for name in ("old", "new"):
        check_can_write(tmp_path / name, "--json")
    assert (tmp_path / "old").read_text() == "old" and not (tmp_path / "new").exists()


def test_a_disk_that_is_full_at_the_end_is_one_line(capsys):
    """A file such as --json /dev/full can be opened, and has no room later."""

    @command
    def write(argv):
        check_can_write(Path(argv[0]), "--json")
        Path(argv[0]).write_text("x")

    assert write(["/dev/full"]) == 1
    error = (
        "error: No space left on device: a file is cut short; free some space on the disk, or use "
        "another\n"
    )
    assert capsys.readouterr().err == error


def test_a_file_above_a_limit_of_its_size_is_told_of_the_limit():
    """Space on the disk would not help."""
    assert "raise the limit of its size, as by ulimit -f" in str(
        line_of(OSError(errno.EFBIG, "File too large"))
    )


@pytest.mark.parametrize("name", ["run\udcff", "é→"])
def test_names_that_the_terminal_cannot_show_are_escaped(name, monkeypatch):
    """A name of a file need not be UTF-8, and a terminal need not be."""
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert command(lambda argv: print(argv[0], flush=True))([name]) == 0
    assert shown.getvalue() == name.encode("ascii", "backslashreplace") + b"\n"


@pytest.mark.parametrize("content, why", [
    ("import no_such_part", "ModuleNotFoundError: No module named 'no_such_part'"),
    ("raise OSError('libcuda.so.1: cannot open\\nshared object file')", "OSError: libcuda.so.1: cannot open shared"),
    ("raise RuntimeError('numpy 1 and 2')", "RuntimeError: numpy 1 and 2"),
    ("(", "SyntaxError: '\\(' was never closed"),
])  # fmt: skip
def test_a_package_that_is_broken_is_one_line(tmp_path, monkeypatch, content, why):
    (tmp_path / "broken_package.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    advice = re.escape(f"install it anew: {pip_install('--force-reinstall broken_package')}")
    with pytest.raises(
        UserError,
        match=rf"^--x needs the package broken_package, which fails here \({why}.*{advice}",
    ):
        import_optional("broken_package", "--x")
    with pytest.raises(
        UserError, match=rf"^--x needs the package broken_package.part, which fails here \({why}"
    ):
        import_optional("broken_package.part", "--x", "broken_package.part")
    for missing in ("no_such_package", "no_such_package.part"):
        with pytest.raises(
            UserError, match=f"^--x needs the package {missing}: .* -m pip install {missing}$"
        ):
            import_optional(missing, "--x", missing)


def test_numbers_in_the_environment(monkeypatch):
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    assert whole_number("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30) == 30
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "60s")
    with pytest.raises(
        UserError, match=r"^TORCH_ELASTIC_SHUTDOWN_TIMEOUT is '60s' in the environment, not a whole"
    ):
        whole_number("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30)


@pytest.mark.parametrize("error, line", [
    (OSError(errno.EMFILE, "Too many open files"), r"Too many open files: this process may have "
                                                   r"\d+ at once; raise"),
    (OSError(errno.EMFILE, "Too many open files", "a.py"), r"Too many open files: this process may "
                                                           r"have \d+ at once"),
    (RuntimeError("can't start new thread"), r"the system starts no more threads; raise .*ulimit "
                                             r"-u.*"),
])  # fmt: skip
def test_limits_of_a_process_are_lines(error, line, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "folder"))

    def fail(argv):
        raise error

    assert command(fail)([]) == 1
    assert re.fullmatch(f"error: {line}[^\n]*\n", capsys.readouterr().err)


def test_a_deleted_working_directory_is_one_line(monkeypatch, tmp_path, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert plots.main(["run"]) == 1
    error = "error: the working directory is gone (No such file or directory); change"
    assert capsys.readouterr().err.startswith(error)


@pytest.mark.parametrize(
    "command",
    ["train", "training.export", "training.logprobs", "training.data", "verify_chunked_loss"],
)
def test_variables_that_a_library_refuses_at_its_import_are_one_line(command):
    given = {**os.environ, "TQDM_NCOLS": "wide", "TQDM_DELAY": "1"}
    words = (
        [str(Path(__file__).parent), "out", "--data", __file__]
        if command == "training.logprobs"
        else []
    )
    ended = subprocess.run(
        [sys.executable, "-m", command, *words], env=given, capture_output=True, text=True
    )
    assert ended.returncode == 1 and ended.stdout == ""
    assert re.fullmatch(
        "error: tqdm refuses [^\n]*TQDM_NCOLS=wide[^\n]*; unset it, or mend it\n", ended.stderr
    )


def test_closed_standard_files_become_empty_ones():
    """Another file would get number 2, and the errors that libraries print would be written into
    it."""
    program = (
        "import os, sys; from training.host.processes import command\n"
        "def main(argv):\n"
        "    os.write(2, b'dropped')\n"
        "    print('shown', file=sys.stderr)\n"
        "    assert os.open('/dev/null', os.O_RDONLY) > 2 and sys.stdin.read() == ''\n"
        "    return 7\n"
        "sys.exit(command(main)([]))"
    )
    shell = 'exec "$0" -c "$1" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", shell, sys.executable, program], check=False).returncode == 7
