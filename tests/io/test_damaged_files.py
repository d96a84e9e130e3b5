"""Damaged and malicious files: refused with a reason, and nothing is changed."""

import json
import os
import pickle
import random
import resource
import struct
import traceback
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import moduli as mo
import moduli.io as mio
from moduli.io._basics import _unique
from moduli.io._safetensors import _PLACE


class Fit(mo.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.w = mo.Tensor(
            torch.randn(3, 2, requires_grad=True), (mo.Space(list("abc"), "in"), mo.Space(range(2), "out"))
        )
        self.head = nn.Linear(2, 2)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("phase", torch.tensor([1 + 2j]))
        mo.nn.tie(self, "again", to="w")


def make_run(seed=0):
    module = Fit(seed)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return module, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])


def read_values(module, optimizer, scheduler):
    inner = [each for state in optimizer.state_dict()["state"].values() for each in state.values()]
    tensors = [*module.state_dict().values(), *inner, torch.get_rng_state()]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return [tensor.clone() for tensor in tensors], repr([groups, scheduler.state_dict()])


def are_equal(left, right):
    return left[1] == right[1] and all(map(torch.equal, left[0], right[0]))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "good.safetensors"
    module, optimizer, scheduler = make_run()
    torch.manual_seed(5)
    extra = {"epoch": 3, "best": float("inf"), "seen": {1, 2}, 5: (None, np.arange(3)), "g": torch.Generator()}
    mio.save(path, module, optimizer=optimizer, scheduler=scheduler, extra=extra)
    return path.read_bytes(), read_values(module, optimizer, scheduler)


