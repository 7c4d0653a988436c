"""Answers of many ranks' doctors merged into one: each finding once, with its ranks.

Under a launcher `rdmafork doctor --json` prints a short line for each row, and a last one:

    {"rank": 3, "size": 8, "host": "node7", "section": "Limits", "status": "ok", "what": ..., ...}
    {"rank": 3, "size": 8, "host": "node7", "counts": {"ok": 17, ...}}

Launchers pass on whole lines if they are short, and mix those of all ranks. The last line tells
whether all rows of a rank have arrived. Elsewhere it prints one document, of which a file has one.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from rdmafork.cli.doctor_rows import OK, STATUSES, Found, Row
from rdmafork.cli.launchers import Rank
from rdmafork.cli.terminal import counted, printable

Who = tuple[str, int | None]  # host and rank
Key = tuple[str, str, int]  # section, what, and the number among rows alike
COMMON = 3  # so many different answers to a check are shown where all is well


class Answer(NamedTuple):
    """The findings of one rank, or of one machine without ranks."""

    rows: dict[Key, Row]
    size: int | None  #: how many ranks there should be


Answers = dict[Who, Answer]


class Merged(NamedTuple):
    head: str
    rows: list[Row]  #: problems first, each with those that have it
    missing: list[str]  #: sentences about missing answers


def lines(found: Found, host: str, rank: Rank, counts: dict[str, int]) -> Iterator[str]:
    """The lines that a rank prints."""
    mine = {"rank": rank.rank, "size": rank.size, "host": host}
    for section, rows in found:
        for row in rows:
            yield json.dumps(mine | {"section": section} | row._asdict())
    yield json.dumps(mine | {"counts": counts})


def read(names: Iterable[str]) -> Merged:
    """Of these files, "-" for stdin. OSError: one cannot be read. ValueError: nothing is there."""
    answers: Answers = {}
    complete: set[Who] = set()
    broken = 0
    for name in names:
        for found in _objects(name):
            try:
                _take(found, answers, complete)
            except (KeyError, TypeError, ValueError, AttributeError):
                broken += 1
    missing = [
        f"the answer of {_name(who)} is incomplete"
        for who in sorted(answers, key=_order)
        if who not in complete
    ]
    size = min(max((answer.size or 0 for answer in answers.values()), default=0), _MOST)
    absent = sorted(set(range(size)) - {rank for _, rank in answers if rank is not None})
    if absent:
        missing.append(f"no answer from {_ranks(absent)} of {size}")
    if broken:
        text = "not printed by rdmafork doctor --json, or cut"
        missing.append(f"{counted(broken, 'line')} could not be read ({text})")
    if not answers:
        raise ValueError("; ".join(["no output of rdmafork doctor --json was found", *missing]))
    return Merged(_head(answers), _rows(answers), missing)


_MOST = 1 << 20  # ranks


def _objects(name: str) -> Iterator[Any]:
    """The documents of a file, or that of each of its lines; None for a line that has none."""
    if name == "-":
        data = sys.stdin.buffer.read()
    else:
        with open(name, "rb") as file:
            data = file.read()
    text = data.decode(errors="replace")
    documents = _documents(text)
    if documents is not None:
        yield from documents
        return
    for line in text.splitlines():
        # Launchers can put a label before it: srun --label, mpirun --tag-output.
        _, brace, rest = line.partition("{")
        try:
            if line.strip():
                yield json.loads(brace + rest)
        except (ValueError, RecursionError):
            yield None


def _documents(text: str) -> list[Any] | None:
    """The documents of a text that has nothing else, as of `cat node*.json`; else None."""
    decoder, found, at = json.JSONDecoder(), [], 0
    text = text.strip()
    try:
        while at < len(text):
            document, at = decoder.raw_decode(text, at)
            found.append(document)
            while text[at : at + 1].isspace():
                at += 1
    except (ValueError, RecursionError):
        return None
    return found


def _take(found: Any, answers: Answers, complete: set[Who]) -> None:
    """Add a document, a row or a last line. A rank's later answer replaces its earlier one."""
    document = "rows" in found
    launched = found["rank"] or {} if document else found
    rank, size = launched.get("rank"), launched.get("size")
    if not all(number is None or isinstance(number, int) for number in (rank, size)):
        raise TypeError
    rows = found["rows"] if document else [found] if "what" in found else []
    read = [(str(row["section"]), _row(row)) for row in rows]
    who = (printable(str(found["host"])), rank)
    if document or who in complete:
        answers.pop(who, None)
        complete.discard(who)
    answer = answers.setdefault(who, Answer({}, size))
    for section, row in read:
        same = sum(key[:2] == (section, row.what) for key in answer.rows)
        answer.rows[section, row.what, same] = row
    if "counts" in found and sum(found["counts"].values()) == len(answer.rows):
        complete.add(who)


