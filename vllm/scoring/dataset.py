"""Scoring of data sets on a Ray cluster: a stream of blocks, through actors with an engine each."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError, VLLMValidationError
from vllm.scoring.batches import BATCH_ROWS, Progress, deciding
from vllm.scoring.files import Item
from vllm.scoring.labels.task import EngineLabelScorer
from vllm.scoring.labels.templates import Template
from vllm.scoring.replicas import engine_resources, load_scorer
from vllm.scoring.rows import PartFolder, differences, meta_path
from vllm.utils.checks import check_integer, check_list
from vllm.utils.ray_utils import import_ray
from vllm.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa
    import ray.data

    from vllm.entrypoints.llm import LLM

# Ray restarts actors without limit; a block that ends its actor more often than this ends the job.
_MAX_DEATHS_PER_BLOCK = 3


def score_dataset(
    ds: ray.data.Dataset,
    labels: Sequence[str] | Sequence[int],
    *,
    text_field: str = "text",
    template: str | None = None,
    replicas: int = 1,
    cpus_per_replica: float | None = None,
    batch_size: int = BATCH_ROWS,
    output: str | Path | None = None,
    id_field: str | None = None,
    **engine_args: Any,
) -> ray.data.Dataset:
    """How likely each label continues the prompt of each row's `text_field`; `batch_size` rows at once.

    The rows, in any order, get the columns of `vllm score`, which replace columns of these names: by label `probs`
    (among the labels), `logprobs`, `logits` and `ranks`; `label_mass`, `prediction`, `num_prompt_tokens`; and `error`,
    null unless the row's text is null, too long or of no token. A batch whose actor dies is scored again by another;
    one that ends its actor repeatedly ends the job.

    Args:
        labels: texts of any number of tokens (mind a leading space), or token ids.
        template: the prompt, with {text} and other columns in braces; None = the default one of `vllm score`.
        replicas: engines, each in an actor of its own.
        cpus_per_replica: None = as many as fit, with one of each node left to read with. On a cluster with GPUs each
            also has tensor_parallel_size of them unless device="cpu".
        output: a folder for Parquet files, one a batch, made if it does not exist. The job runs now; a row whose id the
            folder has is not scored again, and this process alone writes.
        id_field: a column with a unique value a row; needed with `output`.
        **engine_args: fields of EngineArgs (model, dtype, max_model_len, ...).

    Returns:
        the scored rows: a plan that Ray Data runs when it is read, or what the folder holds in the end.

    Raises:
        ImportError: Ray is not installed.
        TypeError: an engine argument that EngineArgs does not have.
        ValueError: a missing column, more replicas than fit, or an output that another call made, or is making.
    """
    import_ray()
    engine = EngineArgs(**engine_args)
    given = check_list("labels", labels, "a list of strings or of token ids")
    try:
        parsed = None if template is None else Template(template)
    except CliError as error:
        raise VLLMValidationError(str(error)) from None
    _check_columns(ds, "text_field", text_field)
    _check_columns(ds, "template", *(parsed.fields() if parsed else ()))
    replicas, batch_size = check_integer("replicas", replicas, 1), check_integer("batch_size", batch_size, 1)
    job = _DatasetJob(engine, replicas, cpus_per_replica, given, parsed, text_field, batch_size)
    if output is None:
        return job.scored(ds)
    if id_field is None:
        raise VLLMValidationError("output needs an id_field, by which rows that are there are known")
    _check_columns(ds, "id_field", id_field)
    try:
        return _into_folder(job, ds, Path(output), id_field)
    except CliError as error:
        raise ValueError(f"output: {error}") from None


class _Replica:
    def __init__(self, job: _DatasetJob) -> None:
        self._job = job
        self._scorer, self._refusal = load_scorer(job.engine_args, job.make_scorer)

    def __call__(self, block: pa.Table) -> pa.Table:
        if self._refusal is not None:
            raise ValueError(self._refusal)
        return self._job.score(self._scorer, block)


@dataclass(frozen=True)
class _DatasetJob:
    """Scoring of a data set: its engines, its labels, its template."""

    engine_args: EngineArgs
    replicas: int  # engines, each in an actor of its own
    cpus: float | None  # of each; None = as many as fit
    labels: list[str] | list[int]
    template: Template | None  # None = the default one
    text_field: str
    batch_size: int

    def make_scorer(self, llm: LLM) -> EngineLabelScorer:
        return EngineLabelScorer(llm, self.template, self.labels, "data set")

    def scored(self, ds: ray.data.Dataset) -> ray.data.Dataset:
        """The results of all rows, in any order. Each block goes to an actor whole, and to another if that dies. The
        engines leave a CPU of every node unused unless `cpus` is set. A ValueError if they do not fit."""
        import ray.data

        with warnings.catch_warnings():
            # Ray has no other way to limit the retries.
            warnings.filterwarnings("ignore", message=".*ray_remote_args_fn", category=DeprecationWarning)
            return ds.repartition(target_num_rows_per_block=self.batch_size).map_batches(
                _Replica,
                fn_constructor_args=(self,),
                batch_size=None,
                batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(size=self.replicas),
                **engine_resources(self.engine_args, self.replicas, self.cpus, spare=1),
                ray_remote_args_fn=lambda: {"max_task_retries": _MAX_DEATHS_PER_BLOCK},
            )

    def score(self, scorer: EngineLabelScorer, block: pa.Table) -> pa.Table:
        import pyarrow as pa

        results = pa.Table.from_pylist(list(self._records(scorer, block)), schema=scorer.labels.schema())
        block = block.drop_columns([name for name in block.column_names if name in results.column_names])
        for name in results.column_names:
            block = block.append_column(results.schema.field(name), results[name])
        return block

    def _records(self, scorer: EngineLabelScorer, block: pa.Table) -> Iterator[dict[str, Any]]:
        needed = {self.text_field, *(self.template.fields() if self.template is not None else ())}
        rows = block.select(sorted(needed)).to_pylist()
        items = [Item(line, row[self.text_field], row) for line, row in enumerate(rows, start=1)]
        texts = [item for item in items if isinstance(item.text, str)]
        scored = iter(scorer.score(texts, 0, 0, Progress(len(texts), shown=False)))
        for item in items:
            kind = type(item.text).__name__ if item.text is not None else "null"
            yield next(scored) if kind == "str" else {"error": f"{self.text_field!r} must be a string, got {kind}"}


def _into_folder(job: _DatasetJob, ds: ray.data.Dataset, folder: Path, id_field: str) -> ray.data.Dataset:
    import pyarrow as pa
    import pyarrow.parquet as pq
    import ray.data

    from vllm.scoring.columns import as_parquet

    made_from = {
        "vllm": __version__,
        "labels": job.labels,
        "text_field": job.text_field,
        "template": job.template and job.template.source,
        "id_field": id_field,
        **deciding(job.engine_args),
    }
    with PartFolder(folder, "parquet", made_from, resume=True) as parts:
        known = parts.parts()
        differing = differences(meta_path(folder), made_from)
        if differing is None or differing:
            what = "; ".join(differing) if differing else "something unknown"
            raise CliError(f"{folder} was made from {what}; name another folder")
        if known:
            ids = pa.concat_arrays(
                [chunk for path in known.values() for chunk in pq.read_table(path, columns=[id_field])[id_field].chunks]
            )
            fn: Any = _without
            ds = ds.map_batches(fn, fn_args=(id_field, ray.put(ids)), batch_format="pyarrow")
        number = max(known, default=-1)
        table: Any
        for table in job.scored(ds).iter_batches(batch_size=None, batch_format="pyarrow"):
            if table.num_rows:
                number += 1
                parts.write(number, as_parquet(table))
    return ray.data.read_parquet(str(folder))


def _without(table: pa.Table, id_field: str, done: ray.ObjectRef) -> pa.Table:
    import pyarrow.compute as pc
    import ray

    ids = table[id_field]
    return table.filter(pc.invert(pc.is_in(ids, value_set=ray.get(done).cast(ids.type))))


def _check_columns(ds: ray.data.Dataset, parameter: str, *names: str) -> None:
    schema = ds.schema()
    for name in names:
        if schema is not None and name not in schema.names:
            raise VLLMValidationError(
                f"no column {name!r}; there is {', '.join(map(repr, schema.names))}", parameter, name
            )
