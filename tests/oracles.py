"""Textbook loops for every attack: slow, obvious, and sharing no code with `attacks`.

Each works one target, sample and query at a time on plain lists. `gone` is the set of models left
out for that target and sample, the target included.
"""

import math

import numpy as np


def complements(keep, t):
    return [
        m for m in range(len(keep)) if all(keep[m][n] != keep[t][n] for n in range(len(keep[0])))
    ]


def left_out(keep, t):
    """The target and its complement."""
    return {t, *complements(keep, t)[:1]}


def sides(scores, keep, n, q, gone):
    """Finite IN and OUT scores of the models that stay."""
    inside, outside = [], []
    for m in range(len(keep)):
        value = float(scores[m][n][q])
        if m not in gone and math.isfinite(value):
            (inside if keep[m][n] else outside).append(value)
    return inside, outside


def mean(values):
    return math.fsum(values) / len(values)


def median(values):
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def squares(values, centre):
    return math.fsum((v - centre) ** 2 for v in values)


def log_normal(x, centre, spread):
    return -((x - centre) ** 2) / (2 * spread**2) - math.log(spread) - math.log(2 * math.pi) / 2


def log_cdf(z):
    """log Phi(z), by the asymptotic series where erfc underflows."""
    if z > -35:
        return (
            math.log(0.5 * math.erfc(-z / math.sqrt(2)))
            if z < 5
            else math.log1p(-0.5 * math.erfc(z / math.sqrt(2)))
        )
    series = 1 - 1 / z**2 + 3 / z**4 - 15 / z**6
    return -(z**2) / 2 - math.log(-z) - math.log(2 * math.pi) / 2 + math.log(series)


def pooled_spreads(scores, keep, q, gone_of, centre):
    """sqrt(sum of squared residuals / sum of (count - 1)), IN and OUT."""
    total, freedom = [0.0, 0.0], [0, 0]
    for n in range(len(keep[0])):
        for side, values in enumerate(sides(scores, keep, n, q, gone_of(n))):
            if values:
                total[side] += squares(values, centre(values))
                freedom[side] += len(values) - 1
    return [math.sqrt(s / f) if f else math.nan for s, f in zip(total, freedom, strict=True)]


def fixed_spread(scores, keep, queries, gone_of):
    """One standard deviation of all IN scores around their grand mean."""
    everything = []
    for q in range(queries):
        for n in range(len(keep[0])):
            everything += sides(scores, keep, n, q, gone_of(n))[0]
    return math.sqrt(squares(everything, mean(everything)) / len(everything))


def lira(scores, keep, t, gone_of, *, online, variance, centre="mean", shrinkage=8.0, floor=1e-6):
    """One target's scores; NaN where a side is empty or the target's own score is not finite."""
    samples, queries = len(keep[0]), len(scores[0][0])
    middle = mean if centre == "mean" else median
    result = []
    pooled = [pooled_spreads(scores, keep, q, gone_of, middle) for q in range(queries)]
    fixed = fixed_spread(scores, keep, queries, gone_of) if variance == "tf_fixed" else math.nan
    for n in range(samples):
        ratios = []
        for q in range(queries):
            x = float(scores[t][n][q])
            both = sides(scores, keep, n, q, gone_of(n))
            needed = both if online else both[1:]
            enough = 2 if variance == "per_example" else 1
            if not math.isfinite(x) or any(len(values) < enough for values in needed):
                ratios.append(math.nan)
                continue
            logs = []
            for side, values in enumerate(both):
                if not online and side == 0:
                    continue
                c = middle(values)
                s2 = {
                    "per_example": squares(values, c) / len(values),
                    "pooled": pooled[q][side] ** 2,
                    "tf_fixed": fixed**2,
                    "shrunk": (shrinkage * pooled[q][side] ** 2 + squares(values, c))
                    / (shrinkage + len(values) - 1),
                }[variance]
                s = max(math.sqrt(s2), floor)
                logs.append(log_normal(x, c, s) if online else log_cdf((x - c) / s))
            ratios.append(logs[0] - logs[1] if online else logs[0])
        result.append(mean(ratios) if all(math.isfinite(r) for r in ratios) else math.nan)
    return result


def loss(scores, t):
    return [mean([float(v) for v in row]) for row in scores[t]]


def calibrated(scores, keep, t, gone_of):
    result = []
    for n in range(len(keep[0])):
        queries = range(len(scores[t][n]))
        outs = [sides(scores, keep, n, q, gone_of(n))[1] for q in queries]
        result.append(
            mean([float(scores[t][n][q]) - mean(outs[q]) for q in queries])
            if all(outs)
            else math.nan
        )
    return result


def attack_p(scores, population, t):
    """Share of population samples with larger loss, that is smaller phi."""
    result = []
    for n in range(len(scores[t])):
        shares = []
        for q in range(len(scores[t][n])):
            smaller = [
                z for z in range(len(population[t])) if population[t][z][q] < scores[t][n][q]
            ]
            shares.append(len(smaller) / len(population[t]))
        result.append(mean(shares))
    return result


