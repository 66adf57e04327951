"""The costs of a GPU as files: what is known of one, and the text of python/weft/costs/<gpu>.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import weft
from weft._base import costs as gpu_costs

from benchmarks.fitting import rounded

Tables = dict[str, dict[str, Any]]
"""The costs as a file has them."""


def before(gpu: Mapping[str, Any]) -> Tables:
    """A GPU's tables as they are: its file's, or else the nearest GPU's, scaled."""
    files = {facts["name"]: tables for facts, tables in map(gpu_costs.read, sorted(gpu_costs.FOLDER.glob("*.json")))}
    if gpu["name"] in files:
        return files[gpu["name"]]
    measured_on, _, scaled = weft._C.common.costs_of(**gpu)

    def numbers(table: str, name: str) -> Any:
        found = [rounded(number) for number in scaled[table][name]]
        return found if len(found) > 1 else found[0]

    return {
        table: {
            kind: f"extrapolated from {measured_on}" if kind == "from" else {n: numbers(table, n) for n in value}
            for kind, value in kinds.items()
        }
        for table, kinds in files[measured_on].items()
    }


def text_of(gpu: Mapping[str, Any], tables: Tables) -> str:
    """The file: a line for every kind of a table's numbers."""
    entries = []
    for name, table in sorted(tables.items()):
        kinds = [f'      "{kind}": {json.dumps(table[kind])}' for kind in ("from", "clock", "chip", "memory", "fixed")
                 if kind in table]  # fmt: skip
        entries.append(f'    "{name}": {{\n' + ",\n".join(kinds) + "\n    }")
    return f'{{\n  "gpu": {json.dumps(dict(gpu))},\n  "costs": {{\n' + ",\n".join(entries) + "\n  }\n}\n"


def path_of(gpu: Mapping[str, Any]) -> Path:
    return gpu_costs.FOLDER / f"{'-'.join(gpu['name'].lower().split())}.json"
