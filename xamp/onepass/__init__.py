"""Optimizer steps in one pass over memory: kernels in Triton over any number of tensors of one device.

A :class:`Plan` is built once for the tensors of an optimizer on one device. :meth:`Plan.check` reads the gradients
once, in the dtype that they have: it looks for inf and nan and takes the L2 norm. :meth:`Plan.step` unscales, clips,
steps the fp32 masters and states, and writes the lower weights, all in one more pass. No fp32 gradient exists.

    plan = Plan(Rule("adam", decoupled=True), [Row(master, low, (exp_avg, exp_avg_sq), step, group=0), ...])
    plan.check(grads, found_inf, optimizer.param_groups)
    plan.step(grads, optimizer.param_groups, found_inf, inv_scale)

The package imports torch, and Triton when a plan is built. It can be read alone: ``rules`` says what the rules are and
what numbers they need, ``plan`` launches, ``parts`` makes the tables, ``ring`` sends those that change, ``kernels``
steps and ``sums`` checks, by ``elements``.
"""

from __future__ import annotations

from xamp.onepass.plan import Plan
from xamp.onepass.ring import PointerRing
from xamp.onepass.rules import Row, Rule, takes

__all__ = ["Plan", "PointerRing", "Row", "Rule", "takes"]
