"""A package with a logits processor, installed as pip would leave it."""

from __future__ import annotations

from pathlib import Path

TARGET_TOKEN = '''
import torch

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, LogitsProcessor, MoveDirectionality


class TargetToken(LogitsProcessor):
    """Leaves a request nothing but its target token."""

    @classmethod
    def validate_params(cls, sampling_params):
        target = (sampling_params.extra_args or {}).get("target_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token must be an integer, got {target!r}")

    def __init__(self, vllm_config, device, is_pin_memory):
        self.targets = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.targets.pop(index, None)
        for index, params, prompt_ids, output_ids in batch_update.added:
            self.targets.pop(index, None)
            if (params.extra_args or {}).get("target_token") is not None:
                self.targets[index] = params.extra_args["target_token"]
        for a, b, direction in batch_update.moved:
            at_a, at_b = self.targets.pop(a, None), self.targets.pop(b, None)
            if at_a is not None:
                self.targets[b] = at_a
            if direction is MoveDirectionality.SWAP and at_b is not None:
                self.targets[a] = at_b

    def apply(self, logits):
        rows, tokens = list(self.targets), list(self.targets.values())
        kept = logits[rows, tokens].clone()
        logits[rows] = -torch.inf
        logits[rows, tokens] = kept
        return logits


class TargetTokenOfRequest(AdapterLogitsProcessor):
    """The same, one request at a time."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        target = (params.extra_args or {}).get("target_token")
        if target is None:
            return None

        def only_target(output_ids, logits):
            result = torch.full_like(logits, -torch.inf)
            result[target] = logits[target]
            return result

        return only_target
'''


def install(folder: Path, module: str, source: str, entry_points: dict[str, str]) -> Path:
    """Put a module and its distribution's metadata into `folder`, to be added to sys.path."""
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(source, encoding="utf-8")
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n", encoding="utf-8")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    text = "\n".join(["[vllm.logits_processors]", *lines, ""])
    (info / "entry_points.txt").write_text(text, encoding="utf-8")
    return folder
