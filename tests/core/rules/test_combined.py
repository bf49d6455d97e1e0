"""Rules from parts: each part does what it says, whatever the others are."""

import jax.numpy as jnp
import numpy as np
import pytest

from braintrace_core.rules import (
    BPTT,
    DNI,
    DRTRL,
    OSTL,
    RTRL,
    Combined,
    EProp,
    Immediate,
    PPProp,
    SnAp,
)
from tests.core.rules import zoo

UNIT_WISE, MIXING = zoo.cases()


def gradients(case, rule, window=zoo.STEPS, **options):
    carry, inputs = zoo.batch_of(case)
    return zoo.online(case, rule, window, carry, inputs, credit="step", **options)[0]


@pytest.mark.parametrize(
    ("named", "combined"),
    [
        (DRTRL(), Combined()),
        (PPProp(0.7), Combined(PPProp(0.7))),
        (EProp(kappa=0.6), Combined(kappa=0.6)),
        (OSTL(), Combined(recurrence="coupled")),
        (OSTL(recurrent=False), Combined(PPProp(0.0))),
        (Immediate(), Combined(recurrence="none")),
        (EProp(feedback="random", seed=2), Combined(feedback="random", seed=2)),
    ],
    ids=repr,
)
def test_named_rules_are_combinations(named, combined):
    case = MIXING["lstm"]
    zoo.assert_close(gradients(case, combined, window=4), gradients(case, named, window=4))


@pytest.mark.parametrize("storage", [DRTRL(), PPProp(0.8)], ids=repr)
def test_each_recurrence_is_another(storage):
    found = [
        gradients(MIXING["lstm"], Combined(storage, recurrence))["u"] for recurrence in ("units", "coupled", "none")
    ]
    for i, one in enumerate(found):
        assert float(jnp.abs(one).max()) > 0
        for other in found[:i]:
            assert float(jnp.abs(one - other).max()) > 1e-6


@pytest.mark.parametrize("recurrence", ["units", "coupled", "none"])
def test_a_filter_smooths_the_trace_of_any_recurrence(recurrence):
    """A signal on a smoothed trace is a signal on all traces up to it: ``sum_t s_t ebar_t = sum_u s'_u eps_u``."""
    case, kappa = MIXING["lstm"], 0.7
    signals = zoo.batch_of(case)[1][..., 0]
    smooth = jnp.stack([sum(kappa ** (t - u) * signals[t] for t in range(u, zoo.STEPS)) for u in range(zoo.STEPS)])
    found = gradients(case, Combined(recurrence=recurrence, kappa=kappa), modulator=signals)
    expected = gradients(case, Combined(recurrence=recurrence), modulator=smooth)
    followed = ("w", "u", "b")
    zoo.assert_close({key: found[key] for key in followed}, {key: expected[key] for key in followed})


def test_the_filter_of_pp_prop_smooths_the_response():
    """By definition, with numbers: ``h' = 0.9 h + x w``, so that ``D = 0.9`` and ``df = 1``."""
    (keep_x, keep_f), kappa = (0.6, 0.8), 0.7
    case = zoo.Case(lambda w, h, x: (0.9 * h + x @ w, h), jnp.ones((zoo.FEATURES, zoo.UNITS)), jnp.zeros(zoo.UNITS))
    _, inputs = zoo.batch_of(case)
    signals = np.cos(np.arange(inputs[..., 0].size)).reshape(inputs.shape[:2])
    of_x, of_f, smooth, expected = np.zeros(inputs.shape[1:]), 0.0, 0.0, 0.0
    for t, (x, signal) in enumerate(zip(np.asarray(inputs), signals, strict=True), start=1):
        of_x = keep_x * of_x + x
        of_f = keep_f * 0.9 * of_f + (1 - keep_f)
        smooth = kappa * smooth + of_f
        expected = expected + (of_x * signal[:, None]).sum(0)[:, None] * smooth / (1 - keep_f**t)
    rule = Combined(PPProp((keep_x, keep_f)), kappa=kappa)
    found = gradients(case, rule, modulator=jnp.asarray(signals))
    np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), rtol=1e-9)


@pytest.mark.parametrize("storage", [DRTRL(), PPProp(0.8), RTRL(), SnAp(2)], ids=repr)
def test_random_feedback_goes_with_any_storage(storage):
    case = UNIT_WISE["indrnn"]
    own, random, again, other = (
        gradients(case, rule)
        for rule in (storage, *(Combined(storage, feedback="random", seed=seed) for seed in (1, 1, 2)))
    )
    np.testing.assert_allclose(random["r"], own["r"], rtol=1e-12)
    np.testing.assert_array_equal(random["w"], again["w"])
    for different in (own, other):
        assert float(jnp.abs(random["w"] - different["w"]).max()) > 1e-3


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Combined("d_rtrl"), r"`storage` is a rule that keeps traces and no more, .* got 'd_rtrl'"),
        (lambda: Combined(BPTT()), "`storage` is a rule that keeps traces and no more"),
        (lambda: Combined(DNI()), "`storage` is a rule that keeps traces and no more"),
        (lambda: Combined(recurrence="full"), "`recurrence` is .* got 'full'"),
        (lambda: Combined(RTRL(), kappa=0.5), r"RTRL\(\) follows the recurrence in a way of its own"),
        (lambda: Combined(SnAp(2), recurrence="none"), "`recurrence` and `kappa` can be chosen with DRTRL"),
        (lambda: Combined(PPProp(0.0), kappa=0.5), "keeps nothing for a filter to smooth: give it a decay above 0"),
        (lambda: Combined(kappa=-0.1), r"`kappa` is a decay in \[0, 1\), got -0.1"),
        (lambda: Combined(feedback="none"), '`feedback` is "symmetric" or "random", got \'none\''),
    ],
)
def test_parts_that_do_not_fit_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()
