"""How sure the numbers are: paired ratios to the baseline, their intervals, verdicts, and the noise floor.

Owns every statistical choice of the analysis. It knows nothing of rooflines or of how a table looks.

Method
    The unit of observation is the round. In every round each implementation has one block of samples; the block's
    median is its time in that round. A ratio is taken within a round: the implementation's block median over the mean
    of the block medians of the baseline's replicas in the same round, so that drift (clocks, temperature, neighbours)
    which lasts longer than a round cancels. Samples within a block are not independent and are never counted as such.

    The estimate is the median of the per-round log ratios, exponentiated. The median, because a round that another
    process disturbed is an outlier and should cost precision rather than move the answer; the logarithm, because then
    A/B and B/A say the same.

    The interval is the percentile bootstrap over rounds (Efron, "Bootstrap methods: another look at the jackknife",
    Annals of Statistics 7, 1979). For a median its distribution is known in closed form, so nothing is resampled: it
    is what infinitely many resamples would give, needs no seed, and serves 100,000 cells in a second (the tests hold it
    against scipy.stats.bootstrap). Its quantiles are taken from the mid-distribution, interpolated (Ma, Genton, Parzen,
    Annals of the Institute of Statistical Mathematics 63, 2011): the plain quantile of so few distinct values would
    cover 88 % at 7 rounds and 96 % at 9. Simulated for normal, Laplace, Student t with 2 degrees of freedom and
    exponential scatter, a nominal 95 % covers the true median in 92 to 97.5 % of cases from 6 to 30 independent rounds.

    A verdict compares the interval with a practical threshold of 2 %: ``tie`` where the whole interval lies within it;
    ``faster`` or ``slower`` where the whole interval lies beyond it and beyond the departure from 1 of the case's own
    A/A ratio (two processes of the same implementation differ by that much: a smaller difference says nothing about
    the implementation); ``undecided`` otherwise. Because a table holds many cells, ``faster`` and ``slower`` must also
    survive Benjamini and Hochberg's control of the false discovery rate at 5 % (JRSS B 57, 1995), on p-values of
    Wilcoxon's signed-rank test of the log ratios against that threshold (not against 1), both directions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from analysis.frame import Frame, rows_of
from impls.baselines import baseline_of

Array = npt.NDArray[np.float64]

LEVEL = 0.95
PRACTICAL = 0.02
FALSE_DISCOVERY = 0.05
# Fewer rounds cannot support a claim at 5 %: the least p-value of a two-sided signed-rank test is 2 / 2**n.
LEAST_ROUNDS = 6
_CHUNK = 2048


@dataclass(frozen=True)
class Estimate:
    """Medians and their intervals, one per row; NaN where a row had no data.

    Attributes:
        value: median of the row.
        low: lower end of the interval.
        high: upper end of the interval.
    """

    value: Array
    low: Array
    high: Array


@cache
def _median_weights(n: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], Array]:
    """The exact bootstrap distribution of a median of ``n`` sorted values.

    Returns:
        Ranks ``a``, ``b`` (from 0) and probabilities: a resample's median is (x[a] + x[b]) / 2 with that probability.
        Terms that together weigh less than 1e-6 are left out.
    """
    rank = np.arange(1, n + 1)
    if n % 2:
        # The middle one of n draws is at most x_(k) when at least (n+1)/2 draws are.
        below = stats.binom.sf((n + 1) // 2 - 1, n, rank / n)
        a = b = rank
        weight = np.diff(below, prepend=0.0)
    else:
        m = n // 2
        # Middle draws x_(a) < x_(b): m draws at most x_(a), one of them equal to it; m at least x_(b), likewise.
        first = (rank / n) ** m - ((rank - 1) / n) ** m
        second = ((n - rank + 1) / n) ** m - ((n - rank) / n) ** m
        pairs = float(stats.binom.pmf(m, n, 0.5)) * 2.0**n * np.triu(np.outer(first, second), k=1)
        # Both equal x_(a): what remains of the probability that the lower of them is x_(a).
        lower = np.diff(stats.binom.sf(m - 1, n, rank / n), prepend=0.0)
        pairs[np.diag_indices(n)] = np.maximum(lower - pairs.sum(axis=1), 0.0)
        a, b = (index.ravel() + 1 for index in np.indices((n, n)))
        weight = pairs.ravel()
    order = np.argsort(weight)
    kept = order[np.cumsum(weight[order]) > 1e-6]
    return a[kept] - 1, b[kept] - 1, weight[kept] / weight[kept].sum()


def median_interval(rows: Array, level: float = LEVEL) -> Estimate:
    """Median of every row and its percentile bootstrap interval, exactly (no resampling).

    Args:
        rows: shape (cells, n), independent observations along a row, no NaN, n at least 1.
        level: nominal coverage.
    """
    cells, n = rows.shape
    low, high = np.empty(cells), np.empty(cells)
    a, b, weight = _median_weights(n)
    for start in range(0, cells, _CHUNK):
        chunk = np.sort(rows[start : start + _CHUNK], axis=1)
        medians = 0.5 * (chunk[:, a] + chunk[:, b])
        order = np.argsort(medians, axis=1)
        medians = np.take_along_axis(medians, order, axis=1)
        mid = np.cumsum(weight[order], axis=1) - 0.5 * weight[order]
        low[start : start + _CHUNK] = _interpolated(mid, medians, (1 - level) / 2)
        high[start : start + _CHUNK] = _interpolated(mid, medians, (1 + level) / 2)
    return Estimate(np.median(rows, axis=1), low, high)


def _interpolated(probability: Array, value: Array, wanted: float) -> Array:
    """For every row, the value at a probability: linear between points, the outermost values beyond them."""
    last = probability.shape[1] - 1
    if last == 0:
        return value[:, 0].copy()
    right = np.clip((probability < wanted).sum(axis=1), 1, last)[:, None]
    p0, p1 = (np.take_along_axis(probability, i, axis=1)[:, 0] for i in (right - 1, right))
    v0, v1 = (np.take_along_axis(value, i, axis=1)[:, 0] for i in (right - 1, right))
    return v0 + np.clip((wanted - p0) / (p1 - p0), 0.0, 1.0) * (v1 - v0)


def p_beyond(log_ratios: Array, log_threshold: Array) -> Array:
    """p-value that the true log ratio lies within the threshold, for every row.

    Wilcoxon's signed-rank test, exact up to 50 rounds, of "not below -threshold" and of "not above +threshold"; the
    smaller p-value, doubled (Bonferroni over the two directions). It assumes that log ratios scatter symmetrically
    about their centre.

    Args:
        log_ratios: shape (cells, rounds).
        log_threshold: shape (cells,), at least 0.
    """
    method = "exact" if log_ratios.shape[1] <= 50 else "approx"
    shift = log_threshold[:, None]
    faster = stats.wilcoxon(log_ratios + shift, axis=1, alternative="less", method=method).pvalue
    slower = stats.wilcoxon(log_ratios - shift, axis=1, alternative="greater", method=method).pvalue
    return np.asarray(np.minimum(1.0, 2.0 * np.minimum(faster, slower)), np.float64)


def verdicts(low: Array, high: Array, q_value: Array, threshold: Array, practical: float) -> list[str | None]:
    """``faster``, ``slower``, ``tie`` or ``undecided`` for every ratio's interval; None where it is NaN.

    Args:
        low, high: the interval of the time ratio (below 1 is faster than the baseline).
        q_value: Benjamini-Hochberg adjusted p-value; a difference above FALSE_DISCOVERY stays undecided.
        threshold: what a difference must exceed: 0.02 means a ratio below 1/1.02 or above 1.02.
        practical: what a tie must stay within, likewise.
    """
    certain = q_value <= FALSE_DISCOVERY
    chosen = np.select(
        [
            np.isnan(low) | np.isnan(high),
            (high < 1 / (1 + threshold)) & certain,
            (low > 1 + threshold) & certain,
            (low >= 1 / (1 + practical)) & (high <= 1 + practical),
        ],
        ["", "faster", "slower", "tie"],
        default="undecided",
    )
    return [str(v) or None for v in chosen]


def compare(frame: Frame, *, practical: float = PRACTICAL, level: float = LEVEL) -> pd.DataFrame:
    """Times and ratios to the baseline of every result that carries rounds.

    Args:
        frame: what the records hold.
        practical: practical threshold of the verdicts, as a share of the baseline's time.
        level: nominal coverage of all intervals.

    Returns:
        One row per ``ok`` result with rounds, indexed like ``frame.results``:

        - ``rounds``, ``time_us``, ``time_low_us``, ``time_high_us``: median over rounds and its interval;
        - ``baseline``: the baseline's name; ``paired_rounds``; ``ratio``, ``ratio_low``, ``ratio_high``: time over the
          baseline's time (NaN for the baseline itself);
        - ``aa_ratio``, ``aa_low``, ``aa_high``: the baseline's second replica over its first, in the same run;
        - ``threshold`` (what a difference must exceed), ``p_value``, ``q_value``;
        - ``verdict`` (``baseline`` for the baseline itself, None where there is no ratio) and ``verdict_reason``: why
          there is no ratio, or why a verdict stays open.
    """
    timed = frame.results[frame.results["rounds"] > 0]
    cells = pd.DataFrame(index=timed.index)
    cells["rounds"] = timed["rounds"]
    where = _rounds(frame, timed)
    _put(cells, "time", "_us", _estimate(where["result"], np.log(where["median_us"].to_numpy()), level))

    cells["baseline"] = baselines(timed)
    is_baseline = (timed["impl"] == cells["baseline"]).to_numpy()
    group = _groups(timed)
    pairs = _paired(where)
    for column, values in _noise_floor(where[where["baseline"]], level).items():
        cells[column] = group.map(values)
    departure = np.expm1(np.abs(np.log(cells["aa_ratio"].to_numpy(float))))
    cells["threshold"] = np.fmax(practical, departure)

    judged = _judge(pairs, cells["threshold"], practical, level).reindex(cells.index)
    cells = cells.join(judged.drop(columns="verdict"))
    cells["paired_rounds"] = cells["paired_rounds"].fillna(0).astype("int64")
    found = judged["verdict"].astype(object).where(judged["verdict"].notna(), None)
    cells["verdict"] = ["baseline" if b else v for v, b in zip(found, is_baseline, strict=True)]
    cells["verdict_reason"] = _reasons(frame, timed, cells, is_baseline, practical)
    return cells


def against(
    frame: Frame, cells: pd.DataFrame, other: pd.Series, *, practical: float = PRACTICAL, level: float = LEVEL
) -> pd.DataFrame:
    """Ratios of results to other results of their own run, by the rules that ``compare`` follows for the baseline.

    Args:
        frame: what the records hold.
        cells: what ``compare`` made of it; the thresholds are taken from there.
        other: result -> the result of the same run that it is compared with.

    Returns:
        One row per result that has rounds in common with its other: ``paired_rounds``, ``ratio`` (its time over the
        other's), ``ratio_low``, ``ratio_high``, ``p_value``, ``q_value`` (over these rows), ``verdict`` (``faster``:
        than the other).
    """
    blocks = frame.blocks[["result", "round", "median_us"]]
    result = blocks["result"].to_numpy()
    position = other.index.get_indexer(result)
    mine, theirs = position >= 0, np.isin(result, other.unique())
    opposite = np.where(mine, other.to_numpy()[position], result)
    key, wanted = _keys(blocks["round"], result, opposite)
    pairs = _matched(blocks[mine], wanted[mine], pd.Series(blocks["median_us"].to_numpy()[theirs], key[theirs]))
    return _judge(pairs, cells["threshold"], practical, level)


def paired_ratios(frame: Frame) -> pd.DataFrame:
    """Every round's ratio to the baseline, before any statistics: what ``compare`` estimates its ratios from.

    Returns:
        One row per round that a result shares with its baseline: ``result``, ``round``, ``log_ratio``.
    """
    pairs = _paired(_rounds(frame, frame.results[frame.results["rounds"] > 0]))
    return pairs[["result", "round", "log_ratio"]].reset_index(drop=True)


def baselines(timed: pd.DataFrame) -> pd.Series:
    """The name of what every result is compared with; None, not NaN, where there is nothing."""
    names = {(w, d): baseline_of(w, d) for w, d in set(zip(timed["workload"], timed["device_kind"], strict=True))}
    fixed = [names[key] for key in zip(timed["workload"], timed["device_kind"], strict=True)]
    return pd.Series(fixed, timed.index, dtype="object")


def _groups(timed: pd.DataFrame) -> pd.Series:
    """A number for every set of results whose rounds can be paired: one run, case, regime and method."""
    return timed.groupby(["run", "case", "regime", "method"], sort=False, dropna=False).ngroup()


def _rounds(frame: Frame, timed: pd.DataFrame) -> pd.DataFrame:
    """The blocks of these results: result, group, round, median_us, baseline (whether it is one), replica."""
    position = timed.index.get_indexer(frame.blocks["result"])
    mine = position >= 0
    columns = {name: frame.blocks[name].to_numpy()[mine] for name in ("result", "round", "median_us")}
    columns["group"] = _groups(timed).to_numpy()[position[mine]]
    columns["baseline"] = (timed["impl"] == baselines(timed)).to_numpy()[position[mine]]
    columns["replica"] = timed["replica"].to_numpy()[position[mine]]
    return pd.DataFrame(columns, copy=False)


def _paired(where: pd.DataFrame) -> pd.DataFrame:
    """Of ``where``, what is no baseline's and shares its round with one: ``result``, ``round``, ``log_ratio`` to it."""
    is_baseline = where["baseline"].to_numpy()
    (key,) = _keys(where["round"], where["group"].to_numpy())
    mean = where.loc[is_baseline, "median_us"].groupby(key[is_baseline], sort=False).mean()
    return _matched(where[~is_baseline], key[~is_baseline], mean)


