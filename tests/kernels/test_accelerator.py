"""On a fake accelerator nothing is read back or copied to the CPU, and launches do not grow with the number of tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from laws.fake_device import Launches
from moduli import Optimizer, kernels, m
from moduli.kernels import _call, _reduce, _triton, _triton_table
from moduli.testing import _gpu


def clipped_adam(p, g, m, v, norm, lr, beta1, beta2, eps, step, decay):
    g = g * (1.0 / (norm + 1e-6)).clamp(max=1.0)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g * (1 - beta2))
    update = m / (1 - beta1**step) / (v.sqrt() * (1 - beta2**step) ** -0.5 + eps)
    p.sub_(lr * (update + decay * p))


@pytest.mark.parametrize("setting", ["auto", "foreach"])
def test_a_step_is_a_few_launches_and_reads_nothing_back(monkeypatch, setting):
    monkeypatch.setenv("MODULI_KERNELS", setting)
    counts = []
    for count in (4, 400):
        fused = kernels.fuse(clipped_adam)
        with FakeTensorMode(), torch.no_grad():
            lists = [[torch.empty(8, 3, device="cuda") for _ in range(count)] for _ in range(4)]
            for step in (1, 2):
                with Launches() as seen:
                    norm = kernels.norm(lists[1])
                    fused(*lists, norm, 1e-3, 0.9, 0.999, 1e-8, step, 0.01)
            assert norm.device.type == "cuda"
            assert fused.explain(*lists, norm, 1e-3, 0.9, 0.999, 1e-8, 1, 0.01).form == "foreach"
        counts.append(len(seen.cost.launches))
    assert counts[0] == counts[1] <= 24, seen.cost.launches


def test_new_results_are_on_the_device(monkeypatch):
    fused = kernels.fuse(lambda x, y, a: torch.where(x > a, x, y) + a)
    with FakeTensorMode(), torch.no_grad():
        xs, ys = ([torch.empty(n, device="cuda") for n in (3, 5)] for _ in range(2))
        for scalar in (2.0, torch.empty((), device="cuda", dtype=torch.float64)):
            got = fused(xs, ys, scalar)
            assert [t.device.type for t in got] == ["cuda", "cuda"]
            assert fused(xs, ys, scalar, flat=True).shape == (8,)
        with pytest.raises(ValueError, match="move one"):
            fused(xs, [torch.empty(3), torch.empty(5)], 2.0)


def test_a_dispatch_mode_gets_foreach_operations(backend):
    fused = kernels.fuse(lambda x, y: x * 2 + y)
    xs = [torch.ones(3), torch.ones(4)]
    with Launches():
        got = fused(xs, xs)
        form = fused.explain(xs, xs).form
    assert torch.equal(got[1], torch.full((4,), 3.0))
    assert form == ("plain" if backend == "plain" else "foreach")


# ---------------------------------------------------------------------- whole optimizers


def chain():
    return [m.ClipNorm(1.0), m.Adam(), m.WeightDecay(0.01), m.LR(1e-3)]


def make_optimizer(devices, links, shape=(8, 3)):
    params = [torch.nn.Parameter(torch.empty(shape, device=device)) for device in devices]
    for param in params:
        param.grad = torch.empty(shape, device=param.device)
    return Optimizer(params, *links), params


def weigh(devices, links, shape=(8, 3)):
    """Return the cost of the third step on fake tensors, and the launches of generated kernels.

    Args:
        devices: The device of each parameter.
        links: The links.
        shape: The shape of each parameter.
    """
    with FakeTensorMode():
        optimizer, _ = make_optimizer(devices, links, shape)
        optimizer.step()
        with Launches():
            optimizer.step()  # under a mode a step has another plan
        with Launches() as seen, kernels.watch_launches() as generated:
            optimizer.step()
    return seen.cost, generated


@pytest.mark.parametrize("count", [4, 400])
def test_launches_of_clip_adam_decay_and_lr(monkeypatch, count):
    cost, generated = weigh(["cuda"] * count, chain())
    assert not generated
    assert len(cost.launches) == 18, cost.launches  # 24 is the most that is accepted
    assert (cost.copies, cost.allocated, cost.numbers) == ([], 0, 0)
    monkeypatch.setenv("MODULI_KERNELS", "triton")
    cost, generated = weigh(["cuda"] * count, chain())
    assert [launch.name for launch in generated] == ["squares", "fused"]
    # Apart from the end of the norm nothing is launched, copied or allocated, so a graph can be captured.
    assert (cost.launches, cost.copies, cost.allocated, cost.numbers) == (["linalg_vector_norm"], [], 0, 0)


def test_bytes_moved_are_those_that_must_be(monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", "triton")
    _, generated = weigh(["cuda"] * 4, chain(), (256, 64))
    elements = 4 * 256 * 64
    least = 4 * elements * (4 + 1 + 3)  # p, g, m, v are read, g once more for the norm, p, m, v are written
    assert least <= sum(launch.bytes for launch in generated) <= 1.1 * least


def test_several_devices_are_a_launch_each(monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", "triton")
    devices = ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    cost, generated = weigh(devices, [m.Adam(), m.LR(1e-3)])
    assert [(launch.name, str(launch.device)) for launch in generated] == [("fused", "cuda:0"), ("fused", "cuda:1")]
    assert (cost.launches, cost.copies) == ([], [])
    monkeypatch.delenv("MODULI_KERNELS")
    cost, _ = weigh([*devices, "cpu"], [m.Adam(), m.LR(1e-3)])
    alone, _ = weigh(["cuda:0"], [m.Adam(), m.LR(1e-3)])
    assert len(cost.launches) == 2 * len(alone.launches)
    assert not cost.copies


def test_a_norm_over_several_devices_is_on_the_first(monkeypatch):
    with FakeTensorMode():
        optimizer, params = make_optimizer(["cuda:0", "cuda:1"], chain())
        optimizer.step()
        optimizer.step()
        norm = kernels.norm([param.grad for param in params])
        assert str(norm.device) == "cuda:0"
        state = optimizer.modules[1].state
        assert {str(state[param]["exp_avg"].device) for param in params} == {"cuda:0", "cuda:1"}


def test_parameters_on_the_host_beside_others_share_a_norm():
    """The only copy between host and device is the norm; all state stays on the device of its parameter."""
    cost, _ = weigh(["cuda", "cpu", "cuda", "cpu"], chain())
    alone, _ = weigh(["cuda", "cuda"], chain())
    assert [name for name in cost.launches if name.startswith("_foreach")] == [
        name for name in alone.launches if name.startswith("_foreach")
    ]
    assert len(cost.copies) == 1, cost.copies  # the norm
    with FakeTensorMode():
        optimizer, params = make_optimizer(["cuda", "cpu"], chain())
        optimizer.step()
        state = optimizer.modules[1].state
        assert [state[param]["exp_avg"].device.type for param in params] == ["cuda", "cpu"]


def test_a_scalar_of_another_device_is_copied_for_a_compiled_kernel(monkeypatch):
    """A subclass that reports the meta device is copied to the CPU, where it has a value."""
    fused = kernels.fuse(lambda x, a: x * a)
    copied_to = []

    class Elsewhere(torch.Tensor):
        @property
        def device(self):
            return torch.device("meta")

        def detach(self):
            return self

        def to(self, device):
            copied_to.append(device)
            return torch.tensor(3.0, device=device)

    number = torch.tensor(0.0).as_subclass(Elsewhere)
    assert torch.equal(fused([torch.ones(2)], number)[0], torch.full((2,), 3.0))
    assert copied_to == [torch.device("cpu")]


@pytest.fixture
def unwatched(monkeypatch):
    """Run fake tensors as if no dispatch mode was active, with all kernels unbuilt."""
    kernels.reset()
    monkeypatch.setattr(_call, "has_dispatch_mode", lambda: False)
    monkeypatch.setattr(_reduce, "has_dispatch_mode", lambda: False)
    monkeypatch.setattr(_triton, "_unbuilt", set())
    yield
    kernels.reset()


def test_a_kernel_that_does_not_compile_is_one_warning_and_foreach(monkeypatch, unwatched):
    monkeypatch.setattr(_triton, "find_problem", lambda device, asked: None)
    monkeypatch.setattr(_reduce, "find_problem", lambda device, asked: None)
    tried = []

    def launch(name, *args, **options):
        tried.append(name)
        raise _triton.UnbuiltError("Triton can't compile a kernel (ptxas: out of registers)")

    monkeypatch.setattr(_triton, "_launch", launch)
    with FakeTensorMode():
        optimizer, params = make_optimizer(["cuda"] * 3, chain())
        with pytest.warns(RuntimeWarning, match="without Triton, with the same results but slower: .*ptxas") as seen:
            optimizer.step()
        assert len(seen) == 1
        optimizer.step()  # a second warning would be raised as an error
        assert tried == ["squares", "fused"]  # each kernel is tried once
        fused = kernels.fuse(lambda x: x + 1)
        fused([params[0].detach()])
        assert fused.explain([params[0].detach()]).form == "foreach"
        monkeypatch.setenv("MODULI_KERNELS", "triton")
        with pytest.raises(kernels.KernelError, match="MODULI_KERNELS=triton, but .*ptxas"):
            kernels.fuse(lambda x: x + 2)([params[0].detach()])


def test_an_error_in_the_first_launch_is_a_compile_error(monkeypatch):
    class Broken:
        def __getitem__(self, grid):
            return self

        def __call__(self, *args, **options):
            raise ValueError("no such intrinsic")

    kernel, table = Broken(), _triton_table.Table(torch.device("cpu"), [4], 1, 64)
    with pytest.raises(_triton.UnbuiltError, match="ValueError: no such intrinsic"):
        _triton._launch("fused", kernel, table, 1, 0, [], 4)
    monkeypatch.setattr(_triton, "_compiled", {id(kernel)})
    with pytest.raises(ValueError, match="intrinsic"):  # a kernel that has run before raises its own error
        _triton._launch("fused", kernel, table, 1, 0, [], 4)


def test_without_triton_there_is_one_warning_and_foreach(monkeypatch, unwatched):
    monkeypatch.setattr(_triton.importlib.util, "find_spec", lambda name: None)
    with FakeTensorMode():
        optimizer, _ = make_optimizer(["cuda"] * 3, chain())
        with pytest.warns(RuntimeWarning, match="on cuda, and Triton is not installed") as seen:
            optimizer.step()
        assert len(seen) == 1
        optimizer.step()


def test_state_moves_with_map_location(tmp_path):
    params = [torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (3, 5)]
    optimizer = Optimizer(params, m.ClipNorm(1.0), m.Adam(), m.SOAP(), m.LR(1e-3))
    for _ in range(2):
        for param in params:
            param.grad = param.detach().cos()
        optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")

    def devices(tree):
        leaves = torch.utils._pytree.tree_leaves(tree)
        return {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}

    elsewhere = torch.load(tmp_path / "state.pt", map_location="meta", weights_only=False)
    assert devices(elsewhere) == {"meta"}
    here = torch.load(tmp_path / "state.pt", map_location="cpu", weights_only=False)
    for saved in (elsewhere, here):  # loading copies state to the device of the parameters
        with FakeTensorMode(allow_non_fake_inputs=True):
            others = [torch.nn.Parameter(torch.empty(n, device="cuda")) for n in (3, 5)]
            twin = Optimizer(others, m.ClipNorm(1.0), m.Adam(), m.SOAP(), m.LR(1e-3))
            twin.load_state_dict(saved)
            rows = [dict(row) for link in twin.modules for row in link.state.values()]
        assert devices(rows) == {"cuda"}
        assert sum(len(row) for row in rows) > 4


def test_settings_that_are_tensors_of_the_device_are_arguments(monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", "triton")
    with FakeTensorMode():
        rate = torch.empty((), device="cuda")
        optimizer, _ = make_optimizer(["cuda"] * 2, [m.Adam(), m.LR(rate)])
        for _ in range(3):
            with kernels.watch_launches() as generated:
                optimizer.step()
        assert [launch.name for launch in generated] == ["fused"]


def test_changed_parameters_use_the_same_kernels(monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", "triton")
    with FakeTensorMode():
        optimizer, params = make_optimizer(["cuda"] * 3, chain())
        extra = torch.nn.Parameter(torch.empty(8, 3, device="cuda"))
        extra.grad = torch.empty(8, 3, device="cuda")

        def lose():
            params[0].grad = None

        def find():
            params[0].grad = torch.empty(8, 3, device="cuda")

        def reload():
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)

        changes = [lose, find, lambda: params[1].requires_grad_(False), lambda: params[1].requires_grad_(True)]
        changes += [lambda: optimizer.add_param_group({"params": [extra]}), reload]
        optimizer.step()
        for change in changes:
            change()
            with Launches():
                optimizer.step()
            with Launches() as seen, kernels.watch_launches() as generated:
                optimizer.step()
            # Parameters that were added later have another step count, and so a launch of the same kernel.
            assert {launch.name for launch in generated} == {"squares", "fused"}
            assert not seen.cost.copies
            assert set(seen.cost.launches) <= {"zeros_like", "linalg_vector_norm"}


def test_devices_without_triton_use_foreach(monkeypatch):
    """Devices without Triton (MPS) use the foreach form, here compared on the CPU."""
    torch.manual_seed(0)
    ends = []
    for form in ("foreach", "plain"):
        monkeypatch.setenv("MODULI_KERNELS", form)
        params = [torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (7, 1, 300)]
        optimizer = Optimizer(params, *chain())
        for step in range(3):
            for param in params:
                param.grad = torch.cos(param.detach() * (step + 1))
            optimizer.step()
        ends.append([param.detach() for param in params])
        assert kernels.fuse(lambda x: x + 1).explain([torch.ones(2)]).form == form
    torch.testing.assert_close(*ends)
    monkeypatch.delenv("MODULI_KERNELS")
    with FakeTensorMode():
        assert kernels.fuse(lambda x: x + 1).explain([torch.empty(2, device="mps")]).form == "foreach"


def test_triton_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", "triton")
    with pytest.raises(kernels.KernelError, match="Triton is not installed|TRITON_INTERPRET"):
        kernels.fuse(lambda x: x + 1)([torch.ones(2)])


def test_the_report_says_that_there_is_no_accelerator(capsys, monkeypatch):
    monkeypatch.setattr(_gpu, "name_device", lambda: None)
    assert _gpu.report() == 0
    assert "no accelerator that torch can use" in capsys.readouterr().out


def test_the_report_compares_numbers_of_two_devices(monkeypatch):
    """Run the comparison for a present device with the CPU as the device."""
    links = ["Adam", "Lion", "LBFGS", "SOAP", "Dropout", "GaussNewton"]
    assert [name for name, *_ in _gpu._compare_links("cpu", links)] == ["clip, Adam, decay, lr", *links[:4]]
    assert _gpu._count("links", _gpu._compare_links("cpu", links))[-1] == "  5 of 5 agree"
    monkeypatch.setattr(_gpu, "make_chain", lambda: [m.Adam(), m.LR(next(rates))])
    rates = iter([1e-3, 1e-3, 2e-3])
    assert "clip, Adam, decay, lr: differs by" in "".join(_gpu._count("links", _gpu._compare_links("cpu", [])))


def test_the_report_compares_operations_of_two_devices(monkeypatch):
    names = ["neg", "exp", "sub", "addcmul"]
    assert _gpu._count("operations", _gpu._compare_operations("cpu", names))[-1] == "  16 of 16 agree"
    fuse = _gpu._fuse
    monkeypatch.setattr(_gpu, "_fuse", lambda function, roles: fuse(lambda *args: function(*args) * 1.1, roles))
    assert "sub in float64: differs by" in "".join(_gpu._count("operations", _gpu._compare_operations("cpu", names)))
