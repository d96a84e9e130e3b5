"""The laws that every link obeys, for links of your own.

A **law** is a sentence about links that a function checks: the fused pass equals the links one by one, a run that is saved
and resumed goes on bit by bit, an error in a closure leaves the parameters where the step began. A `Case` is a link in the
smallest chain that makes it an optimizer, with what may be expected of it. `check_link` puts a link under all laws;
`check_law` under one, so that a test suite can report each by itself; `LAWS` has their names. `pytest --moduli-links mypackage`
makes a test of each law for each link of a package (`find_links`).
"""

from ._check import Report, check_law, check_link
from ._find import find_links, make_case
from ._problems import LAWS, Case, LawError

__all__ = ["LAWS", "Case", "LawError", "Report", "check_law", "check_link", "find_links", "make_case"]
