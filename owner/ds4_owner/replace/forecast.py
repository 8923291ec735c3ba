"""Would the next owner fit: its own plan against the machine's memory.

Owns the question, asked twice: before anything is stopped, as if the old owner's memory were back,
and once it is. The plan comes from `ds4-weight-server plan` in a process of its own, because it
parses a file that nobody has vouched for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ds4_common.errors import BudgetError, LoaderError
from ds4_owner import budget
from ds4_owner.backends.shm import SHM_FOLDER
from ds4_owner.config import OwnerConfig
from ds4_owner.progress import PREFIX, size
from ds4_owner.replace import decisions, machine
from ds4_owner.replace.plan import Plan

OWNER_COMMAND = (sys.executable, "-P", "-m", "ds4_owner.cli")


class Forecast(msgspec.Struct, frozen=True):
    """Bytes needed by purpose, bytes there are by limit. `refusal` "": it fits."""

    needs: dict[str, int]
    limits: dict[str, int]
    reserve: int
    returned: int  # counted as there although the old owner still has it
    enforced: bool
    refusal: str

    @property
    def lines(self) -> list[str]:
        lines = [f"needs {size(n_bytes)}: {what}" for what, n_bytes in self.needs.items()]
        lines += [f"has {size(n_bytes)}: {what}" for what, n_bytes in self.limits.items()]
        if self.returned:
            lines[-1] += f", with {size(self.returned)} that the old owner gives back"
        lines.append(f"reserve {size(self.reserve)}")
        if self.refusal and not self.enforced:
            lines.append(f"does not fit, but the check is off: {self.refusal}")
        elif self.refusal:
            lines.append(f"does not fit: {self.refusal}")
        else:
            lines.append("fits")
        return lines

    @property
    def fits(self) -> bool:
        return not self.refusal or not self.enforced


def forecast(plan: Plan, environ: Mapping[str, str], *, returned: bool) -> Forecast:
    """Checks the next owner's budget. `returned`: count the old owner's memory as free.

    Raises UsageError for its flags, LoaderError with the owner's words for its model, CudaError's
    kinds for a device that this process cannot ask, the old owner's included."""
    config = plan.config(environ)
    if returned and plan.owner is not None and plan.owner.device_uuid:
        from ds4_common.cuda.device import find

        find(plan.owner.device_uuid)
    needs = _plan_needs(plan)
    if config.backend == "vmm":
        return _on_device(plan, config, needs, returned=returned)
    on_tmpfs = config.backend == "shm" and os.path.isdir(SHM_FOLDER)
    memory = budget.read_memory(tmpfs=SHM_FOLDER if on_tmpfs else None)
    gift = plan.owner.host_bytes if returned and plan.owner is not None else 0
    if gift and plan.owner is not None:
        memory = decisions.with_returned(
            memory, gift, same_cgroups=plan.owner.same_cgroups, tmpfs=plan.owner.backend == "shm"
        )
    reserve = budget.default_reserve(config, memory.total)
    refusal = _refusal(needs, reserve, memory, "host memory")
    return Forecast(
        {need.what: need.n_bytes for need in needs}, memory.limits, reserve, gift,
        config.preflight, refusal,
    )  # fmt: skip


def _refusal(needs: Sequence[budget.Need], reserve: int, memory: budget.Memory, where: str) -> str:
    try:
        budget.check(needs, reserve, memory, where)
    except BudgetError as error:
        return str(error)
    return ""


def _on_device(
    plan: Plan, config: OwnerConfig, needs: list[budget.Need], *, returned: bool
) -> Forecast:
    """The same for device memory."""
    from ds4_common.cuda.device import probe
    from ds4_owner import device_budget

    device = probe(config.device)
    memory = device_budget.read_device(device, lambda: machine.device_free(device))
    old = plan.owner if returned else None
    gift = 0
    if old is not None:
        gift = old.device_bytes if old.device_uuid == device.uuid else 0
        gift += old.host_bytes if device.integrated else 0
    memory = replace(memory, available=min(memory.total, memory.available + gift))
    reserve = device_budget.default_reserve(config, device)
    pooled = [need for need in needs if need.on_device or device.integrated]
    return Forecast(
        {need.what: need.n_bytes for need in needs}, memory.limits, reserve, gift,
        config.preflight, _refusal(pooled, reserve, memory, device.name),
    )  # fmt: skip


def _plan_needs(plan: Plan) -> list[budget.Need]:
    command = [*OWNER_COMMAND, "plan", plan.model, "--json", *plan.options]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, text=True)
    if done.returncode:
        said = done.stderr.replace(PREFIX, "").strip()
        raise LoaderError(f"{plan.model} cannot be loaded: {said or done.returncode}")
    document: dict[str, Any] = msgspec.json.decode(done.stdout)
    on_device = document["on_device"]
    return [
        budget.Need(str(what), int(n_bytes), on_device=what in on_device)
        for what, n_bytes in document["needs"].items()
    ]
