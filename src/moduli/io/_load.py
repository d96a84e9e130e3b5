"""`load` and `read`: everything is read and checked first, then all of it is applied, or nothing."""

import copy
import errno
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._loading import allow_labels
from .._texts import cut, shorten
from ..axes import ModelAxes
from ..layout import Guard, NameMap
from ._basics import CheckpointError, DamagedFileError, PathLike, name_file
from ._module import Match, collect, make_rename, plan
from ._open import read_regular
from ._optimizer import StateFitter, parameter_names
from ._read import LABELS, PARTS, SavedFile, is_label_table
from ._tree import Tensors, class_name, collect_random, is_stateful, restore_random, tensor_names

# The first bytes of files of `torch.save`, zipped and old. As the length of a header they would mean more than 2**40 bytes.
_ZIP = b"PK\x03\x04"
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF"


@dataclass(frozen=True)
class Loaded:
    """The result of `load`.

    Attributes:
        extra: The saved `extra`. Objects with a state are represented by their state dicts.
        fresh: Names in the module and the optimizer that were not changed, because the checkpoint has nothing for
            them; also links of the optimizer, as "link 1.Adam".
        dropped: Names of the module or the optimizer in the checkpoint that were not used; also links.
        converted: Names whose values were converted to the module's dtype.
        verified: Whether there were checksums, and they were compared.
    """

    extra: Any = None
    fresh: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    verified: bool = False


@dataclass(frozen=True)
class Contents:
    """Everything in a checkpoint, the result of `read`: state dicts, copied into memory.

    Attributes:
        module: The state dict of the module, with labels and configurations in its `_metadata`; None if there is none.
        optimizer: The state dict of the optimizer, or several by name.
        population: The state dict of the population, or several by name.
        scheduler: The state dict of the scheduler, or several by name.
        extra: The saved `extra`.
        rng: The random states.
    """

    module: Any = None
    optimizer: Any = None
    population: Any = None
    scheduler: Any = None
    extra: Any = None
    rng: Any = None


def load(
    path: PathLike,
    module: nn.Module | None = None,
    *,
    optimizer: Any = None,
    population: Any = None,
    scheduler: Any = None,
    extra: Any = None,
    mapping: NameMap | None = None,
    strict: bool = True,
    axes: ModelAxes | None = None,
    rng: bool | None = None,
    checksums: bool = True,
) -> Loaded:
    """Load a checkpoint into objects, all of it or nothing.

    The whole file is checked before anything is changed; no code in it is run. If an object
    raises, those that were loaded before it are restored.
    Files written by `safetensors` or `torch.save` load into `module`, the latter with `weights_only=True`.
    A sharded model (DTensors of FSDP2 or tensor parallel) keeps its placements: every process reads the file, and slices
    its shards.

    Parameters are matched by name, in the module and in the optimizer. A name on one side only, or another shape,
    raises, unless an edit of the module's species since the checkpoint was written explains it.

    Args:
        path: The file.
        module: The module to load into.
        optimizer: The optimizer to load into, or a dict of several, as they were saved.
        population: The population to load into, or a dict of several.
        scheduler: The scheduler to load into, or a dict of several.
        extra: A dict or list like the saved `extra`, with the objects and generators to load into.
        mapping: New names for names in the checkpoint: a dict from names of tensors, or of modules for everything
            below them, or a function. None as the new name drops it.
        strict: Whether mismatches raise. Otherwise unmatched names are not changed, and listed in the result.
        axes: The axes of the module, for loading a checkpoint of a model with other numbers of units: units in both are loaded,
            matched by label if there are labels, otherwise by position; other units keep their values.
        rng: Whether to restore the random states; by default, if an optimizer or a population is loaded and they are in the file.
        checksums: Whether to compare the loaded tensors with their checksums.

    Returns:
        The saved `extra`, and the names that did not match.

    Raises:
        OSError: If the file cannot be opened.
        CheckpointError: If it is damaged (`DamagedFileError`), or does not fit. Nothing has changed then.

    Example:
        >>> import os, tempfile, torch
        >>> import moduli.io as io
        >>> path = os.path.join(tempfile.mkdtemp(), "net.safetensors")
        >>> io.save(path, torch.nn.Sequential(torch.nn.Linear(2, 1)))
        >>> _ = io.load(path, torch.nn.ModuleDict({"head": torch.nn.Linear(2, 1)}), mapping={"0": "head"})
        >>> io.load(path, torch.nn.ModuleDict({"head": torch.nn.Linear(2, 1)}), strict=False).fresh
        ('head.weight', 'head.bias')
    """
    objects = {"optimizer": optimizer, "population": population, "scheduler": scheduler}
    objects = {part: value for part, value in objects.items() if value is not None}
    with name_file(os.fspath(path)):
        saved = open_file(path)
        for part in (*objects, *([] if extra is None else ["extra"])):
            saved.require(part)
        match = _match_module(saved, module, mapping, strict, axes)
        verified = checksums and saved.compare(_list_used(saved, match, module is not None, objects))
        fitter = StateFitter(saved, match, parameter_names(module), strict)
        loaded = Loaded(None, tuple(match.fresh), tuple(match.dropped), tuple(match.converted), verified)
        steps: list[_Step] = []
        for part, value in objects.items():
            for target, node in _pairs(saved, part, value, strict):
                step, loaded = _fit_state(saved, fitter, part, target, node, axes, loaded)
                steps.append(step)
        content = saved.decode(saved.content.get("extra"))
        if extra is not None:
            steps += _find_objects(extra, content, "extra")
        if rng or (rng is None and (optimizer is not None or population is not None) and "rng" in saved.content):
            saved.require("rng")
            states = saved.decode(_choose_states(saved.content))
            steps.append((_RandomState(collect_random, restore_random), states, {}))
        _apply(steps, match.apply)
    return replace(loaded, extra=content)


