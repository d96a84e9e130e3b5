"""The mutants of `make mutants`: lines of links, each with a change that is plausible and wrong."""

from __future__ import annotations

from typing import NamedTuple


class Link(NamedTuple):
    """Links with their file in `moduli/m`, rows of the law book, tests (arguments of pytest) and mutants (old, new)."""

    name: str
    file: str
    rows: tuple[str, ...]
    tests: tuple[str, ...]
    mutants: tuple[tuple[str, str], ...]


LINKS = [
    Link(
        "ADOPT",
        "adaptive/_adan.py",
        ("ADOPT",),
        ("tests/m/test_adaptive.py", "-k", "adopt"),
        (
            ("bound = before**0.25", "bound = before**0.5"),
            ('.clamp(min=setting["eps"])', ' + setting["eps"]'),
            ("(first + (1 - first) * (1 - beta2))", "(1 - beta2)"),
        ),
    ),
    Link(
        "AdEMAMix",
        "adaptive/_adan.py",
        ("AdEMAMix",),
        (),
        (
            ('state["exp_avg_slow"] * alpha', 'state["exp_avg_slow"]'),
            ('1 / math.log(setting["beta3_start"]), 1 / math.log(beta3)', 'setting["beta3_start"], beta3'),
            ('alpha = alpha * rise(t, setting["warmup"])', "alpha = alpha * 1.0"),
        ),
    ),
    Link(
        "Adafactor",
        "adaptive/_adafactor.py",
        ("Adafactor",),
        ("tests/m/test_matrix_links.py", "-k", "adafactor"),
        (
            ('1 - state["step"] ** -setting["decay"]', '1 - (state["step"] + 1) ** -setting["decay"]'),
            ("rows / rows.mean(-1, keepdim=True)", "rows"),
            ('min(1e-2, state["step"] ** -0.5)', 'state["step"] ** -0.5'),
            ('.clamp(min=setting["scale_eps"])', ""),
        ),
    ),
    Link(
        "CAME",
        "adaptive/_adafactor.py",
        ("CAME",),
        (),
        (
            ('(scaled - state["exp_avg"])', "(scaled)"),
            ('rebuild(state, "instability_").rsqrt()', 'rebuild(state, "instability_").sqrt()'),
            ('setting["beta3"], "instability_"', 'setting["beta2"], "instability_"'),
        ),
    ),
    Link(
        "AdamMini",
        "adaptive/_adafactor.py",
        ("AdamMini",),
        (),
        (
            ('(1 - setting["beta2"] ** t)', "1.0"),
            ("        count = tensor.shape[0]", "        count = 1"),
        ),
    ),
    Link(
        "TrustRatio",
        "step_size/_lr.py",
        ("TrustRatio",),
        (),
        (
            ('step + decay * size + setting["eps"]', 'step + setting["eps"]'),
            ("(u + x * decay) * ratio", "u * ratio"),
            ('counted * setting["trust"]', "counted"),
        ),
    ),
    Link(
        "GrokFast",
        "momentum/_ema.py",
        ("GrokFast",),
        (),
        (
            ('state["exp_avg"] * setting["lamb"]', 'state["exp_avg"]'),
            ('state["exp_avg"] = tensor.clone()', 'state["exp_avg"] = torch.zeros_like(tensor)'),
        ),
    ),
    Link(
        "Lookahead",
        "momentum/_averaging.py",
        ("Lookahead",),
        (),
        (
            ('setting["alpha"] * back', "back"),
            ('state["slow"].lerp_(param - tensor,', 'state["slow"].lerp_(param,'),
        ),
    ),
    Link(
        "GaLore",
        "projections/_low_rank.py",
        ("GaLore",),
        ("tests/m/test_matrix_links.py", "-k", "galore or low_rank or fira or apollo"),
        (
            ("[0][..., : self.rank]", "[0][..., -self.rank :]"),
            ('self.expand(tensor, matrix, row) * self.settings[param]["scale"]', "self.expand(tensor, matrix, row)"),
            ("(steps - 1) % self.update_gap == 0", "steps == 1"),
        ),
    ),
    Link(
        "Fira",
        "projections/_low_rank.py",
        ("Fira",),
        ("tests/m/test_matrix_links.py", "-k", "galore or low_rank or fira or apollo"),
        (
            ('(matrix - state["basis"] @ seen) * _ratios', "matrix * _ratios"),
            ("torch.linalg.vector_norm(t, dim=-2, keepdim=True)", "torch.linalg.vector_norm(t)"),
            ("+ _limit_growth(rest, state, self.growth)", "+ rest"),
        ),
    ),
    Link(
        "APOLLO",
        "projections/_low_rank.py",
        ("APOLLO",),
        ("tests/m/test_matrix_links.py", "-k", "galore or low_rank or fira or apollo"),
        (
            ("return _limit_growth(matrix * ratio, state, self.growth)", "return matrix * ratio"),
            ("ratio = _ratios(inner, seen)", "ratio = 1 / _ratios(inner, seen)"),
            ("drawn.mT / self.rank**0.5", "drawn.mT"),
        ),
    ),
    Link(
        "Dion",
        "adaptive/_adafactor.py",
        ("Dion",),
        ("tests/m/test_matrix_links.py", "-k", "dion"),
        (
            ("total - (1 - mu) * left", "total - left"),
            ("(rows / columns) ** 0.5 * state", "1.0 * state"),
            ("right / torch.where(size > 0, size, 1.0)", "right"),
        ),
    ),
    Link(
        "LMO",
        "adaptive/_orthogonalize.py",
        ("LMO",),
        ("tests/m/test_matrix_links.py", "-k", "lmo"),
        (
            ("tensor) * (rows / columns) ** 0.5", "tensor)"),
            ("/ (tensor[0].numel() if tensor.dim() > 1 and tensor.numel() else 1)", ""),
            ("_unit(x, -2), tensor) * x.shape[-2] ** 0.5", "_unit(x, -1), tensor) * x.shape[-2] ** 0.5"),
            ("_unit(x, -1), tensor) / x.shape[-1] ** 0.5", "_unit(x, -1), tensor)"),
            ("_unit(tensor.to(wide), None) * tensor.numel() ** 0.5", "_unit(tensor.to(wide), None)"),
        ),
    ),
    Link(
        "NeuronNormalize",
        "adaptive/_orthogonalize.py",
        ("NeuronNormalize",),
        (),
        (
            (".abs().square().mean(-1)", ".abs().square().mean(-2)[: x.shape[0]]"),
            ("out * (0.2 * x.numel() ** 0.5 /", "out * (x.numel() ** 0.5 /"),
            ('lerp_(square, 1 - setting["beta"])', "lerp_(square, 1.0)"),
        ),
    ),
    Link(
        "QKClip",
        "clipping/_clip_norm.py",
        ("QKClip",),
        ("tests/m/test_matrix_links.py", "-k", "qk_clip"),
        (
            ('(key, 1 - setting["alpha"])', '(key, setting["tau"])'),
            ('.clamp(min=setting["tau"])', ""),
            ("(weight.detach() - updates[i]) * scale", "weight.detach() * scale"),
        ),
    ),
    Link(
        "KLShampoo",
        "adaptive/_full_matrix.py",
        ("KLShampoo",),
        (),
        (
            ('x @ state["right_inverse"] @ x.mH / columns', "x @ x.mH / columns"),
            ("(vectors * values**-0.5) @ vectors.mH", "(vectors * values**-0.25) @ vectors.mH"),
            ("identity * size\n", "identity\n"),
        ),
    ),
    Link(
        "SPlus",
        "adaptive/_full_matrix.py",
        ("SPlus",),
        (),
        (
            ("rotated.sgn(), 0.0)", "rotated, 0.0)"),
            ("* (2 / (len(left) + len(right)))", ""),
            ('lerp_(x.mH @ x, 1 - setting["beta2"])', 'lerp_(x.mH @ x, 1 - setting["beta1"])'),
            ("if before == 1 or (before > 0", "if before == 0 or (before > 0"),
        ),
    ),
    Link(
        "Quantized",
        "meta/_quantized.py",
        ("Quantized",),
        ("tests/m/test_matrix_links.py", "-k", "bit_by_bit or refuses or slow_mean or keep_their_size"),
        (
            ("part**4 if codes.dtype", "part**3 if codes.dtype"),
            ("torch.where((levels == 0) & (part > 0), 1.0, levels)", "levels"),
            ("((places * _ALONG + step * _OVER) % 1.0)", "(0.5 + 0 * places)"),
            ("scale.repeat_interleave(block)[: codes.numel()]", "scale.repeat(block)[: codes.numel()]"),
        ),
    ),
    Link(
        "AdaBelief",
        "adaptive/_adam.py",
        ("AdaBelief",),
        (),
        (('away = tensor - state["exp_avg"]', "away = tensor"), ('.add_(setting["eps"])', "")),
    ),
    Link(
        "Adadelta",
        "adaptive/_adagrad.py",
        ("Adadelta",),
        (),
        (("(before.clamp(min=0) + eps)", '(state["acc_delta"] + eps)'),),
    ),
    Link(
        "Adamax",
        "adaptive/_adam.py",
        ("Adamax",),
        (),
        (('state["exp_inf"] * setting["beta2"], tensor', 'state["exp_inf"], tensor'),),
    ),
    Link(
        "RAdam",
        "adaptive/_adam.py",
        ("RAdam",),
        (),
        (("(length > 5)", "(length > 4)"), ("(rectified * (1 - power))", "(1 - power)")),
    ),
    Link(
        "NAdam",
        "adaptive/_adam.py",
        ("NAdam",),
        (),
        (("(1 - product * ahead)", "(1 - product)"), ("0.96 ** (t *", "0.9 ** (t *")),
    ),
    Link(
        "ScheduleFree",
        "momentum/_averaging.py",
        ("ScheduleFree",),
        ("tests/m/test_learning_rate_free.py", "tests/m/test_matrix_links.py", "-k", "schedule_free"),
        (
            ("c = t**self.r * size**2 / total", "c = t**self.r * size / total"),
            ("(1 - beta + beta * c)", "(1 - beta)"),
        ),
    ),
    Link(
        "Prodigy",
        "adaptive/_prodigy.py",
        ("Prodigy",),
        ("tests/m/test_learning_rate_free.py", "tests/m/test_matrix_links.py", "-k", "prodigy or paper"),
        (
            ('d * row["eps"]', 'row["eps"]'),
            ('size * row["weight_decay"])', 'row["weight_decay"])'),
        ),
    ),
    Link(
        "DAdaptAdam",
        "adaptive/_prodigy.py",
        ("DAdaptAdam",),
        ("tests/m/test_learning_rate_free.py", "-k", "paper or schedule"),
        (
            ('size = d * row["gamma"]', "size = d"),
            ("(1 - rho) * total, 0.0", "total, 0.0"),
        ),
    ),
    Link(
        "Orthogonalize",
        "adaptive/_polar.py",
        ("Orthogonalize",),
        ("tests/m/test_matrix_links.py", "tests/m/test_adaptive.py", "-k", "ortho or muon or polar"),
        (
            ("(a / safe, b / safe**3, c / safe**5)", "(a, b, c)"),
            ("gram = fused(half, half, rest, beta=a)", "gram = half"),
        ),
    ),
    Link(
        "NewtonCG",
        "second_order/_newton_cg.py",
        (),
        ("tests/m/test_searches_and_curvature.py", "-k", "newton_cg"),
        (
            ("return out + p * (slope / -curvature)", "return out"),
            ("(slope / -curvature)", "slope"),
        ),
    ),
    Link(
        "SOAP",
        "adaptive/_shampoo.py",
        ("SOAP",),
        ("tests/m/test_adaptive.py", "-k", "soap"),
        (
            ('t = state["step"] - 1\n', 't = state["step"]\n'),
            (".index_select(axis, order)", ""),
            ("        if mean is not None:\n", "        if False:\n"),
        ),
    ),
    Link(
        "SPSA1",
        "grad_approximation/_randomized.py",
        ("SPSA1",),
        (),
        (
            ("formula, h, loss) / count", "formula, h, loss)"),
            ("param.copy_(x + point * h * v)", "param.copy_(x - point * h * v)"),
        ),
    ),
    Link(
        "RandomHvp",
        "misc/_curvature.py",
        ("RandomHvp",),
        (),
        (
            ("(v.conj() * Hv if self.zHz else Hv) / self.n_samples", "v.conj() * Hv"),
            ("v.conj() * Hv if self.zHz else Hv", "Hv"),
        ),
    ),
    Link(
        "WeightDropout and RandomReinitialize",
        "weight_decay.py",
        ("WeightDropout", "RandomReinitialize"),
        (),
        (
            ("param.masked_fill_(drawn, 0)", "param.masked_fill_(~drawn, 0)"),
            ('state["stored"] = param.detach().clone()', 'state["stored"] = torch.zeros_like(param)'),
            (
                'coin < self.settings[param]["p_reinit"]',
                'coin > self.settings[param]["p_reinit"]',
            ),
        ),
    ),
    Link(
        "ConjugateGradient",
        "conjugate_gradient.py",
        (),
        ("tests/m/test_conjugate_directions.py",),
        (
            ("_divide(dot(g, y), dot(last, last))", "_divide(dot(g, y), dot(g, g))"),
            ("_divide(-dot(g, g), dot(D, y))", "_divide(-dot(g, y), dot(D, y))"),
            ("dot(y, g) + 2 * _divide(", "dot(y, g) + _divide("),
            ("_divide(dot(g, g), dot(last, D))", "_divide(dot(g, g), dot(last, last))"),
        ),
    ),
    Link(
        "quasi-Newton rules",
        "quasi_newton/_dense.py",
        ("BFGS", "DFP", "SR1", "PSB"),
        ("tests/m/test_searches_and_curvature.py", "tests/m/test_globalisation.py"),
        (
            ("0.5 * (1 + torch.dot(y, Hy) * over)", "0.5"),
            ("torch.where(used, -1 / yHy, 0.0)", "torch.where(used, -1 / sy, 0.0)"),
            ("z = pair.s - H @ pair.y", "z = pair.s + H @ pair.y"),
            ("r - s * (0.5 * _dot(r, s) / ss)", "r - s * (_dot(r, s) / ss)"),
        ),
    ),
    Link(
        "LBFGS",
        "quasi_newton/_lbfgs.py",
        ("LBFGS",),
        ("tests/m/test_searches_and_curvature.py", "-k", "two_loop"),
        (
            ("gamma = float(self._sy[newest] / self._yy[newest, newest])", "gamma = 1.0"),
            ("        inner += self._sy * v\n", ""),
            ("slot = slots.pop(0) if len(slots) == self.history", "slot = slots.pop() if len(slots) == self.history"),
        ),
    ),
    Link(
        "Backtracking",
        "line_search/_backtracking.py",
        ("Backtracking",),
        ("tests/m/test_backtracking.py",),
        (
            ("sufficient = f <= loss + c * a * slope", "sufficient = f <= loss"),
            ("f >= loss + (1 - c) * a * slope", "f >= loss + c * a * slope"),
        ),
    ),
    Link(
        "StrongWolfe",
        "line_search/_strong_wolfe.py",
        ("StrongWolfe",),
        ("tests/m/test_searches_and_curvature.py", "-k", "olfe"),
        (
            ("if f <= enough and abs(d) <= c2 * -slope:", "if f <= enough:"),
            ("if f <= enough and abs(d) <= c2 * -slope:", "if abs(d) <= c2 * -slope:"),
        ),
    ),
    Link(
        "TrustCG",
        "trust_region/_base.py",
        ("TrustCG",),
        ("tests/m/test_trust_region.py", "-k", "TrustCG"),
        (
            ("- 0.5 * float(torch.dot(d, H.matvec(d)))", "- float(torch.dot(d, H.matvec(d)))"),
            ('max(radius, setting["nplus"] * bound)', "radius"),
            ('self._check_radius(setting["nminus"] * bound, setting)', "radius"),
        ),
    ),
    Link(
        "CubicRegularization",
        "trust_region/_regions.py",
        ("CubicRegularization",),
        ("tests/m/test_trust_region.py", "-k", "cubic_regularisation"),
        (
            ("** 3 / (3 * radius)", "** 3 / radius"),
            ("below = values + M * norm", "below = values + M"),
        ),
    ),
    Link(
        "GaussNewton",
        "least_squares.py",
        ("GaussNewton",),
        ("tests/m/test_searches_and_curvature.py", "-k", "gauss or underdetermined"),
        (
            ("A.solve_plus_diag(u, reg) if reg else A.solve(u)", "A.solve_plus_diag(u, 1.0)"),
            ("unflat(J.T @ weights, objective.params)", "unflat(2 * J.T @ weights, objective.params)"),
        ),
    ),
    Link(
        "AugmentedLagrangian",
        "constraints.py",
        ("AugmentedLagrangian",),
        ("tests/minimize/test_constraints.py",),
        (
            ("0.5 * mu * c.square().sum()", "mu * c.square().sum()"),
            ("else multiplier + mu * c", "else multiplier - mu * c"),
            ("return (multiplier - mu * c).clamp(min=0) if", "return (multiplier - mu * c) if"),
        ),
    ),
    Link(
        "links around a search",
        "_search_link.py",
        ("CMAES", "OpenES"),
        ("tests/m/test_evolution.py",),
        (
            ("param.detach() - goal for param", "goal - param.detach() for param"),
            ("search.revise(mean=x.clone())", "pass"),
            (
                "objective.updates = unflat(search.take_estimate(), params)",
                "objective.updates = unflat(-search.take_estimate(), params)",
            ),
        ),
    ),
    Link(
        "PBT",
        "population/_pbt.py",
        (),
        ("tests/m/test_population.py", "tests/m/test_pbt.py", "-k", "PBT or pbt"),
        (
            (
                "best, worst = ranked[:replaced], ranked[-replaced:]",
                "worst, best = ranked[:replaced], ranked[-replaced:]",
            ),
            (".clamp(low, high)", ""),
            ("torch.full_like(losses, torch.inf), losses)", "torch.full_like(losses, -torch.inf), losses)"),
        ),
    ),
    Link(
        "restarts",
        "restarts.py",
        (),
        ("tests/m/test_restarts.py",),
        (
            ("stuck = 0 if moved is None or moved > tol else", "stuck = 0 if moved is None or moved < tol else"),
            ('>= setting["cond1"] * square', '<= setting["cond1"] * square'),
            ("done % max(every, 1) == 0", "done % (max(every, 1) + 1) == 0"),
        ),
    ),
    Link(
        "LaplacianSmoothing",
        "smoothing.py",
        ("LaplacianSmoothing",),
        ("tests/m/test_smoothing.py",),
        (('(1 + 2 * setting["sigma"] * ', '(1 + setting["sigma"] * '),),
    ),
    Link(
        "GradientSampling",
        "smoothing.py",
        (),
        ("tests/m/test_smoothing.py",),
        (
            ('a if point is None else a + scale * self.settings[param]["sigma"] * z', "a"),
            ("[column.mean(0) for column in columns]", "[column.sum(0) for column in columns]"),
        ),
    ),
    Link(
        "termination",
        "termination.py",
        (),
        ("tests/m/test_termination.py",),
        (
            ("if loss <= value else None", "if loss >= value else None"),
            ("bool(best - loss > tol)", "bool(best - loss < tol)"),
            ("if reasons and None not in reasons else None", "if reasons else None"),
        ),
    ),
    Link(
        "MARSCorrection",
        "variance_reduction.py",
        ("MARSCorrection",),
        ("tests/m/test_variance_reduction.py",),
        (
            ('setting["scaling"] * beta / (1 - beta)', 'setting["scaling"] * beta'),
            ('state["previous"] = tensor.clone()', 'state.setdefault("previous", tensor.clone())'),
        ),
    ),
    Link(
        "SVRG",
        "variance_reduction.py",
        ("SVRG",),
        ("tests/m/test_variance_reduction.py",),
        (
            ('(grad - state["full"]) / (count + 1)', '(grad - state["full"]) / (count + 2)'),
            ('grad - alpha * (before - state["full"])', 'grad + alpha * (before - state["full"])'),
        ),
    ),
    Link(
        "running sums",
        "ops/_accumulate.py",
        ("AccumulateSum", "AccumulateMean", "EMASquared", "Debias"),
        ("tests/m/test_ops.py",),
        (
            ('state["weight"] * keep + 1', 'state["weight"] + 1'),
            ("return old * keep + new", "return old + new"),
            ('factor / (1 - setting["beta1"] ** state["step"])', 'factor / (1 - setting["beta1"])'),
        ),
    ),
    Link(
        "Graft",
        "ops/_graft.py",
        ("Graft",),
        ("tests/m/test_ops.py", "-k", "raft or strength"),
        (('1 + setting["strength"] * (ratio - 1)', "ratio"), ("other / torch.where", "mine / torch.where")),
    ),
]
