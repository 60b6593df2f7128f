"""Pairwise covering arrays: few cases in which every pair of factor levels still meets."""

from itertools import combinations, product
from typing import Any


def pairwise(factors: dict[str, list[Any]], allowed: Any = lambda case: True) -> list[dict[str, Any]]:
    """Cases covering every pair of levels that some allowed case can have. Greedy and deterministic."""
    names = list(factors)
    candidates = [dict(zip(names, levels, strict=True)) for levels in product(*factors.values())]
    candidates = [case for case in candidates if allowed(case)]
    pairs_of = [{(a, str(case[a]), b, str(case[b])) for a, b in combinations(names, 2)} for case in candidates]
    missing = set().union(*pairs_of)
    chosen = []
    while missing:
        best = max(range(len(candidates)), key=lambda i: len(pairs_of[i] & missing))
        chosen.append(candidates[best])
        missing -= pairs_of[best]
    return chosen
