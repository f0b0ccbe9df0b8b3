"""Closed formulas for the interval between checkpoints and the time of a run, to which simulations are compared.

They hold if faults come at a constant rate, each costs a constant restart from the newest checkpoint, training
stands still while a checkpoint is written, and there is always a node to continue on.

    Young   tau = sqrt(2 delta M)                       (Communications of the ACM 17(9), 1974)
    Daly    tau = sqrt(2 delta M) (1 + sqrt(x) / 3 + x / 9) - delta, x = delta / 2M     (FGCS 22(3), 2006, eq. 37)
            T = M e^(R/M) (e^((tau + delta)/M) - 1) Ts / tau                            (eq. 20)

delta is the seconds of a save, M the mean time between faults, R the seconds of a restart, Ts the seconds of the
work.
"""

from __future__ import annotations

import math


def young_interval_s(save_s: float, between_faults_s: float) -> float:
    """Return the seconds of work between two saves by Young's formula."""
    return math.sqrt(2 * save_s * between_faults_s)


def daly_interval_s(save_s: float, between_faults_s: float) -> float:
    """Return the seconds of work between two saves by Daly's formula; at most about the time between faults."""
    if save_s >= 2 * between_faults_s:
        return between_faults_s
    x = save_s / (2 * between_faults_s)
    return young_interval_s(save_s, between_faults_s) * (1 + math.sqrt(x) / 3 + x / 9) - save_s


def daly_wall_s(
    work_s: float, interval_s: float, save_s: float, restart_s: float, between_faults_s: float
) -> float:
    """Return the expected seconds of a run by Daly's complete model."""
    mean = between_faults_s
    growth = math.expm1((interval_s + save_s) / mean)
    return mean * math.exp(restart_s / mean) * growth * work_s / interval_s
