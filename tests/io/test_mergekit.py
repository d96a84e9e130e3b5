"""Every method of mergekit compared with that of moduli, tensor by tensor; needs mergekit (the extra `bench`)."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file

import moduli.io as mio
from moduli import merge

pytest.importorskip("mergekit")
transformers = pytest.importorskip("transformers")

TASKS = {"math": {"weight": 0.5}, "code": {"weight": 0.3}, "law": {"weight": 0.4}}
SOURCES = {"math": {"layer_range": [0, 4]}, "code": {"layer_range": [0, 4]}}


def models(names, **more):
    return [{"model": name, "parameters": {**TASKS[name], **more}} for name in names]


def based(method, names=("math", "code", "law"), shared=None, **more):
    return {
        "merge_method": method,
        "base_model": "base",
        "models": models(names, **more),
        "parameters": shared or {},
    }


def pair(method, **shared):
    return {
        "merge_method": method,
        "base_model": "base",
        "models": [{"model": "base"}, {"model": "math"}],
        "parameters": shared,
    }


def unweighted(method, base, names, **shared):
    base_model = {"base_model": "base"} if base else {}
    return {"merge_method": method, **base_model, "models": [{"model": name} for name in names], "parameters": shared}


def sliced(method, *parts, **more):
    slices = []
    for part in parts:
        names = part if isinstance(part[0], tuple) else [part]
        slices.append(
            {"sources": [{"model": name, "layer_range": [low, high], **extra} for name, low, high, extra in names]}
        )
    return {"merge_method": method, **more, "slices": slices}


TWO = ("math", "code")
GRADIENT = [{"filter": "self_attn", "value": [0, 0.5, 1]}, {"filter": "mlp", "value": [1, 0.5]}, {"value": 0.5}]
HALF, QUARTER = {"parameters": {"weight": 0.5}}, {"parameters": {"weight": 0.25}}
RISING, FALLING = {"parameters": {"weight": [0, 1]}}, {"parameters": {"weight": [1, 0.5]}}
HALVED = {"parameters": {"scale": [{"filter": "down_proj", "value": 0.5}, {"value": 1}]}}
TIED = {"base_model": "base", "parameters": {"density": 0.3}}

# A recipe, and the largest difference: 0 means bit for bit, and `few` means at most nine of the 9,000 entries differ.
EQUAL = {
    "linear": (unweighted("linear", False, TWO, weight=1.0), 0),
    "linear, weights": ({"merge_method": "linear", "models": models(("math", "code", "law"))}, 1e-7),
    "linear, sum": ({"merge_method": "linear", "models": models(TWO), "parameters": {"normalize": False}}, 0),
    "linear, gradient": (unweighted("linear", False, TWO, weight=[0.2, 0.9]), 1e-7),
    "slerp": (pair("slerp", t=0.3), 3e-7),
    "slerp, gradients": (pair("slerp", t=GRADIENT), 3e-7),
    "nuslerp": ({"merge_method": "nuslerp", "models": models(TWO)}, 3e-7),
    "nuslerp, task vectors": (based("nuslerp", TWO), 3e-7),
    "nuslerp, rows": ({"merge_method": "nuslerp", "models": models(TWO), "parameters": {"nuslerp_flatten": False}}, 3e-7),
    "nuslerp, columns": (based("nuslerp", TWO, {"nuslerp_flatten": False, "nuslerp_row_wise": True}), 3e-7),
    "multislerp": ({"merge_method": "multislerp", "models": models(("math", "code", "law"))}, 3e-7),
    "multislerp, task vectors": (based("multislerp"), 3e-7),
    "karcher": (unweighted("karcher", False, ("math", "code", "law")), 3e-7),
    "task_arithmetic": (based("task_arithmetic", shared={"lambda": 0.7}), 3e-7),
    "ties": (based("ties", density=0.3), 3e-7),
    "ties, sum": (based("ties", density=0.45, shared={"normalize": False, "lambda": 0.7}), 3e-7),
    "breadcrumbs": (based("breadcrumbs", density=0.83, gamma=0.07), 3e-7),
    "breadcrumbs, many outliers": (based("breadcrumbs", density=0.9, gamma=0.3), 3e-7),
    "breadcrumbs_ties": (based("breadcrumbs_ties", density=0.83, gamma=0.07), 3e-7),
    "dare_linear, density 1": (based("dare_linear"), 3e-7),
    "dare_ties, density 1": (based("dare_ties"), 3e-7),
    "della, density 1": (based("della"), 3e-7),
    "della_linear, density 1": (based("della_linear"), 3e-7),
    "model_stock": (unweighted("model_stock", True, ("alike", "math", "code")), 3e-7),
    "sce": (unweighted("sce", True, ("math", "code", "law"), select_topk=0.37), 3e-7),
    "nearswap": (pair("nearswap", t=0.01), 0),
    # Entries near its threshold depend on rounding, which differs between processors.
    "arcee_fusion": (pair("arcee_fusion"), "few"),
    "ram": (unweighted("ram", True, ("sparse", "math", "code"), epsilon=0.01), 3e-7),
    "ramplus_tl": (unweighted("ramplus_tl", True, ("sparse", "math", "code"), epsilon=0.01, r=0.5, alpha=0.9), 3e-7),
    "passthrough": ({"merge_method": "passthrough", "models": [{"model": "math"}]}, 0),
    "passthrough, slices": (sliced("passthrough", ("math", 0, 3, {}), ("code", 1, 4, {}), ("math", 3, 4, {})), 0),
    "passthrough, scale": (
        sliced("passthrough", ("math", 0, 2, {}), ("code", 2, 4, HALVED)),
        0,
    ),
    "linear, slices": (
        sliced("linear", [("math", 0, 2, HALF), ("code", 2, 4, QUARTER)], [("math", 1, 4, HALF), ("law", 0, 3, HALF)]),
        1e-7,
    ),
    "ties, slices": (
        sliced("ties", [("base", 1, 4, {}), ("math", 1, 4, HALF), ("code", 1, 4, QUARTER)], **TIED),
        3e-7,
    ),
    "linear, gradients in slices": (
        sliced("linear", ("math", 0, 3, RISING), ("code", 1, 4, FALLING), parameters={"normalize": False}),
        0,
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """A small Llama, three models fine-tuned from it, one like the first of them, and one that differs in few entries."""
    folder = tmp_path_factory.mktemp("models")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    state = {name: torch.randn(value.shape, generator=generator) * 0.1 for name, value in model.state_dict().items()}
    steps = {"base": {name: torch.zeros_like(value) for name, value in state.items()}}
    for name in ("math", "code", "law"):
        steps[name] = {key: 0.02 * torch.randn(value.shape, generator=generator) for key, value in state.items()}
    mean = {key: steps["math"][key] + steps["code"][key] for key in state}
    steps["alike"] = {key: 0.5 * value for key, value in mean.items()}
    steps["sparse"] = {
        key: value * (torch.rand(value.shape, generator=generator) < 0.3) for key, value in steps["law"].items()
    }
    for name, step in steps.items():
        model.load_state_dict({key: state[key] + step[key] for key in state})
        model.save_pretrained(folder / name)
    return folder


def run_both(recipe, folder, monkeypatch, seed=0):
    """Merge with mergekit and with moduli; return the tensors of both.

    Args:
        recipe: The recipe as a mapping.
        folder: The directory of the models.
        monkeypatch: The fixture of pytest.
        seed: The seed of mergekit.
    """
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("theirs", "ours"):
        shutil.rmtree(folder / name, ignore_errors=True)
    text = yaml.safe_dump(recipe)
    (folder / "recipe.yml").write_text(text)
    # mergekit reads relative paths like `a/b` as names of the hub, so it gets absolute ones.
    absolute = yaml.safe_load(text)
    for entry in [
        *(absolute.get("models") or []),
        *(s for each in absolute.get("slices") or [] for s in each["sources"]),
    ]:
        entry["model"] = os.fspath(folder / entry["model"])
    if "base_model" in absolute:
        absolute["base_model"] = os.fspath(folder / absolute["base_model"])
    options = MergeOptions(
        quiet=True, random_seed=seed, copy_tokenizer=False, clone_tensors=True, write_model_card=False
    )
    run_merge(MergeConfiguration.model_validate(absolute), os.fspath(folder / "theirs"), options=options)
    mio.merge_recipe(folder / "recipe.yml", folder / "ours")
    return [
        {
            name: value
            for file in sorted((folder / out).glob("*.safetensors"))
            for name, value in load_file(file).items()
        }
        for out in ("theirs", "ours")
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EQUAL)
def test_methods_give_what_mergekit_gives(name, checkpoints, monkeypatch):
    recipe, tolerance = EQUAL[name]
    theirs, ours = run_both(recipe, checkpoints, monkeypatch)
    assert theirs.keys() == ours.keys()
    worst = max(float((theirs[key] - ours[key]).abs().max()) for key in theirs)
    if tolerance == "few":
        assert sum(int((theirs[key] != ours[key]).sum()) for key in theirs) <= 9
    else:
        assert worst <= tolerance
    if name not in ("passthrough",):
        base = load_file(checkpoints / "base/model.safetensors")
        assert any(key not in base or not torch.equal(base[key], ours[key]) for key in ours)
    layers = transformers.AutoConfig.from_pretrained(checkpoints / "ours").num_hidden_layers
    assert layers == transformers.AutoConfig.from_pretrained(checkpoints / "theirs").num_hidden_layers
    loaded = transformers.AutoModelForCausalLM.from_pretrained(checkpoints / "ours")
    assert torch.equal(loaded.state_dict()["model.norm.weight"], ours["model.norm.weight"])


def test_where_methods_differ_from_those_of_mergekit():
    """Each method that differs does so as docs/merge.md describes."""
    from mergekit.merge_methods import merge_tensors

    torch.manual_seed(0)
    base = torch.randn(20, 30)
    a, b, c = (base + 0.02 * torch.randn(20, 30) for _ in range(3))
    states = [{"w": each} for each in (base, a, b, c)]
    # The slerp of mergekit is linear where the cosine is above 0.9995; that of moduli follows the arc.
    theirs = merge_tensors([base, a], "slerp", parameters={"t": 0.3}, base_index=0)
    torch.testing.assert_close(theirs, 0.7 * base + 0.3 * a)
    arc = merge.slerp(states[0], states[1], 0.3)["w"]
    assert 1e-6 < float((theirs - arc).abs().max()) < 2e-4
    # The model_stock of mergekit extrapolates away from models that disagree; that of moduli stays at the base.
    away = [torch.zeros(2), torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.5])]
    assert float(merge_tensors(away, "model_stock", base_index=0)[1]) < 0
    assert not merge.stock({"w": away[0]}, [{"w": each} for each in away[1:]])["w"].any()
    # The della of mergekit rescales a tensor by one number; that of moduli divides each entry by its own probability.
    torch.manual_seed(0)
    theirs = merge_tensors(
        [base, a], "della_linear", parameters={"weight": [1.0], "density": [0.5], "epsilon": [0.3]}, base_index=0
    )
    ours = merge.della(states[0], [states[1]], 0.5, epsilon=0.6, generator=0, then="linear")["w"]
    ratios = [((each - base) / (a - base))[(each - base).abs() > 1e-3] for each in (theirs, ours)]
    assert float(ratios[0].std()) < 0.01 < 0.1 < float(ratios[1].std())


@pytest.mark.filterwarnings("ignore")
def test_random_methods_drop_as_often_as_those_of_mergekit(checkpoints, monkeypatch):
    base = load_file(checkpoints / "base/model.safetensors")
    for method in ("dare_linear", "della_linear"):
        recipe = based(method, ("math",), density=0.4)
        recipe["models"][0]["parameters"]["weight"] = 1.0
        shares = []
        for state in run_both(recipe, checkpoints, monkeypatch):
            changed = sum(int(((state[key] - base[key]).abs() > 1e-7).sum()) for key in base)
            shares.append(changed / sum(value.numel() for value in base.values()))
        # 9,000 entries: five standard deviations are 0.026.
        assert shares == pytest.approx([0.4, 0.4], abs=0.026), method


MOE = """
base_model: {folder}/base
gate_mode: random
dtype: float32
experts:
  - source_model: {folder}/math
  - source_model: {folder}/code
