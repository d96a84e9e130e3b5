"""Labelled tensors: torch data whose axes have names and whose positions have labels.

Two nouns carry this room. A `Space` is the ordered labels of one axis; a `Tensor` is data plus one Space per axis. Every
operation is a pairing of the two: axes are paired by name (or by position where names are missing), positions within an
axis by label, and what can't be paired is refused with a sentence instead of being stretched or reordered by accident.

* *Elementwise*: operators, ``mo.sin``, ``mo.maximum``, ``mo.where``, and any torch function with a rule. Operands are
  paired, the result has the axes of both.
* *Reductions and scans*: ``t.sum("y x")``, ``t.softmax("class")``, ``t.argmax("class", labels=True)``.
* *Products*: ``a @ b``, ``mo.dot(a, b, over="in")``, ``mo.einsum("b in, out in -> b out", x, w)``.
* *Linear algebra* on the last two axes: ``mo.eigh``, ``mo.solve``, ``mo.lowdin``.
* *Rearrangement*: ``rename``, ``relabel``, ``permute``, ``flatten``, ``cat``, ``stack``, indexing, ``sel``, ``isel``.
* *Making*: ``mo.tensor``, ``mo.zeros``, ``mo.eye``, and `from_xarray`.

Labels that occur on one side only are an error unless a `join` policy says otherwise.
"""

import typing as _typing