@pytest.fixture
def no_pickle(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("something was unpickled")

    for name in ("Unpickler", "_Unpickler", "load", "loads", "_load", "_loads"):
        monkeypatch.setattr(pickle, name, refuse)


def split(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join_file(header, body):
    """Return a file with the given header and its correct checksum."""
    text = (header if isinstance(header, str) else json.dumps(header, separators=(",", ":"))).encode()
    head = bytearray(len(text).to_bytes(8, "little") + text)
    at = _PLACE
    if head[:at].endswith(b'"moduli.header":"'):
        head[at : at + 8] = b"0" * 8
        head[at : at + 8] = f"{zlib.crc32(head):08x}".encode()
    return bytes(head) + body


class Target:
    """Objects to load files into, which must not change when a file is refused."""

    def __init__(self, path, expected):
        self.path, self.expected = path, expected
        self.objects = make_run(1)
        self.before = read_values(*self.objects)

    def attempt(self, data, faithful):
        # A new file each time, because overwriting is slow on some disks.
        self.path.unlink(missing_ok=True)
        self.path.write_bytes(data)
        module, optimizer, scheduler = self.objects
        try:
            mio.load(self.path, module, optimizer=optimizer, scheduler=scheduler)
        except mio.CheckpointError:
            assert are_equal(read_values(*self.objects), self.before)
            return False
        if faithful:
            assert are_equal(read_values(*self.objects), self.expected)
        self.objects = make_run(1)
        self.before = read_values(*self.objects)
        return True


def test_an_undamaged_file_is_loaded_without_pickle(good, tmp_path, no_pickle):
    target = Target(tmp_path / "file.safetensors", good[1])
    assert target.attempt(good[0], faithful=True)
    mio.read(target.path)
    mio.inspect(target.path, verify=True)


def mutate(data, rng):
    data = bytearray(data)
    kind = rng.randrange(7)
    if kind == 0:
        return bytes(data[: rng.randrange(len(data))])
    if kind == 1:
        return bytes(data) + rng.randbytes(rng.randrange(1, 9))
    if kind == 2:
        at = rng.randrange(len(data))
        del data[at : at + rng.randrange(1, 9)]
    elif kind == 3:
        at = rng.randrange(len(data))
        data[at:at] = rng.randbytes(rng.randrange(1, 9))
    elif kind == 4:
        a, b = (rng.randrange(len(data)) for _ in range(2))
        data[a : a + 16], data[b : b + 16] = data[b : b + 16], data[a : a + 16]
    else:
        for _ in range(rng.choice([1, 1, 1, 4, 40])):
            at = rng.randrange(len(data) if kind == 5 else min(len(data), 1500))
            data[at] ^= 1 << rng.randrange(8)
    return bytes(data)


def test_mutated_files_are_refused_or_load_unchanged_values(good, tmp_path, no_pickle):
    target, rng = Target(tmp_path / "file.safetensors", good[1]), random.Random(0)
    loaded = sum(target.attempt(mutate(good[0], rng), faithful=True) for _ in range(2000))
    assert loaded < 40


def list_paths(node, path=()):
    yield path
    if isinstance(node, dict):
        for key in node:
            yield from list_paths(node[key], (*path, key))
    elif isinstance(node, list):
        for at, each in enumerate(node):
            yield from list_paths(each, (*path, at))


HARMFUL = [
    0, -1, 1, 2**31, 2**63 - 1, 2**63, 2**200, 1.5, 1e308, True, None, "", "x", "..", "../../etc/passwd", "\x00", "float32",
    [], [0], [1, 2, 3], [[]], {}, {"$tensor": "x"}, {"$tensor": 3}, {"$dict": [[[], 1]]}, {"$dict": 3}, {"$int": "zz"},
    {"$generator": ["cpu", "head.bias"]}, {"$array": ["<f4", "head.bias"]}, {"$array": ["O", "head.bias"]},
    {"$scalar": ["<f8", "00"]}, {"$dtype": "Tensor"}, {"$device": "cuda:99"}, {"$size": [-1]}, {"$size": ["a"]},
    {"$float": "00"}, {"$bytes": "zz"}, {"$set": [[]]}, {"$set": 1}, {"$deque": [-1, []]}, {"$deque": [0, [1]]}, {"$complex": [1]},
    {"$object": 3}, {"$object": ["os.system", {"a": 1}]}, {"$unknown": 1}, {"$int": "1", "$float": "1"}, {"$counter": [["a", "b"]]},
    {"labels": 3}, {"range": [0, 1, 0]}, "F64", "BOOL", "I8", "complex128",
]  # fmt: skip


def test_forged_headers_are_refused_or_harmless(good, tmp_path, no_pickle):
    """Headers have harmful values anywhere and correct checksums, so only their content can be refused."""
    target, rng = Target(tmp_path / "file.safetensors", good[1]), random.Random(1)
    header, body = split(good[0])
    content = json.loads(header["__metadata__"]["moduli"])
    outer, inner = [p for p in list_paths(header) if p], [p for p in list_paths(content) if p]
    for _ in range(1500):
        forged, forged_content = json.loads(json.dumps(header)), json.loads(json.dumps(content))
        for _ in range(rng.choice([1, 1, 2])):
            tree, path = (forged, rng.choice(outer)) if rng.random() < 0.3 else (forged_content, rng.choice(inner))
            try:
                for key in path[:-1]:
                    tree = tree[key]
                if rng.random() < 0.2:
                    del tree[path[-1]]
                elif rng.random() < 0.2 and isinstance(tree, dict):
                    tree[rng.choice(["..", "$tensor", "", "head.bias", "new"])] = tree.pop(path[-1])
                else:
                    tree[path[-1]] = rng.choice(HARMFUL)
            except (KeyError, IndexError, TypeError):
                continue
        if isinstance(forged.get("__metadata__"), dict) and isinstance(forged["__metadata__"].get("moduli"), str):
            forged["__metadata__"]["moduli"] = json.dumps(forged_content)
        target.attempt(join_file(forged, body), faithful=False)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_bytes_are_refused_with_the_path_in_the_error(data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    text = data.draw(st.binary(max_size=64) | st.text(max_size=64).map(str.encode), label="header")
    length = data.draw(st.sampled_from([len(text)]) | st.integers(0, 2**64 - 1), label="length")
    path.write_bytes(length.to_bytes(8, "little") + text + data.draw(st.binary(max_size=16), label="data"))
    for call in (mio.read, mio.inspect, mio.TensorFile):
        try:
            call(path)
        except mio.CheckpointError as error:
            if str(path) not in str(error):
                raise AssertionError("the error does not name the file") from error


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


MALICIOUS = {
    "huge header": (2**60, "{}", b"", "would be"),
    "huge shape": (None, {"w": entry(shape=[2**31, 2**31, 2**31], offsets=[0, 8])}, b"0" * 8, "larger than any memory"),
    "huge empty shape": (None, {"w": entry(shape=[2**62, 2**62, 0], offsets=[0, 0])}, b"", "larger than any memory"),
    "huge number": (
        None,
        '{"w":{"dtype":"F32","shape":[' + "9" * 5000 + '],"data_offsets":[0,8]}}',
        b"0" * 8,
        "not JSON",
    ),
    "out of range": (None, {"w": entry(offsets=[0, 8])}, b"0" * 4, "4 for them"),
    "trailing bytes": (None, {"w": entry()}, b"0" * 9, "9 for them"),
    "overlap": (None, {"a": entry(), "b": entry(offsets=[4, 12])}, b"0" * 12, "overlap"),
    "gap": (None, {"a": entry(), "b": entry(offsets=[9, 17])}, b"0" * 17, "leave a gap"),
    "backwards": (None, {"w": entry(offsets=[8, 0])}, b"0" * 8, "needs 8 bytes"),
    "negative": (None, {"w": entry(shape=[-2])}, b"0" * 8, "natural numbers"),
    "truth for number": (None, {"w": entry(shape=[True, 2])}, b"0" * 8, "natural numbers"),
    "wrong dtype": (None, {"w": entry(dtype="F33")}, b"0" * 8, "'F33', which is unknown"),
    "other dtype": (None, {"w": entry(dtype="F64")}, b"0" * 8, "needs 16 bytes"),
    "many dimensions": (None, {"w": entry(shape=[1] * 100 + [2])}, b"0" * 8, "at most 64"),
    "twice": (None, '{"w":%s,"w":%s}' % ((json.dumps(entry()),) * 2), b"0" * 8, "'w' is there twice"),
    "not UTF-8": (None, b'{"\xff":{}}', b"", "not UTF-8"),
    "deep": (None, "[" * 100_000, b"", "nested too deeply|not JSON"),
    "deep object": (None, '{"a":' * 50_000 + "1" + "}" * 50_000, b"", "nested too deeply|not JSON"),
    "a list": (None, "[]", b"", "not a JSON object"),
    "NaN": (None, '{"w": NaN}', b"", "NaN is no JSON number"),
    "metadata": (None, {"__metadata__": {"a": 1}}, b"", "strings to strings"),
    "truth values": (None, {"w": entry("BOOL", [2], [0, 2])}, b"\x01\x02", "neither true nor false"),
    "unsealed": (None, {"__metadata__": {"moduli": '{"format":1}'}}, b"", "lost its checksum"),
}


@pytest.mark.parametrize("kind", MALICIOUS)
def test_malicious_files_are_refused_with_the_reason(kind, tmp_path):
    length, header, body, match = MALICIOUS[kind]
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    path = tmp_path / "file.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    module = nn.ParameterDict({"w": nn.Parameter(torch.zeros(2))})
    with pytest.raises(mio.CheckpointError):
        mio.load(path, module)
    with pytest.raises(mio.DamagedFileError, match=match):
        mio.read(path)
    assert module["w"].tolist() == [0.0, 0.0]


def test_names_of_tensors_are_never_used_as_paths(tmp_path):
    path = tmp_path / "deep" / "file.safetensors"
    path.parent.mkdir()
    tensors = {"../evil": torch.ones(2), "/etc/evil": torch.ones(2), "a\x00b": torch.ones(1)}
    save_file(tensors, path)
    assert set(mio.read(path).module) == set(tensors)
    mio.inspect(path)
    assert os.listdir(tmp_path) == ["deep"]
    assert os.listdir(path.parent) == ["file.safetensors"]


def test_a_newer_format_is_not_reported_as_damage(good, tmp_path):
    header, body = split(good[0])
    content = json.loads(header["__metadata__"]["moduli"])
    header["__metadata__"]["moduli"] = json.dumps({**content, "format": 99})
    path = tmp_path / "file.safetensors"
    path.write_bytes(join_file(header, body))
    with pytest.raises(mio.CheckpointError, match="format 99.*upgrade") as caught:
        mio.read(path)
    assert not isinstance(caught.value, mio.DamagedFileError)


def test_flipped_bytes_of_the_data_are_found(good, tmp_path):
    data, path = good[0], tmp_path / "file.safetensors"
    start = 8 + int.from_bytes(data[:8], "little")
    for at in range(start, len(data), 97):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with pytest.raises(mio.DamagedFileError, match="do not have the checksum"):
            mio.read(path)
    mio.read(path, checksums=False)


def test_refusing_a_file_allocates_no_claimed_size(tmp_path):
    """Sizes in a header are checked before allocation: with 200 MB of memory, every malicious file is refused."""
    for at, (length, header, body, _) in enumerate(MALICIOUS.values()):
        text = (
            header
            if isinstance(header, bytes)
            else (header if isinstance(header, str) else json.dumps(header)).encode()
        )
        (tmp_path / f"{at}").write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    big = tmp_path / "big"
    mio.save(big, {"w": torch.zeros(4_000_000)}, fsync=False)
    big.write_bytes(big.read_bytes()[:-1])
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 200_000_000, used + 200_000_000))
            for file in sorted(tmp_path.iterdir()):
                try:
                    mio.read(file)
                except mio.DamagedFileError:
                    continue
                raise AssertionError(file)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            assert grown < 64_000_000, grown
            code = 0
        except BaseException:  # noqa: BLE001 - a child must not continue as pytest
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


class RunsCommand:
    def __reduce__(self):
        return os.system, ("echo evil",)


def test_torch_files_with_code_in_them_are_refused(tmp_path):
    path = tmp_path / "evil.pt"
    for payload in (RunsCommand(), {"w": RunsCommand()}):
        torch.save(payload, path)
        with pytest.raises(mio.DamagedFileError, match="weights_only"):
            mio.load(path, nn.Linear(1, 1))
    torch.save({"w": 3}, path)
    with pytest.raises(mio.DamagedFileError, match="no state dict: 'w' is a int"):
        mio.read(path)
    torch.save([torch.zeros(1)], path)
    with pytest.raises(mio.DamagedFileError, match="holds a list"):
        mio.read(path)


def test_damaged_torch_files_are_refused(tmp_path):
    path, rng = tmp_path / "net.pt", random.Random(2)
    for old in (False, True):
        torch.save(nn.Linear(2, 2).state_dict(), path, _use_new_zipfile_serialization=not old)
        data = path.read_bytes()
        for _ in range(60):
            module = nn.Linear(2, 2)
            before = module.weight.detach().clone()
            path.write_bytes(mutate(data, rng))
            try:
                mio.load(path, module)
            except mio.CheckpointError:
                assert torch.equal(module.weight, before)


# -- crafted files -----------------------------------------------------------------------------------------------------


def write_crafted(path, change, module=None, **parts):
    """Write a checkpoint whose JSON is changed by `change` and whose checksums are correct.

    Args:
        path: The file.
        change: Called with the content of the header, to change it in place.
        module: The module to save.
        parts: More parts of the checkpoint.
    """
    mio.save(path, {"w": torch.zeros(2)} if module is None else module, fsync=False, **parts)
    header, body = split(path.read_bytes())
    content = json.loads(header["__metadata__"]["moduli"])
    change(content)
    header["__metadata__"]["moduli"] = json.dumps(content)
    path.write_bytes(join_file(header, body))


@pytest.mark.parametrize("kind", ["$array", "$generator"])
def test_aliases_of_one_array_do_not_multiply_memory(kind, tmp_path):
    path = tmp_path / "file.safetensors"
    node = {"$array": [">f4", "w"]} if kind == "$array" else {"$generator": ["cpu", "w"]}

    def repeat(content):
        content["extra"] = [node] * 20_000

    write_crafted(path, repeat, {"w": torch.zeros(150_000)})
    for call in (mio.read, mio.inspect, mio.TensorFile, lambda file: mio.load(file, nn.Linear(1, 1))):
        with pytest.raises(mio.DamagedFileError, match="two arrays in it are made of the tensor 'w'"):
            call(path)


def test_finding_a_duplicate_name_is_not_quadratic(tmp_path):
    path = tmp_path / "file.safetensors"
    text = "{" + ",".join(f'"{at % 9_989}":{json.dumps(entry(shape=[0], offsets=[0, 0]))}' for at in range(9_990)) + "}"
    comparisons = []

    class Name(str):
        def __eq__(self, other):
            comparisons.append(1)
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    with pytest.raises(ValueError, match="'0' is there twice"):
        _unique([(Name(at % 9_989), at) for at in range(9_990)])
    assert len(comparisons) < 100
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode())
    with pytest.raises(mio.DamagedFileError, match="'0' is there twice"):
        mio.read(path)


