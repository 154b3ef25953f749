"""``memguard devices``: what the devices of this machine have, and how much of it is free."""

from __future__ import annotations

import argparse
from typing import Any

from lightning_memguard.cli import tables
from lightning_memguard.cli.options import devices_here
from lightning_memguard.cli.status import progress
from lightning_memguard.core.decision.decision import Budget
from lightning_memguard.errors import MemGuardError
from lightning_memguard.report.page_data import budget_data

HELP = "show the free memory of this machine's devices, and where that figure comes from"


def run(options: argparse.Namespace) -> bool:
    """Read each device's budget, and print them."""
    with progress() as say:
        say("loading torch")
        budgets = {name: budget_of(name) for name in devices_here()}
    if options.json:
        tables.print_json([_data(name, budget) for name, budget in budgets.items()])
    else:
        tables.print_budgets(budgets, tables.terminal())
    return True


def _data(name: str, budget: Budget | str) -> dict[str, Any]:
    if isinstance(budget, str):
        return {"device": name, "problem": budget}
    return {**budget_data(budget), "device": name, "name": budget.device}


def budget_of(name: str) -> Budget | str:
    """The budget, or why it cannot be read."""
    import torch

    from lightning_memguard.core.device.budget import read_budget

    try:
        return read_budget(torch.device(name), margin=0.0)
    except MemGuardError as error:
        return str(error)
