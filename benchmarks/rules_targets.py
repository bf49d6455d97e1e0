"""What the rules should reach, and whether a run reached it."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from rules_nets import Net
from timing import table


class Check(NamedTuple):
    """A number that should not be above its limit."""

    target: str
    case: str
    found: float
    limit: float

    @property
    def met(self) -> bool:
        return self.found <= self.limit

    @property
    def part(self) -> float:
        """Of the limit; more than 1 is missed."""
        return self.found / self.limit if self.limit else math.inf if self.found else 0.0


def time_checks(net: Net, batch: int, window: int, seconds: dict[str, float], same_pp: bool) -> Iterator[Check]:
    """The targets for times of one net, batch and window.

    Args:
      seconds: of a step, by contender.
      same_pp: whether the peer's pp-prop computes our gradients.
    """

    def check(target: str, of: str, against: str, limit: float) -> Iterator[Check]:
        if of in seconds and against in seconds:
            case = f"{net.name}, batch {batch}, window {window}"
            yield Check(target, case, seconds[of] / seconds[against], limit)

    if window == 32 and batch in (16, 64):
        yield from check(f"window credit, window 32, batch {batch}: BPTT", "window", "bptt", 1.5 if batch == 16 else 2)
    if window == 16 and batch in (16, 64):
        limit = 1.0 if batch == 16 and net.kind != "alif" else 1.5
        yield from check(f"step credit, window 16, batch {batch}: BPTT", "step", "bptt", limit)
    for name in ("window", "step"):
        yield from check(f"{name} credit: floor", name, f"floor {name}", 1.3)
        if batch >= 16:
            limit = 1 / 3 if window == 1 else 1 / 10
            yield from check(f"{name} credit, {'window 1' if window == 1 else 'windows'}: peer", name, "peer", limit)
            yield from check(f"{name} credit: peer in windows", name, "peer window", 1.0)
    if window in (1, 16):
        yield from check("pp-prop, windows 1 and 16: floor", "pp", "floor pp", 1.2)
    if same_pp:
        yield from check("pp-prop: peer", "pp", "peer pp", 1.0)


def report(checks: list[Check]) -> str:
    """One line for each target, with its worst case, then every case that misses its target."""
    rows = []
    for target in dict.fromkeys(check.target for check in checks):
        mine = [check for check in checks if check.target == target]
        worst = max(mine, key=lambda check: check.part)
        met = sum(check.met for check in mine)
        verdict = "met" if met == len(mine) else "MISSED"
        rows.append([target, verdict, f"{met}/{len(mine)}", f"{worst.found:.3g}", f"{worst.limit:.3g}", worst.case])
    lines = [table(["target (of: against)", "", "cases", "worst", "limit", "where"], rows)]
    missed = [[c.target, c.case, f"{c.found:.3g}", f"{c.limit:.3g}"] for c in checks if not c.met]
    if missed:
        lines += ["", table(["missed", "where", "found", "limit"], missed)]
    return "\n".join(lines)
