"""Loading: everything is read and checked first, then all of it is applied, or nothing."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import _random
from ._errors import CheckpointError, DamagedFileError
from ._foreign import is_torch_file, read_torch_file
from ._in_memory import InMemory
from ._match import NameMap, make_rename
from ._module import ModulePlan, plan
from ._optimizer import KnownState, class_name, fit_state, parameter_names
from ._processes import choose_by_rank
from ._read import Reader
from ._replace import PathLike
from ._save import PARTS
from ._saved import Saved
from ._steps import Steps
from ._tree import decode, is_stateful, tensor_names


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
    if is_torch_file(path):
        return _load_torch_file(path, module, {**given, "extra": extra}, mapping, strict)
    source = _SavedSource(path)
    wanted = {part: value for part, value in given.items() if value is not None}
    for part in wanted:
        source.require(part)
    if extra is not None:
        source.require("extra")
    plans = _module_plan(source, module, mapping, strict)
    used = (
        [source.saved.source(name) for name in plans.match.taken.values() if name not in source.saved.extra]
        if plans
        else []
    )
    used += tensor_names([source.content.get(part) for part in (*wanted, "extra", "rng", "rng_by_rank", "module")])
    verified = source.reader.verify(source.known(used)) if checksums else False
    known = _match_known(source.saved, module, plans, mapping, strict)
    steps, fresh, dropped = Steps(), [], []
    if plans is not None:
        fresh, dropped = list(plans.match.fresh), list(plans.match.dropped)
    for part, value in wanted.items():
        for one, saved in source.told(_pairs, part, value, source.content[part], strict):
            state = source.decode(saved.get("state"))
            if part == "optimizer" and hasattr(one, "param_groups"):
                state, new, old = source.told(fit_state, one, saved, state, known)
                fresh += [name for name in new if name not in fresh]
                dropped += [name for name in old if name not in dropped]
            # Ours take over the links that agree.
            by_link = isinstance(state, dict) and isinstance(state.get("links"), dict)
            options = {"strict": False} if by_link and not strict else {}
            steps.load(one, state, **options)
    found = source.decode(source.content.get("extra"))
    if extra is not None:
        _load_tree(extra, found, "extra", steps)
    states = None
    if rng or (rng is None and (optimizer is not None or population is not None) and "rng" in source.content):
        source.require("rng")
        states = source.told(_random.validate, source.decode(_choose_states(source.content)))
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
    if is_torch_file(path):
        return Contents(module=read_torch_file(path))
    source = _SavedSource(path)
    if checksums:
        source.reader.verify(source.reader.slots)
    saved = source.saved
    state: OrderedDict[str, Any] | None = None
    if saved.present:
        state = OrderedDict((name, source.reader.copy(saved.source(name))) for name in [*saved.names, *saved.ties])
        state.update((name, source.decode(node)) for name, node in saved.extra.items())
        if saved.metadata:
            state._metadata = OrderedDict(saved.metadata)  # type: ignore[attr-defined]
    parts = {part: _states(source, part) for part in PARTS}
    return Contents(
        state, **parts, extra=source.decode(source.content.get("extra")), rng=source.decode(source.content.get("rng"))
    )


class _SavedSource:
    """An open file and what it says about its parts."""

    def __init__(self, path: PathLike) -> None:
        self.reader = Reader(path)
        self.content: dict[str, Any] = self.reader.content or {}
        self.saved = self.told(Saved, self.reader)

    def told(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run something, and name the file if it is found to be damaged."""
        try:
            return call(*args)
        except DamagedFileError as error:
            raise error if self.reader.path in str(error) else self.reader.damaged(str(error)) from None

    def require(self, part: str) -> None:
        """Refuse to load a part that is not in the file."""
        if part not in self.content:
            has = [each for each in ("module", *PARTS, "extra", "rng") if each in self.content] or ["tensors"]
            raise CheckpointError(f"{self.reader.path!r} has no {part}; it has {', '.join(has)}")

    def known(self, names: list[str]) -> list[str]:
        for name in names:
            if name not in self.reader.slots:
                raise self.reader.damaged(f"it refers to a tensor {name!r} that is not in it")
        return list(dict.fromkeys(names))

    def decode(self, node: Any) -> Any:
        return self.told(decode, node, self._tensor)

    def _tensor(self, name: str) -> Tensor:
        if not isinstance(name, str) or name not in self.reader.slots:
            raise DamagedFileError(f"it refers to a tensor {name!r} that is not in it")
        return self.reader.copy(name)


