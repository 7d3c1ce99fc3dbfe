"""Convergence of SGD with a stochastic batch size: both theorems, and their steps.

Assumptions of both: the loss is L-smooth, a sample's gradient is unbiased, its
variance is at most sigma^2; a step's batch depends only on what was seen before. The
update is theta - eta * (sum of the samples' gradients): a step size for the mean of
the batch is larger by the batch. K counts the samples that were used, dropped ones
not; a bound does not grow through drops as long as K is the same.

Both proofs lose a factor: the 1/2 on the left of eq:NonCvx3 and of
eq:SGD_GUARANTEES3 is gone one line later, so the lines as written prove twice the
printed bounds. In the convex case the printed bound still holds at the printed step
(the standard analysis of online gradient descent has an unused factor of 2). In the
other it does not: L/2 theta^2 without noise and with full batches ends at 4/3 of it.

Source: DropCompute, theorem:non_convex, theorem:convex_case, appendix:proof; spec C4.
"""

import math

from tailbound.compute.checks import check_not_negative, check_positive


def non_convex_bound(
    *,
    smoothness: float,
    max_batch: float,
    loss_gap: float,
    gradient_std: float,
    num_samples: float,
) -> float:
    """Bound on E||grad L(theta)||^2, theta drawn with the weights of its batches.

    2 L b_max gap / K + 2 sigma sqrt(L gap) / sqrt(K), as printed; twice this is what
    the proof shows, see the module. Linear speedup as long as b_max is O(sqrt(K)).

    Args:
        smoothness: Lipschitz constant of the gradient (L), > 0.
        max_batch: largest number of samples in one step, all workers (b_max), > 0.
        loss_gap: loss at the start minus the minimal loss, >= 0.
        gradient_std: of one sample's gradient (sigma), >= 0.
        num_samples: used in the whole training (K), > 0.

    Raises:
        ConfigError: an argument is out of its range.

    Source: eq:NonCvxSGD_GUARANTEES_final.
    """
    check(smoothness, max_batch, gradient_std, num_samples, loss_gap=loss_gap)
    noise = 2.0 * gradient_std * math.sqrt(smoothness * loss_gap / num_samples)
    return 2.0 * smoothness * max_batch * loss_gap / num_samples + noise


def non_convex_step_size(
    *,
    smoothness: float,
    max_batch: float,
    loss_gap: float,
    gradient_std: float,
    num_samples: float,
) -> float:
    """Step size of the proof: min(sqrt(gap) / (sigma sqrt(L K)), 1 / (2 L b_max)).

    Args and Raises: see :func:`non_convex_bound`.

    Source: appendix:non_convex_proof, before eq:NonCvx4.
    """
    check(smoothness, max_batch, gradient_std, num_samples, loss_gap=loss_gap)
    largest = 1.0 / (2.0 * smoothness * max_batch)
    if gradient_std == 0.0:
        return largest
    noise = gradient_std * math.sqrt(smoothness * num_samples)
    return min(math.sqrt(loss_gap) / noise, largest)


def convex_bound(
    *,
    smoothness: float,
    max_batch: float,
    distance: float,
    gradient_std: float,
    num_samples: float,
) -> float:
    """Bound on E[L(theta) - L(theta*)] of a convex loss, theta the weighted mean.

    8 L b_max D^2 / K + 6 sigma D / sqrt(K).

    Args:
        smoothness: Lipschitz constant of the gradient (L), > 0.
        max_batch: largest number of samples in one step, all workers (b_max), > 0.
        distance: from the first parameters to the best (D), >= 0.
        gradient_std: of one sample's gradient (sigma), >= 0.
        num_samples: used in the whole training (K), > 0.

    Raises:
        ConfigError: an argument is out of its range.

    Source: eq:SGD_GUARANTEES_final.
    """
    check(smoothness, max_batch, gradient_std, num_samples, distance=distance)
    noise = 6.0 * gradient_std * distance / math.sqrt(num_samples)
    return 8.0 * smoothness * max_batch * distance**2 / num_samples + noise


def convex_step_size(
    *,
    smoothness: float,
    max_batch: float,
    distance: float,
    gradient_std: float,
    num_samples: float,
) -> float:
    """Step size of the proof: min(D / (sigma sqrt(8 K)), 1 / (8 L b_max)).

    Args and Raises: see :func:`convex_bound`.

    Source: appendix:convex_proof, before eq:SGD_GUARANTEES4.
    """
    check(smoothness, max_batch, gradient_std, num_samples, distance=distance)
    largest = 1.0 / (8.0 * smoothness * max_batch)
    if gradient_std == 0.0:
        return largest
    return min(distance / (gradient_std * math.sqrt(8.0 * num_samples)), largest)


def check(
    smoothness: float,
    max_batch: float,
    gradient_std: float,
    num_samples: float,
    **start: float,
) -> None:
    """Raise ConfigError unless all are in range; ``start`` is how far the start is."""
    for name, value in (
        ("smoothness", smoothness),
        ("max_batch", max_batch),
        ("num_samples", num_samples),
    ):
        check_positive(name, value)
    for name, value in (("gradient_std", gradient_std), *start.items()):
        check_not_negative(name, value)