def attack_r(scores, keep, t, gone_of):
    result = []
    for n in range(len(keep[0])):
        shares = []
        for q in range(len(scores[t][n])):
            outs = sides(scores, keep, n, q, gone_of(n))[1]
            x = float(scores[t][n][q])
            wins = sum((v < x) + 0.5 * (v == x) for v in outs)
            shares.append(wins / len(outs) if outs else math.nan)
        result.append(mean(shares))
    return result


def sigmoid(phi):
    return 1 / (1 + math.exp(-phi)) if phi > 0 else math.exp(phi) / (1 + math.exp(phi))


def rmia(scores, keep, population, t, gone_of, *, online, gamma, a):
    result = []
    references = [m for m in range(len(keep)) if m not in left_out(keep, t)]
    for n in range(len(keep[0])):
        shares = []
        for q in range(len(scores[t][n])):
            inside, outside = sides(scores, keep, n, q, gone_of(n))
            p_in = mean([sigmoid(v) for v in inside]) if inside else math.nan
            p_out = mean([sigmoid(v) for v in outside]) if outside else math.nan
            level = (p_in + p_out) / 2 if online else ((1 + a) * p_out + (1 - a)) / 2
            ratio = sigmoid(float(scores[t][n][q])) / level
            above = 0
            for z in range(len(population[t])):
                p_z = mean([sigmoid(float(population[m][z][q])) for m in references])
                p_z = p_z if online else ((1 + a) * p_z + (1 - a)) / 2
                above += ratio > gamma * (sigmoid(float(population[t][z][q])) / p_z)
            shares.append(above / len(population[t]) if math.isfinite(ratio) else math.nan)
        result.append(mean(shares))
    return result


def auc(scores, membership):
    """All pairs, ties half."""
    inside = [s for s, y in zip(scores, membership, strict=True) if y]
    outside = [s for s, y in zip(scores, membership, strict=True) if not y]
    wins = sum((i > o) + 0.5 * (i == o) for i in inside for o in outside)
    return wins / (len(inside) * len(outside))


def tpr_at_fpr(scores, membership, alpha):
    """Every threshold in turn: the largest TPR with FPR <= alpha, and its FPR."""
    inside = [s for s, y in zip(scores, membership, strict=True) if y]
    outside = [s for s, y in zip(scores, membership, strict=True) if not y]
    best = (0.0, 0.0)
    for threshold in sorted(set(scores), reverse=True):
        tpr = sum(s >= threshold for s in inside) / len(inside)
        fpr = sum(s >= threshold for s in outside) / len(outside)
        if fpr <= alpha and tpr >= best[0]:
            best = (tpr, fpr)
    return best


def memorization(correct, keep, n):
    """P[correct | IN] - P[correct | OUT] and its standard error."""
    groups = [[], []]
    for m in range(len(keep)):
        groups[0 if keep[m][n] else 1].append(float(correct[m][n]))
    if not all(groups):
        return math.nan, math.nan
    score = mean(groups[0]) - mean(groups[1])
    if any(len(g) < 2 for g in groups):
        return score, math.nan
    variance = sum(squares(g, mean(g)) / (len(g) - 1) / len(g) for g in groups)
    return score, math.sqrt(variance)


def vulnerability(phi, keep, n):
    """P[phi_IN > phi_OUT], ties half."""
    inside = [phi[m][n] for m in range(len(keep)) if keep[m][n]]
    outside = [phi[m][n] for m in range(len(keep)) if not keep[m][n]]
    if not inside or not outside:
        return math.nan
    return mean([(i > o) + 0.5 * (i == o) for i in inside for o in outside])


def phi(logits, label):
    """z_y - log sum exp of the others, term by term from the largest."""
    others = [z for k, z in enumerate(logits) if k != label]
    top = max(others)
    return logits[label] - top - math.log(math.fsum(math.exp(z - top) for z in others))


def as_array(rows):
    return np.array(rows, dtype=np.float64)


def quantile_line(features, values, level):
    """Slope and offset of linear quantile regression on one feature, by trying every vertex.

    An optimum of the pinball loss goes through two of the points.
    """
    best = None
    for i in range(len(values)):
        for j in range(i):
            slope = (values[i] - values[j]) / (features[i] - features[j])
            offset = values[i] - slope * features[i]
            away = [v - slope * f - offset for f, v in zip(features, values, strict=True)]
            cost = math.fsum(max(level * a, (level - 1) * a) for a in away)
            if best is None or cost < best[0]:
                best = (cost, slope, offset)
    return best[1:]


def quantile(scores, z, features, of_population, t, alpha):
    """phi minus the fitted quantile, the mean over queries."""
    queries = len(scores[t][0])
    lines = [
        quantile_line(of_population, [row[q] for row in z[t]], 1 - alpha) for q in range(queries)
    ]
    return [
        mean([phi[q] - slope * f - offset for q, (slope, offset) in enumerate(lines)])
        for f, phi in zip(features, scores[t], strict=True)
    ]
