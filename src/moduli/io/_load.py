"""Loading: everything is read and checked first, then all of it is applied, or nothing."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import _random
from ._errors import CheckpointError, name_file
from ._foreign import TorchFile, is_torch_file
from ._match import NameMap, make_rename
from ._module import ModulePlan, plan
from ._optimizer import KnownState, fit_state, parameter_names
from ._read import Reader
from ._replace import PathLike
from ._saved import PARTS, Saved
from ._tree import class_name, is_stateful, tensor_names


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
    if module is not None and not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; it must be a torch.nn.Module. `read` gives state dicts")
    with name_file(os.fspath(path)):
        saved = open_file(path)
        wanted = {part: value for part, value in given.items() if value is not None}
        for part in (*wanted, *([] if extra is None else ["extra"])):
            saved.require(part)
        plans: ModulePlan | None = None
        used: list[str] = []
        fresh: list[str] = []
        dropped: list[str] = []
        if module is not None:
            if not saved.present:
                saved.require("module")
            plans = plan(saved, module, mapping, strict, saved.reader.path)
            used += [saved.source(name) for name in plans.match.taken.values() if name not in saved.extra]
            fresh, dropped = list(plans.match.fresh), list(plans.match.dropped)
        used += tensor_names([saved.content.get(part) for part in (*wanted, "extra", "rng", "rng_by_rank", "module")])
        verified = saved.reader.verify(used) if checksums else False
        rename = plans.rename if plans is not None else make_rename(mapping, saved.every)
        known = KnownState(parameter_names(module), rename, saved.ties, set(fresh), set(dropped), strict, saved.every)
        steps = _Steps()
        for part, value in wanted.items():
            for one, node in _pairs(saved, part, value, strict):
                state = saved.decode(node.get("state"))
                if part == "optimizer" and hasattr(one, "param_groups"):
                    state, new, old = fit_state(one, node, state, known)
                    fresh += [name for name in new if name not in fresh]
                    dropped += [name for name in old if name not in dropped]
                # Ours take over the links that agree.
                by_link = isinstance(state, dict) and isinstance(state.get("links"), dict)
                options = {"strict": False} if by_link and not strict else {}
                steps.load(one, state, **options)
        found = saved.decode(saved.content.get("extra"))
        if extra is not None:
            _load_tree(extra, found, "extra", steps)
        states = None
        if rng or (rng is None and (optimizer is not None or population is not None) and "rng" in saved.content):
            saved.require("rng")
            states = _random.validate(saved.decode(_choose_states(saved.content)))
        steps.run(plans)
    if states is not None:
        _random.restore(states)
    converted = tuple(plans.converted) if plans is not None else ()
    return Loaded(found, tuple(fresh), tuple(dropped), converted, verified)


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
            saved.reader.verify(saved.reader.slots)
        state: OrderedDict[str, Any] | None = None
        if saved.present:
            state = OrderedDict((name, saved.reader.copy(saved.source(name))) for name in [*saved.names, *saved.ties])
            state.update((name, saved.decode(node)) for name, node in saved.extra.items())
            if saved.metadata:
                state._metadata = OrderedDict(saved.metadata)  # type: ignore[attr-defined]
        parts: dict[str, Any] = {}
        for part in PARTS:
            states = {name: saved.decode(node.get("state")) for name, node in saved.objects(part).items()}
            parts[part] = states.get(None, states or None)
        return Contents(state, **parts, **{part: saved.decode(saved.content.get(part)) for part in ("extra", "rng")})


def open_file(path: PathLike) -> Saved:
    """A file, ours or of others, with what it says about its module."""
    return Saved(TorchFile(path) if is_torch_file(path) else Reader(path))


def _choose_states(content: dict[str, Any]) -> Any:
    """The random states that this process saved, if there are as many as there were; or those of the one that wrote the file."""
    by_rank, distributed = content.get("rng_by_rank"), torch.distributed
    there = distributed.is_available() and distributed.is_initialized()
    if there and isinstance(by_rank, list) and len(by_rank) == distributed.get_world_size():
        return by_rank[distributed.get_rank()] or content["rng"]
    return content["rng"]


def _pairs(saved: Saved, part: str, value: Any, strict: bool) -> list[tuple[Any, Mapping[str, Any]]]:
    """The objects to load into, each with what the file has for it."""
    there = saved.objects(part)
    if isinstance(value, Mapping) == (None in there):
        kinds = ("several, by name", "one")
        told, here = kinds[::-1] if isinstance(value, Mapping) else kinds
        raise CheckpointError(f"the checkpoint has {told}, as {part}, and {here} is to be loaded; give what was saved")
    given: Mapping[str | None, Any] = value if isinstance(value, Mapping) else {None: value}
    if given.keys() != there.keys():
        raise CheckpointError(f"the checkpoint has {part} called {list(there)}, and {list(given)} are to be loaded")
    for name, one in given.items():
        if not is_stateful(one):
            raise TypeError(f"{part} is a {class_name(one)}, which has no state_dict() and load_state_dict()")
        # Not the module it is in: that is __main__ today and something else tomorrow.
        kind = there[name].get("class")
        if strict and str(kind).rpartition(".")[2] != type(one).__name__:
            raise CheckpointError(
                f"the {part} in the checkpoint is a {kind}, and a {class_name(one)} is to be loaded; make one of the same "
                "kind, or use strict=False if their states are alike"
            )
    return [(given[name], node) for name, node in there.items()]


def _load_tree(live: Any, found: Any, where: str, steps: _Steps) -> None:
    """Find the objects in a tree that take the states at their places in the one that was saved."""
    if isinstance(live, torch.Generator):
        if not isinstance(found, torch.Generator):
            raise CheckpointError(f"{where} is a generator, and the checkpoint has {type(found).__name__} there")
        if live.device != found.device:
            raise CheckpointError(f"a generator on {live.device} cannot take the state of one on {found.device}")
        steps.load(_RandomState(live), found.get_state())
    elif is_stateful(live):
        steps.load(live, found)
    elif isinstance(live, Mapping):
        if not isinstance(found, Mapping) or not live.keys() <= found.keys():
            raise CheckpointError(f"{where} has the keys {list(live)}, and the checkpoint {_keys(found)}")
        for key, each in live.items():
            _load_tree(each, found[key], f"{where}/{key}", steps)
    elif isinstance(live, list | tuple):
        if not isinstance(found, list | tuple) or len(live) != len(found):
            raise CheckpointError(f"{where} has {len(live)} entries, and the checkpoint has {_keys(found)}")
        for at, each in enumerate(live):
            _load_tree(each, found[at], f"{where}/{at}", steps)


def _keys(found: Any) -> str:
    if isinstance(found, Mapping):
        return f"{list(found)}"
    return f"{len(found)}" if isinstance(found, list | tuple) else f"a {type(found).__name__}"


class _RandomState:
    """A generator as an object with a state dict."""

    def __init__(self, generator: torch.Generator) -> None:
        self.state_dict, self.load_state_dict = generator.get_state, generator.set_state


class _Steps:
    """Objects to load into, and how to put them back."""

    def __init__(self) -> None:
        self._todo: list[tuple[Any, Any, dict[str, Any]]] = []

    def load(self, value: Any, state: Any, **options: Any) -> None:
        self._todo.append((value, state, options))

    def run(self, plans: ModulePlan | None) -> None:
        """Load everything, the module last: of it alone is it known beforehand that it fits."""
        undo: list[tuple[Any, Callable[[], None]]] = []
        try:
            for value, state, options in self._todo:
                undo.append((value, _undo(value)))
                _take(value, state, options)
            if plans is not None:
                plans.apply()
        except BaseException as error:
            stuck = [told for value, back in reversed(undo) if (told := _try_undo(value, back))]
            if not stuck:
                raise
            told = f"it could not be put back: {'; '.join(stuck)}"
            if not isinstance(error, Exception):
                error.add_note(told)
                raise
            raise CheckpointError(f"{error}; and not all of it is as before: {told}") from error


def _try_undo(value: Any, back: Callable[[], None]) -> str:
    """Put an object back; gives what went wrong, if anything did, so that the others are put back in any case."""
    try:
        back()
    except Exception as error:  # noqa: BLE001 - whatever an object says about its own state
        return f"the {type(value).__name__} raised {type(error).__name__}: {error}"
    return ""


def _take(value: Any, state: Any, options: dict[str, Any]) -> None:
    try:
        value.load_state_dict(state, **options)
    except CheckpointError:
        raise
    except Exception as error:  # whatever an object says about a state that is not its own
        raise CheckpointError(
            f"the {type(value).__name__} refuses its state: {type(error).__name__}: {error}"
        ) from error


def _undo(value: Any) -> Callable[[], None]:
    if (
        isinstance(value, torch.optim.Optimizer)
        and type(value).load_state_dict is torch.optim.Optimizer.load_state_dict
    ):
        # Loading gives it new dicts and leaves the old ones and the tensors in them alone.
        held = dict(value.__dict__)

        def put_back() -> None:
            value.__dict__.clear()
            value.__dict__.update(held)

        return put_back
    try:
        state = copy.deepcopy(value.state_dict())
    except Exception as error:  # whatever an object says about its own state
        raise CheckpointError(
            f"the {type(value).__name__} does not give its state, so it could not be put back: "
            f"{type(error).__name__}: {error}"
        ) from error
    return lambda: value.load_state_dict(state)
