"""One part of the check: its cases in order, each outcome written at once as a line of JSON.

    python -m gpu.child '{"part": ..., "events": FILE, ...}'     # as supervise.py calls it

An exception ends only its case. After one that leaves the device unusable the process ends with RESTART, and can be
started again for the remaining cases.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.setting import Case, Setting
from gpu.sizes import SCALES
from gpu.supervise import RESTART, START

# name of a part -> module with make_cases(setting)
PARTS = {
    "card": "gpu.card",
    "kernels": "gpu.kernels",
    "readings": "gpu.reading_rows",
    "attention": "gpu.attention_rows",
    "engine": "gpu.engine_rows",
}


def main() -> int:
    """Run the cases that are not done yet."""
    parser = argparse.ArgumentParser(description="One part of the check; gpu_check.py starts it.")
    parser.add_argument("options", type=json.loads, help="part, device, scale, seed, folder, events, done, as JSON")
    options = parser.parse_args().options
    device = torch.device(options["device"])
    setting = Setting(
        device, SCALES[options["scale"]], options["seed"], Path(options["folder"]), options.get("rates", {})
    )
    with Path(options["events"]).open("a", encoding="utf-8") as events:

        def tell(**fields: Any) -> None:
            events.write(json.dumps(fields) + "\n")
            events.flush()

        cases: dict[str, Case] = {}
        try:
            if device.type == "cuda" and not torch.cuda.is_available():
                raise RuntimeError("torch finds no usable CUDA device")
            cases = importlib.import_module(PARTS[options["part"]]).make_cases(setting)
        except Exception:
            tell(case=START, error=traceback.format_exc())
        for name, case in cases.items():
            if name in options["done"]:
                continue
            tell(began=name)
            began = time.perf_counter()
            try:
                result = case()
                _synchronize(device)
            except Exception:
                tell(case=name, error=traceback.format_exc(), seconds=time.perf_counter() - began)
                if not _is_usable(device):
                    return RESTART
            else:
                tell(case=name, result=result, seconds=time.perf_counter() - began)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return 0


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _is_usable(device: torch.device) -> bool:
    """False after an illegal access, for example, which makes every later CUDA call fail."""
    try:
        _synchronize(device)
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
