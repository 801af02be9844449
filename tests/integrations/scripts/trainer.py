"""Hugging Face's Trainer on a plan; one function a test."""

import contextlib
import copy
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

if sys.argv[1].startswith("deepspeed"):
    os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_USE_DEEPSPEED": "true"}

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import Trainer, TrainerCallback, TrainingArguments, get_scheduler
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from packer.errors import PackerError
from packer.integrations.hf import PlanTrainer, PlanTrainerMixin
from packer.planner import PlanConfig, make_plan
from packer.runtime import PlanLoader
from tests.integrations import tiny
from tests.integrations.processes import report

DEFAULTS: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "optim": "sgd",
    "learning_rate": 1.0,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "disable_tqdm": True,
    "seed": 1,
}


class Record(TrainerCallback):
    """Rates that the optimizer which really steps is given, and the samples of each step."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.samples: list[list[int]] = []
        self.trainer: Any = None
        self.handle: Any = None

    def on_train_begin(self, args, state, control, **kwargs):
        inner = kwargs["optimizer"]
        while hasattr(inner, "optimizer"):
            inner = inner.optimizer
        self.handle = inner.register_step_pre_hook(self.note)

    def note(self, optimizer, args, kwargs):
        if len(self.rates) == len(self.samples):  # ZeRO updates its groups one after the other
            self.rates.append(float(optimizer.param_groups[0]["lr"]))

    def on_step_end(self, args, state, control, **kwargs):
        step = self.trainer._step.info
        self.samples.append([step.epoch, step.index])


def make_trainer(folder: str, data, plan, *, model=None, record=None, **options: Any):
    defaults = DEFAULTS | {"use_cpu": "deepspeed" not in options}
    own = {
        name: options.pop(name)
        for name in ("eval_dataset", "eval_plan", "compute_metrics")
        if name in options
    }
    args = TrainingArguments(output_dir=folder, **defaults | options)
    trainer = PlanTrainer(
        plan=plan,
        model=model or tiny.decoder(),
        args=args,
        train_dataset=data,
        callbacks=[record] if record else None,
        **own,
    )
    if record:
        record.trainer = trainer
    return trainer


class LogitsOnly(torch.nn.Module):
    """A model that knows of no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = tiny.decoder()

    def forward(self, input_ids, attention_mask, position_ids):
        found = self.decoder(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)
        return {"logits": found.logits}


def one_step(
    folder: str, data, plan, *, model=None, attention: str = "sdpa", expected=None, **options: Any
) -> dict[str, float]:
    """Make one update at rate 1 and compare what it changed with the gradient worked out by hand.

    ``expected``: the loss, and its gradient with respect to ``model``; default: those of the decoder.
    """
    # First of all, since Ulysses takes the place of an attention function in the whole process.
    loss, gradient = expected or tiny.step_gradient(data, tiny.step_samples(plan))
    if model is None:
        model = tiny.decoder()
        model.config._attn_implementation = attention
    trainer = make_trainer(folder, data, plan, model=model, max_steps=1, **options)
    return update_of(trainer, loss, gradient)


def update_of(trainer, loss: float, gradient: torch.Tensor) -> dict[str, float]:
    """Make the Trainer's first update, and compare it."""
    plan, model = trainer.plan, trainer.model
    gradient = gradient * plan.epoch(0).step(0).lr_scale
    before = tiny.weights(model)
    trainer.train()
    with gathered(model):
        change = before - tiny.weights(model)
    return {
        "error": float((change - gradient).abs().max() / gradient.abs().max()),
        "loss": trainer.state.log_history[0]["loss"],
        "expected_loss": loss,
        "rate": trainer.state.log_history[0]["learning_rate"],
        "lr_scale": plan.epoch(0).step(0).lr_scale,
    }


def gathered(model):
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()))


def gradients(folder: str) -> dict[str, Any]:
    """One step's gradient: both layouts, labels with prompts counted by the plan and counted on the way."""
    plain, prompts = tiny.Tokens(), tiny.Tokens(prompts=True)
    return {
        "padded": one_step(folder, plain, tiny.plan(plain)),
        "packed": one_step(folder, plain, tiny.plan(plain, layout="packed")),
        "planned labels": one_step(folder, prompts, tiny.plan(prompts, loss_tokens=True)),
        "counted labels": one_step(folder, prompts, tiny.plan(prompts, layout="packed")),
        "cut labels": one_step(
            folder,
            plain,
            tiny.plan(plain, layout="packed", too_long="truncate", max_seqlen=12, remainder="keep"),
        ),
        "workers": one_step(folder, plain, tiny.plan(plain), dataloader_num_workers=1),
        "smoothed": one_step(folder, plain, tiny.plan(plain), label_smoothing_factor=1e-12),
        "logits only": one_step(folder, plain, tiny.plan(plain), model=LogitsOnly()),
    }


