"""The errors that labelled tensors raise beyond Python's own."""

from __future__ import annotations


class UnknownLabelError(KeyError, IndexError, ValueError):
    """A name or label that an axis or tensor does not have.

    It is a `KeyError` (a look-up by label failed), an `IndexError` (an index does not exist) and a `ValueError`
    (the argument is wrong), so that code written for torch, NumPy or dictionaries catches it.

    Example:
        >>> from moduli.labels import Space
        >>> try:
        ...     Space(["red", "green"]).index("blue")
        ... except KeyError as error:
        ...     print(error)
        Space(['red', 'green']) has no label 'blue'; its labels are ['red', 'green']
    """

    def __str__(self) -> str:
        # KeyError shows repr(message); a sentence should read as a sentence.
        return str(self.args[0]) if self.args else ""


class OwnTransposeError(ValueError):
    """Tensors were combined whose axes have the same labels and stand in another order: one of them may be a transpose.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([[0.0, 1.0], [3.0, 0.0]], row=["a", "b"], column=["a", "b"])
        >>> try:
        ...     t + t.T
        ... except ValueError as error:
        ...     print(type(error).__name__)
        OwnTransposeError
        >>> (t + t.mT).data.tolist()
        [[0.0, 4.0], [4.0, 0.0]]
    """
