"""How much of a run's time is training that stays, where devices fail.

A run trains for an interval, stops for a checkpoint, and goes on. At a failure (x) it restarts from the last
checkpoint that was complete, and what it had trained since is lost:

    train | save | train | save | tra x restart | train | save | ...
                                  ---
                                  lost

Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006
(doi 10.1016/j.future.2004.11.016), has the time of a run in which failures come at random, also during saves
and restarts. With M seconds between failures, d to save, R to restart, an interval t takes

    M exp(R / M) (exp((t + d) / M) - 1)

A checkpoint that is written in the background counts only w seconds later. Then a failure costs w more, as a
longer restart does: R + w stands for R. (A run just restarted needs t + d + w until its next checkpoint
counts, and t + d for each one after it.)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, inf, sqrt

from penstock.errors import ConfigError

_DAY = 86_400.0


@dataclass(frozen=True)
class Goodput:
    """Shares of a run's time, which add up to 1, with a checkpoint every `interval` seconds of training.

    training: training that stays: the goodput
    saving: stops for checkpoints that stay
    restarting: from failures until training goes on
    lost: training and stops since the last complete checkpoint, when a failure came
    failures: of any device, a day
    """

    interval: float
    training: float
    saving: float
    restarting: float
    lost: float
    failures: float


def goodput(
    *,
    devices: int,
    device_mtbf: float,
    checkpoint: float,
    restart: float,
    background: float = 0.0,
    interval: float | None = None,
) -> Goodput:
    """The goodput of a run on `devices` that fail independently of each other. Times are in seconds.

    device_mtbf: mean time between failures of one device
    checkpoint: how long training stops for a checkpoint
    restart: from a failure until training goes on: to notice it, to start, to load
    background: from the end of that stop until the checkpoint is complete
    interval: of training between checkpoints; None: the best one

    Raises ConfigError for numbers that are not possible.
    """
    if type(devices) is not int or devices < 1:
        raise ConfigError(f"devices={devices!r}", "a run has a whole number of them", "Give 1 or more")
    times = {"checkpoint": checkpoint, "restart": restart, "background": background}
    _check(**times)
    _check_positive(device_mtbf=device_mtbf)
    mtbf = device_mtbf / devices
    if interval is None:
        interval = best_interval(checkpoint, mtbf)
    else:
        _check_positive(interval=interval)
    kept = _kept_rate(interval + checkpoint, mtbf) * exp(-(restart + background) / mtbf)
    restarting = -expm1(-restart / mtbf)  # a failure every `mtbf`, and each restart may fail, too
    training, saving = interval * kept, checkpoint * kept
    if not interval + checkpoint:  # after no training at all: the limit
        training = exp(-(restart + background) / mtbf)
    lost = max(0.0, 1 - training - saving - restarting)
    return Goodput(interval, training, saving, restarting, lost, _DAY / mtbf)


def best_interval(checkpoint: float, mtbf: float) -> float:
    """The seconds of training between checkpoints at which most training stays.

    checkpoint: how long training stops for one; mtbf: mean time between failures of the whole run, above 0

    With x the interval and d the checkpoint in units of `mtbf`, the time that an interval takes grows least
    for its length where x = 1 - exp(-(x + d)). How long a restart takes does not matter.
    """
    _check(checkpoint=checkpoint)
    _check_positive(mtbf=mtbf)
    stop = checkpoint / mtbf
    best = min(1.0, sqrt(2 * stop))  # from above, so that Newton's steps only fall
    for _ in range(100):
        excess = best + expm1(-(best + stop))
        following = best - excess / -expm1(-(best + stop)) if excess > 0 else best
        if following >= best:
            break
        best = following
    return best * mtbf


def daly_interval(checkpoint: float, mtbf: float) -> float:
    """Daly's estimate of `best_interval`; its first term alone is Young's, of 1974: sqrt(2 d M)."""
    _check(checkpoint=checkpoint)
    _check_positive(mtbf=mtbf)
    if checkpoint >= 2 * mtbf:
        return mtbf
    share = checkpoint / (2 * mtbf)
    return sqrt(2 * checkpoint * mtbf) * (1 + sqrt(share) / 3 + share / 9) - checkpoint


def _kept_rate(segment: float, mtbf: float) -> float:
    """How many intervals of `segment` seconds stay, a second, if restarts take no time."""
    if not segment:
        return 0.0
    return exp(-segment / mtbf) / -expm1(-segment / mtbf) / mtbf  # no exponent above 0 that could overflow


def _check(**times: float) -> None:
    for name, value in times.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
            raise ConfigError(
                f"{name}={value!r}", "it is a time in seconds", "Give a finite number from 0 on"
            )


def _check_positive(**times: float) -> None:
    _check(**times)
    for name, value in times.items():
        if not value:
            raise ConfigError(f"{name}={value!r}", "it is a time above 0, in seconds", "Give more than 0")