def test_contents_are_printed_without_control_characters_or_refused(tmp_path):
    """Huge numbers, huge ranges, and control sequences of a terminal."""
    path = tmp_path / "file.safetensors"
    huge, escape = {"$int": hex(10**5000)}, "\x1b]0;owned\x07\x1b[2J\u202e"

    def with_metadata(entry_of_root):
        def change(content):
            content["module"]["metadata"] = {"": entry_of_root}

        return change

    for change in (
        with_metadata({"param_config": {"w": {"lr": huge}}}),
        with_metadata({"labels": {"w": [{"name": "x", "labels": [huge, 1]}]}}),
        with_metadata({"labels": {"w": [{"name": "x", "range": [huge, {"$int": hex(10**5000 + 2)}, 1]}]}}),
        with_metadata({"labels": {"w": [{"name": "x", "range": [0, 2**62, 2**61]}]}}),
        lambda content: content.update(made={"moduli": [[1] * 1000], escape: escape}),
        lambda content: content["module"].update(
            {"class": escape, "virtual": [escape], "history": [[1, escape, [], []]]}
        ),
        lambda content: content.update(extra={escape: 1}, optimizer={"class": escape, "state": {}}),
    ):
        write_crafted(path, change)
        try:
            page = str(mio.inspect(path))
        except mio.DamagedFileError:
            continue
        assert all(letter.isprintable() or letter == "\n" for letter in page), page
        assert len(page) < 5000
    mio.save(path, {escape: torch.zeros(2), "\u202eweight": torch.zeros(2)}, fsync=False)
    assert r"\x1b]0;owned\x07" in str(mio.inspect(path))
    assert all(letter.isprintable() or letter == "\n" for letter in str(mio.inspect(path)))


