"""The JSON Schema Test Suite (draft 2020-12, required), json-schema-org/JSON-Schema-Test-Suite on GitHub.

`python tests/support/schema_suite.py jsonschema-VERSION.tar.gz` makes tests/data/json_schema_suite.json.gz from the
source distribution of PyPI's `jsonschema`, which has it in json/. Copyright (c) 2012 Julian Berman, MIT licence.
"""

from __future__ import annotations

import gzip
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "json_schema_suite.json.gz"
_FOLDER = "/json/tests/draft2020-12/"


def load() -> dict[str, list[dict[str, Any]]]:
    """Keyword -> [{"description", "schema", "tests": [{"data", "valid", ...}, ...]}, ...]."""
    return json.loads(gzip.decompress(DATA.read_bytes()))


def main() -> None:
    """Write the file anew."""
    with tarfile.open(sys.argv[1]) as archive:
        found = {}
        for member in sorted(archive.getnames()):
            _, _, name = member.partition(_FOLDER)
            if name.endswith(".json") and "/" not in name:
                found[name.removesuffix(".json")] = json.load(archive.extractfile(member))
    text = json.dumps(found, separators=(",", ":"), ensure_ascii=False)
    DATA.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
