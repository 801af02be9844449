"""Chat templates after public conventions, each with and without marks for what the assistant writes."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "data"

# « and » stand where the marks go.
CHATML = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}«{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}<|im_end|>»{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|stop|>\n\n"
    "{% if m.role == 'assistant' %}«{{ m.content | trim }}<|eot|>»{% else %}{{ m.content | trim }}<|eot|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}« {{ m.content | trim }}{{ eos_token }}»"
    "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]"
    "{% else %}[INST] {{ m.content | trim }} [/INST]{% endif %}{% endfor %}"
)
MERGED_SYSTEM = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content ~ '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}"
    "{% if m.role == 'assistant' %}<turn>model\n«{{ m.content | trim }}<end>»{{ '\n' }}"
    "{% else %}<turn>{{ m.role }}\n{{ (first if loop.first else '') ~ m.content | trim }}<end>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "inst": INST, "merged system": MERGED_SYSTEM}

_TOKENS = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|stop|>", "<|eot|>", "<turn>", "<end>"]


def plain(template: str) -> str:
    """Return a template as most are published: without marks."""
    return template.replace("«", "").replace("»", "")


def marked(template: str) -> str:
    """Return the same template with marks."""
    return template.replace("«", "{% generation %}").replace("»", "{% endgeneration %}")


def write_chat_tokenizer(folder: Path, template: str, **settings: object) -> Path:
    """Write the examples' tokenizer with tokens for turns, a BOS before every text, and a chat template."""
    tokenizer = Tokenizer.from_file(str(EXAMPLES / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>", "</s>", *_TOKENS])
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": template,
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
