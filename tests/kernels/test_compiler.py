"""The cache of compiled kernels: damaged entries are rebuilt, and files that others may write are not loaded."""

import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch

from moduli import kernels
from moduli.kernels import _compiler


def list_entries(path, suffix=".so"):
    return sorted(p for p in path.iterdir() if p.name.endswith(suffix))


def call_fused():
    """Return the form of fused calls with right results, and the warnings they gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for scale in (2.0, 3.0):
            fused = kernels.fuse(lambda x, y, a: a * x + y * y)
            got = fused([torch.full((5,), 2.0)], [torch.full((5,), 3.0)], scale)
            assert torch.equal(got[0], torch.full((5,), 2.0 * scale + 9.0))
            assert kernels.sum(got) == 5 * (2.0 * scale + 9.0)
    return fused.explain([torch.ones(2)], [torch.ones(2)], 1.0).form, [str(w.message) for w in caught]


def expect_foreach(words=""):
    """Assert that fused calls run in the foreach form, with right results and one warning that has some words."""
    form, caught = call_fused()
    assert form == "foreach"
    assert len(caught) == 1
    assert words in caught[0]


def fake_compiler(tmp_path, text):
    path = tmp_path / "fakecc"
    path.write_text("#!/bin/sh\n" + textwrap.dedent(text))
    path.chmod(0o755)
    return str(path)


def test_an_entry_is_written_once_and_found_again(fresh):
    assert call_fused() == ("c", [])
    first = {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in list_entries(fresh)}
    assert first
    assert {p.name[:-2] for p in list_entries(fresh, ".c")} == {p.name[:-3] for p in first}
    kernels.reset()
    assert call_fused() == ("c", [])
    assert {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in list_entries(fresh)} == first
    assert not [p for p in fresh.iterdir() if p.name.startswith(".tmp")]
    assert all(p.stat().st_mode & 0o077 == 0 for p in fresh.iterdir())


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "link", "writable", "directory"])
def test_a_damaged_entry_is_rebuilt(fresh, damage, tmp_path):
    assert call_fused()[0] == "c"
    kernels.reset()
    for path in list_entries(fresh):
        data = path.read_bytes()
        if damage == "link":
            copy = tmp_path / path.name
            path.rename(copy)
            path.symlink_to(copy)
        elif damage == "writable":
            path.chmod(0o777)
        elif damage == "directory":
            continue
        else:
            # Write a new file, because this process may still map the old one.
            path.unlink()
            flipped = bytes([data[0], data[1] ^ 1]) + data[2:]
            path.write_bytes({"truncated": data[: len(data) // 2], "flipped": flipped, "empty": b""}[damage])
    if damage == "directory":
        (fresh / "unrelated").mkdir()
    assert call_fused() == ("c", [])
    for path in list_entries(fresh):
        assert _compiler.is_whole(path)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o755])
def test_a_directory_open_to_others_is_refused(fresh, mode):
    fresh.chmod(mode)
    expect_foreach("chmod 700")
    assert not list_entries(fresh)


def test_a_directory_of_someone_else_is_refused(fresh, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: fresh.stat().st_uid + 1)
    expect_foreach("another user")


def test_a_parent_that_others_may_write_to_is_refused(fresh, monkeypatch):
    open_to_all = fresh / "shared"
    open_to_all.mkdir(mode=0o700)
    open_to_all.chmod(0o777)
    monkeypatch.setenv("MODULI_KERNELS_CACHE", str(open_to_all / "cache"))
    expect_foreach("writable by other users")


def test_a_link_instead_of_a_directory_is_refused(fresh, monkeypatch, tmp_path):
    (tmp_path / "link").symlink_to(fresh)
    monkeypatch.setenv("MODULI_KERNELS_CACHE", str(tmp_path / "link"))
    expect_foreach()


def test_a_home_that_cannot_be_written(fresh, monkeypatch, tmp_path):
    # A file instead of the directory stops root too, which permissions do not.
    (tmp_path / "home").write_text("")
    monkeypatch.delenv("MODULI_KERNELS_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    expect_foreach("MODULI_KERNELS_CACHE")


def test_a_full_disk_while_writing(fresh, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_compiler.tempfile, "mkstemp", full)
    expect_foreach("No space left")


def test_renaming_fails_and_leaves_nothing(fresh, monkeypatch):
    def refuse(*_args):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(_compiler.os, "replace", refuse)
    assert call_fused()[0] == "foreach"
    monkeypatch.undo()
    assert list(fresh.iterdir()) == []


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("MODULI_KERNELS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _compiler.directory() == tmp_path / "moduli" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert _compiler.directory() == tmp_path / "me" / ".cache" / "moduli" / "kernels"
    folder = _compiler.private(_compiler.directory())
    assert folder.stat().st_mode & 0o777 == 0o700


def test_no_compiler(fresh, monkeypatch):
    monkeypatch.setenv("CC", "/nonexistent/cc")
    expect_foreach("/nonexistent/cc")
    assert "was not found" in str(kernels.explain())
    kernels.reset()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "/nonexistent")
    form, caught = call_fused()
    assert form == "foreach"
    assert "no C compiler" in caught[0]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 3\n", "code 3"),
        ('case "$*" in *--version*) exit 0;; esac; kill -9 $$\n', "code -9"),
        ("exit 0\n", "no library"),
        (
            'case "$*" in *--version*) exit 0;; esac\nwhile [ "$1" != -o ]; do shift; done; echo text > "$2"\n',
            "can't be loaded",
        ),
    ],
)
def test_compilers_that_fail(fresh, monkeypatch, tmp_path, script, words):
    monkeypatch.setenv("CC", fake_compiler(tmp_path, script))
    expect_foreach(words)
    assert not list_entries(fresh)
    monkeypatch.setenv("MODULI_KERNELS", "c")
    with pytest.raises(kernels.KernelError, match="can't be compiled"):
        kernels.fuse(lambda x: x + 1)([torch.ones(2)])
    with pytest.raises(kernels.KernelError, match="can't be compiled"):
        kernels.sum([torch.ones(2)])


def test_a_compiler_that_hangs(fresh, monkeypatch, tmp_path):
    monkeypatch.setattr(_compiler, "_SECONDS", 0.2)
    monkeypatch.setenv("CC", fake_compiler(tmp_path, 'case "$*" in *--version*) exit 0;; esac; exec sleep 60\n'))
    expect_foreach("timed out")


def test_without_openmp_and_without_march(fresh, monkeypatch, tmp_path):
    refuse = 'for a in "$@"; do case "$a" in -fopenmp|-march=native) echo no >&2; exit 1;; esac; done; exec cc "$@"\n'
    monkeypatch.setenv("CC", fake_compiler(tmp_path, refuse))
    assert call_fused() == ("c", [])
    assert "without OpenMP" in str(kernels.explain())
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        x = torch.randn(100_001, generator=torch.Generator().manual_seed(0))
        assert torch.equal(kernels.fuse(lambda a: a * 2 - 1)([x])[0], x * 2 - 1)
    finally:
        torch.set_num_threads(before)


def test_another_compiler_makes_another_entry(fresh, monkeypatch, tmp_path):
    path = fake_compiler(tmp_path, 'exec cc "$@"\n')
    monkeypatch.setenv("CC", path)
    assert call_fused()[0] == "c"
    first = set(list_entries(fresh))
    kernels.reset()
    Path(path).write_text('#!/bin/sh\n# newer\nexec cc "$@"\n')
    assert call_fused()[0] == "c"
    assert len(list_entries(fresh)) == 2 * len(first)
    kernels.reset()
    monkeypatch.setattr(_compiler, "_cpu", lambda: "another processor")
    monkeypatch.setattr(_compiler, "reset", lambda: None)
    assert call_fused()[0] == "c"
    assert len(list_entries(fresh)) == 3 * len(first)


PROGRAM = """
import torch, sys
from moduli import kernels
x = torch.arange(1000.0)
got = kernels.fuse(lambda a, s: torch.exp(-a * s) + a)([x], 0.01)[0]
torch.testing.assert_close(got, torch.exp(-x * 0.01) + x)
assert kernels.sum([x]) == 499500
print("right", kernels.explain().form)
"""


def start(**env):
    root = str(Path(kernels.__file__).parents[2])
    full = {**os.environ, "PYTHONPATH": root, "MODULI_KERNELS": "c", **env}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env=full,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_compiling_at_once(fresh):
    running = [start() for _ in range(2)]
    for process in running:
        out, err = process.communicate(timeout=600)
        assert out.strip() == "right c", err
    for path in list_entries(fresh):
        assert _compiler.is_whole(path)


def test_a_process_killed_while_compiling_harms_nobody(fresh, tmp_path):
    slow = fake_compiler(tmp_path, 'case "$*" in *--version*) exec cc "$@";; esac; echo $$ > "$0.pid"; exec sleep 60\n')
    process = start(CC=slow)
    pid = Path(slow + ".pid")
    while process.poll() is None and not (pid.exists() and pid.read_text().strip()):
        pass
    process.kill()
    process.communicate()
    os.kill(int(pid.read_text()), signal.SIGKILL)
    assert call_fused() == ("c", [])


def test_a_forked_child_uses_one_thread(fresh):
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    code = """
    import os, torch, warnings
    from moduli import kernels
    torch.set_num_threads(2)
    x = torch.ones(100_000)
    f = kernels.fuse(lambda a: a + 1)
    f([x])
    pid = os.fork()
    if pid == 0:
        os._exit(0 if kernels.sum(f([x])) == 200_000 else 1)  # torch's threads would deadlock in the child
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    root = str(Path(kernels.__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root, "MODULI_KERNELS": "c"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout.strip() == "0", done.stderr


def test_nothing_but_numbers_reaches_the_source(monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", "c")

    def evil_name_in_function(evil_role, evil_scalar, evil_text):
        return evil_role * evil_scalar + 0.1 + float("inf")

    answer = kernels.fuse(evil_name_in_function).explain([torch.ones(1)], 2.0, '"; system("x"); //')
    assert "evil" not in answer.source
    assert "system" not in answer.source
    assert "INFINITY" not in answer.source  # scalars are passed as arguments


def test_a_fresh_home_under_a_group_umask(fresh, tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    env = {key: value for key, value in os.environ.items() if key not in ("MODULI_KERNELS_CACHE", "XDG_CACHE_HOME")}
    root = str(Path(kernels.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import os; os.umask(0o002)\n" + PROGRAM],
        env={**env, "HOME": str(home), "PYTHONPATH": root, "MODULI_KERNELS": "auto"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout.strip() == "right c", done.stderr
    for path in (".cache", ".cache/moduli", ".cache/moduli/kernels"):
        assert (home / path).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("mode", "private", "is_open"),
    [(0o700, False, False), (0o770, False, True), (0o770, True, False), (0o707, True, True), (0o1777, False, False)],
)
def test_a_group_of_the_user_alone_is_no_other_user(monkeypatch, mode, private, is_open):
    user = _compiler.pwd.struct_passwd(("me", "x", os.geteuid(), 7, "", "/", ""))
    members = [] if private else ["me", "other"]
    monkeypatch.setattr(_compiler.pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(_compiler.grp, "getgrgid", lambda gid: _compiler.grp.struct_group(("me", "x", 7, members)))
    info = os.stat_result((mode, 0, 0, 0, os.geteuid(), 7, 0, 0, 0, 0))
    assert _compiler._is_open(info) is is_open


def test_a_quote_that_is_not_closed(fresh, monkeypatch):
    monkeypatch.setenv("CC", "gcc '")
    expect_foreach("CC=gcc '")


def test_a_compiler_that_omits_functions(fresh, monkeypatch, tmp_path):
    script = """
    case "$*" in *--version*) exec cc "$@";; esac
    while [ "$1" != -o ]; do shift; done
    echo 'int nothing;' > "$2.c"; exec cc -shared -fPIC -o "$2" "$2.c"
    """
    monkeypatch.setenv("CC", fake_compiler(tmp_path, script))
    expect_foreach("has no moduli_")


def test_a_directory_in_the_place_of_an_entry(fresh):
    assert call_fused()[0] == "c"
    kernels.reset()
    for path in list_entries(fresh):
        path.unlink()
        path.mkdir()
    expect_foreach("can't be written")


def test_a_pipe_in_the_place_of_an_entry(fresh):
    assert call_fused()[0] == "c"
    kernels.reset()
    for path in list_entries(fresh):
        path.unlink()
        os.mkfifo(path)
    assert call_fused() == ("c", [])
    assert all(_compiler.is_whole(path) for path in list_entries(fresh))


def test_entries_that_changed_places(fresh):
    assert call_fused()[0] == "c"
    first, second, *_ = list_entries(fresh)
    data = first.read_bytes(), second.read_bytes()
    kernels.reset()
    for path, other in ((first, data[1]), (second, data[0])):
        path.unlink()
        path.write_bytes(other)
        path.chmod(0o700)
        assert not _compiler.is_whole(path)
    assert call_fused() == ("c", [])
    assert (_compiler.is_whole(first), _compiler.is_whole(second)) == (True, True)
