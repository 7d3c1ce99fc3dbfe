"""Write docs/protocol.md from the code it describes, so that the two cannot drift.

States and transitions come from the machines' tables, bytes from the header's dtype,
messages, limits and their notes from the docstrings. A test compares the file with the
page; renew it with::

    python -c "from tailbound.lab import protocol_page as page; page.write_page()"
"""

import ast
import functools
import inspect
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, get_args

from tailbound.protocol import gather, messages, pacing, receiver, sender, session, wire
from tailbound.protocol.events import Direction

PAGE = "docs/protocol.md"

HEADER_NOTES = {
    "version": "Of this page. Another version is counted as malformed.",
    "kind": "Which way the round runs, or a reachability ping.",
    "bucket": "Which bucket of gradients.",
    "counter": "The round; grows by one with each, wraps. Another is counted as stale.",
    "session": "Of the job, drawn by the server. Another is counted as foreign.",
    "sequence": "Number of the chunk in its bucket, from 0.",
    "length": "Bytes of data. Another than the datagram's is counted as malformed.",
    "rank": "The sender's, 65535 for the server. Another is counted as foreign.",
}
MACHINES: tuple[tuple[str, str, ModuleType], ...] = (
    ("A link", "One worker and the server; both ends walk the same states.", session),
    ("A sender", "One round's bucket on its way over one link.", sender),
    ("A receiver", "The other end of it.", receiver),
)
LIMITS: tuple[tuple[ModuleType, str], ...] = (
    (wire, "MAX_FRAME_BYTES"),
    (wire, "MAX_BUCKET_BYTES"),
    (wire, "GATHER_PIECE_BYTES"),
    (gather, "MAX_GATHER_BYTES"),
    (session, "MTU_RANGE"),
    (session, "FALLBACK_DATAGRAM_BYTES"),
    (session, "MIN_ROOM_BYTES"),
    (session, "PING_INTERVAL_S"),
    (session, "PING_GRACE_S"),
    (session, "CHECK_TIMEOUT_S"),
    (pacing, "MARKS_PER_WINDOW"),
    (pacing, "TOLD_PER_WINDOW"),
    (sender, "PATIENT_SENDS"),
    (sender, "FIRST_PAUSE_S"),
    (sender, "SLOWEST_REPAIR_S"),
)

INTRODUCTION = f"""# The wire protocol, version {wire.VERSION}

This page is made from the code by `tailbound.lab.protocol_page`; a test holds the two
together. Why things are so stands in [design](design/README.md).

A worker and the server share a link: one TCP connection for control messages, and one
UDP path for gradients (way in, lossy within the bound) and means (way back, exact). A
round is one bucket on its way in one direction. Its sender hands over all chunks, then
probes; the receiver answers with the bitmap of what arrived, and the sender repairs
what is missing; once what is missing is within the bound, the receiver says stop.
Headers and lengths are in network byte order; gradients are in the senders' own, which
must be the same everywhere.
"""


class Note(NamedTuple):
    """What the source says of a field, a member or a constant."""

    annotation: str
    text: str


def protocol_page() -> str:
    """The text of docs/protocol.md."""
    parts = [INTRODUCTION, "## States\n"]
    for title, summary, module in MACHINES:
        parts.append(machine_section(title, summary, module))
    parts += [header_section(), message_section(), limit_section()]
    return "\n".join(parts)


def write_page(root: Path = Path()) -> None:
    """Renew the page in the checkout at ``root``."""
    (root / PAGE).write_text(protocol_page(), encoding="utf-8")


def machine_section(title: str, summary: str, module: ModuleType) -> str:
    """A machine's states and transitions, as tables and as a diagram."""
    transitions: Mapping[tuple[Enum, str], Enum] = module.TRANSITIONS
    states = type(next(iter(transitions))[0])
    notes = source_notes(module)[states.__name__]
    waits = [(f"`{state.name}`", notes[state.name].text) for state in states]
    rows = [
        (f"`{state.name}`", event, f"`{after.name}`")
        for (state, event), after in transitions.items()
    ]
    diagram = [
        f"    {state.name} --> {after.name}: {event}"
        for (state, event), after in transitions.items()
    ]
    start = next(iter(states)).name
    return "\n".join(
        [
            f"### {title}\n",
            f"{summary} `{module.__name__}`.\n",
            table(("state", "waits"), waits),
            table(("in state", "on", "goes to"), rows),
            "```mermaid",
            "stateDiagram-v2",
            f"    [*] --> {start}",
            *diagram,
            "```\n",
            f"{source_notes(module)['']['TRANSITIONS'].text}\n",
        ]
    )


