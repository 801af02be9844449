"""Damage for files: what disks, copies and editors do to them, and what nobody does."""

import json
from random import Random
from typing import Any


def mutate(data: bytes, random: Random) -> bytes:
    """Return ``data`` with one to three kinds of damage."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        data = random.choice(_DAMAGES)(bytearray(data), random)
    return data


def mutate_json(value: Any, random: Random) -> Any:
    """Return a JSON value with one entry somewhere in it removed, exchanged or made odd."""
    places = list(_places(value, ()))
    *path, key = random.choice(places)
    changed = json.loads(json.dumps(value))
    owner = changed
    for step in path:
        owner = owner[step]
    if random.random() < 0.2:
        del owner[key]
    elif random.random() < 0.2:
        owner[key] = _at(value, random.choice(places))
    else:
        owner[key] = random.choice(_ODD_VALUES + ((_nudged(owner[key], random),) * 6))
    return changed


def mutate_json_text(content: bytes, random: Random) -> bytes:
    """Return a JSON file with one entry made odd, or made so that it says something else to each reader."""
    value = json.loads(content)
    if random.random() < 0.75:
        return json.dumps(mutate_json(value, random)).encode()
    text = json.dumps(value)
    at = random.choice([place for place, letter in enumerate(text) if letter in "{[,:"]) + 1
    odd = random.choice(_ODD_TEXTS)
    end = min((text.find(sign, at) for sign in ",]}" if text.find(sign, at) >= 0), default=at)
    return (text[:at] + odd + text[random.choice((at, end)) :]).encode("utf-8", "surrogatepass")


def _nudged(value: Any, random: Random) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + random.choice((-1, 1, 2**31, -(2**31), value))
    if isinstance(value, str) and value:
        at = random.randrange(len(value))
        return value[:at] + random.choice("0a/.\u0000é") + value[at + 1 :]
    return value


def _places(value: Any, path: tuple[Any, ...]) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from _places(item, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _flip_bit(data: bytearray, random: Random) -> bytes:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(data)


def _set_byte(data: bytearray, random: Random) -> bytes:
    if data:
        data[random.randrange(len(data))] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
    return bytes(data)


def _set_number(data: bytearray, random: Random) -> bytes:
    width = random.choice((2, 4, 8))
    if len(data) > width:
        at = random.randrange(len(data) - width)
        at -= random.choice((0, at % width))
        number = random.choice(
            (0, 1, -1, 2**15, 2**31 - 1, -(2**31), 2**62, -(2**63), random.randrange(2**40))
        )
        data[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")
    return bytes(data)


def _truncate(data: bytearray, random: Random) -> bytes:
    return bytes(data[: random.randrange(len(data) + 1)])


def _extend(data: bytearray, random: Random) -> bytes:
    return bytes(data) + random.choice((b"\0", b"\xff", b"ARROW1")) * random.randrange(1, 40)


def _zero_stretch(data: bytearray, random: Random) -> bytes:
    first, last = _stretch(data, random)
    data[first:last] = bytes(last - first)
    return bytes(data)


def _remove_stretch(data: bytearray, random: Random) -> bytes:
    first, last = _stretch(data, random)
    del data[first:last]
    return bytes(data)


def _copy_stretch(data: bytearray, random: Random) -> bytes:
    first, last = _stretch(data, random)
    at = random.randrange(len(data) + 1)
    if random.random() < 0.5:
        data[at:at] = data[first:last]
    else:
        data[at : at + last - first] = data[first:last]
    return bytes(data)


def _stretch(data: bytearray, random: Random) -> tuple[int, int]:
    first = random.randrange(len(data) + 1)
    return first, min(first + random.choice((1, 4, 8, 64, 1000)), len(data))


_DAMAGES = (
    _flip_bit,
    _flip_bit,
    _set_byte,
    _set_byte,
    _set_number,
    _set_number,
    _set_number,
    _truncate,
    _extend,
    _zero_stretch,
    _remove_stretch,
    _copy_stretch,
)
_ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    2**31,
    2**63,
    10**30,
    -(10**30),
    1e308,
    "",
    "x",
    "../../x",
    "../../etc/passwd",
    "/etc/passwd",
    "a/../../b",
    "C:\\x",
    "a\u0000b",
    "\ud800",
    float("nan"),
    [],
    {},
    [[[]]],
    {"a": None},
)
_ODD_TEXTS = (
    "NaN",
    "-Infinity",
    "1e999",
    "9" * 5000,
    "[" * 100_000,
    '{"a":' * 100_000,
    "[[[[[]]]]]",
    '"format": "twice",',
    '"num_samples": 1, "num_rows": 1,',
    '"\\ud800"',
    "\x00",
    "// a comment\n",
    "\ufeff",
)
