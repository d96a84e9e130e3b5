"""Links that transform the state of other links get copies, and do not change the state."""

import torch

from m.first_order import F64, close, doubles, run
from moduli import m, optim


def test_links_on_moments_get_copies():
    plain, transformed = m.Adam(), m.Adam(exp_avg_tfm=m.Mul(100.0), exp_avg_sq_tfm=m.Mul(7.0))
    w = torch.zeros(3, dtype=F64)
    for k in range(4):
        u = doubles(1.0, -2.0, 3.0) * (k + 1)
        for link in (plain, transformed):
            optim.step_tensors(link, [u.clone()], params=[w])
    for key in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(plain.state[w][key], transformed.state[w][key], rtol=0, atol=0)


def test_identity_links_change_nothing():
    pairs = [
        (m.Adam(), m.Adam(exp_avg_tfm=m.Identity(), exp_avg_sq_tfm=m.Identity())),
        (m.Adam(amsgrad=True), m.Adam(amsgrad=True, exp_avg_sq_tfm=m.Identity())),
        (m.Adan(), m.Adan(m_tfm=m.Identity(), v_tfm=m.Identity(), n_tfm=m.Identity())),
        (m.Adagrad(), m.Adagrad(accumulator_tfm=m.Identity())),
        (m.RMSprop(), m.RMSprop(exp_avg_sq_tfm=m.Identity())),
        (m.FullMatrixAdagrad(), m.FullMatrixAdagrad(accumulator_tfm=m.Identity())),
        (
            m.FullMatrixAdagrad(concat_params=False),
            m.FullMatrixAdagrad(concat_params=False, accumulator_tfm=m.Identity()),
        ),
        (m.ClipValueByEMA(), m.ClipValueByEMA(exp_avg_tfm=m.Identity())),
        (m.AdaHessian(seed=0), m.AdaHessian(seed=0, exp_avg_tfm=m.Identity(), D_exp_avg_sq_tfm=m.Identity())),
        (m.SophiaH(seed=0), m.SophiaH(seed=0, exp_avg_tfm=m.Identity(), D_exp_avg_tfm=m.Identity())),
        (m.ESGD(seed=0), m.ESGD(seed=0, Hz_sq_acc_tfm=m.Identity())),
        (m.SOAP(precond_freq=3), m.SOAP(precond_freq=3, inner=m.Identity())),
    ]
    for plain, transformed in pairs:
        close(run(lambda _, link=plain: [link, m.LR(0.01)]), run(lambda _, link=transformed: [link, m.LR(0.01)]))


def test_links_get_the_largest_second_moment_with_amsgrad():
    w = torch.zeros(1, dtype=F64)
    link = m.Adam(beta1=0.0, beta2=0.5, amsgrad=True, debias=False, eps=0.0, exp_avg_sq_tfm=m.Mul(4.0))
    optim.step_tensors(link, [doubles(8.0)], params=[w])
    out = optim.step_tensors(link, [doubles(1.0)], params=[w])[0]
    torch.testing.assert_close(out, 1 / (4 * doubles(32.0)).sqrt())


def test_links_over_all_parameters_work_on_a_moment():
    # dim="global" takes one norm over all tensors, so the link is called with all of them.
    tensors = [doubles(3.0), doubles(4.0)]
    params = [torch.zeros(1, dtype=F64), torch.zeros(1, dtype=F64)]
    link = m.Adam(beta1=0.0, beta2=0.0, eps=0.0, debias=False, exp_avg_tfm=m.Normalize(dim="global"))
    out = optim.step_tensors(link, tensors, params=params)
    torch.testing.assert_close(out[0], doubles(0.6 / 3))
    torch.testing.assert_close(out[1], doubles(0.8 / 4))


def test_soap_keeps_its_mean_inside_or_outside():
    # The first update of these matrices has full rank; otherwise rounding would choose part of the basis.
    ends = [
        run(lambda _, p=p: [m.SOAP(precond_freq=3, proj_exp_avg=p), m.LR(0.01)], steps=20, shapes=((3, 4), (3, 3)))
        for p in (True, False, None)
    ]
    close(ends[0], ends[1], 1e-9)
    close(ends[0], ends[2], 1e-9)


def test_inner_links_of_soap_come_before_its_moments():
    adam = m.Adam(beta1=0.95, beta2=0.95, eps=1e-4)
    expected = run(lambda _: [m.SOAPBasis(adam, inner=m.EMA(0.5)), m.LR(0.01)])
    for outside in (True, False):
        link = m.SOAP(inner=m.EMA(0.5), eps=1e-4, proj_exp_avg=not outside)
        close(run(lambda _, link=link: [link, m.LR(0.01)]), expected, 1e-9)