def mixture(folder: str) -> dict[str, Any]:
    """Two sources by share for a number of steps: the first step's gradient, and how many there are."""
    whole = tiny.Tokens()
    sources = {"web": torch.utils.data.Subset(whole, range(40))}
    sources["code"] = torch.utils.data.Subset(whole, range(40, 60))
    lengths = {name: [len(sample["input_ids"]) for sample in data] for name, data in sources.items()}
    mix = {"mix": {"web": 0.5, "code": 0.5}, "total_steps": 6}
    plan = make_plan(lengths, PlanConfig(dp_size=2, grad_accum=2, max_tokens=40, **mix))
    expected = tiny.step_gradient(whole, tiny.step_samples(plan))
    first = one_step(folder, sources, plan, expected=expected)
    trainer = make_trainer(folder, sources, plan, learning_rate=1e-3, num_train_epochs=1)
    trainer.train()
    passes = [source.num_passes for source in plan.sources]
    return {"first": first, "steps": trainer.state.global_step, "passes": passes}


def schedules(folder: str) -> dict[str, Any]:
    """The factor under several schedules, over two epochs, with evaluation at each epoch's end."""
    data = tiny.Tokens()
    plan = tiny.plan(data, epochs=2)
    scales = [
        plan.epoch(epoch).step(step).lr_scale
        for epoch in range(2)
        for step in range(plan.epoch(epoch).num_steps)
    ]
    found = {}
    for name in ("linear", "cosine", "constant_with_warmup", "polynomial", "reduce_lr_on_plateau"):
        record = Record()
        trainer = make_trainer(
            folder,
            data,
            plan,
            record=record,
            lr_scheduler_type=name,
            learning_rate=0.1,
            warmup_steps=2,
            eval_strategy="epoch",
            eval_dataset=torch.utils.data.Subset(data, range(4)),
        )
        trainer.train()
        probe = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        schedule = get_scheduler(name, probe, num_warmup_steps=2, num_training_steps=len(scales))
        base = []
        for _ in scales:
            base.append(probe.param_groups[0]["lr"])
            probe.step()
            if name != "reduce_lr_on_plateau":
                schedule.step()
        history = trainer.state.log_history
        found[name] = {
            "rates": record.rates,
            "logged": [entry["learning_rate"] for entry in history if "learning_rate" in entry],
            "expected": [rate * scale for rate, scale in zip(base, scales, strict=True)],
            "epochs": [entry["epoch"] for entry in history if "learning_rate" in entry],
            "evaluated": [entry["epoch"] for entry in history if "eval_loss" in entry],
        }
    return found


def resume(folder: str, zero: str = "") -> dict[str, Any]:
    """Broken off in the second epoch and taken up again, twice; and refused with another plan."""
    data = tiny.Tokens(80)
    plan = tiny.plan(data, epochs=2)
    num_steps = plan.epoch(0).num_steps + plan.epoch(1).num_steps
    options: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": 1e-2, "lr_scheduler_type": "cosine"}
    if zero:
        options["deepspeed"] = deepspeed_config(int(zero))
    runs = {}
    for name, checkpoint, last in [("whole", None, None), ("first", 3, 6), ("second", 6, None)]:
        record = Record()
        model = tiny.decoder()
        own = f"{folder}/whole" if name == "whole" else f"{folder}/broken"
        trainer = make_trainer(
            own if name == "whole" else f"{folder}/broken",
            data,
            plan,
            model=model,
            record=record,
            save_strategy="steps",
            save_steps=3,
            **options,
        )
        if last:
            trainer.add_callback(StopAt(last))
        where = (
            None
            if checkpoint is None
            else f"{folder}/{'whole' if name == 'first' else 'broken'}/checkpoint-{checkpoint}"
        )
        trainer.train(resume_from_checkpoint=where)
        with gathered(model):
            runs[name] = {
                "samples": record.samples,
                "rates": record.rates,
                "weights": tiny.weights(model).tolist(),
            }
    refused = {}
    for reason, other, where in [
        ("other plan", tiny.plan(data, epochs=2, seed=9), f"{folder}/whole/checkpoint-3"),
        ("no position", plan, folder),
    ]:
        try:
            make_trainer(f"{folder}/other", data, other, **options).train(resume_from_checkpoint=where)
        except PackerError as error:
            refused[reason] = f"{type(error).__name__}: {error}"
    return {"runs": runs, "steps": num_steps, "refused": refused}


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step >= self.step


