"""Recipes of mergekit with slices of layers, tokenizers, chat templates and mixtures of experts."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import moduli.io as mio
from moduli import merge

NAMES = [
    "model.embed_tokens.weight",
    *(f"model.layers.{layer}.{part}.weight" for layer in range(4) for part in ("attn", "mlp")),
    "model.norm.weight",
    "lm_head.weight",
]
PASS = """
merge_method: passthrough
slices:
  - sources:
      - model: a
        layer_range: [0, 2]
  - sources:
      - model: b
        layer_range: [1, 4]
"""


def state(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(6, 4, generator=generator) for name in NAMES}


@pytest.fixture
def folder(tmp_path):
    for seed, name in enumerate(("base", "a", "b")):
        write(tmp_path / name, state(seed))
    return tmp_path


def write(place, tensors, tokens="xyz", template=None):
    place.mkdir()
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    config = {"num_hidden_layers": 4, "hidden": 4, "layer_types": [f"{place.name}{layer}" for layer in range(4)]}
    (place / "config.json").write_text(json.dumps(config))
    vocabulary = {"model": {"vocab": {token: at for at, token in enumerate(tokens)}}}
    (place / "tokenizer.json").write_text(json.dumps(vocabulary))
    settings = {"setting": 1} if template is None else {"setting": 1, "chat_template": template}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))


def run(folder, text, **how):
    (folder / "recipe.yml").write_text(text)
    mio.merge_recipe(folder / "recipe.yml", folder / "out", **how)
    files = sorted((folder / "out").glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def test_layers_are_stacked_and_numbered(folder):
    result, a, b = run(folder, PASS, shard_size=300), state(1), state(2)
    assert len([name for name in result if "attn" in name]) == 5
    for layer, (source, number) in enumerate([(a, 0), (a, 1), (b, 1), (b, 2), (b, 3)]):
        for part in ("attn", "mlp"):
            assert torch.equal(
                result[f"model.layers.{layer}.{part}.weight"], source[f"model.layers.{number}.{part}.weight"]
            )
    # Tensors before the layers come from the first slice, tensors after them from the last.
    assert torch.equal(result["model.embed_tokens.weight"], a["model.embed_tokens.weight"])
    assert torch.equal(result["model.norm.weight"], b["model.norm.weight"])
    assert torch.equal(result["lm_head.weight"], b["lm_head.weight"])
    config = json.loads((folder / "out/config.json").read_text())
    assert config == {"num_hidden_layers": 5, "hidden": 4, "layer_types": ["a0", "a1", "a1", "a2", "a3"]}
    assert len(list((folder / "out").glob("*.safetensors"))) > 1


def test_slices_are_merged_with_their_own_parameters(folder):
    text = """
merge_method: slerp
base_model: a
parameters:
  t: 0.1
slices:
  - sources:
      - {model: a, layer_range: [0, 2]}
      - {model: b, layer_range: [2, 4]}
    parameters:
      t: [0.0, 1.0]
  - sources:
      - {model: b, layer_range: [3, 4]}
      - {model: a, layer_range: [0, 1]}
