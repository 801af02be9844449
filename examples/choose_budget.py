"""Which --max-tokens? Calibrate a model on the GPU that there is, plan with what is found, rehearse the plan.

    python examples/choose_budget.py                          on a GPU: all of its memory
    python examples/choose_budget.py --gigabytes 0.5          without one: as if there were so much memory
    python examples/choose_budget.py --model transformers     a Llama of Hugging Face, from its configuration

Put your own model and step in: what is packer's are ``calibrate``, ``make_plan`` and ``rehearse``.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decoder import Decoder, DecoderConfig
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import packer
from packer.budget import HostDevice
from packer.runtime.sequence_parallel import UlyssesAttention

DATA = Path(__file__).parent / "data"
VOCABULARY = 4096


def main() -> None:
    """Measure the shipped data, find the budget, plan, and play the plan's extremes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=["plain", "transformers"], default="plain")
    parser.add_argument("--step-tokens", type=int, default=65_536, help="tokens of an update")
    parser.add_argument("--max-seconds", type=float, default=150.0)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="without a GPU: memory to pretend")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device: Any = "cuda" if on_gpu else HostDevice(int(arguments.gigabytes * 1e9))

    torch.manual_seed(0)
    model, train_step = (of_transformers if arguments.model == "transformers" else plain)(
        "cuda" if on_gpu else "cpu"
    )
    training = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "device": device}

    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics"
        packer.analyze(
            DATA / "instructions.jsonl.gz",
            out=metrics,
            text_column="text",
            tokenizer=DATA / "tokenizer.json",
        )
        # The budget of this configuration need only hold the longest sample.
        config = packer.PlanConfig(max_tokens=2432, step_tokens=arguments.step_tokens)
        found = packer.calibrate(train_step, metrics, config, max_seconds=arguments.max_seconds, **training)
        print(found)
        plan = packer.make_plan(metrics, found.recommended)
        print(packer.rehearse(plan, train_step, **training).require_fit())


def plain(device: str) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """Return a decoder in plain torch, and what its training loop does with a batch."""
    config = DecoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        intermediate_size=256,
    )
    model = Decoder(config, UlyssesAttention(scaled_dot_product_attention)).to(device)
    return model, lambda batch: model(batch) / batch.step.num_loss_tokens


def of_transformers(device: str) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """Return a Llama with random weights, and what its training loop does with a batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device)
    return model, lambda batch: model(**batch, num_items_in_batch=batch.step.num_loss_tokens).loss


if __name__ == "__main__":
    main()
