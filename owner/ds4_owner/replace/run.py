"""The order of a replacement, and what it means to go on with one that was interrupted.

Owns the table of steps and the loop over it. Each step looks before it acts, so that running it
again is harmless; the journal has a line before and after. The first verification that fails ends
the run, and `--resume` begins there, after looking again at what may have changed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from ds4_common.errors import Ds4Error
from ds4_owner.replace import starts, stops
from ds4_owner.replace.log import Journal
from ds4_owner.replace.plan import Plan
from ds4_owner.replace.stops import Context


class Step(NamedTuple):
    """`back_to`: the step at which a resumed run begins when this one is the first not done."""

    name: str
    title: str
    act: Callable[[Context], dict[str, Any]]
    back_to: str


STEPS = (
    Step("inspect", "compute processes and memory", stops.inspect, "inspect"),
    Step("stop-workers", "stop the workers; pids and sockets gone?", stops.stop_workers,
         "stop-workers"),
    Step("stop-owner", "stop the owner; pid and memory gone?", stops.stop_owner, "stop-owner"),
    Step("clear-cache", "clear caches", stops.clear_cache, "clear-cache"),
    Step("recheck", "memory, swap and pressure again", stops.recheck, "recheck"),
    Step("budget", "does the next owner fit?", starts.check_budget, "recheck"),
    Step("start-owner", "start the next owner; ready?", starts.start_owner, "recheck"),
    Step("start-workers", "start the workers; do they answer?", starts.start_workers,
         "start-workers"),
    Step("ask", "one prompt", starts.ask, "start-workers"),
)  # fmt: skip


def pending(done: Collection[str], *, owner_begun: bool, owner_died: bool = False) -> list[Step]:
    """The steps still to run, in order. `owner_begun`: the next owner was started, and may be
    there: free memory says nothing about whether it fits any more. `owner_died`: it was ready, and
    is gone."""
    names = [step.name for step in STEPS]
    if owner_died:
        return list(STEPS[names.index("recheck") :])
    first = next((step for step in STEPS if step.name not in done), None)
    if first is None:
        return []
    begin = first.name if first.name == "start-owner" and owner_begun else first.back_to
    return list(STEPS[names.index(begin) :])


def execute(plan: Plan, journal: Journal, done: Collection[str], say: Callable[[str], None]) -> int:
    """Runs what is left. Returns 0; raises the Ds4Error of the step that refused to go on."""
    owner_begun = journal.facts("saw", "start-owner") is not None
    context = Context(plan, journal, say)
    owner_died = "start-owner" in done and starts.owner_died(context)
    if owner_died:
        starts.stop_orphans(context)
    left = pending(done, owner_begun=owner_begun, owner_died=owner_died)
    for number, step in enumerate(STEPS, 1):
        heading = f"[{number}/{len(STEPS)}] {step.title}"
        if step not in left:
            say(f"{heading}: done before")
            continue
        say(heading)
        journal.write("begin", step.name)
        try:
            facts = step.act(context)
        except Ds4Error as error:
            journal.write("refused", step.name, reason=str(error))
            raise
        journal.write("done", step.name, **facts)
    journal.write("end", outcome="replaced")
    say(f"{plan.model} is served now; journal: {journal.path}")
    return 0
