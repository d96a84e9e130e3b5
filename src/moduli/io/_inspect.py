"""`inspect`: the contents of a checkpoint, without loading it."""

import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

from torch import Tensor

from ..layout import list_names, public_name
from ..particles import CONFIG_KEY as CONFIG
from ..particles import EditHistory
from ._basics import PathLike, name_file
from ._load import TorchFile, open_file
from ._read import PARTS, SavedFile
from ._safetensors import dtype_name
from ._tree import tensor_names

_MOST_VALUES, _MOST_LETTERS, _MOST_NOTES = 16, 200, 64


@dataclass(frozen=True)
class TensorInfo:
    """One tensor in a checkpoint.

    Attributes:
        name: Its name.
        part: The part that it belongs to: "module", "optimizer", "population", "scheduler", "extra" or "rng".
        dtype: Its dtype, without `torch.`.
        shape: Its shape.
        nbytes: The number of its bytes in the file.
        labels: Its axes, if it is labelled: for each its `name` and its `labels` or their `range`.
        tied: Its other names.
        values: Its values as nested lists, if it has at most sixteen; None otherwise. Complex numbers, NaN and infinity, which
            JSON does not have, are text.
    """

    name: str
    part: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    labels: list[dict[str, Any]] | None = None
    tied: tuple[str, ...] = ()
    values: Any = None


@dataclass(frozen=True)
class Description:
    """The contents of a file, the result of `inspect`. `str` gives a text to read, `as_dict` plain data.

    Attributes:
        path: The file.
        size: Its size in bytes.
        format: "moduli", "safetensors" or "torch".
        made: The versions of the software that wrote it, and the number of threads.
        parts: Its parts, with the class of each.
        tensors: Every tensor in it.
        version: The version of the module's structure: the number of edits of its species.
        history: The edits, as sentences.
        virtual: The names of the module's virtual tensors.
        frozen: The names of its parameters that did not require gradients.
        config: The configurations of its parameters that are not the default, by name.
        extra: The keys of the saved `extra`, if it is a dict.
        notes: The numbers and texts in it, by dotted key: the first 64.
        edits: The edits, with their numbers, places and times; it prints as a table.
        checksums: "none", "present", or "verified".
    """

    path: str
    size: int
    format: str
    made: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    tensors: tuple[TensorInfo, ...] = ()
    version: int = 0
    history: tuple[str, ...] = ()
    virtual: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    checksums: str = "none"
    notes: dict[str, Any] = field(default_factory=dict)
    edits: EditHistory = field(default_factory=EditHistory)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain dicts and lists, for JSON.

        Example:
            >>> import os, tempfile, torch
            >>> import moduli.io as io
            >>> path = os.path.join(tempfile.mkdtemp(), "net.safetensors")
            >>> io.save(path, torch.nn.Linear(3, 2))
            >>> io.inspect(path).as_dict()["tensors"][1]["name"]
            'bias'
        """
        edits = [{"number": e.number, "what": e.what, "where": e.where, "when": e.when} for e in self.edits]
        return dict(_to_json({**asdict(replace(self, edits=EditHistory())), "edits": edits}))

    @property
    def parameters(self) -> int:
        """The number of elements of the module's tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors if tensor.part == "module")

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.format} file of {self.size:,} bytes, checksums {self.checksums}"]
        if self.made:
            lines.append("made by " + ", ".join(f"{key} {_format_value(value)}" for key, value in self.made.items()))
        lines += [f"{part}: {kind}" for part, kind in self.parts.items()]
        lines += self._list_history()
        for label, names in (("virtual", self.virtual), ("frozen", self.frozen), ("extra", self.extra)):
            if names:
                lines.append(f"{label}: {list_names(names)}")
        lines += [f"  {key}: {_format_value(value)}" for key, value in self.notes.items()]
        lines += [f"{name}: {_format_value(values)}" for name, values in self.config.items()]
        width = max((len(tensor.name) for tensor in self.tensors), default=0)
        for tensor in self.tensors:
            axes = "" if tensor.labels is None else "  [" + ", ".join(map(_axis, tensor.labels)) + "]"
            tied = "" if not tensor.tied else f"  = {', '.join(tensor.tied)}"
            lines.append(f"  {tensor.name:{width}}  {tensor.dtype:10} {list(tensor.shape)}{axes}{tied}")
            if tensor.values is not None:
                lines.append(f"  {'':{width}}  = {_format_values(tensor.values, tensor.labels)}")
        return "\n".join(map(escape, lines))

    def _list_history(self) -> list[str]:
        """Return the lines about the last edits."""
        if not self.history:
            return []
        before = len(self.history) - _MOST_NOTES
        head = f"version {self.version}:" + (f" after {before} edits that are not shown" if before > 0 else "")
        return [head, *(f"  {sentence}" for sentence in self.history[-_MOST_NOTES:])]


