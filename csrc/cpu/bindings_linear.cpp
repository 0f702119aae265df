// The operators of products with weights that are packed once.
#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "adapted_weights.h"
#include "bindings.h"
#include "huge_pages.h"
#include "kernels.h"
#include "large_result.h"
#include "packed_weights.h"
#include "recording.h"

namespace vllm_cpu {
namespace {

constexpr int64_t kColumns = 32, kHalf = kColumns / 2;  // of a panel
// So many panels of a weight in parts are packed at once by several threads, or more of so many bytes.
constexpr int64_t kLeastTogether = 8, kTogetherBytes = 1 << 20;

// Where each row of all `parts` [n, K], numbered through, begins, by the columns of panels; null: a column of zeros. `gated`:
// 16 rows of the first half and 16 of the second in turn.
std::vector<const void*> columns_of(const std::vector<Tensor>& parts, bool gated) {
  STD_TORCH_CHECK(!parts.empty(), "weight must have parts");
  std::vector<const void*> rows;
  for (const Tensor& part : parts) {
    check_shape(part, "weight", {-1, parts[0].dim() == 2 ? parts[0].size(1) : -1});
    check_same_dtype(part, "weight", parts[0], "its first part");
    check_last_contiguous(part, "weight");
    const char* first = static_cast<const char*>(part.data_ptr());
    const int64_t stride = part.stride(0) * part.element_size();
    for (int64_t i = 0; i < part.size(0); ++i) rows.push_back(first + i * stride);
  }
  const int64_t count = rows.size();
  if (!gated) {
    rows.resize((count + kColumns - 1) / kColumns * kColumns);
    return rows;
  }
  STD_TORCH_CHECK(count % 2 == 0, "weight must have two halves of rows, got ", count);
  const int64_t half = count / 2;
  std::vector<const void*> columns((half + kHalf - 1) / kHalf * kColumns);
  for (int64_t i = 0; i < half; ++i) {
    const int64_t column = i / kHalf * kColumns + i % kHalf;
    columns[column] = rows[i];
    columns[column + kHalf] = rows[half + i];
  }
  return columns;
}

// Calls pack(rows, their stride, their number, their first panel) for all rows of a weight, given in `parts` and ordered as
// `columns_of` says: at once where they lie so, or else for a few panels whose rows are brought together, in the cache.
template <typename Pack>
void pack_panels(const std::vector<Tensor>& parts, bool gated, const std::vector<const void*>& columns, const Pack& pack) {
  if (parts.size() == 1 && !gated) {
    pack(parts[0].data_ptr(), parts[0].stride(0), parts[0].size(0), 0);
    return;
  }
  const int64_t inner = parts[0].size(1), row_bytes = inner * parts[0].element_size(), total = columns.size();
  const int64_t panels = std::max(kLeastTogether, kTogetherBytes / std::max<int64_t>(1, kColumns * row_bytes));
  std::vector<char> rows(std::min(panels * kColumns, total) * row_bytes);
  for (int64_t first = 0; first < total; first += panels * kColumns) {
    const int64_t count = std::min(panels * kColumns, total - first);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; ++i) {
      char* to = rows.data() + i * row_bytes;
      if (columns[first + i] == nullptr) {
        std::memset(to, 0, row_bytes);
      } else {
        std::memcpy(to, columns[first + i], row_bytes);
      }
    }
    pack(rows.data(), inner, count, first / kColumns);
  }
}

// [N, K], in parts -> [panels, K, 32], see kernels/linear.cpp, or, in pairs, [panels, K / 2, 32, 2], see pair_product.h.
Tensor pack_linear(std::vector<Tensor> parts, bool pairs, bool gated) {
  const std::vector<const void*> columns = columns_of(parts, gated);
  const int64_t panels = columns.size() / kColumns;
  const Tensor& first = parts[0];
  PackLinearArgs args{};
  args.dtype = dtype_of(first, "weight");
  args.inner = first.size(1);
  args.pairs = pairs;
  if (pairs) {
    check_dtype(first, "weight", ScalarType::BFloat16, "bfloat16 for packed_bf16_dot");
    STD_TORCH_CHECK(args.inner % 2 == 0, "weight must have an even number of columns for packed_bf16_dot, got ",
                    args.inner);
  }
  const Tensor memory = WeightMemory::make(panels * args.inner * kColumns, first.scalar_type(), first.element_size());
  Tensor packed = pairs ? torch::stable::view(memory, {panels, args.inner / 2, kColumns, 2})
                        : torch::stable::view(memory, {panels, args.inner, kColumns});
  char* const start = static_cast<char*>(packed.data_ptr());
  pack_panels(parts, gated, columns, [&](const void* rows, int64_t stride, int64_t count, int64_t panel) {
    args.weight = rows;
    args.weight_stride = stride;
    args.columns = count;
    args.packed = start + panel * args.inner * kColumns * first.element_size();
    VLLM_KERNEL(pack_linear)(args);
  });
  return packed;
}

// [N, K], in parts -> [panels, 32 (64 B + 2 G)] of 8-bit integers and their scales; see kernels/pack_int8.cpp. A scale is
// not finite where a value of its group is not.
Tensor pack_int8(std::vector<Tensor> parts, bool gated) {
  const std::vector<const void*> columns = columns_of(parts, gated);
  const int64_t panels = columns.size() / kColumns;
  PackInt8Args args{};
  args.dtype = dtype_of(parts[0], "weight");
  args.inner = parts[0].size(1);
  const int64_t size = int8_panel_bytes(args.inner);
  Tensor packed = torch::stable::view(WeightMemory::make(panels * size, ScalarType::Byte, 1), {panels, size});
  uint8_t* const start = static_cast<uint8_t*>(packed.data_ptr());
  pack_panels(parts, gated, columns, [&](const void* rows, int64_t stride, int64_t count, int64_t panel) {
    args.weight = rows;
    args.weight_stride = stride;
    args.columns = count;
    args.panels = start + panel * size;
    VLLM_KERNEL(pack_int8)(args);
  });
  return packed;
}

// [panels, K, 32] or [panels, K / 2, 32, 2] -> [I, K]: rows of the weight [columns, K] that was packed, in its dtype or
// that of `like`.
Tensor panel_rows(Tensor packed, Tensor rows, int64_t columns, std::optional<Tensor> like) {
  PanelRowsArgs args{};
  args.pairs = is_in_pairs(packed, (columns + 31) / 32, -1);
  args.dtype = dtype_of(packed, "packed");
  args.out_dtype = like.has_value() ? dtype_of(*like, "like") : args.dtype;
  args.packed = packed.data_ptr();
  args.inner = args.pairs ? packed.size(1) * 2 : packed.size(1);
  args.count = rows.size(0);
  read_integers(rows, "rows", args.count, &args.rows, &args.narrow_rows);
  for (int64_t i = 0; i < args.count; ++i) {
    const int64_t row = args.rows ? args.rows[i] : args.narrow_rows[i];
    STD_TORCH_CHECK(row >= 0 && row < columns, "rows must be in [0, ", columns, "), got ", row);
  }
  Tensor out = new_result(like.has_value() ? *like : packed, {args.count, args.inner});
  args.out = out.data_ptr();
  launch([args, kernel = VLLM_KERNEL(panel_rows)] { kernel(args); }, packed, rows, out);
  return out;
}

// All but the weight and its scales.
LinearArgs linear_args(const Tensor& x, const std::optional<Tensor>& bias, int64_t columns, bool float_out, bool gated) {
  LinearArgs args{};
  args.dtype = dtype_of(x, "x");
  args.x = x.data_ptr();
  args.rows = x.size(0);
  args.columns = gated ? num_panels(columns, gated) * 32 : columns;
  args.inner = x.size(1);
  args.x_stride = x.stride(0);
  args.out_columns = columns;
  args.out_stride = columns;
  args.float_out = float_out;
  args.gated = gated;
  if (bias.has_value()) {
    check_shape(*bias, "bias", {args.columns});
    check_contiguous(*bias, "bias");
    check_same_dtype(*bias, "bias", x, "x");
    args.bias = bias->data_ptr();
  }
  return args;
}

Tensor new_product(const LinearArgs& args, const Tensor& x) {
  if (!args.float_out) return new_result(x, {args.rows, args.out_columns});
  const bool is_large = args.rows * args.out_columns * int64_t{sizeof(float)} >= LargeResult::kLeastBytes;
  if (is_large && Recording::current() == nullptr) return LargeResult::make(args.rows, args.out_columns);
  return new_result(x, {args.rows, args.out_columns}, ScalarType::Float);
}

// The residual that x is added to and the norm that it gets before it is multiplied, if any.
struct Norm {
  const std::optional<Tensor>&residual, &weight;
  double eps;

