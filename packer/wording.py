"""Words of messages and summaries."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 sample``, ``5,011 samples``, ``2 micro-batches``."""
    if number != 1:
        noun += "es" if noun.endswith(("tch", "sh", "s", "x")) else "s"
    return f"{number:,} {noun}"


def in_bytes(number: float) -> str:
    """Return a number of bytes as people say it: ``512 B``, ``3.4 kB``, ``10.7 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.3g} TB"


def on_one_line(text: str) -> str:
    """Return a text with its control characters written as Python writes them; a name may hold a newline."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


TOO_MANY_FILES = "too many files are open; raise the limit of this shell, as `ulimit -n 65536` does"
"""What to say of EMFILE and ENFILE: neither the file nor its place is at fault."""