_Step = tuple[Any, Any, dict[str, Any]]
"""An object, the state to load into it, and keyword arguments of its `load_state_dict`."""


def _match_module(
    saved: SavedFile, module: nn.Module | None, mapping: NameMap | None, strict: bool, axes: ModelAxes | None
) -> Match:
    """Return the plan for loading the module, or without a module the renamed names of the file."""
    if module is not None:
        if not saved.present:
            saved.require("module")
        return plan(saved, module, mapping, strict, axes)
    rename = make_rename(mapping, saved.every)
    match = Match({here: name for name in saved.every if (here := rename(name)) is not None})
    match.dropped = [name for name in saved.every if rename(name) is None]
    return match


def _list_used(saved: SavedFile, match: Match, has_module: bool, parts: Iterable[str]) -> list[str]:
    """Return the names of the tensors that are loaded, which are compared with their checksums."""
    sources = [saved.source(name) for name in match.taken.values() if name not in saved.extra] if has_module else []
    trees = [saved.content.get(part) for part in (*parts, "extra", "rng", "rng_by_rank", "module")]
    return sources + tensor_names(trees)


def _fit_state(
    saved: SavedFile, fitter: StateFitter, part: str, target: Any, node: Any, axes: ModelAxes | None, loaded: Loaded
) -> tuple[_Step, Loaded]:
    """Return the state of one object in the form that it can load, and the result with its unmatched names.

    Args:
        saved: The file.
        fitter: Fits the states of optimizers.
        part: "optimizer", "population" or "scheduler".
        target: The object.
        node: Its entry in the file.
        axes: The axes of the module, or None.
        loaded: The result so far.
    """
    state = _decode_state(saved, node)
    if part == "optimizer" and hasattr(target, "param_groups"):
        state, fresh, dropped = fitter.fit(target, node, state)
        loaded = replace(
            loaded,
            fresh=tuple(dict.fromkeys((*loaded.fresh, *fresh))),
            dropped=tuple(dict.fromkeys((*loaded.dropped, *dropped))),
        )
    # Optimizers of this library load the links that agree.
    by_link = isinstance(state, dict) and isinstance(state.get("links"), dict)
    options: dict[str, Any] = {"strict": False} if by_link and not fitter.strict else {}
    if by_link and axes is not None and part == "optimizer":
        options["axes"] = axes
    return (target, state, options), loaded


