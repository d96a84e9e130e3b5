"""Loading: everything is read and checked first, then all of it is applied, or nothing."""

import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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

# Neither can be the length of a header: they would stand for more than 2**40 bytes.
_ZIP = b"PK\x03\x04"
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF"


@dataclass(frozen=True)
class Loaded:
    """What `load` did.

    Attributes:
        extra: What was saved as `extra`. Objects with a state are represented by their state dicts.
        fresh: Names in the module, and in the optimizer, that kept what they had, because the checkpoint has nothing for
            them; of an optimizer also links, as "link 1.Adam".
        dropped: Names in the checkpoint that were not used, of the module or of the optimizer; likewise links.
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
    """Everything in a checkpoint, as `read` gives it: state dicts, in memory of their own.

    Attributes:
        module: The state dict of the module, with labels and configurations in its `_metadata`; None if there is none.
        optimizer: The state dict of the optimizer, or several by name.
        population: The state dict of the population, or several by name.
        scheduler: The state dict of the scheduler, or several by name.
        extra: What was saved as `extra`.
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
    """Load a checkpoint into the objects given, all of it or nothing.

    The file is checked from its first byte to its last before anything is changed; no code in it is run. If an object
    refuses its part, those that were loaded before it are put back.

    Files that `safetensors` or `torch.save` wrote load into `module`, the latter with `weights_only=True`.

    A model in pieces (DTensors of FSDP2 or tensor parallel) keeps its placements: every process reads the file, and keeps
    its pieces.

    Parameters are matched by name, in the module and in the optimizer. A name on one side only, or another shape, is
    refused, unless an edit of the module's species since the checkpoint was written explains it.

    Args:
        path: The file.
        module: The module to load into.
        optimizer: The optimizer to load into, or a dict of several, as they were saved.
        population: The population to load into, or a dict of several.
        scheduler: The scheduler to load into, or a dict of several.
        extra: A dict or list like what was saved as `extra`, with the objects and generators in it to load into.
        mapping: What names in the checkpoint are called here: a dict from names of tensors, or of modules for all that is
            below them, or a function. None as the new name leaves it out.
        strict: Whether to refuse what does not match. Otherwise it is left as it is, and listed in the result.
        axes: The axes of the module, to load a checkpoint of a model with other numbers of units: what both have is loaded, by
            label where there are labels, otherwise by position; the other units keep the values that they have.
        rng: Whether to restore the random states; by default, if an optimizer or a population is loaded and they are there.
        checksums: Whether to compare the tensors that are loaded with their checksums.

    Returns:
        What was saved as `extra`, and what did not match.

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
    given = {"optimizer": optimizer, "population": population, "scheduler": scheduler}
    with name_file(os.fspath(path)):
        saved = open_file(path)
        wanted = {part: value for part, value in given.items() if value is not None}
        for part in (*wanted, *([] if extra is None else ["extra"])):
            saved.require(part)
        used: list[str] = []
        if module is not None:
            if not saved.present:
                saved.require("module")
            match = plan(saved, module, mapping, strict, axes)
            used += [saved.source(name) for name in match.taken.values() if name not in saved.extra]
        else:
            rename = make_rename(mapping, saved.every)
            match = Match({here: name for name in saved.every if (here := rename(name)) is not None})
            match.dropped = [name for name in saved.every if rename(name) is None]
        fresh, dropped = [*match.fresh], [*match.dropped]
        used += tensor_names([saved.content.get(part) for part in (*wanted, "extra", "rng", "rng_by_rank", "module")])
        verified = checksums and saved.compare(used)
        fitter = StateFitter(saved, match, parameter_names(module), strict)
        steps: list[tuple[Any, Any, dict[str, Any]]] = []
        for part, value in wanted.items():
            for one, node in _pairs(saved, part, value, strict):
                state = _decode_state(saved, node)
                if part == "optimizer" and hasattr(one, "param_groups"):
                    state, new, old = fitter.fit(one, node, state)
                    fresh += [name for name in new if name not in fresh]
                    dropped += [name for name in old if name not in dropped]
                # Ours take over the links that agree.
                by_link = isinstance(state, dict) and isinstance(state.get("links"), dict)
                options: dict[str, Any] = {"strict": False} if by_link and not strict else {}
                if by_link and axes is not None and part == "optimizer":
                    options["axes"] = axes
                steps.append((one, state, options))
        found = saved.decode(saved.content.get("extra"))
        if extra is not None:
            steps += _find_objects(extra, found, "extra")
        if rng or (rng is None and (optimizer is not None or population is not None) and "rng" in saved.content):
            saved.require("rng")
            states = saved.decode(_choose_states(saved.content))
            steps.append((_RandomState(collect_random, restore_random), states, {}))
        _apply(steps, match.apply)
    return Loaded(found, tuple(fresh), tuple(dropped), tuple(match.converted), verified)


def read(path: PathLike, *, checksums: bool = True) -> Contents:
    """Read a whole checkpoint as state dicts.

    Args:
        path: The file: ours, or one that `safetensors` or `torch.save` wrote.
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
    """Return the state of an object in a file, with the labels that were saved beside it where a state dict has them."""
    state, labels = saved.decode(node.get("state")), node.get("labels")
    if labels is None:
        return state
    if not isinstance(state, dict) or not is_label_table(labels):
        raise DamagedFileError("the labels of a population in it are malformed")
    labelled = OrderedDict(state)
    labelled._metadata = {path: {LABELS: axes} for path, axes in labels.items()}  # type: ignore[attr-defined]
    return labelled