def escape(text: str) -> str:
    """Return a line with all unprintable characters escaped, so that a file can't send control codes to a terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _format_value(value: Any) -> str:
    """Return a value of a file as text of limited length."""
    try:
        text = str(value)
    except ValueError:  # Python prints no integer of more than a few thousand digits
        return "(too large to print)"
    return text if len(text) <= _MOST_LETTERS else text[:_MOST_LETTERS] + "..."


def _axis(axis: dict[str, Any]) -> str:
    name = axis.get("name") or "_"
    if "labels" in axis:
        return f"{name}: {list_names(map(_format_value, axis['labels']))}"
    return f"{name}: {range(*axis['range'])}" if "range" in axis else str(name)


def _format_values(values: Any, axes: list[dict[str, Any]] | None) -> str:
    """Return the values of a small tensor as text, with the labels of its axis if it has one axis."""
    if not isinstance(values, list):
        return f"{values:.6g}" if isinstance(values, float) else str(values)
    axis = axes[0] if axes is not None and len(axes) == 1 else {}
    labels = range(*axis["range"]) if "range" in axis else axis.get("labels")
    texts = [_format_values(each, None) for each in values]
    if labels is None:
        return f"[{', '.join(texts)}]"
    return ", ".join(f"{_format_value(label)}: {each}" for label, each in zip(labels, texts, strict=True))


def _to_json(value: Any) -> Any:
    """Return a value of a file as JSON; types that JSON does not have become text."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else _format_value(key): _to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(each) for each in value]
    small = isinstance(value, int) and abs(value) < 2**63
    if value is None or small or isinstance(value, str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return _format_value(value)


def inspect(path: PathLike, *, verify: bool = False) -> Description:
    """Describe the contents of a file: tensors with their labels, ties, versions, and everything saved beside them.

    Args:
        path: A checkpoint, or a file written by `safetensors` or `torch.save`.
        verify: Whether to compare all tensors with their checksums. Otherwise only the smallest tensors are read.

    Raises:
        OSError: If the file cannot be opened.
        CheckpointError: If it is damaged.

    Example:
        >>> import os, tempfile, torch
        >>> import moduli.io as io
        >>> path = os.path.join(tempfile.mkdtemp(), "net.safetensors")
        >>> io.save(path, torch.nn.Linear(3, 2), extra={"epoch": 3})
        >>> found = io.inspect(path)
        >>> found.parameters, found.parts["module"], found.extra
        (8, 'torch.nn.modules.linear.Linear', ('epoch',))
        >>> print(found)  # doctest: +ELLIPSIS
        /...net.safetensors: moduli file of ... bytes, checksums present
        made by ...
        module: torch.nn.modules.linear.Linear
        extra: 'epoch'
          epoch: 3
          weight  float32    [2, 3]
                  = [[...], [...]]
          bias    float32    [2]
                  = [...]
    """
    with name_file(os.fspath(path)):
        saved = open_file(path)
        content = saved.content
        checked = "verified" if verify and saved.compare(saved.slots) else "present"
        checked = "none" if saved.checksums() is None else checked
        infos = _list_tensors(saved)
    extra = content.get("extra")
    kind = "torch" if isinstance(saved, TorchFile) else "moduli" if saved.ours else "safetensors"
    return Description(
        saved.path,
        saved.size,
        kind,
        content.get("made", {}),
        _parts(saved) if kind == "moduli" else {},
        tuple(infos),
        len(saved.history),
        tuple(f"version {event.number}: {event.sentence}" for event in saved.history),
        tuple(saved.part.get("virtual", [])),
        tuple(saved.part.get("frozen", [])),
        _list_configs(saved),
        tuple(extra) if isinstance(extra, dict) else (),
        checked,
        dict(islice(_notes(extra), _MOST_NOTES)),
        EditHistory(saved.history),
    )


def _list_tensors(saved: SavedFile) -> list[TensorInfo]:
    """Describe the tensors of a file; the values of small ones are compared with their checksums."""
    owners = {name: part for part in (*PARTS, "extra", "rng") for name in tensor_names(saved.content.get(part))}
    sizes = {name: math.prod(saved.shape(name)) for name in saved.slots}
    small = {name for name, size in sizes.items() if name not in owners and 0 < size <= _MOST_VALUES}
    saved.compare(small)
    return [
        TensorInfo(
            name,
            owners.get(name, "module"),
            dtype_name(saved.dtype(name)),
            saved.shape(name),
            sizes[name] * saved.dtype(name).itemsize,
            saved.labels.get(public_name(name)),
            tuple(other for other, first in saved.ties.items() if first == name),
            _to_json(_list_values(saved[name])) if name in small else None,
        )
        for name in saved.slots
    ]


def _list_configs(saved: SavedFile) -> dict[str, Any]:
    """Return the configurations of parameters by dotted name."""
    return {
        f"{path}.{name}" if path else name: values
        for path, entry in saved.metadata.items()
        for name, values in entry.get(CONFIG, {}).items()
    }


def _list_values(tensor: Tensor) -> Any:
    return (tensor.double() if tensor.is_floating_point() else tensor).tolist()


def _notes(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the numbers, texts and short lists of numbers in an encoded tree, by dotted key."""
    if isinstance(node, dict):
        for key, each in node.items():
            if not key.startswith("$"):
                yield from _notes(each, f"{path}.{key}" if path else key)
    elif path:
        numbers = node[: _MOST_VALUES + 1] if isinstance(node, list) else []
        if len(numbers) <= _MOST_VALUES and all(isinstance(each, int | float) for each in numbers):
            yield path, node


def _parts(saved: SavedFile) -> dict[str, str]:
    kinds_by_part = {"module": str(saved.part.get("class", "a state dict"))} if "module" in saved.content else {}
    for part in PARTS:
        kinds = {name: str(each.get("class")) for name, each in saved.objects(part).items()}
        if kinds:
            kinds_by_part[part] = kinds.get(None) or ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    if "rng" in saved.content:
        kinds_by_part["rng"] = "random states of torch, NumPy and Python"
    return kinds_by_part
