"""At home in other people's training loops: one module a framework, imported only by those who have it.

``deepspeed`` replaces DeepSpeed's variable-batch loader, ``hf`` puts a plan under Hugging Face's ``Trainer``,
``accelerate`` and ``lightning`` under theirs; ``megatron`` and ``torchtitan`` hand out batches under their
names. ``deepspeed_*`` and ``hf_*`` are parts of these two; ``together`` lets one process work for all.
"""