def test_forged_headers_are_inspected_and_merged_or_refused(good, tmp_path):
    path, out, rng = tmp_path / "file.safetensors", tmp_path / "out", random.Random(2)
    header, body = split(good[0])
    content = json.loads(header["__metadata__"]["moduli"])
    inner = [p for p in list_paths(content) if p]
    for _ in range(250):
        forged_content = json.loads(json.dumps(content))
        tree, places = forged_content, rng.choice(inner)
        for key in places[:-1]:
            tree = tree[key]
        tree[places[-1]] = rng.choice(HARMFUL)
        forged = json.loads(json.dumps(header))
        forged["__metadata__"]["moduli"] = json.dumps(forged_content)
        path.write_bytes(join_file(forged, body))
        for call in (
            lambda: json.dumps(mio.inspect(path, verify=True).as_dict()),
            lambda: str(mio.inspect(path)),
            lambda: mio.merge_files("linear", [path, path], out, fsync=False),
        ):
            try:
                call()
            except (mio.CheckpointError, mo.merge.MergeError):
                continue


def test_extra_state_is_verified_before_it_is_copied_into_a_merge(tmp_path):
    class WithExtraState(nn.Linear):
        def get_extra_state(self):
            return {"seen": torch.arange(40.0)}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    a, b, out = (tmp_path / name for name in "abc")
    for path in (a, b):
        mio.save(path, WithExtraState(2, 2))
    mio.merge_files("linear", [a, b], out)
    assert mio.read(out).module["_extra_state"]["seen"].tolist() == list(range(40))
    out.unlink()
    data = bytearray(a.read_bytes())
    at = bytes(data).index(torch.arange(40.0).numpy().tobytes())
    data[at + 5] ^= 1
    a.write_bytes(data)
    with pytest.raises(mio.DamagedFileError, match="_extra_state"):
        mio.merge_files("linear", [a, b], out)
    with pytest.raises(mio.DamagedFileError, match="_extra_state"):
        mio.TensorFile(a).verify()
    assert not out.exists()

    def refer_to_a_missing_tensor(content):
        content["module"]["extra_state"]["_extra_state"] = {"$tensor": "nowhere"}

    write_crafted(a, refer_to_a_missing_tensor, WithExtraState(2, 2))
    with pytest.raises(mio.DamagedFileError, match="'nowhere' that is not in it"):
        mio.merge_files("linear", [a, b], out)