"""


@pytest.mark.filterwarnings("ignore")
def test_mixtures_of_experts_are_those_of_mergekit_but_for_random_gates(checkpoints, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{at}": at for at in range(31)} | {"<unk>": 31}, unk_token="<unk>")
    )
    for name in ("base", "math", "code"):
        shutil.copytree(checkpoints / name, tmp_path / name)
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path / name)
    (tmp_path / "moe.yml").write_text(MOE.format(folder=tmp_path))
    program = "from mergekit.scripts.moe import main; main()"
    command = [sys.executable, "-c", program, os.fspath(tmp_path / "moe.yml"), os.fspath(tmp_path / "theirs")]
    done = subprocess.run(
        command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    mio.merge_recipe(tmp_path / "moe.yml", tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / out / "model.safetensors") for out in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        assert value.shape == ours[name].shape
        assert name.endswith("mlp.gate.weight") or torch.equal(value, ours[name]), name
    mixture = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(mixture).__name__ == "MixtralForCausalLM"
    assert mixture(torch.arange(6)[None]).logits.isfinite().all()
    name = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(mixture.state_dict()[name], ours[name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", ["many", "few"])
def test_vocabularies_are_aligned_as_by_mergekit(first, tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    vocabularies = {
        "many": ["<unk>", *(f"w{at}" for at in range(9))],
        "few": ["<unk>", "w5", "w3", "w0", "zz", "w1", "yy"],
    }
    for seed, (name, words) in enumerate(vocabularies.items()):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.LlamaConfig(vocab_size=len(words), tie_word_embeddings=False, **sizes)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / name)
        level = tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>")
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(level), unk_token="<unk>"
        )
        tokenizer.save_pretrained(tmp_path / name)
    names = sorted(vocabularies, key=lambda name: name != first)
    recipe = unweighted("linear", False, names, weight=1.0) | {"base_model": first, "tokenizer_source": "base"}
    theirs, ours = run_both(recipe, tmp_path, monkeypatch)
    assert ours["lm_head.weight"].shape == (len(vocabularies[first]), 8)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
