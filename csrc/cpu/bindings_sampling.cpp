// The operators that read and sample from logits.
#include <cstring>
#include <optional>
#include <tuple>

#include "bindings.h"
#include "kernels.h"
#include "kernels_forms.h"
#include "kernels_readings.h"
#include "recording.h"

namespace vllm_cpu {
namespace {

Logits logits_of(const Tensor& t) {
  check_shape(t, "logits", {-1, -1});
  check_last_contiguous(t, "logits");
  STD_TORCH_CHECK(t.size(1) > 0, "logits must have at least one column");
  return {dtype_of(t, "logits"), t.data_ptr(), t.size(0), t.size(1), t.stride(0)};
}

// int32 [rows], each in [0, width]; null when there are none.
const int32_t* checked_counts(const std::optional<Tensor>& counts, const char* name, int64_t rows, int64_t width) {
  if (!counts.has_value()) return nullptr;
  check_shape(*counts, name, {rows});
  check_dtype(*counts, name, ScalarType::Int, "int32");
  check_contiguous(*counts, name);
  const int32_t* data = data_of<const int32_t>(*counts);
  for (int64_t row = 0; row < rows; ++row) {
    STD_TORCH_CHECK(data[row] >= 0 && data[row] <= width, name, " must be in [0, ", width, "], got ", data[row],
                    " in row ", row);
  }
  return data;
}

using ReadingsResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, std::optional<Tensor>, Tensor,
                                  std::optional<Tensor>, std::optional<Tensor>>;

ReadingsResult token_readings(Tensor logits, Tensor token_ids, std::optional<Tensor> num_token_ids, bool with_entropy,
                              bool greedy, bool with_table, int64_t num_topk, bool ranked) {
  RankedReadingsArgs args{};
  args.logits = logits_of(logits);
  const int64_t rows = args.logits.rows;
  STD_TORCH_CHECK(num_topk >= 0 && num_topk <= args.logits.vocab, "num_topk must be in [0, ", args.logits.vocab,
                  "], got ", num_topk);
  check_shape(token_ids, "token_ids", {rows, -1});
  check_dtype(token_ids, "token_ids", ScalarType::Int, "int32");
  check_last_contiguous(token_ids, "token_ids");
  args.token_ids = data_of<const int32_t>(token_ids);
  args.width = token_ids.size(1);
  args.ids_stride = token_ids.stride(0);
  args.num_token_ids = checked_counts(num_token_ids, "num_token_ids", rows, args.width);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t count = args.num_token_ids == nullptr ? args.width : args.num_token_ids[row];
    STD_TORCH_CHECK(count >= (num_topk > 0 ? 1 + num_topk : greedy),
                    "each row must have columns for its argmax and its greatest logits");
    for (int64_t w = 0; w < count; ++w) {
      if (w < 1 + num_topk && !(w == 0 && !greedy)) continue;
      const int32_t id = args.token_ids[row * args.ids_stride + w];
      STD_TORCH_CHECK(id >= 0 && id < args.logits.vocab, "token_ids must be in [0, ", args.logits.vocab, "), got ", id,
                      " in row ", row);
    }
  }
  Tensor chosen = new_result(logits, {rows, args.width}, ScalarType::Float);
  Tensor logprobs = new_result(logits, {rows, args.width}, ScalarType::Float);
  Tensor ranks = new_result(logits, {rows, args.width}, ScalarType::Int);
  Tensor lse = new_result(logits, {rows}, ScalarType::Float);
  Tensor argmax = new_result(logits, {rows}, ScalarType::Int);
  Tensor max = new_result(logits, {rows}, ScalarType::Float);
  args.chosen = data_of<float>(chosen);
  args.logprobs = data_of<float>(logprobs);
  args.ranks = data_of<int32_t>(ranks);
  args.lse = data_of<float>(lse);
  args.argmax = data_of<int32_t>(argmax);
  args.max = data_of<float>(max);
  std::optional<Tensor> entropy;
  if (with_entropy) {
    entropy = new_result(logits, {rows}, ScalarType::Float);
    args.entropy = data_of<float>(*entropy);
  }
  std::optional<Tensor> columns;
  args.greedy = greedy;
  args.ranked = ranked;
  args.num_topk = num_topk;
  if (greedy || num_topk > 0) {
    columns = new_result(logits, {rows, args.width}, ScalarType::Int);
    args.columns = data_of<int32_t>(*columns);
  }
  std::optional<Tensor> table;
  if (with_table) {
    table = new_result(logits, {rows, 4 * args.width + 2}, ScalarType::Int);
    args.table = data_of<int32_t>(*table);
  }
  launch([args, kernel = VLLM_KERNEL(ranked_readings)] { kernel(args); }, logits, token_ids, num_token_ids, chosen,
         logprobs, ranks, lse, argmax, max, entropy, columns, table);
  return {chosen, ranks, lse, argmax, max, entropy, logprobs, columns, table};
}

Tensor count_above(Tensor logits, Tensor values, std::optional<Tensor> num_values) {
  CountAboveArgs args{};
  args.logits = logits_of(logits);
  const int64_t rows = args.logits.rows;
  check_shape(values, "values", {rows, -1});
  check_dtype(values, "values", ScalarType::Float, "float32");
  check_last_contiguous(values, "values");
  args.values = data_of<const float>(values);
  args.width = values.size(1);
  args.values_stride = values.stride(0);
  args.num_values = checked_counts(num_values, "num_values", rows, args.width);
  Tensor counts = torch::stable::new_empty(logits, {rows, args.width}, ScalarType::Int);
  args.counts = data_of<int32_t>(counts);
  VLLM_KERNEL(count_above)(args);
  return counts;
}

std::tuple<Tensor, Tensor> topk(Tensor logits, int64_t k) {
  TopkArgs args{};
  args.logits = logits_of(logits);
  STD_TORCH_CHECK(k >= 0 && k <= args.logits.vocab, "k must be in [0, ", args.logits.vocab, "], got ", k);
  args.k = k;
  Tensor values = torch::stable::new_empty(logits, {args.logits.rows, k}, ScalarType::Float);
  Tensor ids = torch::stable::new_empty(logits, {args.logits.rows, k}, ScalarType::Int);
  args.values = data_of<float>(values);
  args.ids = data_of<int32_t>(ids);
  VLLM_KERNEL(topk)(args);
  return {values, ids};
}

std::tuple<Tensor, Tensor> gumbel_sample(Tensor logits, Tensor temperature, Tensor seeds, Tensor positions,
                                         Tensor idx_mapping, int64_t first_id) {
  GumbelArgs args{};
  args.logits = logits_of(logits);
  check_dtype(logits, "logits", ScalarType::Float, "float32");
  check_dtype(temperature, "temperature", ScalarType::Float, "float32");
  check_dtype(seeds, "seeds", ScalarType::Long, "int64");
  check_dtype(positions, "positions", ScalarType::Long, "int64");
  check_dtype(idx_mapping, "idx_mapping", ScalarType::Int, "int32");
  check_shape(temperature, "temperature", {-1});
  check_shape(seeds, "seeds", {temperature.size(0)});
  check_shape(positions, "positions", {args.logits.rows});
  check_shape(idx_mapping, "idx_mapping", {args.logits.rows});
  for (const Tensor* t : {&temperature, &seeds, &positions, &idx_mapping}) check_contiguous(*t, "each argument");
  args.temperature = data_of<const float>(temperature);
  args.seeds = data_of<const int64_t>(seeds);
  args.positions = data_of<const int64_t>(positions);
  args.slots = data_of<const int32_t>(idx_mapping);
  for (int64_t row = 0; row < args.logits.rows; ++row) {
    STD_TORCH_CHECK(args.slots[row] >= 0 && args.slots[row] < temperature.size(0), "idx_mapping must be in [0, ",
                    temperature.size(0), "), got ", args.slots[row]);
  }
  args.first_id = first_id;
  Tensor sampled = torch::stable::new_empty(logits, {args.logits.rows}, ScalarType::Int);
  Tensor scores = torch::stable::new_empty(logits, {args.logits.rows}, ScalarType::Float);
  args.sampled = data_of<int32_t>(sampled);
  args.scores = data_of<float>(scores);
  VLLM_KERNEL(gumbel_sample)(args);
  return {sampled, scores};
}

void keep_top_p_(Tensor logits, Tensor top_p) {
  TopPArgs args{};
  const Logits view = logits_of(logits);
  check_dtype(logits, "logits", ScalarType::Float, "float32");
  check_dtype(top_p, "top_p", ScalarType::Float, "float32");
  check_shape(top_p, "top_p", {view.rows});
  check_contiguous(top_p, "top_p");
  args.logits = data_of<float>(logits);
  args.rows = view.rows;
  args.vocab = view.vocab;
  args.stride = view.stride;
  args.top_p = data_of<const float>(top_p);
  VLLM_KERNEL(top_p)(args);
}

void keep_bits_(Tensor logits, Tensor mask, int64_t first, std::optional<Tensor> rows) {
  KeepBitsArgs args{};
  const Logits view = logits_of(logits);
  check_dtype(logits, "logits", ScalarType::Float, "float32");
  check_dtype(mask, "mask", ScalarType::Int, "int32");
  check_shape(mask, "mask", {-1, -1});
  check_contiguous(mask, "mask");
  args.logits = data_of<float>(logits);
  args.mask = data_of<const uint32_t>(mask);
  args.rows = mask.size(0);
  args.words = mask.size(1);
  args.vocab = view.vocab;
  args.stride = view.stride;
  args.first = first;
  STD_TORCH_CHECK(first >= 0 && first + view.vocab <= 32 * args.words, "mask has ", args.words, " words, too few for ",
                  first + view.vocab, " tokens");
  if (rows.has_value()) {
    check_dtype(*rows, "rows", ScalarType::Long, "int64");
    check_shape(*rows, "rows", {args.rows});
    check_contiguous(*rows, "rows");
    args.places = data_of<const int64_t>(*rows);
    for (int64_t row = 0; row < args.rows; ++row) {
      STD_TORCH_CHECK(args.places[row] >= 0 && args.places[row] < view.rows, "rows must be in [0, ", view.rows,
                      "), got ", args.places[row]);
    }
  } else {
    STD_TORCH_CHECK(args.rows == view.rows, "mask must have ", view.rows, " rows, got ", args.rows);
  }
  VLLM_KERNEL(keep_bits)(args);
}

// A copy of a few integers a row: no level of instructions matters.
Tensor fill_logprob_token_ids(Tensor columns, int64_t first_column, Tensor expanded_idx_mapping, Tensor token_ids,
                              Tensor list_idx, Tensor num_token_ids) {
  const int64_t rows = columns.size(0);
  check_shape(columns, "columns", {rows, -1});
  check_shape(expanded_idx_mapping, "expanded_idx_mapping", {rows});
  check_shape(token_ids, "token_ids", {-1, -1});
  check_shape(list_idx, "list_idx", {-1});
  check_shape(num_token_ids, "num_token_ids", {list_idx.size(0)});
  for (const Tensor* t : {&columns, &token_ids, &list_idx, &num_token_ids}) {
    check_dtype(*t, "each table", ScalarType::Int, "int32");
    check_last_contiguous(*t, "each table");
  }
  check_contiguous(expanded_idx_mapping, "expanded_idx_mapping");
  const bool wide = is_int64(expanded_idx_mapping, "expanded_idx_mapping");
  const int64_t room = columns.size(1) - first_column;
  STD_TORCH_CHECK(first_column >= 0 && room >= 0, "first_column must be in [0, ", columns.size(1), "], got ",
                  first_column);
  Tensor counts = torch::stable::new_empty(columns, {rows});
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t slot = wide ? data_of<const int64_t>(expanded_idx_mapping)[row]
                              : data_of<const int32_t>(expanded_idx_mapping)[row];
    STD_TORCH_CHECK(slot >= 0 && slot < list_idx.size(0), "expanded_idx_mapping must be in [0, ", list_idx.size(0),
                    "), got ", slot);
    const int64_t count = data_of<const int32_t>(num_token_ids)[slot];
    const int64_t list = data_of<const int32_t>(list_idx)[slot];
    STD_TORCH_CHECK(count >= 0 && count <= room && count <= token_ids.size(1), "num_token_ids must be in [0, ", room,
                    "], got ", count, " in slot ", slot);
    STD_TORCH_CHECK(list >= 0 && list < token_ids.size(0), "list_idx must be in [0, ", token_ids.size(0), "), got ",
                    list);
    int32_t* out = data_of<int32_t>(columns) + row * columns.stride(0) + first_column;
    std::memcpy(out, data_of<const int32_t>(token_ids) + list * token_ids.stride(0), count * sizeof(int32_t));
    std::memset(out + count, 0, (room - count) * sizeof(int32_t));
    data_of<int32_t>(counts)[row] = static_cast<int32_t>(count);
  }
  return counts;
}

}  // namespace
}  // namespace vllm_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cpu, m) {
  m.def(
      "token_readings(Tensor logits, Tensor token_ids, Tensor? num_token_ids, bool entropy=False, "
      "bool greedy=False, bool table=False, int num_topk=0, bool ranks=True) -> (Tensor logits, Tensor ranks, Tensor lse, Tensor argmax, Tensor max, Tensor? entropy, "
      "Tensor logprobs, Tensor? token_ids, Tensor? table)");
  m.def("count_above(Tensor logits, Tensor values, Tensor? num_values) -> Tensor");
  m.def("topk(Tensor logits, int k) -> (Tensor values, Tensor ids)");
  m.def(
      "gumbel_sample(Tensor logits, Tensor temperature, Tensor seeds, Tensor positions, Tensor idx_mapping, "
      "int first_id=0) -> (Tensor sampled, Tensor scores)");
  m.def("keep_top_p_(Tensor(a!) logits, Tensor top_p) -> ()");
  m.def("keep_bits_(Tensor(a!) logits, Tensor mask, int first=0, Tensor? rows=None) -> ()");
  m.def(
      "fill_logprob_token_ids(Tensor(a!) columns, int first_column, Tensor expanded_idx_mapping, Tensor token_ids, "
      "Tensor list_idx, Tensor num_token_ids) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cpu, CPU, m) {
  m.impl("token_readings", TORCH_BOX(&vllm_cpu::token_readings));
  m.impl("count_above", TORCH_BOX(&vllm_cpu::count_above));
  m.impl("topk", TORCH_BOX(&vllm_cpu::topk));
  m.impl("gumbel_sample", TORCH_BOX(&vllm_cpu::gumbel_sample));
  m.impl("keep_top_p_", TORCH_BOX(&vllm_cpu::keep_top_p_));
  m.impl("keep_bits_", TORCH_BOX(&vllm_cpu::keep_bits_));
  m.impl("fill_logprob_token_ids", TORCH_BOX(&vllm_cpu::fill_logprob_token_ids));
}
