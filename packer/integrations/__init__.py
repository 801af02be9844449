"""At home in other people's training loops: one module a framework, imported only by those who have it.

``deepspeed`` replaces DeepSpeed's variable-batch loader, ``hf`` puts a plan under Hugging Face's ``Trainer``,
``accelerate`` and ``lightning`` under theirs, ``megatron`` hands out batches with Megatron's and torchtitan's
field names.
"""
