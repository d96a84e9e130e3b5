"""`Checkpointer`: writes the checkpoints of a run periodically, deletes old ones, and resumes from the newest."""

import os
import re
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from .._texts import shorten
from ..layout import NameMap, any_sharded
from ._basics import CheckpointError, DamagedFileError, PathLike, has_form
from ._load import Loaded, load
from ._replace import make_directory
from ._save import save

_NAME = re.compile(r"step-(\d{9,})\.safetensors")


class Checkpointer:
    """Writes a checkpoint every few steps or seconds, keeps the newest ones, and resumes from the newest undamaged one.

    Each is a separate file, written all or nothing, so after any failure `resume` finds the last complete one. A damaged one is
    skipped with a warning.

    A directory belongs to one run. If it has checkpoints already, the run must be resumed, or use another directory: a run
    that starts from scratch raises, so that neither run deletes or resumes the other's.

    Args:
        path: A directory; it is made if it does not exist.
        module: The module, as for `save`.
        every: The number of steps between checkpoints; None to use seconds only.
        seconds: The number of seconds between checkpoints; None to use steps only.
        keep: The number of checkpoints to keep; None for all.
        optimizer: The optimizer, as for `save`.
        population: The population, as for `save`.
        scheduler: The scheduler, as for `save`.
        extra: User data, as for `save`; generators and objects with a state in it are restored by `resume`.
        rng: Whether random states are saved and restored.
        checksums: As for `save`.
        fsync: As for `save`.

    Attributes:
        loaded: The result of the last `resume`: the saved `extra`, and unmatched names; None if nothing was loaded.

    Raises:
        ValueError: If no checkpoint would ever be written.

    Example:
        >>> import tempfile, torch
        >>> import moduli.io as io
        >>> def run(steps, directory):
        ...     net = torch.nn.Linear(2, 1)
        ...     opt = torch.optim.SGD(net.parameters(), lr=0.1)
        ...     checkpoints = io.Checkpointer(directory, net, optimizer=opt, every=2, keep=2)
        ...     start = checkpoints.resume()
        ...     for step in range(start + 1, steps + 1):
        ...         net(torch.ones(1, 2)).sum().backward()
        ...         opt.step()
        ...         checkpoints.step(step)
        ...     return start, [path.name for path in checkpoints.files()]
        >>> directory = tempfile.mkdtemp()
        >>> run(5, directory)
        (0, ['step-000000002.safetensors', 'step-000000004.safetensors'])
        >>> run(6, directory)
        (4, ['step-000000004.safetensors', 'step-000000006.safetensors'])
    """

    def __init__(
        self,
        path: PathLike,
        module: nn.Module | None = None,
        *,
        every: int | None = None,
        seconds: float | None = None,
        keep: int | None = 3,
        optimizer: Any = None,
        population: Any = None,
        scheduler: Any = None,
        extra: Any = None,
        rng: bool = True,
        checksums: bool = True,
        fsync: bool = True,
    ) -> None:
        if every is None and seconds is None:
            raise ValueError("a Checkpointer without every= and seconds= would never write; give one of them")
        if not all(number is None or number >= 1 for number in (every, keep)) or not (seconds is None or seconds >= 0):
            raise ValueError(f"every={every}, seconds={seconds} and keep={keep} must be positive, or None")
        if seconds is not None and module is not None and any_sharded(module.parameters()):
            raise ValueError(f"seconds={seconds} comes at another step in each process; all save together: give every=")
        objects = {"module": module, "optimizer": optimizer, "population": population, "scheduler": scheduler}
        self._objects: dict[str, Any] = {name: value for name, value in objects.items() if value is not None}
        if not self._objects and extra is None:
            raise ValueError("a Checkpointer needs something to save: a module, an optimizer, a population or extra=")
        self.path = Path(path)
        self.every, self.seconds, self.keep = every, seconds, keep
        self.extra = extra
        self._rng, self._checksums, self._fsync = rng, checksums, fsync
        self._last, self._time = 0, time.monotonic()
        # The checkpoints of this run, oldest first; None until the run has resumed or written one.
        self._own: list[Path] | None = None
        self.loaded: Loaded | None = None

    def files(self) -> list[Path]:
        """Return the checkpoints in the directory, oldest first.

        Example:
            >>> import tempfile, torch
            >>> import moduli.io as io
            >>> io.Checkpointer(tempfile.mkdtemp(), torch.nn.Linear(1, 1), every=1).files()
            []
        """
        if not self.path.is_dir():
            return []
        numbered = [(int(match[1]), name) for name in os.listdir(self.path) if (match := _NAME.fullmatch(name))]
        return [self.path / name for _, name in sorted(numbered)]

    def step(self, step: int, extra: Any = None) -> Path | None:
        """Report a completed step, and write a checkpoint if one is due.

        Args:
            step: The number of completed steps.
            extra: Saved instead of the constructor's `extra`, if it is not None.

        Returns:
            The checkpoint, if one was written.

        Raises:
            CheckpointError: If it cannot be written, or the directory belongs to another run; no file is changed then.

        Example:
            >>> import tempfile, torch
            >>> import moduli.io as io
            >>> checkpoints = io.Checkpointer(tempfile.mkdtemp(), torch.nn.Linear(1, 1), every=10)
            >>> checkpoints.step(9), checkpoints.step(10).name
            (None, 'step-000000010.safetensors')
        """
        self._begin()
        due = self.every is not None and step - self._last >= self.every
        due = due or (self.seconds is not None and time.monotonic() - self._time >= self.seconds)
        return self.save(step, extra) if due else None

    def save(self, step: int, extra: Any = None) -> Path:
        """Write a checkpoint now, due or not.

        Args:
            step: The number of completed steps.
            extra: As for `step`.

        Raises:
            CheckpointError: If it cannot be written, the directory belongs to another run, or a later step was saved already;
                no file is changed then.

        Example:
            >>> import tempfile, torch
            >>> import moduli.io as io
            >>> io.Checkpointer(tempfile.mkdtemp(), torch.nn.Linear(1, 1), every=10).save(3).name
            'step-000000003.safetensors'
        """
        if type(step) is not int or step < 0:
            raise ValueError(f"step is {shorten(step)}; it must be how many steps are done")
        own = self._begin()
        if step < self._last:
            advice = "count on from there, or give a run that starts again a new directory"
            raise CheckpointError(f"step {step} comes after step {self._last}, which resume() would take up; {advice}")
        make_directory(self.path)
        path = self.path / f"step-{step:09d}.safetensors"
        content = {"step": step, "extra": self.extra if extra is None else extra}
        save(path, **self._objects, extra=content, rng=self._rng, checksums=self._checksums, fsync=self._fsync)
        self._last, self._time = step, time.monotonic()
        own[:] = [each for each in own if each != path] + [path]
        while self.keep is not None and len(own) > self.keep:
            own.pop(0).unlink(missing_ok=True)
        return path

    def _begin(self) -> list[Path]:
        """Return the checkpoints of this run.

        Raises:
            CheckpointError: If the directory has checkpoints, and the run has not resumed from them.
        """
        if self._own is None:
            files = self.files()
            if files:
                advice = "call resume() before the first step, or give a run that starts from scratch a new directory"
                raise CheckpointError(f"{str(self.path)!r} holds a run already, up to {files[-1].name}; {advice}")
            self._own = []
        return self._own

    def resume(self, *, mapping: NameMap | None = None, strict: bool = True) -> int:
        """Load the newest checkpoint that is not damaged.

        Args:
            mapping: As for `load`.
            strict: As for `load`.

        Returns:
            The number of completed steps when it was written; 0 if there is none. `loaded` has the rest.

        Raises:
            CheckpointError: If it does not fit the objects, or all checkpoints are damaged.

        Example:
            >>> import tempfile, torch
            >>> import moduli.io as io
            >>> directory = tempfile.mkdtemp()
            >>> _ = io.Checkpointer(directory, torch.nn.Linear(1, 1), every=10).save(7)
            >>> io.Checkpointer(directory, torch.nn.Linear(1, 1), every=10).resume()
            7
        """
        damaged: list[DamagedFileError] = []
        files, extra = self.files(), None if self.extra is None else {"extra": self.extra}
        for at, path in reversed(list(enumerate(files))):
            try:
                loaded = load(path, **self._objects, extra=extra, mapping=mapping, strict=strict, rng=self._rng)
            except DamagedFileError as error:
                damaged.append(error)
                warnings.warn(f"passed over a checkpoint: {error}", RuntimeWarning, stacklevel=2)
                continue
            if not has_form(loaded.extra, {"step": int}) or not {"step", "extra"} <= loaded.extra.keys():
                raise DamagedFileError(f"{str(path)!r} does not say at which step it was written")
            self.loaded = replace(loaded, extra=loaded.extra["extra"])
            self._last, self._time = loaded.extra["step"], time.monotonic()
            # Damaged ones are not counted or deleted; the run may overwrite them.
            self._own = files[: at + 1]
            return self._last
        if damaged:
            raise damaged[0]
        self._own = []
        return 0