def _matched(mine: pd.DataFrame, key: npt.NDArray[np.int64], others: pd.Series) -> pd.DataFrame:
    """The blocks that have another under their key: ``result``, ``round``, ``log_ratio`` to that other."""
    position = others.index.get_indexer(key)
    found = position >= 0
    log_ratio = np.log(mine["median_us"].to_numpy()[found] / others.to_numpy(float)[position[found]])
    columns = {name: mine[name].to_numpy()[found] for name in ("result", "round")}
    return pd.DataFrame(columns | {"log_ratio": log_ratio}, copy=False)


def _keys(rounds: pd.Series, *groups: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """A whole number for every pair of group and round: pandas joins on one column much faster than on two."""
    number, different = pd.factorize(rounds)
    return [np.asarray(group * len(different) + number, np.int64) for group in groups]


def _judge(pairs: pd.DataFrame, thresholds: pd.Series, practical: float, level: float) -> pd.DataFrame:
    """Ratio, interval, p-value, q-value and verdict of every ``result`` in ``pairs``, from its log ratios."""
    result, log_ratios = pairs["result"], pairs["log_ratio"].to_numpy(float)
    e = _estimate(result, log_ratios, level)
    judged = e.rename(columns={"": "ratio", "_low": "ratio_low", "_high": "ratio_high"}).sort_index()
    judged.insert(0, "paired_rounds", result.groupby(result).size().reindex(judged.index))
    threshold = thresholds.reindex(judged.index)

    judged["p_value"] = np.nan
    log_threshold = np.log1p(threshold)
    for results, matrix in _by_length(result.to_numpy(), log_ratios):
        if matrix.shape[1] >= LEAST_ROUNDS:
            judged.loc[results, "p_value"] = p_beyond(matrix, log_threshold.loc[results].to_numpy())
    judged["q_value"] = np.nan
    tested = judged["p_value"].notna()
    if tested.any():
        judged.loc[tested, "q_value"] = stats.false_discovery_control(judged.loc[tested, "p_value"].to_numpy())

    low, high, q_value = (judged[c].to_numpy(float) for c in ("ratio_low", "ratio_high", "q_value"))
    found = verdicts(low, high, q_value, threshold.to_numpy(float), practical)
    enough = judged["paired_rounds"] >= LEAST_ROUNDS
    found = [v if ok or v is None else "undecided" for v, ok in zip(found, enough, strict=True)]
    judged["verdict"] = pd.Series(found, judged.index, dtype="object")
    return judged


def noise_floor(cells: pd.DataFrame) -> float | None:
    """The A/A departure from 1 that 95 % of the cells stay under, as a share; None where no A/A pair was measured."""
    departures = np.expm1(np.abs(np.log(cells["aa_ratio"].dropna().to_numpy(float))))
    return float(np.quantile(departures, 0.95)) if len(departures) else None


def _by_length(result: npt.NDArray[np.int64], values: Array) -> Iterator[tuple[npt.NDArray[np.int64], Array]]:
    """The values of each result as rows, for every number of values that occurs: (results, shape (results, n))."""
    order = np.argsort(result, kind="stable")
    ids, starts, counts = np.unique(result[order], return_index=True, return_counts=True)
    sorted_values = values[order]
    for n in np.unique(counts):
        chosen = counts == n
        yield ids[chosen], sorted_values[starts[chosen][:, None] + np.arange(n)]


def _estimate(result: pd.Series, log_values: Array, level: float) -> pd.DataFrame:
    """Median and interval of exp(log_values) for every result."""
    parts = []
    for results, matrix in _by_length(result.to_numpy(), log_values):
        e = median_interval(matrix, level)
        columns = {"": np.exp(e.value), "_low": np.exp(e.low), "_high": np.exp(e.high)}
        parts.append(pd.DataFrame(columns, index=results))
    return pd.concat(parts) if parts else pd.DataFrame({"": [], "_low": [], "_high": []}, dtype=float)


def _put(cells: pd.DataFrame, name: str, unit: str, estimate: pd.DataFrame) -> None:
    for column in ("", "_low", "_high"):
        cells[name + column + unit] = estimate[column].reindex(cells.index)


def _noise_floor(baseline_blocks: pd.DataFrame, level: float) -> dict[str, pd.Series]:
    """Per group, the baseline's replica 1 over its replica 0, paired by round."""
    key = ["group", "round"]
    by_replica = [
        baseline_blocks[baseline_blocks["replica"] == r].groupby(key, sort=False)["median_us"].mean() for r in (0, 1)
    ]
    pairs = pd.concat(by_replica, axis=1, keys=["a", "b"], join="inner").reset_index()
    e = _estimate(pairs["group"], np.log(pairs["b"].to_numpy(float) / pairs["a"].to_numpy(float)), level)
    return {"aa_ratio": e[""], "aa_low": e["_low"], "aa_high": e["_high"]}


def _reasons(
    frame: Frame, timed: pd.DataFrame, cells: pd.DataFrame, is_baseline: npt.NDArray[np.bool_], practical: float
) -> list[str | None]:
    """One sentence for every cell without a ratio or with a difference that was not accepted."""
    every = frame.results
    names = set(cells["baseline"].dropna())
    chosen = every[every["impl"].isin(names) & (every["replica"] == 0)]
    identity = ("run", "case", "regime", "impl", "status", "reason", "method")
    known = {row[:4]: row[4:] for row in rows_of(chosen, identity)}

    reasons: list[str | None] = []
    tested = int(cells["p_value"].notna().sum())
    columns = ("run", "case", "regime", "method", "workload", "device_kind")
    told = ("baseline", "paired_rounds", "ratio_low", "ratio_high", "threshold", "verdict")
    about = zip(rows_of(timed, columns), rows_of(cells, told), is_baseline, strict=True)
    for row, cell, itself in about:
        reason = None
        if itself:
            pass
        elif cell.baseline is None:
            if row.workload != "ceiling":
                reason = f"No baseline is fixed for {row.workload} on {row.device_kind}."
        elif cell.paired_rounds == 0:
            status, why, method = known.get((row.run, row.case, row.regime, cell.baseline), (None, None, None))
            if status is None:
                reason = f"The baseline {cell.baseline} was not part of this run."
            elif status != "ok":
                reason = f"The baseline {cell.baseline} is {status}" + (f": {why}" if why else ".")
            elif method != row.method:
                reason = f"The baseline was timed by {method}, this by {row.method}: methods are not compared."
            else:
                reason = f"The baseline {cell.baseline} has no round in common with this result."
        elif cell.paired_rounds < LEAST_ROUNDS:
            reason = f"Only {cell.paired_rounds} paired rounds: a verdict needs {LEAST_ROUNDS}."
        elif cell.verdict == "undecided":
            if cell.ratio_high < 1 / (1 + cell.threshold) or cell.ratio_low > 1 + cell.threshold:
                reason = (
                    f"It does not survive the control of false discoveries over {tested} cells: measure more rounds."
                )
            elif cell.threshold > practical:
                reason = "The difference is not beyond that between the baseline's own processes (A/A)."
            else:
                reason = f"The interval straddles the threshold of {100 * practical:.2g} %."
        reasons.append(reason)
    return reasons
