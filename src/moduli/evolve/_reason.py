"""Why a search ended, as a sentence."""

from __future__ import annotations

from enum import Enum, unique


@unique
class Reason(Enum):
    """Why a search should stop, or did. The value of each member is the sentence, which `str` gives.

    Example:
        >>> from moduli.evolve import Reason
        >>> print(Reason.TARGET)
        The target fitness was reached.
    """

    TARGET = "The target fitness was reached."
    BUDGET = "The budget of evaluations is spent."
    SMALL_STEP = "The steps are smaller than the tolerance."
    FLAT = "The fitness no longer differs between members and generations."
    STALLED = "The best fitness has not improved for as many generations as the patience allows."
    CONDITION = "The covariance matrix is too ill-conditioned to go on."
    DIVERGED = "The steps have grown without limit."
    NOT_FINITE = "No member has had a finite fitness for ten generations."
    RESTARTS = "The limit on restarts was reached."
    CALLBACK = "The callback asked to stop."
    INTERRUPTED = "The search was interrupted; it can be resumed."

    def __str__(self) -> str:
        return self.value

    @property
    def success(self) -> bool:
        """Whether the search ended because it found what it looked for, or can't find better.

        Example:
            >>> from moduli.evolve import Reason
            >>> Reason.SMALL_STEP.success, Reason.BUDGET.success
            (True, False)
        """
        return self in (Reason.TARGET, Reason.SMALL_STEP, Reason.FLAT)
