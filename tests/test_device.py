"""Device: equality and hash, spelling, resolution to torch devices, and the interface of objects on a device."""

import copy
import operator
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moduli.device as device_module
from moduli.device import Device, DeviceBounded

names = st.sampled_from(["cpu", "gpu", "meta", "xpu"])
devices = st.builds(Device, names, st.none() | st.integers(0, 3))
torch_devices = st.builds(
    lambda kind, index: torch.device(kind) if index is None else torch.device(kind, index),
    st.sampled_from(["cpu", "cuda", "mps", "meta", "xpu"]),
    st.none() | st.integers(0, 3),
)


@pytest.fixture
def two_cuda_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.fixture
def only_mps(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


class Place(DeviceBounded):
    """A slotted value that moves by copying."""

    __slots__ = ("data",)

    def __init__(self, data):
        self.data = data

    @property
    def device(self):
        return Device.new(self.data.device)

    def to_device(self, device):
        return Place(self.data.to(Device.new(device).torch_device()))


class Recorder(DeviceBounded):
    """An object that stores the device of the last `to_device`."""

    def __init__(self):
        self.where = Device("cpu")

    @property
    def device(self):
        return self.where

    def to_device(self, device):
        self.where = Device.new(device)
        return self


# -- laws ---------------------------------------------------------------------------------------------------------


@given(st.lists(devices | torch_devices, min_size=3, max_size=3))
def test_equality_is_symmetric_transitive_and_agrees_with_hash(things):
    a, b, c = things
    assert a == a
    assert (a == b) == (b == a)
    assert (a != b) == (not operator.eq(a, b))
    if a == b:
        assert hash(a) == hash(b)
    if a == b and b == c:
        assert a == c


@given(devices)
def test_str_and_repr_give_the_device_back(device):
    assert Device.new(str(device)) == device
    assert eval(repr(device)) == device
    assert Device.new(device) is device


@given(torch_devices)
def test_every_torch_device_is_accepted(reported):
    device = Device.new(reported)
    assert device.name in {"cpu", "gpu", "meta", "xpu"}
    assert Device.new(str(reported)) == device


@given(devices)
def test_copies_are_equal(device):
    for twin in (copy.copy(device), copy.deepcopy(device), pickle.loads(pickle.dumps(device))):
        assert twin == device
        assert hash(twin) == hash(device)
        assert repr(twin) == repr(device)


def test_a_tensor_is_on_the_device_it_reports():
    for kind in ("cpu", "meta"):
        tensor = torch.empty(2, device=kind)
        assert Device.new(kind) == tensor.device
        assert tensor.device == Device.new(kind)
        assert {tensor.device: 1}[Device.new(kind)] == 1


def test_indices_of_one_device_are_equal():
    assert Device("gpu") == Device("gpu", 0) == Device.new("cuda") == Device.new("mps")
    assert Device("cpu", 3) == Device("cpu", 0) == Device("cpu")
    assert str(Device("cpu", 3)) == "cpu"
    assert Device("gpu", 1) != Device("gpu")
    assert len({Device("gpu"), Device("gpu", 0), Device("cpu"), Device("cpu", 1), Device("meta")}) == 3


def test_a_gpu_equals_what_its_tensors_report(monkeypatch):
    monkeypatch.setattr(device_module, "_GPU_TYPE", "cuda")
    assert Device("gpu") == torch.device("cuda", 0)
    assert torch.device("cuda", 1) == Device("gpu", 1)
    monkeypatch.setattr(device_module, "_GPU_TYPE", "mps")
    assert Device("gpu") == torch.device("mps", 0)
    assert Device("gpu") != torch.device("cuda", 0)


def test_other_things_are_not_devices():
    assert Device("cpu") != "cpu"
    assert Device("cpu") != 0
    assert Device("cpu") != None  # noqa: E711


# -- construction -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["gpuX", "gpux:1", "tpu", "", "gpu:", "gpu:-1", "gpu:01", "gpu:1:2", "GPU", " cpu", "cpu\n", "gpu:١", "1"]
)
def test_unknown_spellings_are_refused_at_once(text):
    with pytest.raises(ValueError, match="device"):
        Device.new(text)


