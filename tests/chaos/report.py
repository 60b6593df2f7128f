"""The account of one run: figures, what must be nothing, and the two as a table and as JSON."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from tests.chaos import verdict
from tests.chaos.faults import FAULTS
from tests.chaos.mesh import KINDS
from tests.chaos.verdict import Seen

LEAST_COMPLETED, MOST_REFUSED = 0.85, 0.15  # of requests that we did not end ourselves
LONG_MINUTES = 20.0  # from here on there are least numbers of faults and resumes
LEAST_FAULTS, MOST_KILLS, LEAST_RESUMES = 300, 80, 50
_SHOWN = 12  # requests of each sort in the report


class Left(msgspec.Struct, kw_only=True):
    """What a quiet mesh still has."""

    blocks: list[str] = []  # blocks, rows, publications, pulls, broken counts
    spans: list[str] = []
    processes: list[str] = []


class Account(msgspec.Struct, kw_only=True):
    """minutes: of faults. faults: by (fault, kind of process)."""

    seed: int
    minutes: float
    namespaces: str
    faults: Counter[tuple[str, str]]
    kills: int
    seen: list[Seen]
    left: Left
    ends: list[str]  # processes that ended unasked, or did not when asked
    late_starts: int = 0
    tracebacks: list[str] = []  # in the processes' logs
    log: list[tuple[float, str, str]] = []  # monotonic seconds, fault, process

    def count(self, *outcomes: str) -> int:
        return sum(each.outcome in outcomes for each in self.seen)

    @property
    def counted(self) -> int:
        """Requests that were to be answered: not ended by us, nor by a fault of the gateway they were sent to."""
        return len(self.seen) - self.count(verdict.CANCELLED, verdict.LATE, verdict.GATEWAY)

    @property
    def resumes(self) -> int:
        return sum(each.resumed for each in self.seen)

    def token_faults(self) -> Counter[str]:
        return sum((each.faults() for each in self.seen), Counter())

    def zeros(self) -> dict[str, int]:
        """What must be nothing."""
        tokens = self.token_faults()
        return {
            "wrong tokens": tokens["wrong"],
            "lost or doubled tokens": tokens["moved"],
            "clean-looking false ends": self.count(verdict.FALSE_END),
            "hung requests": self.count(verdict.HUNG),
            "leaked blocks, publications, pulls": len(self.left.blocks),
            "open spans": len(self.left.spans),
            "processes left": len(self.left.processes),
            "processes that ended unasked, or did not when asked": len(self.ends),
            "tracebacks in logs": len(self.tracebacks),
        }

    def failures(self) -> list[str]:
        """Why the run has failed; empty when it has not."""
        found = [f"{name}: {count}" for name, count in self.zeros().items() if count]
        counted = max(1, self.counted)
        if self.count(verdict.COMPLETED) < LEAST_COMPLETED * counted:
            found.append(f"completed: {self.count(verdict.COMPLETED) / counted:.1%}, at least {LEAST_COMPLETED:.0%}")
        if self.count(verdict.REFUSED) > MOST_REFUSED * counted:
            found.append(f"refused: {self.count(verdict.REFUSED) / counted:.1%}, at most {MOST_REFUSED:.0%}")
        least_faults, least_resumes = 1, 1
        if self.minutes >= LONG_MINUTES:
            least_faults, least_resumes = LEAST_FAULTS, LEAST_RESUMES
            if self.kills > MOST_KILLS:
                found.append(f"kill -9: {self.kills}, at most {MOST_KILLS}")
        if self.faults.total() < least_faults:
            found.append(f"faults: {self.faults.total()}, at least {least_faults}")
        if self.resumes < least_resumes:
            found.append(f"resumes in mid-stream: {self.resumes}, at least {least_resumes}")
        return found

    def show(self, console: Console) -> None:
        table = Table("fault", *KINDS, "all", title=f"{self.minutes:g} minutes, seed {self.seed}; {self.namespaces}")
        for fault in FAULTS:
            counts = [self.faults[fault, kind] for kind in KINDS]
            table.add_row(fault, *(str(count or "") for count in counts), str(sum(counts)))
        table.add_row(
            "all", *(str(sum(self.faults[fault, kind] for fault in FAULTS)) for kind in KINDS), str(self.faults.total())
        )
        console.print(table)
        table = Table("requests", str(len(self.seen)))
        for outcome in verdict.OUTCOMES:
            share = f"  {self.count(outcome) / max(1, self.counted):.1%}" if outcome in _SHARED else ""
            table.add_row(outcome, f"{self.count(outcome)}{share}")
        table.add_row("more than one attempt", str(sum(each.attempts > 1 for each in self.seen)))
        table.add_row("resumed in mid-stream", str(self.resumes))
        table.add_row("starts put off by etcd's absence", str(self.late_starts))
        table.add_section()
        for name, count in self.zeros().items():
            table.add_row(name, f"[bold red]{count}[/]" if count else "0")
        console.print(table)
        for line in self.details():
            console.print(line, markup=False, soft_wrap=True)
        failures = self.failures()
        console.print("[bold red]failed:[/] " + "; ".join(failures) if failures else "[bold green]all is well[/]")

    def details(self) -> list[str]:
        lines = [*self.left.blocks, *self.left.spans, *self.left.processes, *self.ends]
        lines += [f"{count:4d} × {line}" for line, count in Counter(self.tracebacks).most_common(_SHOWN)]
        reasons = Counter((each.outcome, each.detail[:110]) for each in self.seen if each.outcome in _EXPLAINED)
        lines += [f"{count:4d} × {outcome}: {detail}" for (outcome, detail), count in reasons.most_common(_SHOWN)]
        wrong = [each for each in self.seen if each.faults() or each.outcome in (verdict.FALSE_END, verdict.HUNG)]
        return lines + [json.dumps(_one(each)) for each in wrong[:_SHOWN]]

    def write(self, path: Path) -> None:
        found: dict[str, Any] = {
            **{"seed": self.seed, "minutes": self.minutes, "network": self.namespaces, "kills": self.kills},
            "faults": {f"{fault} {kind}": count for (fault, kind), count in sorted(self.faults.items())},
            "requests": len(self.seen),
            "outcomes": {outcome: self.count(outcome) for outcome in verdict.OUTCOMES},
            "resumed": self.resumes,
            "must be zero": self.zeros(),
            "failures": self.failures(),
            "details": self.details(),
            "log": [(round(at, 2), fault, process) for at, fault, process in self.log],
            "not completed": [_one(each) for each in self.seen if each.outcome in _EXPLAINED],
        }
        path.write_text(json.dumps(found, indent=1))


_SHARED = (verdict.COMPLETED, verdict.REFUSED, verdict.ERROR, verdict.HUNG, verdict.FALSE_END)
_EXPLAINED = (verdict.REFUSED, verdict.GATEWAY, verdict.ERROR, verdict.HUNG, verdict.FALSE_END)


def _one(seen: Seen) -> dict[str, Any]:
    """A request in few words; these prompts are random and nobody's."""
    return {
        **{"kind": seen.known.name, "way": seen.way, "gateway": seen.gateway, "outcome": seen.outcome},
        **{"attempts": seen.attempts, "resumed": seen.resumed, "trace": seen.trace, "detail": seen.detail[:300]},
        **{"seconds": round(seen.finished - seen.started, 2), "started": round(seen.started, 2)},
        **{"faults": dict(seen.faults()), "options": seen.known.options},
        "got": {index: len(tokens) for index, tokens in seen.tokens.items()},
    }
