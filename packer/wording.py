"""Words of messages and summaries."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 sample``, ``5,011 samples``, ``2 micro-batches``."""
    if number != 1:
        noun += "es" if noun.endswith(("tch", "sh", "s", "x")) else "s"
    return f"{number:,} {noun}"