def _choose_states(content: dict[str, Any]) -> Any:
    """The random states that this process saved, or those of the one that wrote the file."""
    by_rank = content.get("rng_by_rank")
    return (choose_by_rank(by_rank) if isinstance(by_rank, list) else None) or content["rng"]


def _module_plan(
    source: _SavedSource, module: nn.Module | None, mapping: NameMap | None, strict: bool
) -> ModulePlan | None:
    if module is None:
        return None
    if not source.saved.present:
        source.require("module")
    return plan(source.saved, module, mapping, strict, source.reader.path)


def _match_known(
    saved: Saved, module: Any, plans: ModulePlan | None, mapping: NameMap | None, strict: bool
) -> KnownState:
    groups: dict[str, list[str]] = {}
    for name, first in saved.ties.items():
        groups.setdefault(first, [first]).append(name)
    rename = plans.rename if plans is not None else make_rename(mapping, saved.every)
    fresh = set(plans.match.fresh) if plans is not None else set()
    dropped = set(plans.match.dropped) if plans is not None else set()
    return KnownState(
        parameter_names(module), rename, lambda name: groups.get(name, [name]), fresh, dropped, strict, saved.every
    )


def _pairs(part: str, value: Any, content: Any, strict: bool) -> list[tuple[Any, Mapping[str, Any]]]:
    """The objects to load into, each with what the file has for it."""
    if not isinstance(content, dict):
        raise DamagedFileError(f"what it says about {part} is not a mapping")
    many = content.get("many")
    if isinstance(value, Mapping) != (many is not None):
        kinds = ("several, by name", "one")
        there, here = kinds if many is not None else kinds[::-1]
        raise CheckpointError(f"the checkpoint has {there}, as {part}, and {here} is to be loaded; give what was saved")
    if many is None:
        pairs: list[tuple[Any, Mapping[str, Any]]] = [(value, content)]
    else:
        if not isinstance(many, dict) or not all(isinstance(each, dict) for each in many.values()):
            raise DamagedFileError(f"what it says about {part} is not a mapping of mappings")
        if value.keys() != many.keys():
            raise CheckpointError(
                f"the checkpoint has {part} called {sorted(many)}, and {sorted(value)} are to be loaded"
            )
        pairs = [(value[name], each) for name, each in many.items()]
    for one, saved in pairs:
        if not is_stateful(one):
            raise TypeError(f"{part} is a {class_name(one)}, which has no state_dict() and load_state_dict()")
        # Not the module it is in: that is __main__ today and something else tomorrow.
        if strict and str(saved.get("class")).rpartition(".")[2] != type(one).__name__:
            raise CheckpointError(
                f"the {part} in the checkpoint is a {saved.get('class')}, and a {class_name(one)} is to be loaded; make one "
                "of the same kind, or use strict=False if their states are alike"
            )
    return pairs


def _load_tree(live: Any, found: Any, where: str, steps: Steps) -> None:
    """Find the objects in a tree that take the states at their places in the one that was saved."""
    if isinstance(live, torch.Generator):
        if not isinstance(found, torch.Generator):
            raise CheckpointError(f"{where} is a generator, and the checkpoint has {type(found).__name__} there")
        steps.generator(live, found)
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


def _states(source: _SavedSource, part: str) -> Any:
    content = source.content.get(part)
    if content is None:
        return None
    if not isinstance(content, dict):
        raise source.reader.damaged(f"what it says about {part} is not a mapping")
    many = content.get("many")
    if isinstance(many, dict) and all(isinstance(each, dict) for each in many.values()):
        return {name: source.decode(each.get("state")) for name, each in many.items()}
    return source.decode(content.get("state"))


def _load_torch_file(
    path: PathLike, module: nn.Module | None, others: dict[str, Any], mapping: NameMap | None, strict: bool
) -> Loaded:
    asked = [part for part, value in others.items() if value is not None]
    if asked:
        raise CheckpointError(
            f"{os.fspath(path)!r} was written by torch.save; only a module is loaded from it, no {asked[0]}"
        )
    state = read_torch_file(path)
    if module is None:
        return Loaded()
    found = plan(InMemory(path, state), module, mapping, strict, os.fspath(path))
    Steps().run(found)
    return Loaded(None, tuple(found.match.fresh), tuple(found.match.dropped), tuple(found.converted))
