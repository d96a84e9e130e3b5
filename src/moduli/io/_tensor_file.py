"""A file as a mapping from names to tensors that are read when they are asked for."""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ._errors import DamagedFileError, name_file
from ._read import Reader
from ._replace import PathLike
from ._saved import Saved


class TensorMapping(Mapping[str, Tensor]):
    """Tensors by name, each read when it is asked for; `held` has the names, and looking for one reads nothing.

    Args:
        held: The names, in order.
    """

    def __init__(self, held: Collection[str]) -> None:
        self._held = held

    def __contains__(self, name: Any) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class TensorFile(TensorMapping):
    """The tensors of the module in a safetensors file, each read when it is asked for.

    It can be used like a state dict, also by the recipes of `moduli.merge`, without having all of it in memory. A tensor
    is a view of the file as it was when it was opened; writing into one does not change the file.

    Args:
        path: The file: a checkpoint of ours, or any safetensors file.
        checksums: Whether to compare all tensors with their checksums first, which reads the whole file once.

    Raises:
        OSError: If the file cannot be opened.
        CheckpointError: If it is damaged.

    Example:
        >>> import os, tempfile, torch
        >>> import moduli.io as io
        >>> path = os.path.join(tempfile.mkdtemp(), "net.safetensors")
        >>> io.save(path, torch.nn.Linear(3, 2))
        >>> file = io.TensorFile(path)
        >>> list(file), file.meta("weight").shape, file["bias"].shape
        (['weight', 'bias'], torch.Size([2, 3]), torch.Size([2]))
    """

    def __init__(self, path: PathLike, *, checksums: bool = False) -> None:
        self._reader = Reader(path)
        with name_file(self._reader.path):
            self._saved = Saved(self._reader)
            if not self._saved.present:
                raise DamagedFileError("it has no module")
        self._sources = {name: self._saved.source(name) for name in [*self._saved.names, *self._saved.ties]}
        super().__init__(self._sources)
        if self._saved.metadata:
            # Where a state dict has its labels.
            self._metadata = OrderedDict(self._saved.metadata)
        if checksums:
            self.verify()

    def verify(self) -> bool:
        """Compare all tensors with their checksums; returns whether there are any.

        Raises:
            DamagedFileError: If one differs.

        Example:
            >>> import os, tempfile, torch
            >>> import moduli.io as io
            >>> path = os.path.join(tempfile.mkdtemp(), "net.safetensors")
            >>> io.save(path, torch.nn.Linear(3, 2))
            >>> io.TensorFile(path).verify()
            True
        """
        return self._reader.verify([*self._saved.names, *self._saved.carried])

    def meta(self, name: str) -> Tensor:
        """A tensor of the shape and dtype of another, without its values: nothing is read.

        Example:
            >>> import os, tempfile, torch
            >>> import moduli.io as io
            >>> path = os.path.join(tempfile.mkdtemp(), "net.safetensors")
            >>> io.save(path, torch.nn.Linear(3, 2))
            >>> io.TensorFile(path).meta("bias").is_meta
            True
        """
        source = self._sources[name]
        return torch.empty(self._reader.shape(source), dtype=self._reader.dtype(source), device="meta")

    @property
    def path(self) -> str:
        """The file."""
        return self._reader.path

    @property
    def ties(self) -> dict[str, str]:
        """Names that stand for the tensor of another name, by name."""
        return dict(self._saved.ties)

    def __getitem__(self, name: str) -> Tensor:
        return self._reader.tensor(self._sources[name])

    def __repr__(self) -> str:
        return f"<{len(self)} tensors in {self._reader.path!r}>"
