// The operator of linear layers with 8-bit weights.
#include <optional>

#include "bindings.h"
#include "kernels.h"

namespace vllm_cpu {
namespace {

// Gated as `linear`: a panel is 16 columns of a gate and 16 to multiply with it, and the result has `columns`.
Tensor linear_int8(Tensor x, Tensor weight, Tensor scales, std::optional<Tensor> bias, int64_t columns, bool float_out,
                   bool gated) {
  check_shape(x, "x", {-1, -1});
  check_last_contiguous(x, "x");
  const int64_t panels = gated ? (columns + 15) / 16 : (columns + 31) / 32;
  check_shape(weight, "weight", {panels, (x.size(1) + 15) / 16 * 4, 32, 4});
  check_dtype(weight, "weight", ScalarType::Byte, "uint8");
  check_contiguous(weight, "weight");
  check_shape(scales, "scales", {panels * 32});
  check_dtype(scales, "scales", ScalarType::Float, "float32");
  check_contiguous(scales, "scales");
  LinearArgs args{};
  args.dtype = dtype_of(x, "x");
  if (bias.has_value()) {
    check_shape(*bias, "bias", {gated ? panels * 32 : columns});
    check_contiguous(*bias, "bias");
    check_same_dtype(*bias, "bias", x, "x");
    args.bias = bias->data_ptr();
  }
  args.rows = x.size(0);
  args.columns = gated ? panels * 32 : columns;
  args.inner = x.size(1);
  args.x_stride = x.stride(0);
  args.out_columns = columns;
  args.float_out = float_out;
  args.gated = gated;
  Tensor out = float_out ? torch::stable::new_empty(x, {args.rows, columns}, ScalarType::Float)
                         : torch::stable::new_empty(x, {args.rows, columns});
  args.x = x.data_ptr();
  args.weight = weight.data_ptr();
  args.scales = static_cast<const float*>(scales.data_ptr());
  args.out = out.data_ptr();
  if (args.rows > 0) VLLM_KERNEL(linear_int8)(args);
  return out;
}

}  // namespace
}  // namespace vllm_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cpu, m) {
  m.def(
      "linear_int8(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int columns, bool float_out, bool gated) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cpu, CPU, m) { m.impl("linear_int8", TORCH_BOX(&vllm_cpu::linear_int8)); }