dtype: float64
"""
    result, a, b = run(folder, text), state(1), state(2)

    def layer(tensors, number):
        return {"w": tensors[f"model.layers.{number}.mlp.weight"]}

    # t is 0 at the base, whatever the order of sources.
    for number, (first, second, t) in enumerate([(0, 2, 0.0), (1, 3, 1.0), (0, 3, 0.1)]):
        expected = merge.slerp(layer(a, first), layer(b, second), t)["w"].double()
        assert torch.equal(result[f"model.layers.{number}.mlp.weight"], expected)
    assert torch.equal(result["model.embed_tokens.weight"], a["model.embed_tokens.weight"].double())
    expected = merge.slerp({"w": a["lm_head.weight"]}, {"w": b["lm_head.weight"]}, 0.1)["w"]
    assert torch.equal(result["lm_head.weight"], expected.double())


def test_one_slice_of_all_layers_equals_the_plain_merge(folder):
    sources = "".join(f"      - {{model: {name}, layer_range: [0, 4], parameters: {{weight: 0.5}}}}\n" for name in "ab")
    base = "      - {model: base, layer_range: [0, 4]}\n"
    text = f"merge_method: ties\nbase_model: base\nslices:\n  - sources:\n{base}{sources}"
    expected = merge.ties(state(0), [state(1), state(2)], 1.0, weights=[0.5, 0.5])
    result = run(folder, text)
    assert all(torch.equal(result[name], expected[name]) for name in NAMES)
    assert result.keys() == expected.keys()


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("[1, 4]", "[1, 5]", r"has layer 4, and it has layers 0 to 3"),
        ("[1, 4]", "[4, 1]", "layer_range"),
        ("[1, 4]", "[-1, 2]", "layer_range"),
        ("[1, 4]", "4", "layer_range"),
        ("model: b", "model: nobody", "there is no checkpoint"),
        ("slices:", "models: [{model: a}]\nslices:", "models and slices"),
        ("slices:", "tokenizer: {tokens: {x: {source: a}}}\nslices:", "tokens and pad_to_multiple_of are not done"),
        ("slices:", "tokenizer_source: c\nslices:", "there is no checkpoint"),
        ("slices:", "chat_template: chatml\nslices:", "'chatml' is not here"),
        ("passthrough", "ties\nbase_model: base", "is in no source of a slice"),
        ("      - model: b\n", "      - {model: a, layer_range: [0, 2]}\n      - model: b\n", "one model at a time"),
        ("slices:", "experts: []\nslices:", "'merge_method', which is not done for experts"),
    ],
)
def test_slices_that_do_not_fit_are_refused(old, new, match, folder):
    with pytest.raises(merge.MergeError, match=match):
        run(folder, PASS.replace(old, new))
    assert not (folder / "out").exists()


def test_recipes_with_slices_write_directories_only(folder):
    (folder / "recipe.yml").write_text(PASS)
    with pytest.raises(merge.MergeError, match="is a directory"):
        mio.merge_recipe(folder / "recipe.yml", folder / "out.safetensors")
    with pytest.raises(merge.MergeError, match=r"have \[2, 3\] layers"):
        run(folder, PASS.replace("passthrough", "linear").replace("  - sources:\n      - model: b", "      - model: b"))


LINEAR = "merge_method: linear\nmodels: [{model: a}, {model: more}]\n"


def test_merged_vocabularies_are_those_of_the_first_model(folder):
    write(folder / "more", state(5), tokens="zxyw")
    rows = state(1)["lm_head.weight"]
    other = state(5)["lm_head.weight"]
    for block in ("tokenizer_source: base", "tokenizer: {source: base}", "tokenizer_source: a"):
        result = run(folder, LINEAR + block)["lm_head.weight"]
        # x, y, z of the other model are in its rows 1, 2, 0.
        assert torch.allclose(result[:3], (rows[:3] + other[[1, 2, 0]]) / 2)
        shutil.rmtree(folder / "out")
    # Without a tokenizer_source, the base_model has no effect on a linear merge.
    run(folder, LINEAR + "base_model: more")
    shutil.rmtree(folder / "out")
    for block in (
        "tokenizer_source: union",
        "tokenizer: {}",
        "tokenizer_source: more",
        "base_model: more\ntokenizer_source: base",
    ):
        with pytest.raises(merge.MergeError, match="has the token 'w', which the first model"):
            run(folder, LINEAR + block)
    text = LINEAR.replace("{model: a}, {model: more}", "{model: more}, {model: a}")
    result = run(folder, text + "tokenizer_source: union")["lm_head.weight"]
    # Rows of tokens that only the first model has are unchanged.
    assert torch.allclose(result[[0, 1, 2]], (other[[0, 1, 2]] + rows[[2, 0, 1]]) / 2)
    assert torch.equal(result[3], other[3])


def test_paths_are_relative_to_the_recipe(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    (folder / "recipe.yml").write_text(LINEAR.replace("more", "b") + "tokenizer_source: base\nchat_template: auto\n")
    relative = folder.relative_to(folder.parent)
    mio.merge_recipe(relative / "recipe.yml", relative / "out")
    result, expected = load_file(folder / "out/model.safetensors"), merge.linear([state(1), state(2)])
    assert all(torch.equal(result[name], expected[name]) for name in NAMES)


def test_chat_templates_are_written_into_the_tokenizer(folder):
    for name, template in (("one", "{{ 1 }}"), ("two", "{{ 2 }}"), ("three", "{{ 2 }}")):
        write(folder / name, state(7), template=template)
    text = "merge_method: linear\nmodels: [{model: one}, {model: two}, {model: three}]\nchat_template: "
    for chosen, expected in (("auto", "{{ 2 }}"), ('"{% if x %}y{% endif %}"', "{% if x %}y{% endif %}")):
        run(folder, text + chosen)
        settings = json.loads((folder / "out/tokenizer_config.json").read_text())
        assert settings == {"setting": 1, "chat_template": expected}
        assert json.loads((folder / "out/config.json").read_text())["num_hidden_layers"] == 4
        shutil.rmtree(folder / "out")


# -- mixtures of experts -------------------------------------------------------------------------------------------------


MIXTURE = """
base_model: base
gate_mode: random
dtype: float64
experts_per_token: 1
experts:
  - source_model: a
    positive_prompts: [poems]
  - source_model: b