def _row(row: dict[str, Any]) -> Row:
    if row["status"] not in STATUSES:
        raise ValueError
    cure = row["cure"]
    words = (printable(str(row["what"])), printable(str(row["evidence"])))
    return Row(row["status"], *words, None if cure is None else printable(str(cure)))


# ---- saying it once ---------------------------------------------------------------------


def _head(answers: Answers) -> str:
    hosts = counted(len({host for host, _ in answers}), "host")
    ranked = any(rank is not None for _, rank in answers)
    who = f"{counted(len(answers), 'rank')} on {hosts}" if ranked else hosts
    if len(answers) < 2:
        return who
    kinds: dict[frozenset[tuple[Key, str]], list[Who]] = {}
    for one, answer in answers.items():
        statuses = frozenset((key, row.status) for key, row in answer.rows.items())
        kinds.setdefault(statuses, []).append(one)
    agreeing, *others = sorted(kinds.values(), key=len, reverse=True)
    if not others:
        return f"{who}: all agree"
    differing = [one for kind in others for one in kind]
    differ = "differs" if len(differing) == 1 else "differ"
    return f"{who}: {len(agreeing)} agree, {_names(differing, answers)} {differ}"


def _rows(answers: Answers) -> list[Row]:
    """Problems first."""
    rows: list[Row] = []
    for key in dict.fromkeys(key for answer in answers.values() for key in answer.rows):
        found: dict[Row, list[Who]] = {}
        for who, answer in answers.items():
            if row := answer.rows.get(key):
                found.setdefault(row, []).append(who)
        common = sorted(found.items(), key=lambda item: -len(item[1]))
        well = [item for item in common if item[0].status == OK]
        rows += [_told(row, those, answers) for row, those in well[:COMMON]]
        if len(well) > COMMON:
            number = len(well) - COMMON
            more = f"{number} more {'check is' if number == 1 else 'checks are'} OK"
            rows.append(Row(OK, key[1], more))
        # Numbers may differ from rank to rank: the cure, and the ranks it is for, matter.
        troubles: dict[tuple[str, str | None], list[tuple[Row, list[Who]]]] = {}
        for row, those in common:
            if row.status != OK:
                troubles.setdefault((row.status, row.cure), []).append((row, those))
        for same in troubles.values():
            rows.append(_told(same[0][0], [who for _, w in same for who in w], answers, len(same)))
    return sorted(rows, key=lambda row: STATUSES.index(row.status))


def _told(row: Row, those: list[Who], answers: Answers, kinds: int = 1) -> Row:
    parts = [_names(those, answers)] if len(those) < len(answers) else []
    if kinds > 1:
        parts.append(f"and {counted(kinds - 1, 'answer')} like it")
    suffix = f" ({'; '.join(parts)})" if parts else ""
    return row._replace(evidence=row.evidence + suffix)


def _names(those: list[Who], answers: Answers) -> str:
    """A host all of whose ranks are meant by its name, the others by their ranks."""
    hosts: dict[str, list[Who]] = {}
    for who in sorted(those, key=_order):
        hosts.setdefault(who[0], []).append(who)
    whole = Counter(host for host, _ in answers)
    several = len(whole) > 1
    names = [
        host if several and len(found) == whole[host] else _ranks_at(host, found, several)
        for host, found in hosts.items()
    ]
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return ", ".join(names)


def _ranks_at(host: str, found: list[Who], several: bool) -> str:
    ranks = [rank for _, rank in found if rank is not None]
    if not ranks:
        return host
    return _ranks(ranks) + (f" on {host}" if several else "")


def _ranks(ranks: list[int]) -> str:
    """ "rank 3", "ranks 0-3, 7"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in spans]
    more = sum(b - a + 1 for a, b in spans[5:])
    tail = f" and {more} more" if more else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words[:5])}{tail}"


def _name(who: Who) -> str:
    host, rank = who
    return host if rank is None else f"rank {rank} on {host}"


def _order(who: Who) -> tuple[int, str]:
    host, rank = who
    return (-1 if rank is None else rank, host)
