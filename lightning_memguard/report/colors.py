"""The color of each part of the memory, in every picture; in the order they are stacked."""

from __future__ import annotations

from lightning_memguard.core.trace.trace import OPTIONAL_PARTS, PARTS

# What stays allocated is at the bottom of the stack, what comes and goes on top. Most colors are those of Okabe and
# Ito, which color-blind people can tell apart; neighbors also differ in lightness.
COLORS = {
    "parameters": "#0072b2",
    "buffers": "#8a8f98",
    "callbacks": "#7a5230",
    "communication": "#b8bec7",
    "optimizer_state": "#cc79a7",
    "gradients": "#e69f00",
    "activations": "#009e73",
    "batch": "#e3cb00",
    "temporaries": "#d55e00",
    "workspaces": "#56b4e9",
}
assert set(COLORS) == {*PARTS, *OPTIONAL_PARTS}
