"""What whole-model arithmetic promises: labels, buffers, relatives, names, attributes, threads, copies, compilers."""

import copy
import pickle
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import moduli as mo
from moduli import particles as P
from moduli.compat.nytorch import Particle, ParticleModule, Product
from moduli.particles import NytoModule, StructureError, adopt
from moduli.particles._record import ParticleRecord
from moduli.particles._species import version_of


class Labelled(mo.Module):
    def __init__(self, values, **axes):
        super().__init__()
        self.w = mo.tensor(values, **axes).attach()


def net():
    return adopt(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


class Net(NytoModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.body(x))


# -- labels ------------------------------------------------------------------------------------------------------------


def test_labels_are_paired_as_the_tensors_pair_them():
    a, b = Labelled([1.0, 2.0], ch=["r", "g"]), Labelled([10.0, 20.0], ch=["g", "r"])
    for made, expected in (
        (a + b, a.w + b.w),
        (b + a, b.w + a.w),
        (a - b, a.w - b.w),
        (a * b, a.w * b.w),
        (a + 0.5 * (b - a), a.w + 0.5 * (b.w - a.w)),
        (P.lerp(a, b, 0.25), a.w + 0.25 * (b.w - a.w)),
        (P.only(a, "w") + b, a.w + b.w),
        (P.map(torch.add, a, b), a.w + b.w),
        (P.where(False, a, b), 0 * a.w + b.w),
    ):
        assert made.w.dims == expected.dims
        assert torch.equal(made.w.data, expected.data)
    assert P.dot(a, b).item() == 1 * 20 + 2 * 10
    assert P.distance(a, b).item() == pytest.approx((19**2 + 8**2) ** 0.5)
    with P.differentiable():
        assert torch.equal((a + b).w.data, (a.w + b.w).data)
    c = copy.deepcopy(a)
    c += b
    assert c.w.sel(ch="r").item() == 21
    P.lerp_(c, b, 1.0)
    assert c.w.sel(ch="r").item() == 20
    P.axpy_(c, 1.0, b)
    assert c.w.sel(ch="g").item() == 20
    assert (a + (b + 0)).w.sel(ch="r").item() == 21  # a result that was not looked into


def test_axes_may_be_in_another_order_and_of_another_size():
    a = Labelled(torch.arange(6.0).reshape(2, 3), y=["a", "b"], x=["p", "q", "r"])
    b = Labelled(torch.arange(6.0).reshape(3, 2) * 10, x=["r", "q", "p"], y=["b", "a"])
    assert torch.equal((a + b).w.data, (a.w + b.w).data)
    a -= b
    assert a.w.sel(y="b", x="p").item() == 3 - 40


@pytest.mark.parametrize("other", [{"ch": ["r", "b"]}, {"channel": ["r", "g"]}])
def test_other_labels_are_refused_by_name(other):
    a, b = Labelled([1.0, 2.0], ch=["r", "g"]), Labelled([1.0, 2.0], **other)
    before = a.w.data.clone()
    for act in (lambda: a + b, lambda: a.__iadd__(b), lambda: P.lerp(a, b, 0.5), lambda: P.dot(a, b)):
        with pytest.raises(StructureError, match=r"'tensor:w' is labelled differently"):
            act()
    assert torch.equal(a.w.data, before)


def test_populations_and_merge_pair_labels():
    a, b = Labelled([1.0, 2.0], ch=["r", "g"]), Labelled([10.0, 20.0], ch=["g", "r"])
    pop = mo.Population.from_modules([a, a])
    assert torch.equal((pop + b)[0].w.data, (a.w + b.w).data)
    assert torch.equal(mo.merge.lerp(a, b, 0.5).w.data, (0.5 * a.w + 0.5 * b.w).data)
    assert torch.equal(mo.merge.linear([a, b]).w.data, (0.5 * a.w + 0.5 * b.w).data)
    state = mo.merge.linear([a.state_dict(), b.state_dict()])
    assert torch.equal(state["tensor:w"], (0.5 * a.w + 0.5 * b.w).data)


def test_labels_of_edited_relatives_stay_alike():
    a = Labelled([1.0, 2.0], ch=["r", "g"])
    twin = a.clone()
    a.w = mo.tensor([5.0, 6.0], ch=["g", "r"]).attach()
    assert twin.touch().w.dims == a.w.dims
    assert (twin.product() + a.product()).module().w.sel(ch="r").item() == 12


# -- buffers -----------------------------------------------------------------------------------------------------------


def normed(mean, policy=True):
    made = adopt(nn.BatchNorm1d(2))
    made.running_mean.fill_(mean)
    return P.buffer_policy(made, "operate", "running_*") if policy else made


def test_buffers_that_operate_take_part_like_parameters():
    a = normed(2.0)
    b = a.clone()
    b.running_mean.fill_(4.0)
    clone = a.clone()
    assert clone.running_mean is not a.running_mean
    assert torch.equal(clone.running_mean, a.running_mean)
    for made, mean in (
        (a + b, 6.0),
        (2 * a, 4.0),
        (1 - a, -1.0),
        (P.lerp(a, b, 0.5), 3.0),
        ((a.product() + b.product()).module(), 6.0),
        ((0.5 * a.product()).module(), 1.0),
        (a.product().lerp(b.product(), 0.5).module(), 3.0),
        (P.sqrt(b), 2.0),
        (P.zeros_like(a), 0.0),
    ):
        assert made.running_mean.tolist() == [mean, mean]
        assert made.num_batches_tracked.item() == 0  # integers are never averaged
        assert made.num_batches_tracked is not a.num_batches_tracked
    a += b
    assert a.running_mean.tolist() == [6, 6]
    P.lerp_(a, b, 0.5)
    assert a.running_mean.tolist() == [5, 5]
    P.axpy_(a, 2.0, b)
    assert a.running_mean.tolist() == [13, 13]
    a *= 2
    assert a.running_mean.tolist() == [26, 26]
    a.product_(0 * a.product())
    assert a.running_mean.tolist() == [0, 0]
    a.product().lerp_(clone.product(), 1.0)
    assert a.running_mean.tolist() == [2, 2]
    assert b.running_mean.tolist() == [4, 4]


def test_buffers_that_only_one_side_operates_on_are_an_error():
    a, b = normed(2.0), normed(4.0, policy=False)
    for act in (
        lambda: a + b,
        lambda: b + a,
        lambda: a.__iadd__(b),
        lambda: P.lerp(a, b, 0.5),
        lambda: P.lerp_(a, b, 0.5),
    ):
        with pytest.raises(StructureError, match=r"the buffer 'running_mean' has the policy"):
            act()
    assert a.running_mean.tolist() == [2, 2]
    related = a.clone()
    P.buffer_policy(related, "copy", "*")
    with pytest.raises(StructureError, match="has the policy"):
        a.product() + related.product()


def test_only_scopes_buffers():
    a, b = normed(2.0), normed(4.0)
    assert (P.only(a, "weight") * 2).running_mean.tolist() == [2, 2]
    assert (P.only(a, "weight") + b).running_mean.tolist() == [2, 2]
    made = P.only(a, "running_mean") * 3
    assert made.running_mean.tolist() == [6, 6]
    assert torch.equal(made.weight, a.weight)
    assert torch.equal(made.running_var, a.running_var)


def test_the_buffers_of_an_expression_are_those_of_its_left_most_operand():
    a, b = normed(2.0, policy=False), normed(4.0, policy=False)
    assert (a + b).running_mean.tolist() == [2, 2]
    assert (b + a).running_mean.tolist() == [4, 4]
    assert (1 - 2 * b).running_mean.tolist() == [4, 4]
    assert (0.5 * b + a).running_mean.tolist() == [4, 4]


# -- relatives ---------------------------------------------------------------------------------------------------------

RELATIVES = {
    "clone": lambda n: n.clone(),
    "clone_from": lambda n: n.clone_from(Net()),
    "a result": lambda n: 2 * n,
    "a product": lambda n: n.product().module(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda n: pickle.loads(pickle.dumps(n)),
    "a copy of a copy": lambda n: copy.deepcopy(n.clone()),
}
OPERATIONS = {
    "b + b": lambda n, b: b + b,
    "2 * b": lambda n, b: 2 * b,
    "b + n": lambda n, b: b + n,
    "n + b": lambda n, b: n + b,
    "lerp": lambda n, b: P.lerp(b, n, 0.5),
    "touch": lambda n, b: b.touch(),
    "in place": lambda n, b: b.__iadd__(n),
    "product": lambda n, b: b.touch().product().module(),
}


@pytest.mark.parametrize("act", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("relate", RELATIVES.values(), ids=RELATIVES)
def test_relatives_follow_at_once(relate, act):
    n = Net()
    n + n  # the species begins
    b = relate(n)
    n.head = nn.Linear(2, 7)
    made = act(n, b)
    assert made.head.weight.shape == (7, 2)
    assert b.touch().head.weight.shape == (7, 2)
    assert b._version_kernel is n._version_kernel
    assert b.head.weight is not n.head.weight


CONTAINERS = {
    "append": lambda n: n.body.append(nn.Linear(2, 2)),
    "insert": lambda n: n.body.insert(0, nn.Linear(2, 2)),
    "pop": lambda n: n.body.pop(0),
    "replace": lambda n: n.body.__setitem__(0, nn.Linear(2, 2, bias=False)),
    "set_submodule": lambda n: n.set_submodule("body.1", nn.Tanh()),
    "a parameter below": lambda n: n.body[0].register_parameter("more", nn.Parameter(torch.ones(3))),
    "a buffer below": lambda n: n.body[0].register_buffer("mask", torch.ones(3)),
    "late tying": lambda n: setattr(n.body[0], "bias", n.head.bias),
    "a bias less": lambda n: setattr(n.body[0], "bias", None),
    "pruning": lambda n: prune.l1_unstructured(n.body[0], "weight", 0.5),
}


@pytest.mark.parametrize("edit", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize("relate", ["clone", "clone_from", "a result", "deepcopy"])
def test_touch_sees_edits_inside_plain_children_of_relatives(relate, edit):
    n = Net()
    n.clone()
    child = RELATIVES[relate](n)
    if relate == "a result":
        child.head  # built
    edit(n)
    child.touch()
    assert list(child.state_dict()) == list(n.state_dict())
    assert [type(m) for m in child.modules()] == [type(m) for m in n.modules()]
    assert child._version_kernel is n._version_kernel
    child(torch.ones(1, 2)).sum().backward()
    assert child.head.weight.grad is not None
    assert n.head.weight.grad is None
    assert {id(p) for p in child.parameters()}.isdisjoint(id(p) for p in n.parameters())
    n + child


def test_lists_and_dicts_of_parameters_follow_whole():
    a = NytoModule()
    a.p, a.d = nn.ParameterList([torch.ones(2)]), nn.ParameterDict({"x": torch.ones(1)})
    b = a.clone()
    a.p.append(torch.full((3,), 2.0))
    a.d["y"] = torch.zeros(2)
    a.touch()
    b.touch()
    assert len(b.p) == 2
    assert b.p[1].tolist() == [2, 2, 2]
    assert list(b.d) == ["x", "y"]
    assert [tuple(q.shape) for q in b.p] == [(2,), (3,)]
    del a.d["x"]
    assert list(b.touch().d) == ["y"]
    assert b.d._keys is not a.d._keys


def test_a_relative_on_another_device_stays_there():
    n = Net()
    b = n.clone().to("meta")
    n.head = nn.Linear(2, 7)
    n.head.register_buffer("scale", torch.ones(1))
    b.touch()
    assert {t.device.type for t in b.state_dict().values()} == {"meta"}
    assert b.head.scale.device.type == "meta"
    assert n.head.weight.device.type == "cpu"


def test_a_copy_that_must_not_follow_is_independent():
    n = Net()
    n.clone()
    apart = P.independent(copy.deepcopy(n))
    n.head = nn.Linear(2, 7)
    assert apart.touch().head.weight.shape == (2, 2)
    assert (2 * apart).head.weight.shape == (2, 2)
    apart.extra = nn.Parameter(torch.zeros(1))
    assert not hasattr(n.touch(), "extra")


# -- names -------------------------------------------------------------------------------------------------------------


def test_a_configuration_belongs_to_a_name():
    for replace in (nn.Linear(2, 3), nn.Sequential(nn.Linear(2, 3)), nn.Linear(2, 2)):
        n = Net()
        n.set_param_config(operational=False, name="head")
        n.head = replace
        doubled = 2 * n
        for name, p in n.head.named_parameters():
            assert torch.equal(doubled.head.get_parameter(name), p)
        assert torch.equal(doubled.body[0].weight, 2 * n.body[0].weight)
    n = Net()
    n.apply_param_config(lambda _, config: setattr(config, "rate", 0.1), "head.weight")
    twin = n.clone()
    n.head = nn.Linear(2, 5)
    for each in (n, twin.touch(), n.detach()):
        config = each._version_kernel.data.config
        assert config[each.get_param_id(each.head.weight)].rate == 0.1
        assert not hasattr(config[each.get_param_id(each.head.bias)], "rate")


def test_public_names_are_accepted_where_registered_ones_are():
    @mo.nograd_tensors("scale")
    class Fit(mo.Module):
        def __init__(self):
            super().__init__()
            self.coef = mo.tensor([1.0, 2.0], mode=["a", "b"]).attach()
            self.scale = mo.tensor([3.0], k=["c"])
            self.other = nn.Parameter(torch.ones(1))

    class Outer(mo.Module):
        def __init__(self):
            super().__init__()
            self.fit = Fit()

    for name in ("fit.coef", "fit.tensor:coef", "*.coef"):
        n = Outer()
        n.set_param_config(operational=False, name=name)
        assert torch.equal((2 * n).fit.coef.data, n.fit.coef.data)
        assert (2 * n).fit.other.item() == 2
        assert (P.only(Outer(), name) * 2).fit.other.item() == 1
        assert (P.only(Outer(), name) * 2).fit.coef.data.tolist() == [2, 4]
    for name in ("fit.scale", "fit.*scale"):
        n = P.buffer_policy(Outer(), "operate", name)
        assert (2 * n).fit.scale.data.tolist() == [6]
    inner = Fit()
    inner.set_param_config(operational=False, name="coef")
    assert (2 * inner).coef.data.tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"no parameters called 'cof'; did you mean 'coef'"):
        inner.set_param_config(operational=False, name="cof")


def test_a_subclass_of_the_labelled_tensor_is_registered_as_its_class():
    class Spectrum(mo.Tensor):
        pass

    n = mo.Module()
    n.s = Spectrum(torch.tensor([1.0, 2.0], requires_grad=True), (mo.Space(["a", "b"], name="k"),))
    assert [name for name, _ in n.named_parameters()] == ["tensor:s"]
    assert type(n.s) is Spectrum
    assert n.s.names == ("k",)
    twin = 2 * n
    assert type(twin.s) is Spectrum
    assert twin.s.data.tolist() == [2, 4]
    assert type(copy.deepcopy(n).s) is Spectrum


# -- plain attributes --------------------------------------------------------------------------------------------------


class Calls(list):
    """Counts how often it is copied."""

    copies = 0

    def __copy__(self):
        Calls.copies += 1
        return Calls(self)

    def __deepcopy__(self, memo):
        Calls.copies += 1
        return Calls(self)


def test_plain_attributes_are_shared(tmp_path):
    n = Net()
    n.lock, n.file, n.ticks = threading.Lock(), open(tmp_path / "log", "w"), (i for i in range(3))  # noqa: SIM115
    n.body.data = Calls(range(10))
    n.body.large = list(range(1_000_000))
    with n.file:
        for made in (2 * n, n + n, n.clone(), n.randn(), n.product().module(), n.detach(), n.clone_from(Net())):
            assert made.lock is n.lock
            assert made.file is n.file
            assert made.ticks is n.ticks
            assert made.body.data is n.body.data
            assert made.body.large is n.body.large
    twin = n.clone()
    n.head = nn.Sequential(nn.Linear(2, 2))
    n.head.lock = threading.Lock()
    n.other = nn.Linear(1, 1)
    assert twin.touch().other.weight.shape == (1, 1)
    assert Calls.copies == 0


def test_attributes_that_refer_to_the_model_refer_to_the_result():
    class Odd(NytoModule):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
            self.order = [self.two, self.one]
            self.by_name = {"first": (self.one, "text"), "weights": [self.one.weight]}
            self.run = self.go
            self.hook = self.one.register_forward_hook(self.seen)
            self.count = []

        def seen(self, module, args, out):
            self.count.append(self)

        def go(self, x):
            return self.order[0](x)

    n = Odd()
    made = 2 * n
    assert made.order == [made.two, made.one]
    assert made.by_name["first"] == (made.one, "text")
    assert made.by_name["weights"][0] is made.one.weight
    assert made.run.__self__ is made
    made.one(torch.ones(2))
    assert n.count[-1] is made
    assert n.order == [n.two, n.one]
    n.order.append(n.one)
    assert len(made.order) == 2


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def switching(request):
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    if "thread" in request.node.name:
        sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_threads(count, work):
    failures = []
    barrier = threading.Barrier(count)

    def guarded(i):
        try:
            barrier.wait()
            work(i)
        except BaseException as error:  # noqa: BLE001 - reported below
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures, failures[0]


def test_threads_that_read_one_result_see_one_module():
    base = adopt(nn.Sequential(*(nn.Linear(2, 2) for _ in range(20))))
    for _ in range(250):
        fresh = 2 * base
        seen = [None] * 4

        def look(i, fresh=fresh, seen=seen):
            seen[i] = [id(p) for p in fresh.parameters()], id(fresh[3].weight), fresh._version_kernel

        run_threads(4, look)
        assert all(each == seen[0] for each in seen)


def test_threads_that_use_one_multiple_multiply_it_once():
    a, b, c = Net(), Net(), Net()
    with torch.no_grad():
        rows = zip(a.parameters(), b.parameters(), c.parameters(), strict=True)
        expected = [torch.add(x, y - z, alpha=0.5) for x, y, z in rows]
    for _ in range(100):
        half = 0.5 * (b - c)
        made = [None] * 8

        def use(place, half=half, made=made):
            if place % 2:
                list(half.parameters())
            made[place] = a + half

        run_threads(8, use)
        for each in made:
            assert all(torch.allclose(x, y) for x, y in zip(each.parameters(), expected, strict=True))


def test_what_another_thread_builds_between_a_look_and_its_miss_is_found():
    net = 2 * Net()
    list(net.parameters())
    # As if the registry had been missing when it was looked for.
    assert net.__getattr__("_parameters") is net.__dict__["_parameters"]
    assert net.__getattr__("training") is True
    with pytest.raises(AttributeError, match="nothing_like_it"):
        net.__getattr__("nothing_like_it")


def test_an_edit_has_its_version_before_the_new_tree_is_known(monkeypatch):
    net = Net()
    first = version_of(net + 0)
    seen, saw = [], ParticleRecord.saw

    def look(record, reading, states=None):
        # What another thread would find that reads now: not the new tree at the version before.
        seen.append((record.version, "late" in reading.structure.layout))
        saw(record, reading, states)

    relative = 2 * net
    assert version_of(relative) is first
    monkeypatch.setattr(ParticleRecord, "saw", look)
    relative.late = nn.Parameter(torch.zeros(2))
    version_of(relative)
    assert [version for version, late in seen if late]
    assert all(version is first.next_version for version, late in seen if late)


def test_no_edit_of_relatives_in_threads_is_lost():
    for _ in range(125):
        base = NytoModule()
        base.w = nn.Parameter(torch.zeros(1))
        nets = [base.clone() for _ in range(8)]

        def edit(i, nets=nets):
            setattr(nets[i], f"p{i}", nn.Parameter(torch.full((2,), float(i))))

        run_threads(8, edit)
        expected = {"w", *(f"p{i}" for i in range(8))}
        for each in nets:
            assert {name for name, _ in each.touch().named_parameters()} == expected
        assert len(P.history(base)) == 8
        assert torch.equal(nets[0].p5, torch.full((2,), 5.0))


def test_threads_may_begin_one_species():
    for _ in range(50):
        base = adopt(nn.Linear(2, 2))
        made = [None] * 4

        def work(i, base=base, made=made):
            made[i] = base + i

        run_threads(4, work)
        assert len({id(each._version_kernel) for each in made}) == 1


# -- products ----------------------------------------------------------------------------------------------------------


def test_products_copy_and_pickle():
    n = Net()
    product = 2 * n.product()
    for twin in (copy.deepcopy(product), pickle.loads(pickle.dumps(product)), copy.copy(product)):
        assert torch.equal(twin.module().head.weight, 2 * n.head.weight)
        assert torch.equal((twin + product).module().head.weight, 4 * n.head.weight)
        assert twin.module()._version_kernel is n._version_kernel
    part = n.product().unary_operator(lambda p, _: nn.Parameter(p * 3))
    assert torch.equal(copy.deepcopy(part).module().head.bias, 3 * n.head.bias)
    wrapped = ParticleModule(Net()).product()
    assert torch.equal(copy.deepcopy(wrapped).module().root_module.head.bias, wrapped.module().root_module.head.bias)


class Numbers(Product):
    def __init__(self, values):
        self.values = values

    def unary_operator(self, fn):
        return Numbers([fn(x, None) for x in self.values])

    def binary_operator(self, other, fn):
        return Numbers([fn(x, y, None) for x, y in zip(self.values, other.values, strict=True)])

    def particle(self):
        return Point(self.values)

    def clone(self):
        return Numbers(list(self.values))

    def rand(self):
        return Numbers([0.5 for _ in self.values])

    randn = rand


class Point(Particle):
    def __init__(self, values):
        self.values = values

    def product(self):
        return Numbers(self.values)

    def product_(self, product):
        self.values[:] = product.values
        return self


class Terse(Numbers):
    unary_operator = binary_operator = None

    def __add__(self, other):
        return Terse([x + y for x, y in zip(self.values, other.values, strict=True)])

    def __neg__(self):
        return Terse([-x for x in self.values])

    def __mul__(self, factor):
        return Terse([factor * x for x in self.values])

    __rmul__ = __mul__


def test_a_pair_of_ones_own_has_arithmetic():
    a, b = Point([1.0, 2.0]), Point([10.0, 20.0])
    assert (a + b).values == [11, 22]
    assert (-a).values == [-1, -2]
    assert (2 * a - b / 2).values == [-3, -6]
    assert (1 - a).values == [0, -1]
    assert abs(-a).values == [1, 2]
    a += b
    assert a.values == [11, 22]
    a *= 2
    assert a.values == [22, 44]
    assert a.clone().values == [22, 44]
    assert a.rand().values == [0.5, 0.5]


def test_operators_of_ones_own_products_are_used():
    class Own(Point):
        def product(self):
            return Terse(self.values)

    a, b = Own([1.0, 2.0]), Own([10.0, 20.0])
    assert (a + b).values == [11, 22]
    assert (-a).values == [-1, -2]
    assert (3 * a).values == [3, 6]
    with pytest.raises(TypeError, match="has no arithmetic"):
        a / b


# -- compilers and other kinds of modules ------------------------------------------------------------------------------


def test_expressions_inside_a_compiled_function():
    n, k = Net(), Net()
    x = torch.randn(3, 2)

    def combine(n, k, x):
        return (n + k)(x) + (2 * n)(x) - (-k)(x) + (n + 0.5 * (k - n))(x)

    compiled = torch.compile(combine, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(n, k, x), combine(n, k, x))


def test_a_graph_module_is_a_value():
    g = adopt(torch.fx.symbolic_trace(Net()))
    x = torch.randn(3, 2)
    made = g + 0.5 * (g.randn() * 0)
    torch.testing.assert_close(made(x), g(x))
    assert torch.equal((2 * g).get_parameter("head.weight"), 2 * g.get_parameter("head.weight"))
    twin = copy.deepcopy(g)
    torch.testing.assert_close((twin - g).get_parameter("head.weight"), torch.zeros(2, 2))


def test_lazy_modules_are_refused_by_a_sentence():
    n = Net()
    twin = n.clone()
    before = list(n.state_dict())
    with pytest.raises(ValueError, match=r"'head.weight' is lazy: .* run one forward pass first"):
        n.head = nn.LazyLinear(3)
    assert list(n.state_dict()) == before
    assert torch.equal((n + twin).head.weight, n.head.weight + twin.head.weight)
    with pytest.raises(ValueError, match="is lazy"):
        adopt(nn.Sequential(nn.LazyLinear(2))) + 1
    lone = Net()
    lone.head = nn.LazyLinear(3)
    lone(torch.ones(1, 2))
    assert (2 * lone).head.weight.shape == (3, 2)
