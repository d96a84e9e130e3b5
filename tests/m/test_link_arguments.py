"""Arguments of links that are out of range raise an error that names them."""

import pytest

from moduli import m


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: m.AEGD(lr=-0.1), "lr"),
        (lambda: m.MSAMMomentum(0.1, momentum=1.0), "momentum"),
        (lambda: m.MSAM(m.LR(0.1), rho=-1.0), "rho"),
        (lambda: m.TwoPointNewton(derivatives_method="x"), "derivatives_method"),
        (lambda: m.InverseFreeNewton(hessian_method="x"), "hessian_method"),
        (lambda: m.MatrixMomentum(0.1, hvp_method="x"), "hvp_method"),
        (lambda: m.MatrixMomentum(0.1, adapt_freq=0), "adapt_freq"),
        (lambda: m.AdaptiveBisection(nplus=1.0), "nplus"),
        (lambda: m.AdaptiveBisection(nminus=1.0), "nminus"),
        (lambda: m.ScipyMinimizeScalar(method="x"), "method"),
        (lambda: m.ScipyMinimizeScalar(method="bounded"), "bounds"),
        (lambda: m.SPSA1(h=0.0), "h is"),
        (lambda: m.CD(index="x"), "index"),
        (lambda: m.Dropout(1.5), "p is"),
        (lambda: m.WeightDropout(-0.5), "p is"),
        (lambda: m.PerturbWeights(distribution="x"), "distribution"),
        (lambda: m.RandomReinitialize(p_reinit=2.0), "p_reinit"),
        (lambda: m.SubspaceNewton(truncate=0), "truncate"),
        (lambda: m.SubspaceNewton(eigv_tol=1.0), "eigv_tol"),
        (lambda: m.NystromSketchAndSolve(damping=-1.0), "damping"),
        (lambda: m.NystromPCG(eigv_tol=1.0), "eigv_tol"),
    ],
)
def test_arguments_are_checked(make, words):
    with pytest.raises(ValueError, match=words):
        make()
