"""`vllm decide --backend ray`."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from vllm.scoring.columns import FieldKinds
from vllm.scoring.decide.task import made_from_questions, questions_and_params
from vllm.scoring.decide.scorers import BatchDecider
from vllm.scoring.ray_backend import check_file, run_on_ray
from vllm.scoring.labels.report import Totals
from vllm.scoring.run import read_texts


def decide_file_on_ray(args: argparse.Namespace) -> int:
    """Complete the output folder to one row a text; 0, or 1 when some of the texts could not be decided."""
    check_file(args)
    asked, params = questions_and_params(args)
    kinds = FieldKinds()
    texts, made_from = read_texts(args, lambda item: kinds.add(item.fields))
    made_from |= made_from_questions(args, asked, params)
    output = args.output or Path(f"{args.file.stem}.decisions")
    make = partial(BatchDecider, asked=asked, params=params)
    return run_on_ray(args, texts.name, kinds, made_from, output, make, Totals("decide"))