def deepspeed_config(stage: int, **extra: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage} | extra.pop("zero", {}),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    } | extra


def deepspeed_gradients(folder: str) -> dict[str, Any]:
    """One step's gradient on every ZeRO stage; a schedule from DeepSpeed's configuration under the factor."""
    data = tiny.Tokens()
    plan = tiny.plan(data, layout="packed")
    found: dict[str, Any] = {
        f"zero {stage}": one_step(folder, data, plan, deepspeed=deepspeed_config(stage)) for stage in range(4)
    }
    scattered = deepspeed_config(3, zero={"reduce_scatter": False})
    found["zero 3, no reduce-scatter"] = one_step(folder, data, plan, deepspeed=scattered)
    return found | {"config schedule": _configured_schedule(folder)}


def _configured_schedule(folder: str) -> dict[str, Any]:
    """A schedule that DeepSpeed makes of its configuration, and steps within the engine."""
    from deepspeed.runtime.lr_schedules import WarmupLR

    data = tiny.Tokens(120)
    plan = tiny.plan(data)
    warmup = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    config = deepspeed_config(1, scheduler={"type": "WarmupLR", "params": warmup})
    record = Record()
    options = {"learning_rate": 0.1, "warmup_steps": 4, "deepspeed": config}
    make_trainer(folder, data, plan, record=record, **options).train()
    probe = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = WarmupLR(probe, warmup_min_lr=0, warmup_max_lr=0.1, warmup_num_steps=4)
    expected = []
    for step in range(plan.epoch(0).num_steps):
        expected.append(probe.param_groups[0]["lr"] * plan.epoch(0).step(step).lr_scale)
        schedule.step()
    return {"rates": record.rates, "expected": expected}


def deepspeed_resume(folder: str) -> dict[str, Any]:
    return resume(folder, "2")


def ulysses_options(stage: int, attention: str = "sdpa") -> dict[str, Any]:
    # Newer than the oldest accelerate that the rest works with.
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation=attention
    )
    parallel = ParallelismConfig(sp_backend="deepspeed", sp_size=2, dp_replicate_size=1, sp_handler=handler)
    return {
        "parallelism_config": parallel,
        "deepspeed": deepspeed_config(stage),
        "gradient_accumulation_steps": 4,
    }


def deepspeed_ulysses(folder: str, *stages: str) -> dict[str, Any]:
    """Two ranks that share every row: one step's gradient."""
    data = tiny.Tokens(prompts=True)
    plan = tiny.plan(data, loss_tokens=True, max_samples=1, sp_size=2)
    found = {}
    for stage in stages:
        with _ulysses_left_behind():
            found[f"zero {stage}"] = one_step(folder, data, plan, **ulysses_options(int(stage)))
    with _ulysses_left_behind():
        found["evaluation"] = _evaluated_whole(folder, data, plan)
    packed = tiny.plan(data, loss_tokens=True, layout="packed", sp_size=2)
    ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = attention_by_segments
    with _ulysses_left_behind():
        options = ulysses_options(1, "flash_attention_2")
        found["packed"] = one_step(folder, data, packed, attention="flash_attention_2", **options)
    return found


