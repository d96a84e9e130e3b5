"""Round trips: values, trees, labels, ties and configurations are loaded exactly, and files are exchanged with safetensors."""

import copy
import json
import math
import struct
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import moduli as mo
import moduli.io as mio
from strategies import ALL_DTYPES, modules

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex32, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


def raw(tensor):
    """Return the dtype, shape and bits of a tensor."""
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = torch.view_as_real(data).reshape(-1) if data.is_complex() else data
    return tensor.dtype, tuple(tensor.shape), data.view(torch.uint8).tolist()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "net.safetensors"


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5,), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape_is_loaded_exactly(dtype, shape, path):
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = bits.view(dtype).reshape(shape) if bits.numel() else torch.empty(shape, dtype=dtype)
    mio.save(path, {"w": tensor, "odd": torch.tensor([1], dtype=torch.int8)}, extra=[tensor], fsync=False)
    content = mio.read(path)
    assert raw(content.module["w"]) == raw(tensor)
    assert raw(content.extra[0]) == raw(tensor)
    assert raw(mio.TensorFile(path)["w"]) == raw(tensor)
    holder = nn.Module()
    holder.register_buffer("w", torch.zeros(shape, dtype=dtype))
    holder.register_buffer("odd", torch.zeros(1, dtype=torch.int8))
    mio.load(path, holder)
    assert raw(holder.w) == raw(tensor)


def test_views_of_all_kinds_are_loaded_exactly(path):
    base = torch.arange(24.0).reshape(4, 6)
    z = torch.randn(3, 2, dtype=torch.complex64)
    tensors = {
        "t": base.t(), "step": base[::2, 1::3], "expanded": torch.ones(1).expand(5), "flipped": base.flip(0),
        "conj": z.conj(), "imag": z.conj().imag, "real": z.real, "tail": base[3:], "last": base.permute(1, 0)[None],
    }  # fmt: skip
    mio.save(path, tensors)
    assert {name: raw(value) for name, value in mio.read(path).module.items()} == {
        n: raw(v) for n, v in tensors.items()
    }


@settings(max_examples=60, deadline=None)
@given(net=modules(dtypes=ALL_DTYPES), seed=st.integers(0, 99))
def test_random_trees_of_modules_are_loaded_exactly(net, seed, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "tree.safetensors"
    expected = {name: raw(value) for name, value in net.state_dict().items()}
    other = copy.deepcopy(net)
    for tensor in other.state_dict().values():
        tensor.zero_()
    if not expected:
        return
    mio.save(path, net, fsync=False)
    mio.load(path, other)
    assert {name: raw(value) for name, value in other.state_dict().items()} == expected
    assert {name: raw(value) for name, value in mio.read(path).module.items()} == expected
    # Tensors with several names are in the file once.
    distinct = {t.data_ptr() if t.numel() else id(name) for name, t in net.state_dict().items()}
    assert len(load_file(path)) == len(distinct)


# -- trees -------------------------------------------------------------------------------------------------------------

floats = st.floats(allow_nan=True, allow_infinity=True)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**5000), 2**5000), floats, st.text(), st.binary(),
    st.complex_numbers(allow_nan=False), st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([2, 3])]),
)  # fmt: skip
keys = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(st.sampled_from(["$tensor", "$", "a"]), inner, max_size=2),
        st.dictionaries(keys, inner, max_size=2).map(OrderedDict),
        st.lists(inner, max_size=3).map(lambda items: deque(items, 3)),
        st.sets(st.integers(), max_size=3),
        st.frozensets(st.text(), max_size=3),
        st.lists(st.integers(0, 3)).map(Counter),
    ),
    max_leaves=12,
)


def canonical(value):
    """Return a form in which two values are equal only if their types, orders and bits are."""
    if isinstance(value, float):
        return type(value), struct.pack(">d", value)
    if isinstance(value, complex):
        return type(value), struct.pack(">dd", value.real, value.imag)
    if isinstance(value, torch.Tensor):
        return raw(value)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return type(value), [(canonical(key), canonical(each)) for key, each in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value), getattr(value, "maxlen", None), [canonical(each) for each in value]
    return type(value), value