"""
SHAPES = {"gate_proj": (6, 4), "up_proj": (6, 4), "down_proj": (4, 6)}


@pytest.fixture
def llamas(tmp_path):
    for seed, name in enumerate(("base", "a", "b")):
        generator = torch.Generator().manual_seed(seed)
        tensors = {"model.embed_tokens.weight": torch.randn(5, 4, generator=generator)}
        for layer in range(2):
            tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] = torch.randn(4, 4, generator=generator)
            for part, shape in SHAPES.items():
                tensors[f"model.layers.{layer}.mlp.{part}.weight"] = torch.randn(shape, generator=generator)
        write(tmp_path / name, tensors)
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4}))
    return tmp_path


def test_experts_are_the_layers_of_the_source_models(llamas):
    result = run(llamas, MIXTURE, shard_size=2000)
    base, *experts = (load_file(llamas / name / "model.safetensors") for name in ("base", "a", "b"))
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"):
        assert torch.equal(result.pop(name), base[name].double())
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp"
        stacked = result[f"{prefix}.experts.gate_up_proj"], result[f"{prefix}.experts.down_proj"]
        assert [tuple(each.shape) for each in stacked] == [(2, 12, 4), (2, 4, 6)]
        for at, expert in enumerate(experts):
            assert torch.equal(stacked[0][at, :6], expert[f"{prefix}.gate_proj.weight"].double())
            assert torch.equal(stacked[0][at, 6:], expert[f"{prefix}.up_proj.weight"].double())
            assert torch.equal(stacked[1][at], expert[f"{prefix}.down_proj.weight"].double())
    gates = [result[f"model.layers.{layer}.mlp.gate.weight"] for layer in range(2)]
    assert gates[0].shape == (2, 4)
    assert not torch.equal(*gates)
    config = json.loads((llamas / "out/config.json").read_text())
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "hidden_size": 4}
    assert config == {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **sizes}
    mio.merge_experts(llamas / "base", [llamas / "a", llamas / "b"], llamas / "again", dtype=torch.float64)
    again = load_file(llamas / "again/model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in result.items())


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("gate_mode: random", "gate_mode: hidden", "hidden and cheap_embed run the model"),
        ("gate_mode: random", "gate_mode: cheap_embed", "hidden and cheap_embed run the model"),
        ("gate_mode: random", "", "gate_mode None"),
        ("dtype", "shared_experts: []\ndtype", "'shared_experts', which is not done"),
        ("dtype", "architecture: qwen\ndtype", "it must be mixtral"),
        ("experts_per_token: 1", "experts_per_token: 3", "3 of 2 experts"),
        ("source_model: b", "source_model: nobody", "there is no checkpoint"),
        ("source_model: b", "source_model: odd", r"is \(3, 4\) in"),
        ("base_model: base", "base_model: bert", "of type 'bert'"),
    ],
)
def test_experts_that_do_not_fit_are_refused(old, new, match, llamas):
    tensors = load_file(llamas / "a/model.safetensors")
    write(llamas / "odd", tensors | {"model.layers.1.mlp.gate_proj.weight": torch.ones(3, 4)})
    write(llamas / "bert", tensors)
    (llamas / "bert/config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(merge.MergeError, match=match):
        run(llamas, MIXTURE.replace(old, new))
    assert not (llamas / "out").exists()