def open_file(path: PathLike) -> SavedFile:
    """A file, ours or of others; what `torch.save` wrote is known by its first bytes."""
    start = read_regular(lambda descriptor: os.read(descriptor, 8), path)
    ours = start != _OLD and (start[:4] != _ZIP or start[5:] == b"\0\0\0")
    return SavedFile(path) if ours else TorchFile(path)


class TorchFile(SavedFile):
    """A file that `torch.save` wrote, seen as a checkpoint with a module."""

    def _open(self) -> dict[str, Any]:
        self.size = os.path.getsize(self.path)
        tensors = Tensors()
        found, content = collect(_read_state(self.path), tensors)
        self.slots = {**found, **tensors.found}
        return {"module": content}

    def checksums(self) -> None:
        """There are none."""
        return

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self.slot(self.source(name))
        return found


def _read_state(path: PathLike) -> Mapping[str, Any]:
    """The state dict in a file that `torch.save` wrote.

    Raises:
        DamagedFileError: If there is anything in it but tensors and plain values, or it is no state dict.
    """
    allow_labels()
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's reader fails in many ways on files that are damaged
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise DamagedFileError(f"{str(path)!r} cannot be read with weights_only=True: {cut(first, 500)}") from error
    if not isinstance(found, Mapping):
        raise DamagedFileError(f"{str(path)!r} holds a {type(found).__name__}, not a state dict")
    inner = found.get("state_dict")
    state: Mapping[str, Any] = inner if isinstance(inner, Mapping) else found
    for name, value in state.items():
        if not isinstance(value, Tensor) and str(name).rpartition(".")[2] != "_extra_state":
            raise DamagedFileError(f"{str(path)!r} is no state dict: {shorten(name)} is a {type(value).__name__}")
    return state


def _choose_states(content: dict[str, Any]) -> Any:
    """The random states that this process saved, if there are as many as there were; or those of the one that wrote the file."""
    by_rank, distributed = content.get("rng_by_rank"), torch.distributed
    there = distributed.is_available() and distributed.is_initialized()
    if there and isinstance(by_rank, list) and len(by_rank) == distributed.get_world_size():
        return by_rank[distributed.get_rank()] or content["rng"]
    return content["rng"]


def _pairs(saved: SavedFile, part: str, value: Any, strict: bool) -> list[tuple[Any, Mapping[str, Any]]]:
    """The objects to load into, each with what the file has for it."""
    there = saved.objects(part)
    given: Mapping[str | None, Any] = value if isinstance(value, Mapping) else {None: value}
    if given.keys() != there.keys():
        told = f"as {part}, and {shorten(list(given))} are to be loaded; None is one without a name"
        raise CheckpointError(f"the checkpoint has {shorten(list(there))} {told}")
    for name, one in given.items():
        # Not the module it is in: that is __main__ today and something else tomorrow.
        kind = there[name].get("class")
        if strict and str(kind).rpartition(".")[2] != type(one).__name__:
            told = f"a {class_name(one)} is to be loaded; make one of the same kind, or use strict=False"
            raise CheckpointError(f"the {part} in the checkpoint is a {cut(str(kind), 200)}, and {told}")
    return [(given[name], node) for name, node in there.items()]


def _find_objects(live: Any, found: Any, where: str) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """The objects in a tree, with the states at their places in the one that was saved."""
    if isinstance(live, torch.Generator):
        if not isinstance(found, torch.Generator) or live.device != found.device:
            raise CheckpointError(f"{where} is a generator on {live.device}, and the checkpoint has none such there")
        yield _RandomState(live.get_state, live.set_state), found.get_state(), {}
    elif is_stateful(live):
        yield live, found, {}
    else:
        here, saved = _children(live), _children(found)
        if not here.keys() <= saved.keys():
            raise CheckpointError(
                f"{where} has the keys {shorten(list(here))}, and the checkpoint {shorten(list(saved))}"
            )
        for key, each in here.items():
            yield from _find_objects(each, saved[key], f"{where}/{key}")


def _children(tree: Any) -> dict[Any, Any]:
    return dict(tree) if isinstance(tree, Mapping) else dict(enumerate(tree if isinstance(tree, list | tuple) else ()))


class _RandomState(NamedTuple):
    """A generator as an object with a state dict."""

    state_dict: Callable[[], Any]
    load_state_dict: Callable[[Any], Any]


def _apply(steps: list[tuple[Any, Any, dict[str, Any]]], load_module: Callable[[], None]) -> None:
    """Load objects, the module last: of it alone is it known beforehand that it fits. If one refuses, all are put back."""
    with Guard(deferred=True) as guard:
        try:
            for value, state, options in steps:
                try:
                    guard.add(partial(_put_back, value, copy.deepcopy(value.state_dict())))
                    value.load_state_dict(state, **options)
                except Exception as error:
                    if isinstance(error, CheckpointError):
                        raise
                    told = f"{type(error).__name__}: {error}"
                    raise CheckpointError(f"the {type(value).__name__} refuses its state: {told}") from error
            load_module()
        except Exception as error:
            failures = guard.restore()
            if failures:
                told = f"it could not be put back: {'; '.join(map(str, failures))}"
                raise CheckpointError(f"{error}; and not all of it is as before: {told}") from error
            raise


def _put_back(value: Any, state: Any) -> None:
    try:
        value.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(f"the {type(value).__name__} raised {type(error).__name__}: {error}") from error