@settings(max_examples=200, deadline=None)
@given(tree=trees)
def test_trees_of_plain_values_are_loaded_exactly(tree, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "plain.safetensors"
    mio.save(path, extra={"tree": tree}, fsync=False)
    assert canonical(mio.read(path).extra["tree"]) == canonical(tree)
    with safetensors.safe_open(path, "pt") as file:
        assert list(file.keys()) == []


def test_arrays_numbers_generators_and_shared_tensors_are_loaded_exactly(path):
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    shared = torch.randn(3)
    nan = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    tree = {
        "a": np.arange(6, dtype=">i4").reshape(2, 3)[:, ::-1], "z": np.zeros((), dtype=np.complex128), "f": np.float32(0.1),
        "b": np.bool_(True), "s": shared, "again": [shared], "g": generator, "nan": nan, "minus": -0.0,
    }  # fmt: skip
    mio.save(path, extra=tree)
    loaded = mio.read(path).extra
    for key in ("a", "z", "s", "nan", "minus"):
        assert canonical(loaded[key]) == canonical(tree[key])
    assert (type(loaded["f"]), loaded["f"], type(loaded["b"])) == (np.float32, np.float32(0.1), np.bool_)
    assert loaded["again"][0] is loaded["s"]
    assert torch.equal(torch.rand(9, generator=loaded["g"]), torch.rand(9, generator=generator))
    assert math.copysign(1, loaded["minus"]) == -1


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (object(), "extra/x is a builtins.object, which cannot be saved without pickle"),
        (nn.Linear(1, 1), "extra/x is a torch.nn.modules.linear.Linear, .* module= for modules"),
        (lambda: 0, "function"),
        (np.array([object()]), "array of object"),
        (mo.tensor([1.0]), "extra/x is a moduli.labels.*Tensor, which cannot be saved without pickle"),
    ],
)
def test_values_that_cannot_be_saved_exactly_are_refused_with_their_path(value, match, path):
    with pytest.raises(mio.CheckpointError, match=match):
        mio.save(path, extra={"x": value})
    cycle = []
    cycle.append(cycle)
    with pytest.raises(mio.CheckpointError, match="contains itself"):
        mio.save(path, extra=cycle)
    with pytest.raises(mio.CheckpointError, match="nothing to save"):
        mio.save(path)
    assert not path.exists()


# -- modules -----------------------------------------------------------------------------------------------------------


class Fit(mo.Module):
    def __init__(self, order="abc", fill=1.0):
        super().__init__()
        self.w = mo.Tensor(torch.arange(3.0) * fill, (mo.Space(list(order), "x"),))
        self.inner = nn.Linear(3, 3)
        self.register_buffer("running", torch.full((2,), fill))
        mo.nn.tie(self, "copy", to="w")

    @mo.virtual
    def doubled(self):
        return self.w.data * 2


def test_labels_ties_configurations_and_policies_are_loaded(path):
    net = Fit()
    net.set_param_config(operational=False, name="inner.weight")
    mo.particles.buffer_policy(net, "share", "running")
    mio.save(path, net)
    other = Fit("cab", 0.0)
    result = mio.load(path, other)
    assert result.fresh == result.dropped == ()
    assert result.verified
    assert other.w.data.tolist() == [2.0, 0.0, 1.0]
    assert other.copy.data is other.w.data
    assert (other + other).inner.weight.equal(net.inner.weight)  # not operational
    assert other.clone().running is other.running
    description = mio.inspect(path)
    assert description.virtual == ("doubled",)
    assert description.config == {"inner.weight": {"operational": False, "clone": True}}
    (w,) = [each for each in description.tensors if each.name == "tensor:w"]
    assert w.labels == [{"name": "x", "labels": ["a", "b", "c"]}]
    assert w.tied == ("tensor:copy",)
    assert "x: 'a', 'b', 'c'" in str(description)
    assert json.loads(json.dumps(description.as_dict()))["parts"]["module"].endswith("Fit")
    with pytest.raises(mio.CheckpointError, match="only the checkpoint has \\['c'\\]"):
        mio.load(path, Fit("abd"))