def header_section() -> str:
    """The datagram, byte by byte."""
    rows = []
    assert wire.HEADER.fields is not None
    for name, (dtype, offset, *_) in wire.HEADER.fields.items():
        rows.append((str(offset), str(dtype.itemsize), name, HEADER_NOTES[name]))
    kinds = [(str(int(way)), way.name, way_note(way)) for way in Direction]
    kinds.append((str(wire.PING), "PING", "Either way, while the link is checked."))
    return "\n".join(
        [
            "## Datagrams\n",
            f"A header of {wire.HEADER_BYTES} bytes, then the chunk's data. All chunks "
            "of a bucket but the last have\nequally many elements; an element is never "
            "split.\n",
            table(("byte", "bytes", "field", "meaning"), rows),
            table(("kind", "name", "meaning"), kinds),
        ]
    )


def message_section() -> str:
    """Every control message with its fields."""
    notes = source_notes(messages)
    parts = [
        "## Control messages\n",
        "A length of 4 bytes, then msgpack: an array of the message's name and its "
        "fields in\nthis order. Bytes that are no message end the session.\n",
    ]
    for kind in get_args(messages.Message):
        parts.append(f"### {kind.__name__}\n\n{inspect.getdoc(kind)}\n")
        rows = []
        for name in kind.__struct_fields__:
            note = next(
                notes[owner.__name__][name]
                for owner in kind.__mro__
                if name in notes.get(owner.__name__, {})
            )
            rows.append((f"`{name}`", f"`{note.annotation}`", note.text))
        if rows:
            parts.append(table(("field", "type", "note"), rows))
    spec_rows = [
        (f"`{name}`", f"`{note.annotation}`", note.text)
        for name, note in notes[messages.BucketSpec.__name__].items()
    ]
    parts += [
        f"### BucketSpec, inside Hello\n\n{inspect.getdoc(messages.BucketSpec)}\n",
        table(("field", "type", "note"), spec_rows),
        "`LossBound` travels as a map of its fields; see `tailbound.config`.\n",
    ]
    return "\n".join(parts)


def limit_section() -> str:
    """Numbers that both ends must know, or that explain what is seen on the wire."""
    rows = [
        (
            f"`{module.__name__.rpartition('.')[2]}.{name}`",
            str(getattr(module, name)),
            source_notes(module)[""].get(name, Note("", "")).text,
        )
        for module, name in LIMITS
    ]
    return f"## Limits\n\n{table(('name', 'value', 'note'), rows)}"


def way_note(way: Direction) -> str:
    """What the source says of a direction."""
    module = inspect.getmodule(Direction)
    assert module is not None
    return source_notes(module)[Direction.__name__][way.name].text


@functools.cache
def source_notes(module: ModuleType) -> dict[str, dict[str, Note]]:
    """The string under each field, member or constant.

    Returns:
        By class name, ``""`` for the module itself, then by the name of the field.
    """
    tree = ast.parse(inspect.getsource(module))
    notes = {"": body_notes(tree.body)}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            notes[node.name] = body_notes(node.body)
    return notes


def body_notes(body: list[ast.stmt]) -> dict[str, Note]:
    """The notes of one class or module."""
    notes: dict[str, Note] = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            name, annotation = ast.unparse(node.target), ast.unparse(node.annotation)
        elif isinstance(node, ast.Assign):
            name, annotation = ast.unparse(node.targets[0]), ""
        else:
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = inspect.cleandoc(str(after.value.value)).replace("\n", " ")
        notes[name] = Note(annotation, text)
    return notes


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table, its columns padded so that the source reads well too."""
    cells = [
        [cell.replace("|", "\\|").replace("``", "`") for cell in row]
        for row in [head, *rows]
    ]
    widths = [max(len(row[index]) for row in cells) for index in range(len(head))]
    widths[-1] = 3  # the last column holds sentences; padding would only stretch it
    cells.insert(1, ["-" * width for width in widths])
    lines = [
        "| " + " | ".join(map(str.ljust, row, widths)).rstrip() + " |" for row in cells
    ]
    return "\n".join(lines) + "\n"
