"""Threads that share results, edit relatives and create species."""

import sys
import threading

import pytest
import torch
from torch import nn

from moduli import particles as P
from moduli.particles import NytoModule, adopt
from moduli.particles._record import ParticleRecord
from moduli.particles._species import version_of
from particles.helpers import Net


def net():
    return adopt(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


@pytest.fixture(autouse=True)
def switch_threads_often():
    """Set the shortest interval between switches of threads."""
    before = sys.getswitchinterval()
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
        except BaseException as error:  # noqa: BLE001 - raised below
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
        read = [None] * 4

        def look(i, fresh=fresh, read=read):
            read[i] = [id(p) for p in fresh.parameters()], id(fresh[3].weight), fresh._version_kernel

        run_threads(4, look)
        assert all(each == read[0] for each in read)


def test_threads_that_use_one_deferred_factor_apply_it_once():
    a, b, c = Net(), Net(), Net()
    with torch.no_grad():
        rows = zip(a.parameters(), b.parameters(), c.parameters(), strict=True)
        expected = [torch.add(x, y - z, alpha=0.5) for x, y, z in rows]
    for _ in range(100):
        half = 0.5 * (b - c)
        results = [None] * 8

        def use(index, half=half, results=results):
            if index % 2:
                list(half.parameters())
            results[index] = a + half

        run_threads(8, use)
        for each in results:
            assert all(torch.allclose(x, y) for x, y in zip(each.parameters(), expected, strict=True))


def test_attributes_set_by_another_thread_during_a_failed_lookup_are_found():
    net = 2 * Net()
    list(net.parameters())
    # `__getattr__` runs after a failed lookup; here another thread has set the registry in the meantime.
    assert net.__getattr__("_parameters") is net.__dict__["_parameters"]
    assert net.__getattr__("training") is True
    with pytest.raises(AttributeError, match="nothing_like_it"):
        net.__getattr__("nothing_like_it")


def test_an_edit_has_its_version_before_the_new_structure_is_recorded(monkeypatch):
    net = Net()
    first = version_of(net + 0)
    records, original = [], ParticleRecord.saw

    def look(record, reading, states=None):
        # Another thread that reads now must not find the new structure at the old version.
        records.append((record.version, "late" in reading.structure.layout))
        original(record, reading, states)

    relative = 2 * net
    assert version_of(relative) is first
    monkeypatch.setattr(ParticleRecord, "saw", look)
    relative.late = nn.Parameter(torch.zeros(2))
    version_of(relative)
    assert [version for version, late in records if late]
    assert all(version is first.next_version for version, late in records if late)


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


def test_threads_that_use_a_new_model_create_one_species():
    for _ in range(50):
        base = adopt(nn.Linear(2, 2))
        results = [None] * 4

        def work(i, base=base, results=results):
            results[i] = base + i

        run_threads(4, work)
        assert len({id(each._version_kernel) for each in results}) == 1


def test_threads_may_combine_relatives_that_others_edit():
    for _ in range(60):
        base = Net()
        relatives = [base.clone() for _ in range(6)]
        start, errors = threading.Barrier(6), []

        def run(k, relatives=relatives, start=start, errors=errors):
            start.wait()
            try:
                if k % 2:
                    setattr(relatives[k], f"p{k}", nn.Parameter(torch.full((1,), float(k))))
                for other in relatives:
                    relatives[k] + other
            except BaseException as error:  # noqa: BLE001 - raised by the test
                errors.append(error)

        threads = [threading.Thread(target=run, args=(k,)) for k in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors[0]
        for each in (base, *relatives):
            assert [each.touch().get_parameter(f"p{k}").item() for k in (1, 3, 5)] == [1, 3, 5]