def test_different_values_for_tied_names_are_refused(path):
    state = dict(copy.deepcopy(Fit().state_dict()))
    state["tensor:copy"] = state["tensor:copy"] + 1
    mio.save(path, state)
    net = Fit()
    before = raw(net.w.data)
    with pytest.raises(mio.CheckpointError, match="different values"):
        mio.load(path, net)
    assert raw(net.w.data) == before


def test_extra_state_of_modules_is_loaded(path):
    class Noted(nn.Linear):
        note = None

        def get_extra_state(self):
            return self.note

        def set_extra_state(self, state):
            self.note = state

    a, b = nn.Sequential(Noted(1, 1)), nn.Sequential(Noted(1, 1))
    a[0].note = {"when": (1, 2), "t": torch.ones(2)}
    mio.save(path, a)
    mio.load(path, b)
    assert canonical(b[0].note) == canonical(a[0].note)
    assert mio.read(path).module["0._extra_state"]["when"] == (1, 2)


# -- files of other libraries -----------------------------------------------------------------------------------------


def test_saved_files_are_read_by_safetensors(path):
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(torch.bfloat16)
    optimizer = torch.optim.Adam(net.parameters())
    mio.save(path, net, optimizer=optimizer)
    other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(torch.bfloat16)
    tensors = load_file(path)
    other.load_state_dict({name: tensors[name] for name in net.state_dict()})
    assert all(map(torch.equal, net.state_dict().values(), other.state_dict().values()))
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"


@pytest.mark.parametrize("form", ["safetensors", "torch", "old torch", "nested"])
def test_files_of_safetensors_and_torch_are_loaded(form, tmp_path):
    path = tmp_path / "file"
    net, other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    nn.init.normal_(net[1].weight)
    state = net.state_dict()
    if form == "safetensors":
        save_file(state, path)
    elif form == "nested":
        torch.save({"state_dict": state, "epoch": 3}, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form == "torch")
    result = mio.load(path, other)
    assert not result.verified
    assert all(map(torch.equal, state.values(), other.state_dict().values()))
    assert mio.inspect(path).format == ("safetensors" if form == "safetensors" else "torch")
    assert set(mio.read(path).module) == set(state)
    with pytest.raises(mio.CheckpointError, match="no optimizer|optimizer"):
        mio.load(path, other, optimizer=torch.optim.SGD(other.parameters()))
    with pytest.raises(mio.CheckpointError, match="only the module has 'weight', 'bias'"):
        mio.load(path, nn.Linear(3, 2))


def test_complex_tensors_of_safetensors_and_plain_names_are_loaded(tmp_path):
    path = tmp_path / "file"
    data = torch.randn(3, dtype=torch.complex64)
    save_file({"w": data}, path)
    assert torch.equal(mio.read(path).module["w"], data)
    net = mo.Module()
    net.w = mo.Tensor(torch.zeros(3, dtype=torch.complex64), (mo.Space(3),))
    mio.load(path, net)
    assert torch.equal(net.w.data, data)
    plain = nn.ParameterDict({"w": nn.Parameter(torch.zeros(3, dtype=torch.complex64))})
    mio.save(path, net)
    mio.load(path, plain)
    assert torch.equal(plain["w"], data)


def test_floats_are_converted_to_other_floats_but_not_to_integers(path):
    mio.save(path, {"w": torch.tensor([1.5, 2.0])})

    def target(dtype):
        holder = nn.Module()
        holder.register_buffer("w", torch.zeros(2, dtype=dtype))
        return holder

    half = target(torch.float16)
    assert mio.load(path, half).converted == ("w",)
    assert half.w.tolist() == [1.5, 2.0]
    mio.load(path, target(torch.complex64))
    for dtype in (torch.int64, torch.bool):
        with pytest.raises(mio.CheckpointError, match="float32 of shape"):
            mio.load(path, target(dtype))