def test_array_settings_of_groups_are_compared(tmp_path):
    """Groups are merged only if their settings are equal; arrays need a comparison without a truth value."""
    path, net = tmp_path / "file.safetensors", nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for other, fine in ((np.arange(3), True), (np.arange(1, 4), False), (np.arange(4), False), (0, False)):
        groups = [
            {"params": net[0].parameters(), "mask": np.arange(3)},
            {"params": net[1].parameters(), "mask": other},
        ]
        mio.save(path, net, optimizer=torch.optim.SGD(groups, lr=0.1), fsync=False)
        joint = torch.optim.SGD(net.parameters(), lr=0.1)
        if fine:
            mio.load(path, net, optimizer=joint)
            assert joint.param_groups[0]["mask"].tolist() == [0, 1, 2]
        else:
            with pytest.raises(mio.CheckpointError, match="different settings"):
                mio.load(path, net, optimizer=joint)


def test_inspect_verifies_the_values_it_prints(tmp_path):
    path = tmp_path / "net.safetensors"
    mio.save(path, {"large": torch.zeros(1000), "small": torch.tensor([1.0, 2.0])})
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(mio.DamagedFileError, match="'small'"):
        mio.inspect(path)


def test_a_history_of_very_many_edits_is_abbreviated(tmp_path):
    path, count = tmp_path / "net", 20_000

    def write_history(content):
        content["module"]["history"] = [[n, f"edit {n} of {'x' * 100}", [f"w{n}"], []] for n in range(1, count + 1)]

    write_crafted(path, write_history, nn.Linear(2, 2))
    page = str(mio.inspect(path))
    assert len(page) < 20_000
    assert f"edit {count} of" in page
    assert "after 19936 edits that are not shown" in page
    with pytest.raises(mio.CheckpointError, match="and 19994 more") as caught:
        mio.load(path, nn.Linear(2, 3))
    assert len(str(caught.value)) < 4000
    assert mio.inspect(path).version == count