from . import _placement as _placement
from . import _rules as _rules
from ._adjoint import adjoint as adjoint
from ._assign import diag_embed as diag_embed
from ._assign import diagonal as diagonal
from ._assign import index_add as index_add
from ._assign import one_hot as one_hot
from ._assign_coords import assign_coords as assign_coords
from ._assign_coords import coordinate as coordinate
from ._axes import Axes as Axes
from ._concat import cat as cat
from ._concat import chunk as chunk
from ._concat import flatten as flatten
from ._concat import split as split
from ._concat import stack as stack
from ._concat import unbind as unbind
from ._concat import unflatten as unflatten
from ._constant import refuse_compilation as _refuse_compilation
from ._elementwise import elementwise as elementwise
from ._errors import OwnTransposeError as OwnTransposeError
from ._errors import UnknownLabelError as UnknownLabelError
from ._factories import empty as empty
from ._factories import full as full
from ._factories import ones as ones
from ._factories import rand as rand
from ._factories import randn as randn
from ._factories import tensor as tensor
from ._factories import zeros as zeros
from ._gaps import bfill as bfill
from ._gaps import count as count
from ._gaps import dropna as dropna
from ._gaps import ffill as ffill
from ._gaps import fillna as fillna
from ._gaps import interpolate_na as interpolate_na
from ._gaps import isnull as isnull
from ._gaps import notnull as notnull
from ._gaps import quantile as quantile
from ._groupby import groupby as groupby
from ._groups import Groups as Groups
from ._join import join as join
from ._like import arange as arange
from ._like import empty_like as empty_like
from ._like import eye as eye
from ._like import full_like as full_like
from ._like import ones_like as ones_like
from ._like import rand_like as rand_like
from ._like import randn_like as randn_like
from ._like import zeros_like as zeros_like
from ._linalg import QR as QR
from ._linalg import SVD as SVD
from ._linalg import Eigen as Eigen
from ._linalg import cholesky as cholesky
from ._linalg import eig as eig
from ._linalg import eigh as eigh
from ._linalg import eigvals as eigvals
from ._linalg import eigvalsh as eigvalsh
from ._linalg import qr as qr
from ._linalg import svd as svd
from ._linalg import svdvals as svdvals
from ._loc import Loc as Loc
from ._maths import abs as abs
from ._maths import acos as acos
from ._maths import acosh as acosh
from ._maths import add as add
from ._maths import allclose as allclose
from ._maths import angle as angle
from ._maths import asin as asin
from ._maths import asinh as asinh
from ._maths import atan as atan
from ._maths import atan2 as atan2
from ._maths import atanh as atanh
from ._maths import ceil as ceil
from ._maths import clamp as clamp
from ._maths import conj as conj
from ._maths import cos as cos
from ._maths import cosh as cosh
from ._maths import div as div
from ._maths import equal as equal
from ._maths import erf as erf
from ._maths import exp as exp
from ._maths import expm1 as expm1
from ._maths import floor as floor
from ._maths import hypot as hypot
from ._maths import imag as imag
from ._maths import isclose as isclose
from ._maths import isfinite as isfinite
from ._maths import isinf as isinf
from ._maths import isnan as isnan
from ._maths import lerp as lerp
from ._maths import log as log
from ._maths import log1p as log1p
from ._maths import log2 as log2
from ._maths import log10 as log10
from ._maths import logaddexp as logaddexp
from ._maths import logical_and as logical_and
from ._maths import logical_not as logical_not
from ._maths import logical_or as logical_or
from ._maths import maximum as maximum
from ._maths import minimum as minimum
from ._maths import mul as mul
from ._maths import nan_to_num as nan_to_num
from ._maths import neg as neg
from ._maths import pow as pow
from ._maths import real as real
from ._maths import reciprocal as reciprocal
from ._maths import relu as relu
from ._maths import remainder as remainder
from ._maths import round as round
from ._maths import rsqrt as rsqrt
from ._maths import sigmoid as sigmoid
from ._maths import sign as sign
from ._maths import sin as sin
from ._maths import sinh as sinh
from ._maths import sqrt as sqrt
from ._maths import square as square
from ._maths import sub as sub
from ._maths import tan as tan
from ._maths import tanh as tanh
from ._maths import trunc as trunc
from ._maths import where as where
from ._pandas import from_pandas as from_pandas
from ._pandas import to_dataframe as to_dataframe
from ._pandas import to_pandas as to_pandas
from ._plot import plot as plot
from ._products import dot as dot
from ._products import einsum as einsum
from ._products import matmul as matmul
from ._products import outer as outer
from ._rank import Ranked as Ranked
from ._rank import argmax as argmax
from ._rank import argmin as argmin
from ._rank import argsort as argsort
from ._rank import cumprod as cumprod
from ._rank import cumsum as cumsum
from ._rank import flip as flip
from ._rank import log_softmax as log_softmax
from ._rank import max as max
from ._rank import min as min
from ._rank import roll as roll
from ._rank import softmax as softmax
from ._rank import sort as sort
from ._rank import topk as topk
from ._reduce import all as all
from ._reduce import amax as amax
from ._reduce import amin as amin
from ._reduce import any as any
from ._reduce import count_nonzero as count_nonzero
from ._reduce import logsumexp as logsumexp
from ._reduce import mean as mean
from ._reduce import nanmean as nanmean
from ._reduce import nansum as nansum
from ._reduce import norm as norm
from ._reduce import prod as prod
from ._reduce import std as std
from ._reduce import sum as sum
from ._reduce import var as var
from ._reindex import align as align
from ._reindex import reindex as reindex
from ._reindex import reindex_like as reindex_like
from ._reindex import unstack as unstack
from ._resample import resample as resample
from ._select import interp as interp
from ._select import isel as isel
from ._select import sel as sel
from ._shape import align_to as align_to
from ._shape import h as h
from ._shape import movedim as movedim
from ._shape import permute as permute
from ._shape import relabel as relabel
from ._shape import rename as rename
from ._shape import squeeze as squeeze
from ._shape import transpose as transpose
from ._shape import unsqueeze as unsqueeze
from ._solve import Slogdet as Slogdet
from ._solve import add_identity as add_identity
from ._solve import det as det
from ._solve import inv as inv
from ._solve import lowdin as lowdin
from ._solve import matrix_exp as matrix_exp
from ._solve import pinv as pinv
from ._solve import slogdet as slogdet
from ._solve import solve as solve
from ._solve import trace as trace
from ._space import BROADCAST as BROADCAST
from ._space import Space as Space
from ._tensor import AmbiguousTruthError as AmbiguousTruthError
from ._tensor import Tensor as Tensor
from ._tensor import wrap as wrap
from ._tensor import wrap_like as wrap_like
from ._transforms import vmap as vmap
from ._windows import Rolling as Rolling
from ._windows import diff as diff
from ._windows import rolling as rolling
from ._windows import shift as shift
from ._xarray import from_xarray as from_xarray
from ._xarray import open_dataset as open_dataset
from ._xarray import to_xarray as to_xarray

_refuse_compilation(globals(), Tensor, Space)

if not _typing.TYPE_CHECKING:  # which takes a name that is imported as itself for public
    __all__ = sorted(name for name in globals() if not name.startswith("_"))
