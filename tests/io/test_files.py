"""Special cases of files: interrupts, errors after the renaming, pipes, links, permissions, and texts of any size."""

import errno
import json
import os
import stat
import tracemalloc
from pathlib import Path

import pytest
import torch
from torch import nn

import moduli.io as mio
from moduli.io import _replace
from moduli.io._replace import replace_file


def save(path, number=1):
    mio.save(path, {"w": torch.full((3,), float(number))}, fsync=False)


def number_in(path):
    return int(mio.read(path).module["w"][0])


# -- writing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(6))
def test_an_interrupt_of_any_system_call_leaves_no_temporary_file(at, tmp_path, monkeypatch):
    """Each system call of a save is interrupted in turn, before and after its work."""
    path = tmp_path / "net"
    save(path, 1)
    names = ["chmod", "fsync", "replace", "fstat", "listdir", "lstat"]
    call = getattr(os, names[at])
    descriptors = len(os.listdir("/proc/self/fd"))
    for after in (False, True):

        def interrupt(*args, after=after, **kwargs):
            if after:
                call(*args, **kwargs)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(os, names[at], interrupt)
            with pytest.raises(KeyboardInterrupt):
                mio.save(path, {"w": torch.full((3,), 2.0)})
        assert os.listdir(tmp_path) == ["net"]
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert number_in(path) == (2 if names[at] == "replace" and after else 1)


@pytest.mark.parametrize("name", ["replace", "close", "sync_directory"])
def test_an_error_after_the_renaming_reports_that_the_file_was_replaced(name, tmp_path, monkeypatch):
    """The calls work and raise, as for a lost reply of a file server, a failed close, or a directory that cannot be synced."""
    path = tmp_path / "net"
    save(path, 1)
    owner = _replace if name == "sync_directory" else os
    call = getattr(owner, name)

    def fail(*args):
        call(*args)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        message = "was replaced by the new one.*Input/output error.*may not survive a loss of power"
        with pytest.raises(mio.CheckpointError, match=message):
            replace_file(path, lambda descriptor: os.write(descriptor, b"new") and None)
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["net"]


def test_an_error_before_the_renaming_reports_that_the_old_file_is_unchanged(tmp_path, monkeypatch):
    path = tmp_path / "net"
    save(path, 1)

    def fail(*args):
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(mio.CheckpointError, match="what was there before is unchanged"):
        save(path, 2)
    assert number_in(path) == 1
    assert os.listdir(tmp_path) == ["net"]