def read(path: PathLike, *, checksums: bool = True) -> Contents:
    """Read a whole checkpoint as state dicts.

    Args:
        path: A checkpoint, or a file written by `safetensors` or `torch.save`.
        checksums: Whether to compare all tensors with their checksums.

    Raises:
        OSError: If the file cannot be opened.
        CheckpointError: If it is damaged.

    Example:
        >>> import os, tempfile, torch
        >>> import moduli.io as io
        >>> path = os.path.join(tempfile.mkdtemp(), "net.safetensors")
        >>> io.save(path, {"w": torch.arange(3.0)}, extra=(1, float("inf")))
        >>> found = io.read(path)
        >>> found.module["w"], found.extra
        (tensor([0., 1., 2.]), (1, inf))
    """
    with name_file(os.fspath(path)):
        saved = open_file(path)
        if checksums:
            saved.compare(saved.slots)
        state: OrderedDict[str, Any] | None = None
        if saved.present:
            state = OrderedDict((name, saved.copy(name)) for name in saved)
            state.update((name, saved.decode(node)) for name, node in saved.extra.items())
            state._metadata = OrderedDict(saved.metadata)  # type: ignore[attr-defined]
        parts: dict[str, Any] = {}
        for part in PARTS:
            states = {name: _decode_state(saved, node) for name, node in saved.objects(part).items()}
            parts[part] = states.get(None, states or None)
        return Contents(state, **parts, **{part: saved.decode(saved.content.get(part)) for part in ("extra", "rng")})


def _decode_state(saved: SavedFile, node: Mapping[str, Any]) -> Any:
    """Return the state of an object in a file; labels that were saved with it are put into its `_metadata`."""
    state, labels = saved.decode(node.get("state")), node.get("labels")
    if labels is None:
        return state
    if not isinstance(state, dict) or not is_label_table(labels):
        raise DamagedFileError("the labels of a population in it are malformed")
    labelled = OrderedDict(state)
    labelled._metadata = {path: {LABELS: axes} for path, axes in labels.items()}  # type: ignore[attr-defined]
    return labelled


def open_file(path: PathLike) -> SavedFile:
    """Open a safetensors file, or a file of `torch.save`, which is recognised by its first bytes."""
    if os.path.isdir(path):
        text = "it is a directory; give the file that `mo.save` has written (`moduli.io.TensorFiles` reads models in several files)"
        raise IsADirectoryError(errno.EISDIR, text, os.fspath(path))
    start = read_regular(lambda descriptor: os.read(descriptor, 8), path)
    ours = start != _OLD and (start[:4] != _ZIP or start[5:] == b"\0\0\0")
    return SavedFile(path) if ours else TorchFile(path)


class TorchFile(SavedFile):
    """A file of `torch.save`, as a checkpoint with a module."""

    def _open(self) -> dict[str, Any]:
        self.size = os.path.getsize(self.path)
        tensors = Tensors()
        state, content = collect(_read_state(self.path), tensors)
        self.slots = {**state, **tensors.found}
        return {"module": content}

    def checksums(self) -> None:
        """Return None: such files have no checksums."""
        return

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self.slot(self.source(name))
        return tensor


def _read_state(path: PathLike) -> Mapping[str, Any]:
    """Return the state dict in a file of `torch.save`.

    Raises:
        DamagedFileError: If it contains other objects than tensors and plain values, or is no state dict.
    """
    allow_labels()
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's reader raises many kinds of errors for damaged files
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise DamagedFileError(f"{str(path)!r} cannot be read with weights_only=True: {cut(first, 500)}") from error
    if not isinstance(content, Mapping):
        raise DamagedFileError(f"{str(path)!r} holds a {type(content).__name__}, not a state dict")
    inner = content.get("state_dict")
    state: Mapping[str, Any] = inner if isinstance(inner, Mapping) else content
    for name, value in state.items():
        if not isinstance(value, Tensor) and str(name).rpartition(".")[2] != "_extra_state":
            raise DamagedFileError(f"{str(path)!r} is no state dict: {shorten(name)} is a {type(value).__name__}")
    return state


