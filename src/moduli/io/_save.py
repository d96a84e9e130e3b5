"""`save`: writing a checkpoint."""

import json
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._encoding import encode
from .._texts import shorten
from ..layout import any_sharded, find_group, gather_objects, is_sharded, make_whole
from . import _module
from ._basics import CheckpointError, PathLike
from ._optimizer import describe, parameter_names
from ._read import PARTS
from ._safetensors import CONTENT, FORMAT, describe_stored, dtype_name, write_tensors
from ._tree import Tensors, class_name, collect_random


def save(
    path: PathLike,
    module: nn.Module | Mapping[str, Any] | None = None,
    *,
    optimizer: Any = None,
    population: Any = None,
    scheduler: Any = None,
    extra: Any = None,
    rng: bool | None = None,
    checksums: bool = True,
    fsync: bool = True,
) -> None:
    """Write a checkpoint: one safetensors file, all of it or nothing.

    It has everything that `load` needs for an exact continuation: parameters and buffers with their labels, ties and
    configurations, the version of the structure and its edits, the state of optimizer, population and scheduler, and the
    random states of torch, NumPy and Python. The file is written beside the old one, synced to the disk and renamed. No
    copy of the model is made.

    For a sharded model (DTensors of FSDP2 or tensor parallel) the file has whole tensors, and loads in any number of
    processes. All processes with shards must call `save`; one tensor after the other is gathered, and the first process writes.

    Any program that reads safetensors can read the tensors of the module, under their names in the state dict.

    Args:
        path: The file. An old one stays intact until the new one is complete.
        module: A module, or a state dict.
        optimizer: An optimizer of moduli or torch, any other object with `state_dict`, or a dict of such by name.
        population: A population, or a dict of several.
        scheduler: A scheduler, or a dict of several.
        extra: Anything made of numbers, strings, tensors, arrays, generators, and lists, tuples, sets and dicts of them;
            objects in it that have `state_dict` and `load_state_dict`, such as a `GradScaler`, are saved by it.
        rng: Whether to save random states; by default, if an optimizer or a population is saved.
        checksums: Whether to write a checksum for each tensor.
        fsync: Whether to wait for the disk. Without it a loss of power, though no crash of the program, may lose both
            the old file and the new one.

    Raises:
        CheckpointError: If something cannot be saved without pickle, or the file cannot be written. The old one is
            unchanged then, unless the error says that it was replaced.
        ValueError: If the name of a tensor has a lone surrogate in it. Nothing was written.

    Example:
        >>> import os, tempfile, torch
        >>> import moduli.io as io
        >>> path = os.path.join(tempfile.mkdtemp(), "net.safetensors")
        >>> net = torch.nn.Linear(2, 1)
        >>> io.save(path, net, extra={"epoch": 3})
        >>> other = torch.nn.Linear(2, 1)
        >>> io.load(path, other).extra
        {'epoch': 3}
        >>> torch.equal(other.weight, net.weight)
        True
    """
    tensors = Tensors()
    content: dict[str, Any] = {}
    stored: dict[str, Tensor] = {}
    if module is not None:
        stored, content["module"] = _module.collect(module, tensors)
    names = parameter_names(module)
    for part, value in zip(PARTS, (optimizer, population, scheduler), strict=True):
        if value is not None:
            content[part] = _part(part, value, names, tensors)
    if extra is not None:
        content["extra"] = encode(extra, ("extra",), tensors)
    if rng or (rng is None and (optimizer is not None or population is not None)):
        content["rng"] = encode(collect_random(), ("rng",), tensors)
        pieces = [*stored.values(), *tensors.found.values()]
        if any_sharded(pieces):
            content["rng_by_rank"] = encode(gather_objects(collect_random(), pieces), ("rng_by_rank",), tensors)
    if not content:
        raise CheckpointError(f"there is nothing to save in {str(path)!r}: give a module, an optimizer or others")
    every = {**stored, **tensors.found}

    def write(stream: Iterable[tuple[str, Tensor]]) -> None:
        like = [(name, *describe_stored(tensor, name)) for name, tensor in every.items()]
        views = {name: dtype_name(tensor.dtype) for name, tensor in every.items() if tensor.is_complex()}
        metadata = describe_content({**content, "views": views} if views else content)
        write_tensors(path, stream, like, metadata, checksums=checksums, fsync=fsync)

    if any_sharded(every.values()):
        _write_together(path, every, write)
    else:
        write(every.items())


def describe_content(content: dict[str, Any]) -> dict[str, str]:
    """Return the metadata of a file: its content beside tensors, and the versions of the software."""
    versions = {
        "moduli": str(getattr(sys.modules.get("moduli"), "__version__", "")),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }
    whole = {"format": FORMAT, "made": versions, **content}
    return {"format": "pt", CONTENT: json.dumps(whole, separators=(",", ":"), allow_nan=False)}


def _part(part: str, value: Any, names: Mapping[int, list[str]], tensors: Tensors) -> dict[str, Any]:
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise CheckpointError(f"{part}= has the keys {shorten(list(value))}; a dict of several has names for keys")
        return {"many": {name: _one((part, name), each, names, tensors) for name, each in value.items()}}
    return _one((part,), value, names, tensors)


def _one(path: tuple[str, ...], value: Any, names: Mapping[int, list[str]], tensors: Tensors) -> dict[str, Any]:
    state = getattr(value, "named_state_dict", value.state_dict)()
    description = {"class": class_name(value), "state": encode(state, path, tensors)}
    metadata = getattr(state, "_metadata", {})
    labels = {path: entry["labels"] for path, entry in metadata.items() if entry.get("labels")}
    if path[0] == "population" and labels:
        description["labels"] = labels
    if path[0] == "optimizer" and hasattr(value, "param_groups"):
        description |= describe(value, state, names)
    return description


def _write_together(
    path: PathLike, tensors: Mapping[str, Tensor], write: Callable[[Iterable[tuple[str, Tensor]]], None]
) -> None:
    """Write tensors, some of which are DTensors; return in every process after the file was written.

    Args:
        path: The file, for errors.
        tensors: The tensors by name, in every process the same ones in the same order.
        write: Writes whole tensors, one at a time; called in one process.

    Raises:
        CheckpointError: In every process, if writing fails, or processes save different tensors.
    """
    asked = gather_objects([name for name, tensor in tensors.items() if is_sharded(tensor)], tensors.values())
    if any(names != asked[0] for names in asked):
        raise CheckpointError(f"the processes save different tensors in {str(path)!r}; call save alike in all of them")
    writes = torch.distributed.get_rank(find_group(tensors.values())) == 0
    stream = ((name, make_whole(each.detach())) for name, each in tensors.items() if writes or is_sharded(each))
    failure: Exception | None = None
    try:
        if writes:
            write(stream)
    except Exception as error:  # noqa: BLE001 - raised below, after the other processes have been served
        failure = error
    for _ in stream:
        pass  # gather the remaining tensors, for which the other processes wait
    failures = gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}", tensors.values())
    if failure is not None:
        raise failure
    if failures[0] is not None:
        raise CheckpointError(f"{str(path)!r} could not be written by the first process: {failures[0]}")
