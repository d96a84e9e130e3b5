"""Threads that share results, edit relatives and start species."""

import sys
import threading

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import particles as P
from moduli.particles import NytoModule, adopt
from moduli.particles._record import ParticleRecord
from moduli.particles._species import version_of


def net():
    return adopt(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


class Net(NytoModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.body(x))


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


class Scaled(mo.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.body(x))


def test_operations_on_a_relative_that_another_thread_edits(switching):
    for _ in range(60):
        base = Scaled()
        relatives = [base.clone() for _ in range(6)]
        start, errors = threading.Barrier(6), []

        def run(k, relatives=relatives, start=start, errors=errors):
            start.wait()
            try:
                if k % 2:
                    setattr(relatives[k], f"p{k}", nn.Parameter(torch.full((1,), float(k))))
                for other in relatives:
                    relatives[k] + other
            except BaseException as error:  # noqa: BLE001 - told by the test
                errors.append(error)

        threads = [threading.Thread(target=run, args=(k,)) for k in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors[0]
        for each in (base, *relatives):
            assert [each.touch().get_parameter(f"p{k}").item() for k in (1, 3, 5)] == [1, 3, 5]