def _choose_states(content: dict[str, Any]) -> Any:
    """Return the random states of this rank if the number of processes is the same; otherwise those of the writing process."""
    by_rank, distributed = content.get("rng_by_rank"), torch.distributed
    there = distributed.is_available() and distributed.is_initialized()
    if there and isinstance(by_rank, list) and len(by_rank) == distributed.get_world_size():
        return by_rank[distributed.get_rank()] or content["rng"]
    return content["rng"]


def _pairs(saved: SavedFile, part: str, value: Any, strict: bool) -> list[tuple[Any, Mapping[str, Any]]]:
    """Return the objects to load into, each with its entry in the file."""
    saved_objects = saved.objects(part)
    objects: Mapping[str | None, Any] = value if isinstance(value, Mapping) else {None: value}
    if objects.keys() != saved_objects.keys():
        conflict = f"as {part}, and {shorten(list(objects))} are to be loaded; None is one without a name"
        raise CheckpointError(f"the checkpoint has {shorten(list(saved_objects))} {conflict}")
    for name, one in objects.items():
        # Only the class's name is compared: its module may be `__main__` in one program and not in another.
        kind = saved_objects[name].get("class")
        if strict and str(kind).rpartition(".")[2] != type(one).__name__:
            conflict = f"a {class_name(one)} is to be loaded; make one of the same kind, or use strict=False"
            raise CheckpointError(f"the {part} in the checkpoint is a {cut(str(kind), 200)}, and {conflict}")
    return [(objects[name], node) for name, node in saved_objects.items()]


def _find_objects(live: Any, saved: Any, where: str) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Yield the objects with a state in a tree, with the states at the same places in the saved tree."""
    if isinstance(live, torch.Generator):
        if not isinstance(saved, torch.Generator) or live.device != saved.device:
            raise CheckpointError(f"{where} is a generator on {live.device}, and the checkpoint has none such there")
        yield _RandomState(live.get_state, live.set_state), saved.get_state(), {}
    elif is_stateful(live):
        yield live, saved, {}
    else:
        here, children = _children(live), _children(saved)
        if not here.keys() <= children.keys():
            raise CheckpointError(
                f"{where} has the keys {shorten(list(here))}, and the checkpoint {shorten(list(children))}"
            )
        for key, each in here.items():
            yield from _find_objects(each, children[key], f"{where}/{key}")


def _children(tree: Any) -> dict[Any, Any]:
    return dict(tree) if isinstance(tree, Mapping) else dict(enumerate(tree if isinstance(tree, list | tuple) else ()))


class _RandomState(NamedTuple):
    """A generator as an object with a state dict."""

    state_dict: Callable[[], Any]
    load_state_dict: Callable[[Any], Any]


def _apply(steps: list[tuple[Any, Any, dict[str, Any]]], load_module: Callable[[], None]) -> None:
    """Load objects, and last the module, which is known to fit; if one raises, all are restored."""
    with Guard(deferred=True) as guard:
        try:
            for value, state, options in steps:
                try:
                    guard.add(partial(_put_back, value, copy.deepcopy(value.state_dict())))
                    value.load_state_dict(state, **options)
                except Exception as error:
                    if isinstance(error, CheckpointError):
                        raise
                    reason = f"{type(error).__name__}: {error}"
                    raise CheckpointError(f"the {type(value).__name__} refuses its state: {reason}") from error
            load_module()
        except Exception as error:
            failures = guard.restore()
            if failures:
                reason = f"it could not be put back: {'; '.join(map(str, failures))}"
                raise CheckpointError(f"{error}; and not all of it is as before: {reason}") from error
            raise


def _put_back(value: Any, state: Any) -> None:
    try:
        value.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(f"the {type(value).__name__} raised {type(error).__name__}: {error}") from error
