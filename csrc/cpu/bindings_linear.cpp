// The operators of products with weights that are packed once.
#include <optional>

#include "bindings.h"
#include "kernels.h"
#include "large_result.h"
#include "recording.h"

namespace vllm_cpu {
namespace {

// [N, K] -> [ceil(N / 32), K, 32], see kernels/linear.cpp, or, in pairs, [ceil(N / 32), K / 2, 32, 2], see
// pair_product.h.
Tensor pack_linear(Tensor weight, bool pairs) {
  check_shape(weight, "weight", {-1, -1});
  check_last_contiguous(weight, "weight");
  PackLinearArgs args{};
  args.dtype = dtype_of(weight, "weight");
  args.columns = weight.size(0);
  args.inner = weight.size(1);
  args.weight_stride = weight.stride(0);
  args.pairs = pairs;
  const int64_t panels = (args.columns + 31) / 32;
  if (pairs) {
    check_dtype(weight, "weight", ScalarType::BFloat16, "bfloat16 for packed_bf16_dot");
    STD_TORCH_CHECK(args.inner % 2 == 0, "weight must have an even number of columns for packed_bf16_dot, got ",
                    args.inner);
  }
  Tensor packed = pairs ? torch::stable::new_empty(weight, {panels, args.inner / 2, 32, 2})
                        : torch::stable::new_empty(weight, {panels, args.inner, 32});
  args.weight = weight.data_ptr();
  args.packed = packed.data_ptr();
  VLLM_KERNEL(pack_linear)(args);
  return packed;
}

// Whether a packed weight, of `inner` values a row (-1: any number), is in pairs.
bool is_in_pairs(const Tensor& packed, int64_t panels, int64_t inner) {
  const bool pairs = packed.dim() == 4;
  if (pairs) {
    check_shape(packed, "packed", {panels, inner < 0 ? inner : inner / 2, 32, 2});
    check_dtype(packed, "packed", ScalarType::BFloat16, "bfloat16 for packed_bf16_dot");
  } else {
    check_shape(packed, "packed", {panels, inner, 32});
  }
  check_contiguous(packed, "packed");
  return pairs;
}

// [panels, K, 32] or [panels, K / 2, 32, 2] -> [I, K]: rows of the weight [columns, K] that was packed.
Tensor panel_rows(Tensor packed, Tensor rows, int64_t columns) {
  PanelRowsArgs args{};
  args.pairs = is_in_pairs(packed, (columns + 31) / 32, -1);
  args.dtype = dtype_of(packed, "packed");
  args.packed = packed.data_ptr();
  args.inner = args.pairs ? packed.size(1) * 2 : packed.size(1);
  args.count = rows.size(0);
  read_integers(rows, "rows", args.count, &args.rows, &args.narrow_rows);
  for (int64_t i = 0; i < args.count; ++i) {
    const int64_t row = args.rows ? args.rows[i] : args.narrow_rows[i];
    STD_TORCH_CHECK(row >= 0 && row < columns, "rows must be in [0, ", columns, "), got ", row);
  }
  Tensor out = new_result(packed, {args.count, args.inner});
  args.out = out.data_ptr();
  launch([args, kernel = VLLM_KERNEL(panel_rows)] { kernel(args); }, packed, rows, out);
  return out;
}

// Panels of a product with `columns` results. When gated, a panel is 16 columns of a gate and 16 to multiply with it.
int64_t num_panels(int64_t columns, bool gated) { return gated ? (columns + 15) / 16 : (columns + 31) / 32; }

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

const float* scales_of(const Tensor& scales, int64_t panels) {
  check_shape(scales, "scales", {panels * 32});
  check_dtype(scales, "scales", ScalarType::Float, "float32");
  check_contiguous(scales, "scales");
  return static_cast<const float*>(scales.data_ptr());
}

Tensor new_product(const LinearArgs& args, const Tensor& x) {
  if (!args.float_out) return new_result(x, {args.rows, args.out_columns});
  if (args.rows * args.out_columns * int64_t{sizeof(float)} >= LargeResult::kLeastBytes) {
    return LargeResult::make(args.rows, args.out_columns);
  }
  return torch::stable::new_empty(x, {args.rows, args.out_columns}, ScalarType::Float);
}

// What x is added to and normalised with before it is multiplied, if it is.
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
    check_same_dtype(*weight, "norm_weight", x, "x");
    args.residual = residual->data_ptr();
    args.residual_stride = residual->stride(0);
    args.norm_weight = weight->data_ptr();
    args.eps = static_cast<float>(eps);
  }
};

Tensor multiply(void (*kernel)(const LinearArgs&), LinearArgs args, const Tensor& x, const Tensor& weight,
                const std::optional<Tensor>& scales, const std::optional<Tensor>& bias, const Norm& norm) {
  norm.set(args, x);
  Tensor out = new_product(args, x);
  args.out = out.data_ptr();
  if (args.rows > 0) launch([=] { kernel(args); }, x, weight, scales, bias, norm.residual, norm.weight, out);
  return out;
}

// With scales [panels * 32] the weight is float16, and bfloat16 rows are multiplied with it and them.
Tensor linear(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t columns, bool float_out,
              std::optional<Tensor> scales, bool gated, std::optional<Tensor> residual,
              std::optional<Tensor> norm_weight, double eps) {
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
    check_same_dtype(packed, "packed", x, "x");
  }
  return multiply(VLLM_KERNEL(linear), args, x, packed, scales, bias, {residual, norm_weight, eps});
}

// The weight is of 8-bit integers with their scales; see kernels/linear_int8.cpp.
Tensor linear_int8(Tensor x, Tensor weight, std::optional<Tensor> bias, int64_t columns, bool float_out, bool gated,
                   std::optional<Tensor> residual, std::optional<Tensor> norm_weight, double eps) {
  check_shape(x, "x", {-1, -1});
  check_last_contiguous(x, "x");
  // Bytes in blocks of 64 values of k, and bfloat16 scales in groups of 128.
  const int64_t blocks = (x.size(1) + 63) / 64;
  check_shape(weight, "weight", {num_panels(columns, gated), 32 * (64 * blocks + 2 * ((blocks + 1) / 2))});
  check_dtype(weight, "weight", ScalarType::Byte, "uint8");
  check_contiguous(weight, "weight");
  LinearArgs args = linear_args(x, bias, columns, float_out, gated);
  args.weight = weight.data_ptr();
  return multiply(VLLM_KERNEL(linear_int8), args, x, weight, std::nullopt, bias, {residual, norm_weight, eps});
}

}  // namespace
}  // namespace vllm_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cpu, m) {
  m.def("pack_linear(Tensor weight, bool bf16_dot=False) -> Tensor");
  m.def("panel_rows(Tensor packed, Tensor rows, int columns) -> Tensor");
  m.def(
      "linear(Tensor x, Tensor packed, Tensor? bias, int columns, bool float_out, Tensor? scales, bool gated, "
      "Tensor(a!)? residual=None, Tensor? norm_weight=None, float eps=0.0) -> Tensor");
  m.def(
      "linear_int8(Tensor x, Tensor weight, Tensor? bias, int columns, bool float_out, bool gated, "
      "Tensor(a!)? residual=None, Tensor? norm_weight=None, float eps=0.0) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cpu, CPU, m) {
  m.impl("pack_linear", TORCH_BOX(&vllm_cpu::pack_linear));
  m.impl("panel_rows", TORCH_BOX(&vllm_cpu::panel_rows));
  m.impl("linear", TORCH_BOX(&vllm_cpu::linear));
  m.impl("linear_int8", TORCH_BOX(&vllm_cpu::linear_int8));
}