def _evaluated_whole(folder: str, data, plan) -> dict[str, float]:
    """While the model evaluates, each rank has rows of its own, several samples each."""
    held_out = tiny.Tokens(21, prompts=True)
    trainer = make_trainer(
        folder,
        data,
        plan,
        max_steps=1,
        eval_dataset=held_out,
        eval_plan=tiny.plan(held_out, loss_tokens=True, remainder="keep"),
        eval_strategy="steps",
        eval_steps=1,
        **ulysses_options(1),
    )
    trainer.train()
    trainer.model.eval()
    (found,) = (entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    return {"found": found, "expected": tiny.mean_loss(trainer.model, held_out, range(21)).item()}


def untrainable(folder: str) -> dict[str, Any]:
    """A plan whose first steps have no token to learn: they leave the weights as they are, and no NaN."""
    data = tiny.Tokens(24, prompts=True)
    for sample in data.samples[:8]:
        sample["labels"][:] = -100
    plan = tiny.plan(data, loss_tokens=True, order="sequential", max_samples=2)
    weights = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            weights.append(tiny.weights(model))

    trainer = make_trainer(folder, data, plan, gradient_accumulation_steps=4, max_steps=3)
    before = tiny.weights(trainer.model)
    trainer.add_callback(Watch())
    trainer.train()
    return {
        "untouched": torch.equal(weights[0], before),
        "trained": not torch.equal(weights[2], before),
        "finite": bool(weights[2].isfinite().all()),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


def attention_by_segments(module, query, key, value, attention_mask, *, cu_seq_lens_q, **kwargs):
    """What FlashAttention computes of a packed row, from the edges that it is told: it runs on no CPU."""
    outputs = []
    for first, last in itertools.pairwise(cu_seq_lens_q.tolist()):
        segment = [x[:, :, first:last] for x in (query, key, value)]
        outputs.append(F.scaled_dot_product_attention(*segment, is_causal=True, enable_gqa=True))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


@contextlib.contextmanager
def _ulysses_left_behind():
    """Take back what Ulysses sets up for the whole process, so that the next engine can set it up anew."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    yield
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
    for name in vars(parallel_state_sp):
        if name.startswith("_") and name.isupper():
            setattr(parallel_state_sp, name, None)


def deepspeed_refusals(folder: str) -> dict[str, str]:
    """What would let samples see each other, or lacks its mask, is refused by name before the first step."""
    data = tiny.Tokens()
    packed = tiny.plan(data, layout="packed", sp_size=2)
    several = tiny.plan(data, sp_size=2)
    refused = {}
    for reason, plan, attention in [
        ("eager", packed, "eager"),
        ("sdpa", packed, "sdpa"),
        ("rows", several, "sdpa"),
    ]:
        options = ulysses_options(1)
        try:
            make_trainer(folder, data, plan, model=tiny.decoder(attention), **options)
        except PackerError as error:
            refused[reason] = f"{type(error).__name__}: {error}"
    return refused


class ShiftsLabels(torch.nn.Module):
    """A model with a loss of its own, which shifts the labels that it is given and divides as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = tiny.decoder()

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        logits = self.decoder(input_ids=input_ids, attention_mask=attention_mask).logits
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def losses_of_their_own(folder: str) -> dict[str, Any]:
    """Models that would shift labels once more, take a mean of their own, or add to the loss."""
    from transformers import BartConfig, BartForCausalLM

    data = tiny.Tokens(prompts=True)
    plan = tiny.plan(data, loss_tokens=True)
    torch.manual_seed(0)
    small = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
    bart = BartForCausalLM(BartConfig(vocab_size=tiny.VOCABULARY, dropout=0.0, **small))
    found = {
        "shifts": one_step(folder, data, plan, model=ShiftsLabels()),
        "mean of its own": one_step(
            folder, data, plan, model=bart, expected=tiny.step_gradient(data, tiny.step_samples(plan), bart)
        ),
    }
    return found | {"experts": experts(folder), "pairs": pairs(folder)}


def experts(folder: str) -> dict[str, Any]:
    """A mixture of experts: the mean over tokens, and the mean over micro-batches of what balances it."""
    from transformers import MixtralConfig, MixtralForCausalLM

    data = tiny.Tokens(32)
    plan = tiny.plan(data, layout="packed", max_tokens=60)
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    routed = {
        "experts_implementation": "eager",
        "num_local_experts": 4,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    }
    model = MixtralForCausalLM(
        MixtralConfig(vocab_size=tiny.VOCABULARY, num_key_value_heads=2, **small, **routed)
    )
    by_hand = copy.deepcopy(model).double()
    loss = tiny.mean_loss(by_hand, data, tiny.step_samples(plan))
    for row in range(plan.dp_size * plan.grad_accum):
        ids = [data[i]["input_ids"] for i in plan.epoch(0).microbatch(row).sample_ids]
        positions = torch.cat([torch.arange(len(part)) for part in ids])
        packed = torch.from_numpy(np.concatenate(ids)).long()
        found = by_hand(input_ids=packed[None], position_ids=positions[None], use_cache=False)
        loss = loss + 0.5 * found.aux_loss / (plan.dp_size * plan.grad_accum)
    loss.backward()
    gradient = torch.cat([tiny.gradient_of(parameter).flatten() for parameter in by_hand.parameters()])
    return one_step(folder, data, plan, model=model, expected=(loss.item(), gradient))


class Pairs(torch.utils.data.Dataset):
    """Source and target of each sample; some of the target's first tokens are not to be learnt."""

    def __init__(self, count: int = 40) -> None:
        self.sources, targets = tiny.Tokens(count), tiny.Tokens(count + 1, prompts=True)
        self.targets = targets.samples[1:]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"source": self.sources[index], "target": self.targets[index]}


def pairs(folder: str) -> dict[str, Any]:
    """An encoder and a decoder on a plan of pairs: the loader's labels, predicted where they stand."""
    from transformers import T5Config, T5ForConditionalGeneration

    data = Pairs()
    lengths = {
        name: np.array([len(data[i][name]["input_ids"]) for i in range(len(data))], np.int32)
        for name in ("source", "target")
    }
    config = PlanConfig(max_tokens={"source": 40, "target": 40}, dp_size=2, grad_accum=2)
    plan = make_plan(lengths["source"], config, metrics=lengths)
    torch.manual_seed(0)
    small = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=tiny.VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, **small
        )
    )
    by_hand = copy.deepcopy(model).double()
    total, count = torch.zeros(()), 0
    for rank in range(2):
        loader = PlanLoader(plan, data, dp_rank=rank, dp_size=2)
        for batch in next(iter(loader)):
            source, target = batch["source"], batch["target"]
            given = F.pad(target["input_ids"], (1, -1), value=0)
            logits = by_hand(
                input_ids=source["input_ids"],
                attention_mask=source["attention_mask"],
                decoder_input_ids=given,
            ).logits
            total = total + F.cross_entropy(logits.flatten(0, 1), target["labels"].flatten(), reduction="sum")
            count += int((target["labels"] != -100).sum())
    loss = total / count
    loss.backward()
    gradient = torch.cat([tiny.gradient_of(parameter).flatten() for parameter in by_hand.parameters()])
    return one_step(folder, data, plan, model=model, expected=(loss.item(), gradient))


