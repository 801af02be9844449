"""Evaluation under Hugging Face's Trainer: what it plays, its loss, and what ``compute_metrics`` is given."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from packer.integrations.accelerate import rank_and_world
from packer.integrations.hf_eval_batches import (
    LABELS,
    EvaluationBatch,
    PaddingCollator,
    PlainEvaluation,
    PlannedEvaluation,
    RowGatherer,
    pair_up,
    require_each_sample_once,
    require_plain,
    rows_of,
)
from packer.integrations.hf_inputs import SHIFTED
from packer.integrations.hf_limits import require_evaluable, require_model
from packer.integrations.hf_loss import TokenMean, logits_of
from packer.integrations.labels import IGNORE_INDEX
from packer.plan import Plan, load_plan
from packer.runtime import PlanLoader

if TYPE_CHECKING:
    # Whether transformers is installed or not, and whatever types it declares: the same here.
    _Mixed = Any
else:
    _Mixed = object


class PlanEvaluationMixin(_Mixed):
    """The part of ``PlanTrainerMixin`` that evaluates: by tokens, each sample once, on any number of ranks.

    Where the user brought a ``data_collator``, sets without a plan are the stock Trainer's affair.
    """

    def _open(self, plan: Plan, dataset: Any, place: Mapping[str, int]) -> PlanLoader:
        """Make a loader as the Trainer's arguments say."""
        raise NotImplementedError

    def _open_evaluations(self, eval_plan: Any) -> None:
        """Open the plans of the evaluation sets that have one, and look at those that have none."""
        plans = pair_up(self.eval_dataset, eval_plan, as_plan)
        sets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {None: self.eval_dataset}
        rank, num_ranks, _ = self._evaluation_place()
        self._evaluations: dict[str | None, PlannedEvaluation] = {}
        self._evaluated = TokenMean()
        self._rows = RowGatherer(is_copy=False)
        self._evaluation_speed: tuple[str, int] | None = None
        for name, dataset in sets.items():
            own = "" if name is None else f"[{name!r}]"
            if name in plans:
                require_each_sample_once(plans[name], f"eval_plan{own}")
                require_model(self.model, plans[name], 1)
                loader = self._open(plans[name], dataset, {"dp_rank": rank, "dp_size": num_ranks})
                self._evaluations[name] = PlannedEvaluation(loader, self.model)
            elif dataset is not None and isinstance(self.data_collator, PaddingCollator):
                require_plain(dataset, self.model, f"eval_dataset{own}")
            if name in plans or isinstance(self.data_collator, PaddingCollator):
                require_evaluable(self.args, is_packed=name in plans and plans[name].layout == "packed")

    def _evaluation_place(self) -> tuple[int, int, bool]:
        """This process among those that share an evaluation, their number, whether it repeats another's work.

        Rows are whole: sequence parallelism is off while a model evaluates.
        """
        rank, world = rank_and_world(self.accelerator)
        tp_size = self.get_tp_size()
        return rank // tp_size, world // tp_size, rank % tp_size > 0

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the micro-batches of an evaluation set: of the only one, of a name's, or of another one."""
        if eval_dataset is self.eval_dataset:  # the Trainer asks for its only set as itself, and not by None
            eval_dataset = None
        if eval_dataset is None or isinstance(eval_dataset, str):
            if (planned := self._evaluations.get(eval_dataset)) is not None:
                return planned
            if self.eval_dataset is not None and isinstance(self.data_collator, PaddingCollator):
                return self._plain(
                    self.eval_dataset if eval_dataset is None else self.eval_dataset[eval_dataset]
                )
        elif isinstance(self.data_collator, PaddingCollator):
            require_plain(eval_dataset, self.model, "eval_dataset")
            return self._plain(eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the batches of a data set to predict, in its order."""
        if not isinstance(self.data_collator, PaddingCollator):
            return super().get_test_dataloader(test_dataset)
        require_plain(test_dataset, self.model, "test_dataset")
        return self._plain(test_dataset)

    def _plain(self, dataset: Any) -> PlainEvaluation:
        rank, num_ranks, _ = self._evaluation_place()
        return PlainEvaluation(
            dataset,
            self.data_collator,
            self.model,
            batch_size=self.args.eval_batch_size,
            rank=rank,
            num_ranks=num_ranks,
            loader_options={
                "num_workers": self.args.dataloader_num_workers,
                "prefetch_factor": self.args.dataloader_prefetch_factor,
            },
        )

    def evaluation_loop(
        self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> Any:
        """Evaluate, with the mean over the tokens of all micro-batches on all ranks as the loss."""
        if not isinstance(dataloader, PlannedEvaluation | PlainEvaluation):
            return super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        *_, is_copy = self._evaluation_place()
        self._evaluated = TokenMean()
        self._rows = self.gather_function = RowGatherer(is_copy=is_copy)
        try:
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        finally:
            self.gather_function = self.accelerator.gather_for_metrics
        output.metrics[f"{metric_key_prefix}_loss"] = self._evaluated.over_all_ranks()
        self._evaluation_speed = (metric_key_prefix, len(dataloader))
        return output

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Return a micro-batch's mean loss and, one row a sample, its logits and its labels."""
        if not isinstance(inputs, EvaluationBatch):
            stock: tuple[Any, Any, Any] = super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys
            )
            return stock
        batch = inputs
        inputs = self._prepare_inputs(dict(inputs))
        labels = inputs.pop(LABELS)
        num_tokens = (inputs[SHIFTED] != IGNORE_INDEX).sum()
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(
                model, inputs, return_outputs=True, num_items_in_batch=num_tokens.clamp(min=1)
            )
        loss = loss.detach().mean()
        self._evaluated.add(loss, int(num_tokens))
        self._rows.is_filler = batch.is_filler
        if prediction_loss_only:
            return loss, None, None
        logits = logits_of(outputs, inputs[SHIFTED], self.model).detach()
        return loss, rows_of(logits, batch), rows_of(labels, batch)

    def num_examples(self, dataloader: Any) -> int:
        """Return the number of samples that a loader plays."""
        if isinstance(dataloader, PlannedEvaluation | PlainEvaluation):
            return dataloader.num_samples
        return int(super().num_examples(dataloader))


def as_plan(plan: Any) -> Plan:
    """Return a plan that is given as itself, or as its directory."""
    return plan if isinstance(plan, Plan) else load_plan(plan)
