"""Problems, races and reports.

* A **problem** (`moduli.lab.problems`) is a model at a starting point, a loss, and the best value that is known.
* A **contender** is a chain of links as text, read by `parse` and looked up in the `catalogue`, or a function from a model to an
  optimizer.
* A **race** runs every contender on every problem from every seed, in processes of their own, with a budget that is
  counted in evaluations of the loss. It gives `Results`, which live in a file that survives whatever ends the race.
* A **report** is one HTML page of the results; `picture` draws them as one SVG.
* The **tour** is six short programs that are run, and one page with their code, their numbers and their pictures (`Sketch`).
* A **fit** runs one chain on a problem of the user's own, and can be stopped and resumed.

The `moduli` command is a thin layer over this room.
"""

from . import catalogue, problems
from ._contender import Contender, Entrant, contender
from ._fit import Fit, fit
from ._grammar import ChainSyntaxError, Link, ParsedChain, parse
from ._paper import figures, write_figures
from ._race import DEFAULT_BUDGET, DEFAULT_FIELD, DEFAULT_PROBLEMS, default_field, race
from ._reference import ProblemFileError, as_problem, load_object, load_problem, split_reference
from ._report import command_for, picture, report, write_picture, write_report
from ._results import Results, ResultsError, flat_rows, write_table
from ._run import Ended, RunReason, run
from ._scores import choose_winners, find_goals
from ._sketch import Sketch
from ._standings import (
    Standing,
    chosen_settings,
    sensitivity,
    standings,
    tuning_gains,
)
from ._statistics import curves, profiles, quantile, summary
from ._tables import TABLE_FORMS, load, summary_table, write_curves, write_summary
from ._tour import TOUR, TourStop, UnknownStopError, read_program, run_program, tour_page, write_tour

__all__ = [
    "problems",
    "catalogue",
    "ParsedChain",
    "ChainSyntaxError",
    "Link",
    "parse",
    "Contender",
    "Entrant",
    "contender",
    "RunReason",
    "run",
    "race",
    "DEFAULT_BUDGET",
    "DEFAULT_FIELD",
    "DEFAULT_PROBLEMS",
    "default_field",
    "Results",
    "ResultsError",
    "flat_rows",
    "write_table",
    "summary",
    "curves",
    "profiles",
    "quantile",
    "report",
    "write_report",
    "command_for",
    "picture",
    "write_picture",
    "Standing",
    "standings",
    "find_goals",
    "choose_winners",
    "chosen_settings",
    "tuning_gains",
    "sensitivity",
    "load",
    "TABLE_FORMS",
    "summary_table",
    "write_summary",
    "write_curves",
    "figures",
    "write_figures",
    "Sketch",
    "TOUR",
    "TourStop",
    "UnknownStopError",
    "read_program",
    "run_program",
    "tour_page",
    "write_tour",
    "fit",
    "Fit",
    "Ended",
    "ProblemFileError",
    "as_problem",
    "load_object",
    "load_problem",
    "split_reference",
]
