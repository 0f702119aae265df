"""Readings from the kernel to the user: token ids, logprobs, logits, ranks and lse, in the form that a place needs.

- `RowReadings` (vllm/ops/token_readings.py): what one pass over rows of logits yields, on the device.
- `LogprobsTensors` (vllm/v1/outputs.py): the columns of a step's rows (sampled token, top-k, requested ids), still on
  the device: on CUDA a step is dispatched before the one before it has been copied to the host.
- `LogprobsLists` (`lists`): the same as numpy arrays or one table; a `LogprobsRow` refers to one row, without a copy.
- `FlatLogprobs` (`flat`): a sequence's rows, copied so that the step's table can go; arrays on first access. A prompt's
  are `PromptLogprobs` (`prompt`), blocks of rows. To `isinstance` both are lists, as callers ask for one before they
  read positions; they cannot be, as C code reads a list's items from its memory, where these have none.
- `PositionLogprobs` or, above 256 entries, `WidePositionLogprobs` (`position`): one position's `{token_id: Logprob}`,
  made when it is indexed.
- `PromptTables` (`tables`): a prompt's rows as rectangular arrays, in the columns of the request.
- `Readings`: a table of chosen ids, from `FlatLogprobs.select`.
"""

from vllm.logprobs.divergence import KLTerms
from vllm.logprobs.flat import FlatLogprobs, Readings, SampleLogprobs
from vllm.logprobs.position import Logprob, PositionLogprobs, TokenDecoder, WidePositionLogprobs
from vllm.logprobs.prompt import PromptLogprobs
from vllm.logprobs.tables import PromptTables

LogprobsOnePosition = dict[int, Logprob]
"""A position's entries as callers write them down."""

__all__ = [
    "FlatLogprobs",
    "KLTerms",
    "Logprob",
    "LogprobsOnePosition",
    "PositionLogprobs",
    "PromptLogprobs",
    "PromptTables",
    "Readings",
    "SampleLogprobs",
    "TokenDecoder",
    "WidePositionLogprobs",
]
