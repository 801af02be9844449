"""What must hold for a step: its sums over the micro-batches, its learning-rate factor, its place."""

import math

import numpy as np
from numpy.typing import NDArray

from packer.errors import InvariantError
from packer.plan.reader import Epoch, Plan
from packer.plan.rows import MicroBatches, Steps
from packer.plan.trained import accounts_of
from packer.plan.verify_metrics import PlanMetrics

RELATIVE_ERROR = 1e-12
"""Of a learning-rate factor: one division, one root, one mean."""


class StepRules:
    """Counts what the micro-batches of each step hold, and compares it with ``steps.arrow``."""

    def __init__(self, plan: Plan, metrics: PlanMetrics | None) -> None:
        self._plan = plan
        labels = plan.header["loss_tokens"]
        self._from_seqlens = labels == "seqlen - 1"
        self._loss_metric = None
        if metrics is not None and labels == "labels":
            self._loss_metric = metrics.metric("loss_tokens")
        before = accounts_of(plan)
        self._samples_before = sum(account.num_samples for account in before)
        self._tokens_before = sum(account.num_tokens for account in before)
        self._full_size = 0
        self._full_steps = 0
        self._size = 0
        self._steps = 0

    def begin(self, number: int, epoch: Epoch) -> None:
        """Start an epoch."""
        self._name = f"epoch {number}"
        self._epoch = epoch
        # (num_steps,) what the micro-batches hold
        self._samples, self._tokens, self._loss = (np.zeros(epoch.num_steps, np.int64) for _ in range(3))
        self._longest = np.zeros(epoch.num_steps, np.int64)
        self._full = np.ones(epoch.num_steps, np.bool_)
        self._cut = False

    def count(self, table: MicroBatches) -> None:
        """Add rows that follow those of the call before."""
        first = int(table.step[0])
        step = (table.step - first).astype(np.int64)
        edges = np.flatnonzero(np.diff(step, prepend=-1))
        steps = slice(first, first + int(step[-1]) + 1)
        counts = ~table.is_filler
        self._samples[steps] += np.add.reduceat(table.num_samples * counts, edges, dtype=np.int64)
        self._tokens[steps] += np.add.reduceat(table.num_tokens * counts, edges)
        self._longest[steps] = np.maximum(
            self._longest[steps], np.maximum.reduceat(table.max_seqlen, edges).astype(np.int64)
        )
        self._full[steps] &= np.logical_and.reduceat(counts & ~table.is_repeat, edges)
        self._cut |= table.starts is not None
        loss = self._loss_tokens(table)
        if loss is not None:
            of_row = np.add.reduceat(loss, table.offsets[:-1]) * counts
            self._check_rows(table, of_row)
            self._loss[steps] += np.add.reduceat(of_row, edges)
        elif table.num_loss_tokens is not None:
            self._loss[steps] += np.add.reduceat(table.num_loss_tokens * counts, edges)
            self._check_rows(table, table.num_loss_tokens * counts)

    def _check_rows(self, table: MicroBatches, actual: NDArray[np.int64]) -> None:
        """Compare the loss tokens that rows state, where they state any."""
        if table.num_loss_tokens is None:
            return
        if self._plan.header["loss_tokens"] != "labels" or table.starts is not None:
            raise InvariantError(
                f"{self._name}: micro-batches state num_loss_tokens, and no labels were counted"
            )
        wrong = table.num_loss_tokens != actual
        if wrong.any():
            at = int(np.argmax(wrong))
            raise InvariantError(
                f"{self._name}, step {table.step[at]}: num_loss_tokens of the micro-batch in row "
                f"{table.first_row + at} is {table.num_loss_tokens[at]}, its samples have {actual[at]}"
            )

    def _loss_tokens(self, table: MicroBatches) -> NDArray[np.int64] | None:
        """Return the loss tokens of each piece, where the files tell."""
        if self._from_seqlens:
            return np.maximum(table.seqlens, 1).astype(np.int64) - 1
        if self._loss_metric is None:
            return None
        loss_tokens: NDArray[np.int64] = self._loss_metric[table.sample_ids].astype(np.int64)
        return loss_tokens

    def check(self) -> None:
        """Compare the epoch's steps with what was counted.

        Raises:
            InvariantError: the first step whose row is wrong.
        """
        for table in self._epoch.steps():
            steps = slice(table.first_step, table.first_step + len(table.step))
            self._compare("step", table.step, np.arange(steps.start, steps.stop), steps)
            self._compare("num_samples", table.num_samples, self._samples[steps], steps)
            self._compare("num_tokens", table.num_tokens, self._tokens[steps], steps)
            self._compare("max_seqlen", table.max_seqlen, self._longest[steps], steps)
            self._check_loss_tokens(table, steps)
            for name, stated, sizes in (
                ("samples_before", table.samples_before, table.num_samples),
                ("tokens_before", table.tokens_before, table.num_tokens),
            ):
                start = getattr(self, f"_{name}")
                totals = start + np.concatenate(([0], np.cumsum(sizes)))
                self._compare(name, stated, totals[:-1], steps)
                setattr(self, f"_{name}", int(totals[-1]))
            size = self._sizes(table)
            full = self._full[steps]
            self._full_size += int(size[full].sum())
            self._full_steps += int(np.count_nonzero(full))
            self._size += int(size.sum())
            self._steps += len(size)

    def check_learning_rates(self) -> None:
        """Check, after the last epoch, every learning-rate factor.

        Raises:
            InvariantError: the base is not the mean over the full steps, or a factor does not follow from it.
        """
        config = self._plan.config
        base = 1.0 if config["lr_scaling"] == "none" else self._check_base()
        for number in range(self._plan.num_epochs):
            for table in self._plan.epoch(number).steps():
                expected = self._factors(table, base)
                wrong = ~np.isclose(table.lr_scale, expected, rtol=RELATIVE_ERROR, atol=0.0)
                if wrong.any():
                    at = int(np.argmax(wrong))
                    raise InvariantError(
                        f"epoch {number}, step {table.step[at]}: lr_scale is {table.lr_scale[at]:g}, "
                        f"{config['lr_scaling']} of "
                        f"{self._sizes(table)[at]} over {base:g} gives {expected[at]:g}"
                    )

    def _check_base(self) -> float:
        stated = self._plan.header["lr_base"]
        asked = self._plan.config.get("lr_base")
        if asked is not None:
            expected = float(asked)
        elif self._full_steps:
            expected = self._full_size / self._full_steps
        else:
            expected = self._size / max(self._steps, 1)
        if stated is None or not math.isclose(stated, expected, rel_tol=RELATIVE_ERROR):
            raise InvariantError(f"lr_base is {stated} in plan.json, the steps give {expected:g}")
        return expected

    def _factors(self, table: Steps, base: float) -> NDArray[np.float64]:
        scaling = self._plan.config["lr_scaling"]
        if scaling == "none":
            return np.ones(len(table.step))
        ratio = self._sizes(table) / base
        factors = np.sqrt(ratio) if scaling == "sqrt" else ratio
        most = self._plan.config.get("lr_max_scale")
        return factors if most is None else np.minimum(factors, most)

    def _sizes(self, table: Steps) -> NDArray[np.int64]:
        """Return the sizes of steps in the unit that the learning rate follows."""
        by = self._plan.config["lr_by"]
        if by == "samples":
            return table.num_samples
        if by == "tokens":
            return table.num_tokens
        return np.zeros(len(table.step), np.int64) if table.num_loss_tokens is None else table.num_loss_tokens

    def _check_loss_tokens(self, table: Steps, steps: slice) -> None:
        known = self._plan.header["loss_tokens"] is not None
        if self._cut and self._plan.header["loss_tokens"] == "labels":
            known = False
        if known != (table.num_loss_tokens is not None):
            state = "known" if known else "unknown"
            raise InvariantError(f"{self._name}: num_loss_tokens must be {state} for every step, and is not")
        if table.num_loss_tokens is not None:
            self._compare("num_loss_tokens", table.num_loss_tokens, self._loss[steps], steps)

    def _compare(
        self, name: str, stated: NDArray[np.integer], actual: NDArray[np.integer], steps: slice
    ) -> None:
        wrong = stated != actual
        if wrong.any():
            at = int(np.argmax(wrong))
            raise InvariantError(
                f"{self._name}, step {steps.start + at}: {name} is {stated[at]}, "
                f"its micro-batches give {actual[at]}"
            )