  void set(LinearArgs& args, const Tensor& x) const {
    STD_TORCH_CHECK(residual.has_value() == weight.has_value(), "residual and norm_weight belong together");
    if (!residual.has_value()) return;
    check_shape(*residual, "residual", {args.rows, args.inner});
    check_last_contiguous(*residual, "residual");
    check_same_dtype(*residual, "residual", x, "x");
    check_shape(*weight, "norm_weight", {args.inner});
    check_contiguous(*weight, "norm_weight");
    args.wide_norm_weight = check_norm_weight_dtype(*weight, "norm_weight", x);
    args.residual = residual->data_ptr();
    args.residual_stride = residual->stride(0);
    args.norm_weight = weight->data_ptr();
    args.eps = static_cast<float>(eps);
  }
};

// Where a product's columns go: into those of `out` [rows, all columns] from `first` on; without it, into a new tensor.
struct Place {
  const std::optional<Tensor>& out;
  int64_t first;

  // The whole of it.
  Tensor set(LinearArgs& args, const Tensor& x) const {
    if (out.has_value()) {
      check_shape(*out, "out", {args.rows, -1});
      check_contiguous(*out, "out");
      check_dtype(*out, "out", args.float_out ? ScalarType::Float : x.scalar_type(), "of the result");
      STD_TORCH_CHECK(first >= 0 && first + args.out_columns <= out->size(1), "out must have columns ", first, " to ",
                      first + args.out_columns);
      args.out_stride = out->size(1);
    }
    Tensor result = out.has_value() ? *out : new_product(args, x);
    args.out = static_cast<char*>(result.data_ptr()) + first * result.element_size();
    return result;
  }
};

Tensor multiply(void (*kernel)(const LinearArgs&), LinearArgs args, const Tensor& x, const Tensor& weight,
                const std::optional<Tensor>& scales, const std::optional<Tensor>& bias, const Norm& norm,
                const Place& place, const Adapters& adapters) {
  norm.set(args, x);
  Tensor out = place.set(args, x);
  const auto adapted = adapters.set(args);
  if (args.rows > 0) {
    launch([args, kernel, adapted] { kernel(args); }, x, weight, scales, bias, norm.residual, norm.weight, out,
           adapters.order, adapters.starts);
  }
  return out;
}

// With scales [panels * 32] the weight is float16, and bfloat16 rows are multiplied with it and them. Without, it has
// x's dtype, or one of 16 bits.
Tensor linear(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t columns, bool float_out,
              std::optional<Tensor> scales, bool gated, std::optional<Tensor> residual,
              std::optional<Tensor> norm_weight, double eps, std::optional<Tensor> out, int64_t first,
              int64_t adapters, std::optional<Tensor> order, std::optional<Tensor> starts) {
  check_shape(x, "x", {-1, -1});
  check_last_contiguous(x, "x");
  const int64_t panels = num_panels(columns, gated);
  const bool pairs = is_in_pairs(packed, panels, x.size(1));
  LinearArgs args = linear_args(x, bias, columns, float_out, gated);
  args.pairs = pairs;
  args.weight = packed.data_ptr();
  if (scales.has_value()) {
    check_dtype(x, "x", ScalarType::BFloat16, "bfloat16 where there are scales");
    check_dtype(packed, "packed", ScalarType::Half, "float16 where there are scales");
    args.scales = scales_of(*scales, panels);
  } else {
    args.weight_dtype = dtype_of(packed, "packed");
    STD_TORCH_CHECK(args.weight_dtype == args.dtype || (args.weight_dtype != DType::f32 && !pairs),
                    "packed must be of x's dtype, or of 16 bits and not for packed_bf16_dot");
  }
  return multiply(VLLM_KERNEL(linear), args, x, packed, scales, bias, {residual, norm_weight, eps}, {out, first},
                  {adapters, order, starts});
}

// x [T, H, K] times the packed weight of each head, [H, panels, K, 32] or, in pairs, [H, panels, K / 2, 32, 2].
Tensor head_linear(Tensor x, Tensor packed, int64_t columns) {
  check_last_contiguous(x, "x");
  const Heads heads = heads_of(x, "x");
  check_same_dtype(packed, "packed", x, "x");
  check_contiguous(packed, "packed");
  const int64_t panels = num_panels(columns, false), inner = x.size(2);
  const bool pairs = packed.dim() == 5;
  if (pairs) {
    check_shape(packed, "packed", {heads.num_heads, panels, inner / 2, 32, 2});
    check_dtype(packed, "packed", ScalarType::BFloat16, "bfloat16 in pairs");
  } else {
    check_shape(packed, "packed", {heads.num_heads, panels, inner, 32});
  }
  STD_TORCH_CHECK(!pairs || inner % 2 == 0, "x must have an even width for a weight in pairs, got ", inner);
  Tensor out = new_result(x, {x.size(0), heads.num_heads, columns});
  HeadLinearArgs args{};
  args.multiply = VLLM_KERNEL(linear);
  args.heads = heads.num_heads;
  args.x_bytes = heads.head_stride * x.element_size();
  args.weight_bytes = panels * inner * 32 * packed.element_size();
  args.out_bytes = columns * x.element_size();
  LinearArgs& first = args.first;
  first.dtype = first.weight_dtype = dtype_of(x, "x");
  first.x = x.data_ptr();
  first.weight = packed.data_ptr();
  first.out = out.data_ptr();
  first.rows = x.size(0);
  first.columns = first.out_columns = columns;
  first.inner = inner;
  first.x_stride = heads.token_stride;
  first.out_stride = heads.num_heads * columns;
  first.pairs = pairs;
  if (first.rows > 0) launch([args, kernel = VLLM_KERNEL(head_linear)] { kernel(args); }, x, packed, out);
  return out;
}

// The weight is of 8-bit integers with their scales; see kernels/linear_int8.cpp.
Tensor linear_int8(Tensor x, Tensor weight, std::optional<Tensor> bias, int64_t columns, bool float_out, bool gated,
                   std::optional<Tensor> residual, std::optional<Tensor> norm_weight, double eps, int64_t adapters,
                   std::optional<Tensor> order, std::optional<Tensor> starts) {
  check_shape(x, "x", {-1, -1});
  check_last_contiguous(x, "x");
  check_int8_weight(weight, num_panels(columns, gated), x.size(1));
  LinearArgs args = linear_args(x, bias, columns, float_out, gated);
  args.weight = weight.data_ptr();
  const Norm norm{residual, norm_weight, eps};
  return multiply(VLLM_KERNEL(linear_int8), args, x, weight, std::nullopt, bias, norm, {std::nullopt, 0},
                  {adapters, order, starts});
}

// See kernels/linear_quantized.cpp; with `half`, bfloat16 takes float16 sums where the level has them. With `out` [rows, all
// columns] the product's columns are written into it from column `first` on, and it is returned.
Tensor linear_quantized(Tensor x, Tensor panels, Tensor description, std::optional<Tensor> table,
                        std::optional<Tensor> input_order, std::optional<Tensor> sparse_starts,
                        std::optional<Tensor> sparse_columns, std::optional<Tensor> sparse_places,
                        std::optional<Tensor> sparse_values, std::optional<Tensor> bias, int64_t columns,
                        bool float_out, bool gated, std::optional<Tensor> residual,
                        std::optional<Tensor> norm_weight, double eps, std::optional<Tensor> out, int64_t first,
                        bool int8, bool half, int64_t adapters, std::optional<Tensor> order,
                        std::optional<Tensor> starts) {
  check_shape(x, "x", {-1, -1});
  check_last_contiguous(x, "x");
  const QuantizedParts parts{panels,        description,    table,         input_order,
                             sparse_starts, sparse_columns, sparse_places, sparse_values};
  LinearArgs args = linear_args(x, bias, columns, float_out, gated);
  args.quant = parts.read(args.inner, num_panels(columns, gated));
  args.quant.zero_in_codes = int8;
  check_int8_product(int8, args.quant);
  args.weight = panels.data_ptr();
  const Norm norm{residual, norm_weight, eps};
  norm.set(args, x);
  const Tensor result = Place{out, first}.set(args, x);
  const auto adapted = Adapters{adapters, order, starts}.set(args);
  if (args.rows > 0) {
    half = half && args.dtype == DType::bf16;
    const auto kernel = int8   ? VLLM_KERNEL(linear_quantized_int8)
                        : half ? VLLM_KERNEL(linear_quantized_half)
                               : VLLM_KERNEL(linear_quantized);
    launch([args, kernel, adapted] { kernel(args); }, x, panels, table, input_order, sparse_starts,
           sparse_places, sparse_values, bias, residual, norm_weight, result, order, starts);
  }
  return result;
}

// [I, K] of the dtype of `like`: rows of the weight [columns, K].
Tensor quantized_rows(Tensor rows, Tensor panels, Tensor description, std::optional<Tensor> table,
                      std::optional<Tensor> order, std::optional<Tensor> sparse_starts,
                      std::optional<Tensor> sparse_columns, std::optional<Tensor> sparse_places,
                      std::optional<Tensor> sparse_values, int64_t columns, int64_t inner, Tensor like) {
  const QuantizedParts parts{panels,        description,    table,         order,
                             sparse_starts, sparse_columns, sparse_places, sparse_values};
  QuantizedRowsArgs args{};
  args.quant = parts.read(inner, num_panels(columns, false));
  args.dtype = dtype_of(like, "like");
  args.panels = panels.data_ptr();
  args.inner = inner;
  args.count = rows.size(0);
  read_integers(rows, "rows", args.count, &args.rows, &args.narrow_rows);
  for (int64_t i = 0; i < args.count; ++i) {
    const int64_t row = args.rows ? args.rows[i] : args.narrow_rows[i];
    STD_TORCH_CHECK(row >= 0 && row < columns, "rows must be in [0, ", columns, "), got ", row);
  }
  Tensor out = new_result(like, {args.count, inner});
  args.out = out.data_ptr();
  launch([args, kernel = VLLM_KERNEL(quantized_rows)] { kernel(args); }, rows, panels, table, order, sparse_starts,
         sparse_columns, sparse_values, out);
  return out;
}

}  // namespace
}  // namespace vllm_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cpu, m) {
  m.def("pack_linear(Tensor[] parts, bool bf16_dot=False, bool gated=False) -> Tensor");
  m.def("pack_int8(Tensor[] parts, bool gated=False) -> Tensor");
  m.def("panel_rows(Tensor packed, Tensor rows, int columns, Tensor? like=None) -> Tensor");
  m.def(
      "linear(Tensor x, Tensor packed, Tensor? bias, int columns, bool float_out, Tensor? scales, bool gated, "
      "Tensor(a!)? residual=None, Tensor? norm_weight=None, float eps=0.0, Tensor(b!)? out=None, int first=0, int adapters=0, "
      "Tensor? order=None, Tensor? starts=None) -> Tensor");
  m.def("head_linear(Tensor x, Tensor packed, int columns) -> Tensor");
  m.def(
      "linear_int8(Tensor x, Tensor weight, Tensor? bias, int columns, bool float_out, bool gated, "
      "Tensor(a!)? residual=None, Tensor? norm_weight=None, float eps=0.0, int adapters=0, Tensor? order=None, "
      "Tensor? starts=None) -> Tensor");
  m.def(
      "linear_quantized(Tensor x, Tensor panels, Tensor description, Tensor? table, Tensor? input_order, "
      "Tensor? sparse_starts, Tensor? sparse_columns, Tensor? sparse_places, Tensor? sparse_values, Tensor? bias, "
      "int columns, bool float_out, bool gated, Tensor(a!)? residual=None, Tensor? norm_weight=None, float eps=0.0, "
      "Tensor(b!)? out=None, int first=0, bool int8=False, bool half=False, int adapters=0, "
      "Tensor? order=None, Tensor? starts=None) -> Tensor");
  m.def(
      "quantized_rows(Tensor rows, Tensor panels, Tensor description, Tensor? table, Tensor? order, "
      "Tensor? sparse_starts, Tensor? sparse_columns, Tensor? sparse_places, Tensor? sparse_values, int columns, "
      "int inner, Tensor like) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cpu, CPU, m) {
  m.impl("pack_linear", TORCH_BOX(&vllm_cpu::pack_linear));
  m.impl("pack_int8", TORCH_BOX(&vllm_cpu::pack_int8));
  m.impl("panel_rows", TORCH_BOX(&vllm_cpu::panel_rows));
  m.impl("linear", TORCH_BOX(&vllm_cpu::linear));
  m.impl("head_linear", TORCH_BOX(&vllm_cpu::head_linear));
  m.impl("linear_int8", TORCH_BOX(&vllm_cpu::linear_int8));
  m.impl("linear_quantized", TORCH_BOX(&vllm_cpu::linear_quantized));
  m.impl("quantized_rows", TORCH_BOX(&vllm_cpu::quantized_rows));
}
