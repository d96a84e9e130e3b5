"""Mixtures of experts: a Mixtral from one Llama or Mistral model, with the MLPs of several models as experts, and random gates.

The tensors are named and stacked as in transformers 5: `mlp.experts.gate_up_proj` of shape (experts, 2 x inner, hidden),
`mlp.experts.down_proj` of shape (experts, hidden, inner), and the gate `mlp.gate.weight` of shape (experts, hidden).
"""

import json
import re
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from .._texts import shorten
from ..merge import MergeError
from ._basics import PathLike, parse_json
from ._files import TensorFiles, side_files, write_directory
from ._merge import announce, convert
from ._open import read_bytes
from ._safetensors import Announced

_PARTS: Final = ("gate_proj", "up_proj", "down_proj")
_MLP: Final = re.compile(rf"(.+\.layers\.[0-9]+\.mlp)\.({'|'.join(_PARTS)})\.weight")
_KINDS: Final = ("llama", "mistral")
_CONFIG: Final = "config.json"


def merge_experts(
    base: PathLike,
    experts: Sequence[PathLike],
    out: PathLike,
    *,
    experts_per_token: int = 2,
    seed: int = 0,
    shard_size: int | None = None,
    dtype: torch.dtype | None = None,
    fsync: bool = True,
) -> None:
    """Write a mixture of experts: one model without its MLPs, the MLPs of others as experts, and random gates to be trained.

    Args:
        base: The directory of a Llama or Mistral model. It gives attention, norms and embeddings.
        experts: The directories of at least two models of the same structure.
        out: The directory to write, with the side files of the base and the configuration of a Mixtral.
        experts_per_token: The number of experts per token.
        seed: The seed of the gates, whose entries are from the standard normal distribution.
        shard_size: The largest number of bytes of tensors in a file.
        dtype: The floating dtype of the result; without it, that of the base.
        fsync: Whether to wait for the disk.

    Raises:
        MergeError: If the models do not fit. Nothing is written then.
        CheckpointError: If a file is damaged, or the result cannot be written.

    Example:
        >>> import json, pathlib, tempfile, torch
        >>> from safetensors.torch import save_file
        >>> import moduli.io as io
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> shapes = {"model.norm.weight": (4,), "model.layers.0.mlp.gate_proj.weight": (6, 4)}
        >>> shapes |= {"model.layers.0.mlp.up_proj.weight": (6, 4), "model.layers.0.mlp.down_proj.weight": (4, 6)}
        >>> for name in ("a", "b"):
        ...     (folder / name).mkdir()
        ...     save_file({key: torch.randn(shape) for key, shape in shapes.items()}, folder / name / "model.safetensors")
        ...     _ = (folder / name / "config.json").write_text('{"model_type": "llama"}')
        >>> io.merge_experts(folder / "a", [folder / "a", folder / "b"], folder / "mixture")
        >>> {name.removeprefix("model."): tuple(value.shape) for name, value in io.TensorFiles(folder / "mixture").items()}
        {'norm.weight': (4,), 'layers.0.mlp.experts.gate_up_proj': (2, 12, 4), 'layers.0.mlp.experts.down_proj': (2, 4, 6), \
'layers.0.mlp.gate.weight': (2, 4)}
    """
    home = Path(base)
    if not 1 <= experts_per_token <= len(experts) or len(experts) < 2:
        raise MergeError(
            f"experts_per_token is {experts_per_token} of {len(experts)} experts; there are two or more, and no fewer"
        )
    config = _make_config(home, len(experts), experts_per_token)
    first, *others = (TensorFiles(path) for path in (home, *experts))
    layers = _check_layers(first, others)
    like: Announced = [
        announce(name, first.meta(name), dtype, pairs=False) for name in first if _MLP.fullmatch(name) is None
    ]
    for layer in layers:
        gate, _, down = (first.meta(f"{layer}.{part}.weight") for part in _PARTS)
        inner, hidden = gate.shape
        for name, shape in (
            ("experts.gate_up_proj", (len(others), 2 * inner, hidden)),
            ("experts.down_proj", (len(others), *down.shape)),
            ("gate.weight", (len(others), hidden)),
        ):
            like.append(
                announce(f"{layer}.{name}", torch.empty(shape, dtype=gate.dtype, device="meta"), dtype, pairs=False)
            )
    values = _compute(first, others, layers, seed)
    texts = {_CONFIG: json.dumps(config, indent=2).encode() + b"\n"}
    merged = ((name, convert(value, dtype)) for name, value in values)
    write_directory(Path(out), merged, like, side_files(home), shard_size=shard_size, fsync=fsync, texts=texts)


def _make_config(home: Path, count: int, experts_per_token: int) -> dict[str, Any]:
    """Return the configuration of a Mixtral with the sizes of the base."""
    file = home / _CONFIG
    if not file.is_file():
        raise MergeError(f"{str(home)!r} has no {_CONFIG}, which says what kind of model it is")
    config: dict[str, Any] = parse_json(read_bytes(file), f"{str(file)!r}")
    kind = config.get("model_type")
    if kind not in _KINDS or config.get("mlp_bias") or config.get("attention_bias"):
        raise MergeError(
            f"{str(file)!r} is of a model of type {shorten(kind)}; experts are put together of plain {' and '.join(_KINDS)} "
            "models, without biases"
        )
    return config | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": count,
        "num_experts_per_tok": experts_per_token,
    }


def _check_layers(first: TensorFiles, others: Sequence[TensorFiles]) -> list[str]:
    """Return the prefixes of the MLPs of the base, in order.

    Raises:
        MergeError: If it has none, or those of an expert differ.
    """
    layers = list(dict.fromkeys(match[1] for name in first if (match := _MLP.fullmatch(name)) is not None))
    if not layers:
        raise MergeError(f"{str(first.path)!r} has no layers with an mlp of {', '.join(_PARTS)}")
    for name in (f"{layer}.{part}.weight" for layer in layers for part in _PARTS):
        for each in (first, *others):
            here = tuple(each.meta(name).shape) if name in each else "not there"
            wanted = tuple(first.meta(name).shape) if name in first else "there"
            if here != wanted:
                raise MergeError(f"{shorten(name)} is {here} in {str(each.path)!r} and {wanted} in {str(first.path)!r}")
    return layers


def _compute(
    first: TensorFiles, others: Sequence[TensorFiles], layers: Sequence[str], seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Compute the tensors of the mixture one after the other."""
    for name in first:
        if _MLP.fullmatch(name) is None:
            yield name, first[name]
    for layer in layers:
        gates, ups, downs = ([each[f"{layer}.{part}.weight"] for each in others] for part in _PARTS)
        dtype = first.meta(f"{layer}.gate_proj.weight").dtype
        yield (
            f"{layer}.experts.gate_up_proj",
            torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)]).to(dtype),
        )
        yield f"{layer}.experts.down_proj", torch.stack(downs).to(dtype)
        key = blake2b(f"{seed}\0{layer}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
        yield f"{layer}.gate.weight", torch.randn(len(others), gates[0].shape[1], generator=generator).to(dtype)
