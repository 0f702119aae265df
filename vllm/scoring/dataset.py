"""Scoring data sets on a Ray cluster: a stream of rows through actors that hold an engine each.

`vllm score --backend ray` does the same for one file; see docs/scaling.md for which to use when.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError, VLLMValidationError
from vllm.scoring.batches import BATCH_ROWS, DECIDING, BatchScorer, Progress
from vllm.scoring.files import Item
from vllm.scoring.parts import PartFolder
from vllm.scoring.rows import differences, meta_path
from vllm.scoring.templates import Template
from vllm.utils.checks import check_integer, wrong_type
from vllm.utils.ray_utils import cpus_for_each, import_ray
from vllm.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa
    import ray.data


# Ray restarts actors for ever; a block that ends its actor more often than this is at fault itself.
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
    """How likely each label continues each row's prompt.

    The rows keep their columns and get those of `vllm score`: by label `probs` (among the labels), `logprobs`,
    `logits` and `ranks`; `label_mass`, `prediction`, `num_prompt_tokens`; and `error`, null unless this row could not
    be scored (its text is null, too long or of no token). A column of the input that has one of these names is
    replaced. Rows come in any order: sort by a column of your own.

    A batch whose actor dies is scored again by another. A batch that ends its actor again and again ends the job.

    Args:
        ds: rows with a column of texts.
        labels: texts of any number of tokens (mind a leading space), or token ids.
        text_field: the column of the texts.
        template: the prompt, with {text} and other columns in braces; None = the default one of `vllm score`.
        replicas: engines, each in an actor of its own.
        cpus_per_replica: CPUs that each has to itself; None = as many as fit, with one of each node left to read with.
            On a cluster with GPUs each also has one (tensor_parallel_size of them) unless device="cpu".
        batch_size: rows that one engine scores at once, and that are scored again when it dies.
        output: a folder for Parquet files, one a batch, which is made if it is not there. The job runs now, and what
            the folder holds in the end is returned. A row whose id is there is not scored again: the same call
            continues a job that was stopped. This process alone writes, so that no row is there twice.
        id_field: a column that tells every row from all others; needed with `output`.
        **engine_args: fields of EngineArgs (model, dtype, max_model_len, ...).

    Returns:
        the scored rows; without `output` a plan that Ray Data carries out when it is read.

    Raises:
        ImportError: Ray is not installed.
        TypeError: an engine argument that EngineArgs does not have.
        ValueError: a column that is not there, more replicas than there is room for, or an output that another call
            made, or is making.
    """
    import_ray()
    job = _job(ds, labels, text_field, template, EngineArgs(**engine_args))
    scored = _Plan(
        job, check_integer("replicas", replicas, 1), check_integer("batch_size", batch_size, 1), cpus_per_replica
    )
    if output is None:
        return scored.of(ds)
    if id_field is None:
        raise VLLMValidationError("output needs an id_field, by which rows that are there are known")
    _check_columns(ds, "id_field", id_field)
    try:
        return _into_folder(scored, ds, Path(output), id_field)
    except CliError as error:
        raise ValueError(f"output: {error}") from None


def through_engines(
    blocks: ray.data.Dataset,
    actor: type,
    arguments: tuple[Any, ...],
    engine_args: EngineArgs,
    replicas: int,
    cpus: float,
) -> ray.data.Dataset:
    """A data set whose blocks went through actors that hold an engine each.

    Args:
        blocks: each block is given to an actor whole, and to another one if that dies.
        actor: its instances are called with pyarrow tables and return such.
        arguments: of its constructor.
        engine_args: of its engine.
        replicas: how many of them.
        cpus: of each.
    """
    import ray.data

    has_gpus = ray.cluster_resources().get("GPU", 0) > 0 and engine_args.device != "cpu"
    with warnings.catch_warnings():
        # Ray has no other way yet to bound the retries.
        warnings.filterwarnings("ignore", message=".*ray_remote_args_fn", category=DeprecationWarning)
        return blocks.map_batches(
            actor,
            fn_constructor_args=arguments,
            batch_size=None,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=replicas),
            num_cpus=cpus,
            num_gpus=engine_args.tensor_parallel_size if has_gpus else 0,
            ray_remote_args_fn=lambda: {"max_task_retries": _MAX_DEATHS_PER_BLOCK},
        )


@dataclass(frozen=True)
class _Job:
    """What every engine is told."""

    labels: list[str] | list[int]
    text_field: str
    template: Template | None
    engine_args: EngineArgs

    def made_from(self, id_field: str) -> dict[str, Any]:
        """What decides the rows."""
        return {
            "vllm": __version__,
            "labels": self.labels,
            "text_field": self.text_field,
            "template": self.template and self.template.source,
            "id_field": id_field,
            **{name: getattr(self.engine_args, name) for name in DECIDING},
        }


@dataclass(frozen=True)
class _Plan:
    """How the rows go through the cluster."""

    job: _Job
    replicas: int
    batch_size: int
    cpus: float | None

    def of(self, ds: ray.data.Dataset) -> ray.data.Dataset:
        """Rows with their scores."""
        cpus = cpus_for_each(self.replicas, spare=1) if self.cpus is None else self.cpus
        batches = ds.repartition(target_num_rows_per_block=self.batch_size)
        return through_engines(batches, _Replica, (self.job,), self.job.engine_args, self.replicas, cpus)


class _Replica:
    """An actor that holds an engine."""

    def __init__(self, job: _Job) -> None:
        """
        Raises:
            ValueError, OSError: the model cannot be loaded, or the labels not be scored with it.
        """
        from vllm.entrypoints.llm import LLM
        from vllm.scoring.columns import result_schema

        self._job = job
        try:
            llm = LLM(**vars(job.engine_args), use_tqdm_on_load=False)
            self._scorer = BatchScorer.of(llm, job.template, job.labels, "data set")
        except CliError as error:
            raise ValueError(str(error)) from None
        self._schema = result_schema(self._scorer.labels)

    def __call__(self, table: pa.Table) -> pa.Table:
        """The table with the columns of the results."""
        import pyarrow as pa

        results = pa.Table.from_pylist(list(self._results(table)), schema=self._schema)
        kept = table.drop_columns([name for name in table.column_names if name in results.column_names])
        for name in results.column_names:
            kept = kept.append_column(results.schema.field(name), results[name])
        return kept

    def _results(self, table: pa.Table) -> Iterator[dict[str, Any]]:
        template = self._job.template
        needed = {self._job.text_field, *(template.fields() if template is not None else ())}
        rows = table.select(sorted(needed)).to_pylist()
        items = [Item(line, row[self._job.text_field], row) for line, row in enumerate(rows, start=1)]
        texts = [item for item in items if isinstance(item.text, str)]
        scored = iter(self._scorer.score(texts, 0, 0, Progress(len(texts), shown=False)))
        for item in items:
            kind = type(item.text).__name__ if item.text is not None else "null"
            yield next(scored) if kind == "str" else {"error": f"{self._job.text_field!r} must be a string, got {kind}"}


def _into_folder(plan: _Plan, ds: ray.data.Dataset, folder: Path, id_field: str) -> ray.data.Dataset:
    """Bring the folder to the rows of `ds`.

    Raises:
        CliError: it cannot be written, another process does, or it holds rows of another kind.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    import ray.data

    from vllm.scoring.columns import as_parquet

    made_from = plan.job.made_from(id_field)
    with PartFolder(folder, "parquet", made_from, resume=True) as parts:
        known = parts.parts()
        differing = differences(meta_path(folder), made_from)
        if differing is None or differing:
            what = "; ".join(differing) if differing else "nobody knows what"
            raise CliError(f"{folder} was made from {what}; name another folder")
        if known:
            ids = pa.concat_arrays(
                [chunk for path in known.values() for chunk in pq.read_table(path, columns=[id_field])[id_field].chunks]
            )
            fn: Any = _without
            ds = ds.map_batches(fn, fn_args=(id_field, ray.put(ids)), batch_format="pyarrow")
        number = max(known, default=-1)
        table: Any
        for table in plan.of(ds).iter_batches(batch_size=None, batch_format="pyarrow"):
            if table.num_rows:
                number += 1
                parts.write(number, as_parquet(table))
    return ray.data.read_parquet(str(folder))


def _without(table: pa.Table, id_field: str, done: ray.ObjectRef) -> pa.Table:
    """The rows that are not done."""
    import pyarrow.compute as pc
    import ray

    ids = table[id_field]
    return table.filter(pc.invert(pc.is_in(ids, value_set=ray.get(done).cast(ids.type))))


def _job(ds: ray.data.Dataset, labels: Any, text_field: str, template: str | None, engine_args: EngineArgs) -> _Job:
    given = labels.tolist() if hasattr(labels, "tolist") else labels
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise wrong_type("labels", labels, "a list of strings or of token ids")
    try:
        parsed = None if template is None else Template(template)
    except CliError as error:
        raise VLLMValidationError(str(error)) from None
    _check_columns(ds, "text_field", text_field)
    for name in parsed.fields() if parsed is not None else ():
        _check_columns(ds, "template", name)
    return _Job(list(given), text_field, parsed, engine_args)


def _check_columns(ds: ray.data.Dataset, parameter: str, name: str) -> None:
    schema = ds.schema()
    if schema is not None and name not in schema.names:
        raise VLLMValidationError(
            f"no column {name!r}; there is {', '.join(map(repr, schema.names))}", parameter=parameter, value=name
        )