@pytest.mark.parametrize("name", ["tpu", "gpuX", "", "gpu 1"])
def test_unknown_names_are_refused_at_construction(name):
    with pytest.raises(ValueError, match="is not a device"):
        Device(name)


def test_an_index_inside_the_name_points_to_the_parser():
    with pytest.raises(ValueError, match=r"Device\.new\('gpu:1'\)"):
        Device("gpu:1")


def test_wrong_types_are_refused():
    with pytest.raises(TypeError, match="NoneType"):
        Device.new(None)
    with pytest.raises(TypeError, match="int"):
        Device.new(0)
    with pytest.raises(TypeError, match="name is text"):
        Device(torch.device("cpu"))
    for index in (True, 1.0, "1"):
        with pytest.raises(TypeError, match="integer or None"):
            Device("gpu", index)
    with pytest.raises(ValueError, match="counts from 0"):
        Device("gpu", -1)


def test_a_device_never_changes():
    device = Device("gpu", 1)
    for change in (lambda: setattr(device, "index", 0), lambda: setattr(device, "name", "cpu")):
        with pytest.raises(AttributeError):
            change()
    with pytest.raises((AttributeError, TypeError)):
        device.other = 1


# -- resolution ---------------------------------------------------------------------------------------------------


def test_cpu_and_meta_resolve_anywhere():
    assert Device("cpu").torch_device() == torch.device("cpu")
    assert Device("meta", 0).torch_device() == torch.device("meta")
    assert torch.empty(3, device=Device.new("meta").torch_device()).is_meta


def test_gpu_is_cuda_first(two_cuda_gpus):
    assert Device("gpu").torch_device() == torch.device("cuda", 0)
    assert Device("gpu", 1).torch_device() == torch.device("cuda", 1)
    with pytest.raises(RuntimeError, match="2 cuda devices; the highest index is 1"):
        Device("gpu", 2).torch_device()


def test_gpu_is_mps_where_there_is_no_cuda(only_mps):
    assert Device("gpu").torch_device() == torch.device("mps", 0)
    with pytest.raises(RuntimeError, match="1 mps device; the highest index is 0"):
        Device("gpu", 1).torch_device()


def test_a_missing_gpu_is_an_error_with_a_remedy(no_gpu):
    with pytest.raises(RuntimeError, match=r"gpu:1 was asked for, but .* neither CUDA nor MPS .* use Device"):
        Device("gpu", 1).torch_device()


# -- DeviceBounded ------------------------------------------------------------------------------------------------


def test_the_interface_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        DeviceBounded()


def test_the_interface_works_with_slots_and_modules():
    assert not hasattr(Place(torch.zeros(1)), "__dict__")

    class Net(DeviceBounded, torch.nn.Module):
        device = property(lambda self: Device.new(self.w.device))

        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(2))

        def to_device(self, device):
            return self.to(Device.new(device).torch_device())

    net = Net()
    assert net.to_device("meta") is net
    assert net.device == Device("meta")
    assert isinstance(net, DeviceBounded)


def test_cpu_moves_through_to_device():
    here = Place(torch.arange(3.0)).cpu()
    assert here.device == Device("cpu")
    assert here.data.tolist() == [0.0, 1.0, 2.0]


def test_gpu_takes_the_current_one_when_no_index_is_given(two_cuda_gpus):
    assert Recorder().gpu().device == Device("gpu", 1)
    assert Recorder().gpu(0).device == Device("gpu", 0)


def test_gpu_on_mps_is_the_only_one(only_mps):
    assert Recorder().gpu().device == Device("gpu")


def test_gpu_without_one_is_an_error(no_gpu):
    with pytest.raises(RuntimeError, match="neither CUDA nor MPS"):
        Place(torch.zeros(1)).gpu()
