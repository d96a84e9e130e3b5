"""Architectures of `transformers`, from small configurations without weights: every free axis may be permuted."""

import pytest
import torch

import moduli as mo

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
}
TEXT = {
    **SIZES,
    "vocab_size": 50,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "use_cache": False}
IMAGE = {**SIZES, "image_size": 8, "patch_size": 4}
PAIR = {
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 40 for side in ("encoder", "decoder")},
    "vocab_size": 50,
    "d_model": 24,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
GPT2 = {"vocab_size": 50, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32, "use_cache": False}
T5 = {"vocab_size": 50, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4, "use_cache": False}
BLOOM = {"vocab_size": 50, "hidden_size": 24, "n_layer": 2, "n_head": 4, "use_cache": False}

# The class, the configuration, and the axes that must be free: the residual stream, heads, hidden units.
FAMILIES = {
    "GPT2LMHeadModel": (
        GPT2,
        "transformer.wte.out",
        "transformer.h.1.attn.c_attn.head",
        "transformer.h.0.mlp.c_fc.out",
    ),
    "LlamaForCausalLM": (GROUPED, "model.embed_tokens.out", "*.1.self_attn.q_proj.head.0", "*.0.mlp.gate_proj.out"),
    "MistralForCausalLM": (
        {**GROUPED, "sliding_window": 4},
        *("model.embed_tokens.out", "*.0.self_attn.q_proj.head.1", "*.0.mlp.gate_proj.out"),
    ),
    "Qwen2ForCausalLM": (GROUPED, "model.embed_tokens.out", "*.0.self_attn.q_proj.head.0", "*.0.mlp.gate_proj.out"),
    "Qwen3ForCausalLM": (
        {**GROUPED, "head_dim": 6},
        *("model.embed_tokens.out", "*.0.self_attn.q_proj.head.0", "*.0.mlp.gate_proj.out"),
    ),
    "Phi3ForCausalLM": (
        GROUPED,
        "model.embed_tokens.out",
        "*.0.self_attn.qkv_proj.head.0",
        "*.0.mlp.gate_up_proj.out.1",
    ),
    "MixtralForCausalLM": (
        {**GROUPED, "num_local_experts": 4, "experts_implementation": "batched_mm"},
        *("model.embed_tokens.out", "*.0.self_attn.q_proj.head.0", "*.0.mlp.experts.gate_up_proj.out.1"),
        "*.0.mlp.gate.out",  # experts
    ),
    "GPTNeoXForCausalLM": (
        TEXT,
        "gpt_neox.embed_in.out",
        "*.0.attention.query_key_value.head",
        "*.0.mlp.dense_h_to_4h.out",
    ),
    # The biases of attention heads are computed from their index, so that heads are fixed.
    "BloomForCausalLM": (BLOOM, "transformer.word_embeddings.out", "*.0.mlp.dense_h_to_4h.out"),
    "MambaForCausalLM": (
        {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "state_size": 4, "use_cache": False},
        *("backbone.embeddings.out", "*.0.mixer.in_proj.out.1"),
    ),
    "BertForMaskedLM": (TEXT, "*.word_embeddings.out", "*.0.attention.self.query.head", "*.1.intermediate.dense.out"),
    "RobertaForMaskedLM": (
        TEXT,
        "*.word_embeddings.out",
        "*.0.attention.self.query.head",
        "*.1.intermediate.dense.out",
    ),
    "ElectraForMaskedLM": (
        {**TEXT, "embedding_size": 16},
        *("*.word_embeddings.out", "electra.embeddings_project.out", "*.0.attention.self.query.head"),
    ),
    "ViTForImageClassification": (IMAGE, "*.projection.out", "*.0.attention.q_proj.head", "*.0.mlp.fc1.out"),
    "T5ForConditionalGeneration": (T5, "shared.out", "encoder.block.0.layer.0.SelfAttention.q.head"),
    "BartForConditionalGeneration": (PAIR, "model.shared.out", "model.decoder.layers.0.encoder_attn.q_proj.head"),
    "WhisperForConditionalGeneration": (
        {**PAIR, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16},
        *("model.encoder.conv1.out", "model.decoder.embed_tokens.out", "model.encoder.layers.1.self_attn.q_proj.head"),
    ),
    "CLIPModel": (
        {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 20},
        *(
            "visual_projection.out",
            "text_model.embeddings.token_embedding.out",
            "vision_model.*.0.self_attn.q_proj.head",
        ),
    ),
    "ResNetForImageClassification": (
        {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 2], "layer_type": "basic"},
        *("resnet.embedder.embedder.convolution.out", "resnet.encoder.stages.0.layers.0.layer.0.convolution.out"),
    ),
}


def make(name):
    model = getattr(transformers, name)
    net = model(model.config_class(**FAMILIES[name][0])).eval()
    ids, pixels = (
        torch.randint(3, 40, (2, 7)),
        torch.randn(2, 3, 32 if "ResNet" in name else 8, 32 if "ResNet" in name else 8),
    )
    if name == "WhisperForConditionalGeneration":
        return net, {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": ids}
    if name == "CLIPModel":
        return net, {"input_ids": ids, "pixel_values": pixels}
    if "ImageClassification" in name:
        return net, {"pixel_values": pixels}
    return net, {"input_ids": ids, **({"decoder_input_ids": ids} if "ConditionalGeneration" in name else {})}


def read(result):
    return result["logits_per_image"] if "logits_per_image" in result else result["logits"]


@pytest.mark.parametrize("name", FAMILIES)
def test_permuting_free_axes_does_not_change_the_output(name):
    torch.manual_seed(0)
    net, inputs = make(name)
    ax = mo.axes.trace(net, kwargs=inputs, output=read)
    assert mo.axes.check(net, axes=ax, kwargs=inputs, output=read) < 1e-5
    assert ax.unknown == ()
    for pattern in FAMILIES[name][1:]:
        matching = [ax[axis] for axis in ax if mo.layout.match_name(axis, [pattern])]
        assert matching, f"{name} has no axis {pattern}"
        assert all(axis.free for axis in matching), pattern


def test_parameters_of_a_decoder_have_roles():
    net, inputs = make("LlamaForCausalLM")
    roles = {name: each.role for name, each in mo.axes.trace(net, kwargs=inputs, output=read).parameters.items()}
    assert {name for name, role in roles.items() if role == "hidden"} == {
        name for name, param in net.named_parameters() if param.dim() == 2 and "layers" in name
    }
    assert roles["model.embed_tokens.weight"] == "input"
    assert roles["lm_head.weight"] == "output"


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("LlamaForCausalLM", {"model.embed_tokens.out": 48, "*.head.0": 4, "*.mlp.gate_proj.out": 50}),
        ("Qwen2ForCausalLM", {"model.embed_tokens.out": 48, "*.head.1": 4}),
        ("BertForMaskedLM", {"*.intermediate.dense.out": 50}),
    ],
)
def test_grown_models_compute_the_same_outputs(name, sizes):
    torch.manual_seed(0)
    net, inputs = make(name)
    net.eval()
    ax = mo.axes.trace(net, kwargs=inputs, output=read)
    with torch.no_grad():
        before = read(net(**inputs))
        mo.particles.grow(net, sizes, ax, kwargs=inputs)
        torch.testing.assert_close(read(net(**inputs)), before, rtol=1e-5, atol=1e-5)