def search(folder: str) -> dict[str, Any]:
    """A trial of a hyperparameter search: it saves where the Trainer does, and is held against the plan."""
    from transformers.trainer_utils import HPSearchBackend

    data = tiny.Tokens()
    plan = tiny.plan(data, dp_size=1, grad_accum=4, epochs=2)
    options = {"gradient_accumulation_steps": 4, "save_strategy": "steps", "save_steps": 2}
    args = TrainingArguments(output_dir=folder, use_cpu=True, **DEFAULTS | options)
    trainer = PlanTrainer(plan=plan, model_init=tiny.decoder, args=args, train_dataset=data)
    trainer.hp_search_backend = HPSearchBackend.RAY
    trainer.hp_name = lambda trial: "trial-7"
    trainer.train(trial={"learning_rate": 0.5})
    saved = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("packer_position.json"))
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    scales = [plan.epoch(0).step(step).lr_scale for step in range(2)]
    refused = {}
    for name, value in [("num_train_epochs", 5), ("gradient_accumulation_steps", 2)]:
        try:
            trainer.train(trial={name: value})
        except PackerError as error:
            refused[name] = f"{type(error).__name__}: {error}"
        trainer.args.num_train_epochs, trainer.args.gradient_accumulation_steps = 2, 4
    return {
        "saved": saved,
        "steps": trainer.state.max_steps,
        "rates": rates[:2],
        "expected": [0.5 * scale for scale in scales],
        "refused": refused,
    }


def refusals(folder: str) -> dict[str, str]:
    """Arguments that contradict the plan, each by name and with a cure."""
    data = tiny.Tokens()
    plan = tiny.plan(data, epochs=2)
    refused = {}
    for reason, options in {
        "max_steps": {"max_steps": 1000},
        "num_train_epochs": {"num_train_epochs": 5},
        "gradient_accumulation_steps": {"gradient_accumulation_steps": 3},
        "auto_find_batch_size": {"auto_find_batch_size": True},
    }.items():
        try:
            make_trainer(folder, data, plan, **{"gradient_accumulation_steps": 4} | options)
        except PackerError as error:
            refused[reason] = f"{type(error).__name__}: {error}"

    class Weighted(Trainer):
        def compute_loss(self, *args, **kwargs):
            raise NotImplementedError

    class PlanWeighted(PlanTrainerMixin, Weighted):
        pass

    try:
        PlanWeighted(plan=plan)
    except PackerError as error:
        refused["Weighted.compute_loss"] = f"{type(error).__name__}: {error}"
    return refused


if __name__ == "__main__":
    if sys.argv[1].startswith("deepspeed"):
        import deepspeed

        # Or the first start compiles a kernel for a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    result = globals()[sys.argv[1]](*sys.argv[2:])
    report(json.loads(json.dumps(result)))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
