"""`TensorList` compared with list, `TensorDict` compared with dict, and both as children of a module."""

import copy
import pickle

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moduli.labels import Space, Tensor
from moduli.nn import Module, TensorDict, TensorList
from nn.helpers import assert_wrappers_are_storage, labelled


def tensor(number):
    return Tensor(torch.tensor([float(number)], requires_grad=True), (Space(["only"]),))


def numbers(tensors):
    return [int(t.data.item()) for t in tensors]


class Lists(RuleBasedStateMachine):
    """The same random operations on a `TensorList` and on a list of numbers."""

    @initialize(start=st.lists(st.integers(0, 99), max_size=4), nograd=st.booleans())
    def start(self, start, nograd):
        self.tensors, self.numbers, self.nograd = TensorList(map(tensor, start), nograd=nograd), list(start), nograd

    @rule(number=st.integers(0, 99))
    def append(self, number):
        self.tensors.append(tensor(number))
        self.numbers.append(number)

    @rule(at=st.integers(-3, 5), number=st.integers(0, 99))
    def insert(self, at, number):
        self.tensors.insert(at, tensor(number))
        self.numbers.insert(at, number)

    @rule(at=st.integers(-5, 5), number=st.integers(0, 99))
    def set(self, at, number):
        self.both(lambda: self.tensors.__setitem__(at, tensor(number)), lambda: self.numbers.__setitem__(at, number))

    @rule(at=st.integers(-5, 5))
    def delete(self, at):
        self.both(lambda: self.tensors.__delitem__(at), lambda: self.numbers.__delitem__(at))

    @rule(at=st.integers(-5, 5))
    def pop(self, at):
        self.both(lambda: int(self.tensors.pop(at).data.item()), lambda: self.numbers.pop(at))

    @rule(start=st.integers(-3, 3), stop=st.integers(-3, 5), values=st.lists(st.integers(0, 99), max_size=3))
    def set_slice(self, start, stop, values):
        self.tensors[start:stop] = [tensor(number) for number in values]
        self.numbers[start:stop] = values
        assert numbers(self.tensors[start:stop]) == self.numbers[start:stop]

    @rule(values=st.lists(st.integers(0, 99), max_size=3))
    def extend(self, values):
        self.tensors += [tensor(number) for number in values]
        self.numbers += values

    @rule()
    def reverse(self):
        self.tensors.reverse()
        self.numbers.reverse()

    @rule()
    def clear(self):
        self.tensors.clear()
        self.numbers.clear()

    @rule(how=st.sampled_from([copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))]))
    def duplicate(self, how):
        self.tensors = how(self.tensors)

    @staticmethod
    def both(on_tensors, on_numbers):
        try:
            expected = on_numbers()
        except IndexError:
            with pytest.raises(IndexError):
                on_tensors()
        else:
            assert on_tensors() == expected

    @invariant()
    def same(self):
        assert len(self.tensors) == len(self.numbers)
        assert numbers(self.tensors) == self.numbers
        assert_wrappers_are_storage(self.tensors)
        kind = "buffer" if self.nograd else "tensor"
        assert list(self.tensors.state_dict()) == [f"{kind}:{at}" for at in range(len(self.numbers))]


TestLists = Lists.TestCase
TestLists.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


def test_moving_tensors_within_a_list_keeps_their_parameters():
    tensors = TensorList(map(tensor, range(3)))
    parameters = [t.data for t in tensors]
    del tensors[0]
    assert tensors[0].data is parameters[1]
    tensors.insert(0, tensor(9))
    assert tensors[1].data is parameters[1]
    assert tensors[2].data is parameters[2]


def test_appended_tensors_are_copied_and_must_be_labelled():
    source = tensor(1)
    tensors = TensorList([source])
    assert tensors[0].data is not source.data
    for wrong in (torch.ones(1), 3):
        with pytest.raises(TypeError, match="labelled"):
            tensors.append(wrong)
        with pytest.raises(TypeError, match="labelled"):
            tensors[0:1] = [wrong]
    assert numbers(tensors) == [1]


def test_adding_several_tensors_changes_nothing_if_one_is_refused():
    tensors, table = TensorList([tensor(1)]), TensorDict({"a": tensor(1)})
    with pytest.raises(TypeError, match="labelled"):
        tensors.extend([tensor(2), 3])
    with pytest.raises(TypeError, match="labelled"):
        tensors += [tensor(2), 3]
    with pytest.raises(TypeError, match="labelled"):
        table.update({"a": tensor(5), "b": 3})
    with pytest.raises(KeyError, match=r"\."):
        table.update({"a": tensor(5), "b.c": tensor(3)})
    assert numbers(tensors) == [1]
    assert numbers(table.values()) == [1]


def test_a_tensor_dict_behaves_as_a_dict():
    tensors = TensorDict({"a": tensor(1), "keys": tensor(2), "export": tensor(3)})
    assert list(tensors) == ["a", "keys", "export"]
    assert numbers(tensors.values()) == [1, 2, 3]
    assert "keys" in tensors
    assert callable(tensors.export)
    assert tensors.export("keys").item() == 2
    assert list(tensors.export_all()) == ["a", "keys", "export"]
    tensors["a"] = tensor(7)
    assert tensors["a"].item() == 7
    assert tensors.pop("a").item() == 7
    assert tensors.pop("a", None) is None
    del tensors["keys"]
    assert list(tensors) == ["export"]
    tensors.update(b=tensor(4))
    assert len(tensors) == 2
    assert tensors.get("nothing") is None
    with pytest.raises(KeyError, match="no tensor 'nothing'"):
        tensors["nothing"]
    with pytest.raises(KeyError):
        del tensors["nothing"]
    with pytest.raises(TypeError, match="text"):
        tensors[3] = tensor(1)
    with pytest.raises(KeyError, match=r"\."):
        tensors["a.b"] = tensor(1)
    with pytest.raises(TypeError, match="labelled"):
        tensors["c"] = torch.ones(1)
    assert list(tensors) == ["export", "b"]
    assert_wrappers_are_storage(tensors)
    assert "(export): Tensor(_=1)" in repr(tensors)


def test_containers_are_modules_hashable_and_equal_to_themselves_only():
    a, b = TensorDict(), TensorDict()
    assert a != b
    assert len({a, b, TensorList()}) == 3


def test_containers_train_inside_a_module():
    module = Module()
    module.layers, module.table = TensorList([labelled(2), labelled(2, seed=1)]), TensorDict({"x": labelled(2, seed=2)})
    module.fixed = TensorList([labelled(1)], nograd=True)
    assert [name for name, _ in module.named_parameters()] == ["layers.tensor:0", "layers.tensor:1", "table.tensor:x"]
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    before = module.export_all()
    (sum(t.sum() for t in module.layers) + module.table["x"].sum()).backward()
    optimizer.step()
    for name in ("layers.0", "layers.1", "table.x"):
        assert torch.allclose(module.export_all()[name].data, before[name].data - 1)
    assert list(before) == ["layers.0", "layers.1", "table.x", "fixed.0"]


def test_plain_lists_and_dicts_stay_plain():
    module = Module()
    module.plain = [labelled(2)]
    assert type(module.plain) is list
    assert not module.state_dict()


def test_containers_follow_the_device_of_their_module():
    module = Module().to_device("meta")
    module.layers = TensorList([labelled(2)])
    assert module.layers[0].data.is_meta
    module.layers.append(labelled(2))
    module.layers.insert(0, labelled(2))
    assert all(t.data.is_meta for t in module.layers)