def test_a_temporary_file_has_no_more_permissions_than_the_file_it_replaces(tmp_path):
    path = tmp_path / "net"
    old = os.umask(0o022)
    try:
        for mode in (0o600, 0o640, 0o664, 0o400):
            path.write_bytes(b"old")
            path.chmod(mode)
            modes = []

            def record(number, mode=mode, modes=modes):
                (part,) = _replace.find_unfinished(tmp_path)
                modes.append(stat.S_IMODE(part.stat().st_mode))

            with pytest.MonkeyPatch.context() as patch:
                chmod = os.chmod
                patch.setattr(os, "chmod", lambda *args, record=record: (record(0), chmod(*args)))
                replace_file(path, record, fsync=False)
            assert all(each & ~mode == 0 for each in modes), [oct(each) for each in modes]
            assert len(modes) == 2
            assert modes[-1] == mode == stat.S_IMODE(path.stat().st_mode)
            path.unlink()
        save(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
    finally:
        os.umask(old)


def test_a_cyclic_link_is_refused_and_not_replaced(tmp_path):
    one, two, itself = tmp_path / "one", tmp_path / "two", tmp_path / "itself"
    one.symlink_to(two)
    two.symlink_to(one)
    itself.symlink_to(itself)
    for link in (one, two, itself):
        with pytest.raises(mio.CheckpointError, match="symbolic link that leads back to itself"):
            save(link)
        with pytest.raises(mio.CheckpointError, match="symbolic link that leads back to itself"):
            mio.write_bytes(link, b"")
        assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["itself", "one", "two"]


@pytest.mark.parametrize("name", ["\ud800", "a.\udfff.b"])
def test_a_name_with_a_lone_surrogate_is_refused_before_any_write(name, tmp_path):
    path = tmp_path / "net"
    save(path, 1)
    with pytest.raises(ValueError, match="has a lone surrogate in it") as caught:
        mio.save(path, {"w": torch.zeros(2), name: torch.zeros(2)})
    assert repr(name) in str(caught.value)
    assert "codec" not in str(caught.value)
    assert number_in(path) == 1
    # Other programs can write such a name as a JSON escape.
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    text = json.dumps({name: entry}).encode()
    (tmp_path / "foreign.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    assert list(mio.read(tmp_path / "foreign.safetensors").module) == [name]
    with pytest.raises(ValueError, match="has a lone surrogate in it"):
        mio.merge_files("linear", [tmp_path / "foreign.safetensors"] * 2, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- reading -----------------------------------------------------------------------------------------------------------


def make_readers(tmp_path):
    from moduli import lab
    from moduli.evolve._checkpoint import SearchFile

    good = tmp_path / "good.safetensors"
    save(good)
    recipe = {"merge_method": "linear", "models": [{"model": "good.safetensors"}, {"model": "odd"}]}
    return {
        "load": lambda path: mio.load(path, nn.Linear(1, 1)),
        "read": mio.read,
        "inspect": mio.inspect,
        "TensorFile": mio.TensorFile,
        "TensorFiles": mio.TensorFiles,
        "read_bytes": mio.read_bytes,
        "read_recipe": mio.read_recipe,
        "merge_recipe": lambda path: mio.merge_recipe(path, tmp_path / "out"),
        "merge_files": lambda path: mio.merge_files("linear", [good, path], tmp_path / "out"),
        "model of a recipe": lambda path: (
            (tmp_path / "odd").symlink_to(path),
            (tmp_path / "recipe.yml").write_text(json.dumps(recipe)),
            mio.merge_recipe(tmp_path / "recipe.yml", tmp_path / "out"),
        ),
        "results of a race": lab.Results.read,
        "journal of a search": lambda path: (
            (tmp_path / "search.journal").symlink_to(path),
            SearchFile(tmp_path / "search", False, {})._read_journal(0),
        ),
    }


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("reader", [
    "load", "read", "inspect", "TensorFile", "TensorFiles", "read_bytes", "read_recipe", "merge_recipe", "merge_files",
    "model of a recipe", "results of a race", "journal of a search",
])  # fmt: skip
def test_pipes_and_devices_are_refused_without_reading_them(reader, kind, tmp_path):
    call = make_readers(tmp_path)[reader]
    path = tmp_path / "odd file" if kind == "pipe" else Path("/dev/zero")
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises((mio.CheckpointError, ValueError), match=f"is a {kind}, not a regular file"):
        call(path)
    assert not (tmp_path / "out").exists()


def test_links_of_side_files_out_of_the_model_directory_are_refused(tmp_path):
    model, secret = tmp_path / "model", tmp_path / "secret"
    model.mkdir()
    secret.write_text("secret")
    save(model / "model.safetensors")
    (model / "real.json").write_text("{}")
    (model / "config.json").symlink_to("real.json")
    mio.merge_files("linear", [model, model], tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    for target in (secret, "../secret"):
        (model / "config.json").unlink()
        (model / "config.json").symlink_to(target)
        with pytest.raises(mio.CheckpointError, match="config.json' is a symbolic link to .*secret', outside"):
            mio.merge_files("linear", [model, model], tmp_path / "again")
    assert sorted(os.listdir(tmp_path)) == ["model", "out", "secret"]


def test_links_into_the_blobs_of_a_cache_are_followed(tmp_path):
    """The Hugging Face cache links the files in models--x/snapshots/1 to models--x/blobs."""
    snapshot, blobs = tmp_path / "snapshots" / "1", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save(blobs / "aa")
    (blobs / "bb").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/aa")
    (snapshot / "config.json").symlink_to("../../blobs/bb")
    mio.merge_files("linear", [snapshot, snapshot], tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "{}"


def test_the_length_of_a_header_is_checked_before_it_is_read(tmp_path):
    path = tmp_path / "sparse"
    with open(path, "wb") as file:
        file.write((10**9).to_bytes(8, "little"))
        file.truncate(2 * 10**9)
    tracemalloc.start()
    try:
        for call in (mio.read, mio.inspect, mio.TensorFile):
            with pytest.raises(mio.DamagedFileError, match="1000000000 bytes long, and a header has 100000000 at most"):
                call(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    path.write_bytes((50).to_bytes(8, "little") + bytes(20))
    with pytest.raises(mio.DamagedFileError, match="50 bytes long, and the file has 20 more"):
        mio.read(path)


# -- texts -------------------------------------------------------------------------------------------------------------

# A list in which each entry repeats the previous one ten times: some megabytes when its aliases are expanded.
HUGE = f"[&a0 [lol], {', '.join(f'&a{n} [' + ', '.join([f'*a{n - 1}'] * 10) + ']' for n in range(1, 7))}]"
MODELS = "{model: good.safetensors}, {model: good.safetensors}"
PLACES = {
    "models": f"models: {HUGE}",
    "an entry": f"models: [{HUGE}]",
    "a path": f"models: [{{model: {HUGE}}}]",
    "merge_method": f"merge_method: {HUGE}",
    "a key": f"? {HUGE}\n: 1",
    **{key: f"{key}: {HUGE}" for key in ("dtype", "out_dtype", "base_model", "name", "tokenizer_source", "parameters")},
    **{key: f"parameters: {{{key}: {HUGE}}}" for key in ("weight", "t", "density", "seed", "lambda", "odd")},
    "a filter": f"parameters: {{t: [{{filter: {HUGE}, value: 1}}]}}",
    "a value": f"parameters: {{t: [{{filter: w, value: {HUGE}}}]}}",
    "a mapping": f"parameters: {{t: {{w: {HUGE}}}}}",
    "a key of a mapping": f"parameters: {{t: {{? {HUGE} : 1}}}}",
    "parameters of a model": f"models: [{{model: good.safetensors, parameters: {{weight: {HUGE}}}}}, {MODELS}]",
    "merged mappings": "parameters: {int8_mask: [&m0 {x: 1}, "
    + ", ".join(f"&m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 30)}]}}" for n in range(1, 9))
    + "]}",
    "a number": "parameters: {t: 0x" + "f" * 5000 + "}",
    "a long number": "parameters: {t: " + "9" * 5000 + "}",
    "no number": "parameters: {t: !!int ''}",
    "no date": "parameters: {t: 2001-99-99}",
}


@pytest.mark.parametrize("place", PLACES)
def test_recipes_that_expand_to_huge_values_are_refused_with_a_short_error(place, tmp_path):
    pytest.importorskip("yaml")
    save(tmp_path / "good.safetensors")
    usual = {"merge_method": "slerp", "models": f"[{MODELS}]"}
    text = [f"{key}: {value}" for key, value in usual.items() if not PLACES[place].startswith(f"{key}:")]
    (tmp_path / "recipe.yml").write_text("\n".join([*text, PLACES[place]]))
    with pytest.raises((mio.CheckpointError, ValueError)) as caught:
        mio.merge_recipe(tmp_path / "recipe.yml", tmp_path / "out")
    assert len(str(caught.value)) < 3000
    assert not (tmp_path / "out").exists()


def write_header(path, entries, size=0):
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))


def test_errors_abbreviate_very_long_names(tmp_path):
    path, long = tmp_path / "net", "x" * 1_000_000
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    for entries, size in (
        ({long: entry}, 8),
        ({long: {**entry, "dtype": long}}, 4),
        ({long: {**entry, "shape": [2]}}, 4),
        ({long: entry, "b": entry}, 4),
        ({long: 3}, 4),
        ({long: entry}, 4),
        ({f"{long}{n}": {**entry, "data_offsets": [4 * n, 4 * n + 4]} for n in range(9)}, 36),
    ):
        write_header(path, entries, size)
        with pytest.raises(mio.CheckpointError) as caught:
            mio.load(path, nn.Linear(1, 1))
        assert len(str(caught.value)) < 4000
