"""Merges of sharded directories, adapters and vocabularies, and recipes in YAML."""

import json
import os
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import moduli as mo
import moduli.io as mio
from moduli import merge

NAMES = [
    "model.embed_tokens.weight",
    *(f"model.layers.{i}.{p}.weight" for i in range(4) for p in ("attn", "mlp")),
    "lm_head.weight",
]


def state(seed, rows=10, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in NAMES:
        shape = (rows, 6) if "embed" in name or "head" in name else (6, 6)
        tensors[name] = torch.randn(shape, generator=generator).to(dtype)
    return tensors


def write(folder, tensors, shards=3, tokens=None):
    """Write a directory with shards and an index, as on the Hugging Face hub, and return it.

    Args:
        folder: The directory to create.
        tensors: The state dict.
        shards: The number of files.
        tokens: The vocabulary of a tokenizer; none by default.
    """
    folder.mkdir()
    names = list(tensors)
    files = {}
    for at in range(shards):
        file = f"model-{at + 1:05d}-of-{shards:05d}.safetensors"
        part = names[at::shards]
        save_file({name: tensors[name].contiguous() for name in part}, folder / file, {"format": "pt"})
        files |= dict.fromkeys(part, file)
    weight_map = {name: files[name] for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"of": folder.name}))
    if tokens is not None:
        vocabulary = {"model": {"vocab": {token: at for at, token in enumerate(tokens)}}, "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    return folder


def load_tensors(place):
    files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def assert_same(tensors, expected):
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(tensors[name], value), name


@pytest.mark.parametrize("shard_size", [None, 300, 1])
@pytest.mark.parametrize("index", [False, True])
def test_directories_and_indices_are_read_and_written(shard_size, index, tmp_path):
    models = [state(seed, dtype=torch.bfloat16) for seed in range(3)]
    paths = [write(tmp_path / f"{at}", model, shards=at + 1) for at, model in enumerate(models)]
    sources = [path / "model.safetensors.index.json" for path in paths] if index else paths
    out = tmp_path / "out"
    if index and shard_size is None:
        out = tmp_path / "out.safetensors"
    merge.ties(sources[0], sources[1:], out=out, density=0.5, shard_size=shard_size)
    assert_same(load_tensors(out), merge.ties(models[0], models[1:], density=0.5))
    if out.suffix:
        return
    assert (out / "config.json").read_text() == '{"of": "0"}'
    assert list(mio.TensorFiles(out)) == NAMES
    count = len(list(out.glob("*.safetensors")))
    assert count == {None: 1, 300: 3, 1: 10}[shard_size]
    if count > 1:
        written_index = json.loads((out / "model.safetensors.index.json").read_text())
        assert written_index["metadata"]["total_size"] == sum(value.nbytes for value in models[0].values())
        assert set(written_index["weight_map"].values()) == {file.name for file in out.glob("*.safetensors")}
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2", "out"]


def test_invalid_directories_are_refused_with_the_reason(tmp_path):
    good = write(tmp_path / "good", state(0))
    index = good / "model.safetensors.index.json"
    valid = json.loads(index.read_text())

    def check_refused(match, kind=mio.CheckpointError):
        with pytest.raises(kind, match=match):
            mio.TensorFiles(good)

    for weight_map, match in [
        ({**valid["weight_map"], "more": "model-00001-of-00003.safetensors"}, "differ about 'more'"),
        ({name: file for name, file in valid["weight_map"].items() if name != NAMES[1]}, "differ about"),
        ({**valid["weight_map"], "x": "../secret.safetensors"}, "no safetensors file beside it"),
        ({**valid["weight_map"], "x": "gone.safetensors"}, "not there; is the download complete"),
        ([], "no weight_map"),
        ({}, "no weight_map"),
    ]:
        index.write_text(json.dumps({"weight_map": weight_map}))
        check_refused(match)
    index.write_text("{")
    check_refused("not JSON")
    index.unlink()
    check_refused("3 safetensors files and no model.safetensors.index.json")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(mio.CheckpointError, match="no safetensors file; it has pytorch_model.bin, which holds pickles"):
        mio.TensorFiles(empty)


def test_a_failed_merge_writes_no_directory(tmp_path):
    a, b = (
        write(tmp_path / "a", state(0)),
        write(tmp_path / "b", {**state(1), NAMES[5]: torch.full((6, 6), float("nan"))}),
    )
    with pytest.raises(merge.MergeError, match="NaN"):
        mio.merge_files("linear", [a, b], tmp_path / "out", shard_size=300)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    with pytest.raises(mio.CheckpointError, match="not an empty directory"):
        mio.merge_files("linear", [a, a], b)
    assert "config.json" in os.listdir(b)


def test_damage_is_found_while_merging(tmp_path):
    a, b, out = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    for at, path in enumerate((a, b)):
        mio.save(path, state(at))
    data = bytearray(b.read_bytes())
    data[-5] ^= 1
    b.write_bytes(data)
    with pytest.raises(mio.DamagedFileError, match="do not have the checksum"):
        mio.merge_files("linear", [a, b], out)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_merges_are_written_in_the_requested_dtype(tmp_path):
    a, b = (write(tmp_path / name, state(at)) for at, name in enumerate("ab"))
    mio.merge_files("lerp", [a, b], tmp_path / "c", t=0.5, dtype=torch.float16)
    assert {value.dtype for value in load_tensors(tmp_path / "c").values()} == {torch.float16}
    with pytest.raises(merge.MergeError, match="floating dtype"):
        mio.merge_files("lerp", [a, b], tmp_path / "d", t=0.5, dtype=torch.int8)


# -- layers ------------------------------------------------------------------------------------------------------------


def test_coefficients_are_selected_by_layer():
    spec = merge.layered("layers.0-1:0.25,layers.3:1,*:0.5")
    a, b = state(0), state(1)
    merged = merge.lerp(a, b, spec)
    for name in NAMES:
        t = {"0": 0.25, "1": 0.25, "3": 1.0}.get(name.split(".")[2] if "layers" in name else "", 0.5)
        assert torch.equal(merged[name], merge.lerp(a, b, t)[name]), name
    many = {f"model.layers.{i}.w": torch.zeros(1) for i in range(12)}
    ones = {name: torch.ones(1) for name in many}
    merged = merge.lerp(many, ones, merge.layered("layers.1:1,*:0"))
    assert [name for name, value in merged.items() if value] == ["model.layers.1.w"]
    with pytest.raises(merge.MergeError, match="matches none"):
        merge.lerp(many, ones, merge.layered("layers.20-30:1,*:0"))
    with pytest.raises(merge.MergeError, match=r"no number for 'model.layers.2.w'"):
        merge.lerp(many, ones, merge.layered("layers.0-1:1,layers.3-11:0"))
    for wrong in ("layers.0-3", "0.5", "layers:x", ":1", ""):
        with pytest.raises(merge.MergeError, match="is no number for a layer"):
            merge.layered(wrong)


# -- vocabularies ------------------------------------------------------------------------------------------------------


def test_vocabularies_are_aligned_by_token_or_refused(tmp_path):
    tokens_a, tokens_b = list("abcdefgh"), list("hgxbay")
    first, other = state(0, rows=10), state(1, rows=7)  # both have rows that no token has
    a, b = write(tmp_path / "a", first, tokens=tokens_a), write(tmp_path / "b", other, tokens=tokens_b)
    mio.merge_files("lerp", [a, b], tmp_path / "c", t=0.25)
    merged = load_tensors(tmp_path / "c")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        for at, token in enumerate(tokens_a):
            row = other[name][tokens_b.index(token)] if token in tokens_b else first[name][at]
            assert torch.allclose(merged[name][at], torch.lerp(first[name][at], row, 0.25)), token
        assert torch.equal(merged[name][9], first[name][9])
    assert torch.equal(
        merged[NAMES[1]], merge.lerp(first, {**other, **{n: first[n] for n in (NAMES[0], NAMES[-1])}}, 0.25)[NAMES[1]]
    )
    (b / "tokenizer.json").unlink()
    with pytest.raises(merge.MergeError, match=r"has 10 rows in .* and 7 in .*tokenizer.json; .*b has none"):
        mio.merge_files("lerp", [a, b], tmp_path / "d", t=0.25)


def test_vocabularies_of_one_size_in_another_order_are_aligned_too(tmp_path):
    tokens = list("abcdefghij")
    first = state(0)
    reversed_rows = {name: value.flip(0) if len(value) == 10 else value for name, value in first.items()}
    a, b = write(tmp_path / "a", first, tokens=tokens), write(tmp_path / "b", reversed_rows, tokens=tokens[::-1])
    mio.merge_files("linear", [a, b], tmp_path / "c")
    assert_same(load_tensors(tmp_path / "c"), first)


# -- adapters ----------------------------------------------------------------------------------------------------------


def adapter(folder, seed, rank=2, alpha=8, **config):
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir()
    tensors, deltas = {}, {}
    for name in (NAMES[1], NAMES[4]):
        a, b = torch.randn(rank, 6, generator=generator), torch.randn(6, rank, generator=generator)
        path = name.removesuffix(".weight")
        tensors |= {f"base_model.model.{path}.lora_A.weight": a, f"base_model.model.{path}.lora_B.weight": b}
        scaling = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        deltas[name] = scaling * ((b @ a).T if config.get("fan_in_fan_out") else b @ a)
    head = torch.randn(10, 6, generator=generator)
    tensors["base_model.model.lm_head.weight"] = head  # modules_to_save
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "modules_to_save": ["lm_head"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder, deltas, head


@pytest.mark.parametrize("config", [{}, {"use_rslora": True}, {"fan_in_fan_out": True}])
def test_merging_adapters_equals_merging_the_models_with_them_applied(config, tmp_path):
    base = state(0)
    root = write(tmp_path / "base", base)
    adapters = [adapter(tmp_path / f"lora{at}", at, **config) for at in (1, 2)]
    models_with_adapters = []
    for _, deltas, head in adapters:
        model = {name: value + deltas.get(name, 0) for name, value in base.items()}
        models_with_adapters.append({**model, "lm_head.weight": head})
    paths = [path for path, _, _ in adapters]
    mio.merge_files("task_arithmetic", [root, paths[0]], tmp_path / "applied")
    for name, value in load_tensors(tmp_path / "applied").items():
        assert torch.allclose(value, models_with_adapters[0][name], atol=1e-6), name
    for recipe, options in (
        ("ties", {"density": 0.5}),
        ("linear", {"weights": [1, 2, 3]}),
        ("stock", {}),
        ("karcher", {}),
    ):
        out = tmp_path / recipe
        mio.merge_files(recipe, [root, *paths], out, **options)
        models = [base, *models_with_adapters]
        expected = {
            "ties": lambda: merge.ties(base, models_with_adapters, density=0.5),
            "linear": lambda: merge.linear(models, weights=[1, 2, 3]),
            "stock": lambda: merge.stock(base, models_with_adapters),
            "karcher": lambda: merge.karcher(models),
        }[recipe]()
        for name, value in load_tensors(out).items():
            assert torch.allclose(value, expected[name], atol=1e-5), (recipe, name)
    mio.merge_files("lerp", paths, tmp_path / "between", base=root, t=0.5)
    for name, value in load_tensors(tmp_path / "between").items():
        assert torch.allclose(value, merge.lerp(*models_with_adapters, 0.5)[name], atol=1e-5), name


def test_adapters_that_do_not_fit_are_refused(tmp_path):
    root = write(tmp_path / "base", state(0))
    for at, (config, match) in enumerate(
        [({"peft_type": "IA3"}, "type 'IA3'"), ({"use_dora": True}, "use_dora"), ({"lora_alpha": "x"}, "no number")]
    ):
        path, _, _ = adapter(tmp_path / f"bad{at}", 1, **config)
        with pytest.raises((merge.MergeError, mio.CheckpointError), match=match):
            mio.merge_files("task_arithmetic", [root, path], tmp_path / "out")
    path, _, _ = adapter(tmp_path / "good", 1)
    with pytest.raises(merge.MergeError, match="give the model that it was trained on"):
        mio.merge_files("task_arithmetic", [path, path], tmp_path / "out")
    tensors = load_file(path / "adapter_model.safetensors")
    for extra, match in (
        ({"base_model.model.nowhere.lora_A.weight": torch.ones(2, 6)}, "has only lora_A"),
        ({"base_model.model.strange.weight": torch.ones(2)}, "'strange.weight' is .* not there in the base"),
    ):
        save_file({**tensors, **extra}, path / "adapter_model.safetensors")
        with pytest.raises((merge.MergeError, mio.CheckpointError), match=match):
            mio.merge_files("task_arithmetic", [root, path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- recipes in YAML ---------------------------------------------------------------------------------------------------

TIES = """
# two of three
merge_method: ties
base_model: base
models:
  - model: base
  - model: math
    parameters:
      weight: 0.5
      density: 0.6
  - model: 'code'
    parameters:
      weight: 1
      density: [0.2, 0.8]
parameters:
  normalize: true
  int8_mask: true
dtype: float16
"""


def test_recipes_of_mergekit_are_merged(tmp_path):
    base, math, code = (state(seed) for seed in range(3))
    for name, model in (("base", base), ("math", math), ("code", code)):
        write(tmp_path / name, model)
    (tmp_path / "ties.yml").write_text(TIES)
    mio.merge_recipe(tmp_path / "ties.yml", tmp_path / "out", shard_size=400)

    def truncate(share):
        # mergekit keeps int(density * size) entries.
        def compute_density(name):
            layer = int(name.split(".")[2]) if ".layers." in name else 0
            return (
                int((share if isinstance(share, float) else 0.2 + 0.6 * (layer / 3)) * base[name].numel())
                / base[name].numel()
            )

        return compute_density

    expected = merge.ties(base, [math, code], density=[truncate(0.6), truncate(None)], weights=[0.5, 1.0])
    assert_same(load_tensors(tmp_path / "out"), {name: value.half() for name, value in expected.items()})
    slerp = """
merge_method: slerp
base_model: base
models:
  - model: base
  - model: math
parameters:
  t:
    - filter: attn
      value: [0, 1]
    - value: 0.5
"""
    (tmp_path / "slerp.yaml").write_text(slerp)
    mio.merge_recipe(tmp_path / "slerp.yaml", tmp_path / "second")
    t = {f"*.layers.<{at}-{at}>.*attn*": at / 3 for at in range(4)} | {"*": 0.5}
    assert_same(load_tensors(tmp_path / "second"), merge.slerp(base, math, t))
    # A filter may be any part of a name, including the number of a layer.
    (tmp_path / "slerp.yaml").write_text(
        slerp.replace("attn", "layers.1").replace("- value: 0.5", "- value: [0.5, 0.1]")
    )
    mio.merge_recipe(tmp_path / "slerp.yaml", tmp_path / "fourth")
    falls = {f"*.layers.<{at}-{at}>.*": 0.5 - 0.4 * at / 3 for at in (0, 2, 3)} | {"*": 0.5}
    assert_same(load_tensors(tmp_path / "fourth"), merge.slerp(base, math, {"*.layers.<1-1>.*": 1 / 3, **falls}))
    weights = [f"- model: {name}\n  parameters:\n    weight: {weight}\n" for name, weight in (("math", 1), ("code", 3))]
    linear = "merge_method: linear\nmodels:\n" + "".join(weights)
    (tmp_path / "linear.yml").write_text(linear)
    mio.merge_recipe(tmp_path / "linear.yml", tmp_path / "third")
    assert_same(load_tensors(tmp_path / "third"), merge.linear([math, code], [1, 3]))


TASKS = """
merge_method: {method}
base_model: base
models:
  - model: math
    parameters:
      weight: 0.5
{more}
  - model: code
    parameters:
      weight: 0.25
{more}
parameters:
{shared}
  lambda: 2
"""
HALF = "      density: 0.5"


@pytest.mark.parametrize(
    ("method", "more", "shared", "expected"),
    [
        # The defaults of mergekit: only ties and della normalise, the density is 1, and gamma is 0.01 rounded down.
        ("dare_linear", HALF, "", lambda *m: merge.dare(*m, 0.5, generator=0, normalize=False, **W)),
        ("dare_linear", "", "", lambda *m: merge.task_arithmetic(*m, [1.0, 0.5])),
        ("dare_ties", HALF, "", lambda *m: merge.dare(*m, 0.5, generator=0, normalize=False, then="ties", **W)),
        (
            "dare_ties",
            HALF,
            "  rescale: false\n  normalize: true",
            lambda *m: merge.dare(*m, 0.5, generator=0, rescale=False, then="ties", **W),
        ),
        ("breadcrumbs", HALF, "", lambda *m: merge.breadcrumbs(*m, 0.5, gamma=0.0, **W)),
        ("breadcrumbs", f"{HALF}\n      gamma: 0.2", "", lambda *m: merge.breadcrumbs(*m, 0.5, gamma=0.2, **W)),
        ("breadcrumbs_ties", HALF, "", lambda *m: merge.breadcrumbs(*m, 0.5, gamma=0.0, then="ties", normalize=False, **W)),
        # mergekit's epsilon is half of the range of probabilities; moduli's, as the paper's, is the whole range.
        ("della", HALF, "  epsilon: 0.2", lambda *m: merge.della(*m, 0.5, epsilon=0.4, generator=0, **W)),
        ("della", HALF, "", lambda *m: merge.della(*m, 0.5, epsilon=0.3, generator=0, **W)),
        (
            "della_linear",
            f"{HALF}\n      epsilon: 0.1",
            "",
            lambda *m: merge.della(*m, 0.5, epsilon=0.2, generator=0, then="linear", **W),
        ),
        ("della", "", "", lambda *m: merge.ties(*m, 1.0, **W)),
        ("ties", "", "  rescale: false", lambda *m: merge.ties(*m, 1.0, **W)),
        ("task_arithmetic", "", "  normalize: false", lambda *m: merge.task_arithmetic(*m, [1.0, 0.5])),
    ],
)  # fmt: skip
def test_recipes_of_mergekit_have_its_defaults(method, more, shared, expected, tmp_path):
    models = [state(seed) for seed in range(3)]
    for name, model in zip(("base", "math", "code"), models, strict=True):
        write(tmp_path / name, model)
    (tmp_path / "recipe.yml").write_text(TASKS.format(method=method, more=more, shared=shared))
    mio.merge_recipe(tmp_path / "recipe.yml", tmp_path / "out")
    merged, reference = load_tensors(tmp_path / "out"), expected(models[0], models[1:])
    assert merged.keys() == reference.keys()
    for name, value in reference.items():
        torch.testing.assert_close(merged[name], value)


W = {"weights": [0.5, 0.25], "scale": 2.0}


def test_weights_and_lambda_by_layer_are_multiplied(tmp_path):
    base, math = state(0), state(1)
    write(tmp_path / "base", base)
    write(tmp_path / "math", math)
    text = "merge_method: task_arithmetic\nbase_model: base\nmodels:\n- model: math\n  parameters:\n    weight: [0.3, 0.9]\n"
    grows = {f"*.layers.<{at}-{at}>.*": (0.3 + 0.6 * at / 3) for at in range(4)} | {"*": 0.3}
    for shared, factor in (("2", lambda at: 2.0), ("[1, 4]", lambda at: 1 + at)):
        (tmp_path / "recipe.yml").write_text(f"{text}parameters:\n  lambda: {shared}\n")
        out = tmp_path / f"out{len(shared)}"
        mio.merge_recipe(tmp_path / "recipe.yml", out)
        scale = {
            pattern: number * factor(int(pattern.split("<")[1][0]) if "<" in pattern else 0)
            for pattern, number in grows.items()
        }
        assert_same(load_tensors(out), merge.task_arithmetic(base, [math], [scale]))


SLERP = "merge_method: slerp\nbase_model: base\nmodels:\n  - model: base/model.safetensors.index.json\nparameters:"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("merge_method: passthrough\nmodels: []", "no models to merge"),
        ("merge_method: evolve\nmodels: []", "method 'evolve' is not here"),
        ("merge_method: linear\nmodels: []", "no models to merge"),
        ("merge_method: ties\nslices:\n  - x: 1", "a source has a model and a layer_range"),
        ("merge_method: ties\nmodules: {}", "'modules', which is not merged here"),
        ("merge_method: ties\nmodels:\n  - model: base", "needs a base_model"),
        ("merge_method: linear\nmodels:\n  - model: someone/else", "download it first"),
        (
            "merge_method: linear\nmodels:\n  - model: base\n    parameters:\n      strength: 1",
            "'strength' of a model is not here",
        ),
        ("merge_method: linear\nmodels:\n  - model: base\nparameters:\n  magic: 1", "'magic' is not here"),
        ("merge_method: linear\nmodels:\n  - model: base\ndtype: int4", "dtype 'int4'"),
        (f"{SLERP}\n  t:\n    - filter: atn\n      value: 1\n    - value: 0", "contains the filter 'atn'"),
        (f"{SLERP}\n  t:\n    - filter: attn\n      value: 1", "no value for 'model.embed_tokens.weight'"),
        (f"{SLERP}\n  t: []", "no number|no value"),
        (f"{SLERP}\n  t: [a, 1]", "no filter with a value"),
        ("models: []", "no merge_method"),
        ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a: 1\n   b: 2", "mapping values are not allowed"),
        ("\ta: 1", "cannot start any token"),
        ("just words", "no merge_method"),
        ("merge_method: [ties]\nmodels: []", r"method \['ties'\] is not here"),
        ("merge_method: ties\nbase_model: [base]\nmodels:\n  - model: base", "base_model"),
        ("merge_method: linear\nmodels:\n  - model: base\ndtype: [float16]", "dtype"),
        ("merge_method: linear\nmodels:\n  - model: base\nparameters: 3", "parameters"),
        ("merge_method: linear\nmodels:\n  - model: base\n    parameters: [1]", "parameters"),
        ("merge_method: linear\nmodels:\n  - model: base\nparameters:\n  [1]: 2", "unhashable key"),
        (
            SLERP.replace("slerp", "task_arithmetic") + "\n  rescale: true",
            "'rescale'",
        ),
        ("merge_method: linear\nmodels:\n  - model: base\n  - model: base\nparameters:\n  density: 0.5", "'density'"),
        ("a: " + "[" * 5000, "nested too deeply|cannot be read"),
        ("a: \x00", "cannot be read"),
    ],
)
def test_unsupported_recipes_are_refused_with_the_reason(text, match, tmp_path):
    write(tmp_path / "base", state(0))
    (tmp_path / "recipe.yml").write_text(text)
    with pytest.raises((merge.MergeError, mio.CheckpointError), match=match):
        mio.merge_recipe(tmp_path / "recipe.yml", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_recipe_that_is_no_valid_text_is_refused(tmp_path):
    (tmp_path / "recipe.yml").write_bytes(b"merge_method: \xc3(")
    with pytest.raises(mio.CheckpointError, match="cannot be read"):
        mio.merge_recipe(tmp_path / "recipe.yml", tmp_path / "out")


def test_reading_a_recipe_without_pyyaml_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "recipe.yml").write_text("merge_method: linear")
    with pytest.raises(mio.CheckpointError, match=r"pip install 'moduli\[yaml\]'"):
        mio.merge_recipe(tmp_path / "recipe.yml", tmp_path / "out")


def test_mixtures_of_paths_and_models_are_refused(tmp_path):
    models = [{"w": torch.ones(1)}, {"w": torch.zeros(1)}]
    assert (
        merge.linear(models, buffers="first", integers="equal")["w"] == 0.5
    )  # strings of options are not taken for paths
    assert merge.soup(models)["w"] == 0.5
    assert merge.ties(*models[:1], models[1:], density=1.0, elect="sum", buffers="first")["w"] == 0
    mo.save(tmp_path / "a", {"w": torch.ones(1)})
    with pytest.raises(merge.MergeError, match="out="):
        merge.lerp(tmp_path / "a", tmp_path / "a", 0.5)
    with pytest.raises(merge.MergeError, match="as out="):
        merge.lerp({"w": torch.ones(1)}, {"w": torch.ones(1)}, 0.5, out=tmp_path / "b")
    with pytest.raises(merge.MergeError, match="paths of all models"):
        merge.linear([tmp_path / "a", {"w": torch.ones(1)}], out=tmp_path / "b")
