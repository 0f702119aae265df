// The operators of the model's layers.
#include <cstring>

#include "bindings.h"
#include "kernels.h"
#include "recording.h"

namespace vllm_cpu {
namespace {

RmsNormArgs norm_args(const Tensor& x, const Tensor& weight, const Tensor& out, double eps) {
  const int64_t last = x.dim() - 1;
  STD_TORCH_CHECK(last == 1 || last == 2, "x must have 2 or 3 dimensions, got ", x.dim());
  check_last_contiguous(x, "x");
  check_shape(weight, "weight", {x.size(last)});
  check_contiguous(weight, "weight");
  RmsNormArgs args{};
  args.wide_weight = check_norm_weight_dtype(weight, "weight", x);
  args.dtype = dtype_of(x, "x");
  args.x = x.data_ptr();
  args.weight = weight.data_ptr();
  args.out = out.data_ptr();
  args.rows = x.size(0);
  args.hidden = x.size(last);
  args.x_stride = x.stride(0);
  args.heads = last == 1 ? 1 : x.size(1);
  args.head_stride = last == 1 ? 0 : x.stride(1);
  args.eps = static_cast<float>(eps);
  return args;
}

Tensor rms_norm(Tensor x, Tensor weight, double eps) {
  Tensor out = new_result(x, x.sizes());
  launch([args = norm_args(x, weight, out, eps), kernel = VLLM_KERNEL(rms_norm)] { kernel(args); }, x, weight, out);
  return out;
}

Tensor fused_add_rms_norm_(Tensor x, Tensor residual, Tensor weight, double eps) {
  check_shape(x, "x", {-1, -1});
  Tensor out = new_result(x, x.sizes());
  RmsNormArgs args = norm_args(x, weight, out, eps);
  check_shape(residual, "residual", {x.size(0), x.size(1)});
  check_last_contiguous(residual, "residual");
  check_same_dtype(residual, "residual", x, "x");
  args.residual = residual.data_ptr();
  args.residual_stride = residual.stride(0);
  launch([args, kernel = VLLM_KERNEL(rms_norm)] { kernel(args); }, x, residual, weight, out);
  return out;
}

Tensor gate_and_mul(Tensor x, int64_t activation) {
  check_shape(x, "x", {-1, -1});
  check_last_contiguous(x, "x");
  STD_TORCH_CHECK(x.size(1) % 2 == 0, "x must have an even number of columns, got ", x.size(1));
  STD_TORCH_CHECK(activation >= 0 && activation <= static_cast<int64_t>(Activation::gelu),
                  "activation must be the number of one, got ", activation);
  GateAndMulArgs args{};
  args.activation = static_cast<Activation>(activation);
  args.dtype = dtype_of(x, "x");
  args.rows = x.size(0);
  args.width = x.size(1) / 2;
  args.x_stride = x.stride(0);
  Tensor out = new_result(x, {args.rows, args.width});
  args.x = x.data_ptr();
  args.out = out.data_ptr();
  launch([args, kernel = VLLM_KERNEL(gate_and_mul)] { kernel(args); }, x, out);
  return out;
}

ElementwiseArgs elementwise_args(const Tensor& x, const Tensor& out) {
  check_contiguous(x, "x");
  ElementwiseArgs args{};
  args.dtype = dtype_of(x, "x");
  args.x = x.data_ptr();
  args.out = out.data_ptr();
  args.count = x.numel();
  return args;
}

Tensor scaled(Tensor x, double factor) {
  Tensor out = new_result(x, x.sizes());
  ElementwiseArgs args = elementwise_args(x, out);
  args.factor = static_cast<float>(factor);
  launch([args, kernel = VLLM_KERNEL(scaled)] { kernel(args); }, x, out);
  return out;
}

Tensor added(Tensor x, Tensor y) {
  STD_TORCH_CHECK(x.sizes() == y.sizes(), "y must have the shape of x");
  check_same_dtype(y, "y", x, "x");
  check_contiguous(y, "y");
  Tensor out = new_result(x, x.sizes());
  ElementwiseArgs args = elementwise_args(x, out);
  args.y = y.data_ptr();
  launch([args, kernel = VLLM_KERNEL(added)] { kernel(args); }, x, y, out);
  return out;
}

// Copies of whole rows: no level of instructions matters.
Tensor embedding(Tensor weight, Tensor token_ids) {
  check_shape(weight, "weight", {-1, -1});
  check_contiguous(weight, "weight");
  const int64_t tokens = token_ids.size(0), vocab = weight.size(0);
  const size_t row_bytes = static_cast<size_t>(weight.size(1)) * weight.element_size();
  const int64_t* wide = nullptr;
  const int32_t* narrow = nullptr;
  read_integers(token_ids, "token_ids", tokens, &wide, &narrow);
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t id = wide ? wide[i] : narrow[i];
    STD_TORCH_CHECK(id >= 0 && id < vocab, "token_ids must be in [0, ", vocab, "), got ", id);
  }
  Tensor out = new_result(weight, {tokens, weight.size(1)});
  const char* rows = static_cast<const char*>(weight.data_ptr());
  char* copies = static_cast<char*>(out.data_ptr());
  const auto copy = [=] {
    for (int64_t i = 0; i < tokens; ++i) {
      std::memcpy(copies + i * row_bytes, rows + (wide ? wide[i] : narrow[i]) * row_bytes, row_bytes);
    }
  };
  launch(copy, weight, token_ids, out);
  return out;
}

int64_t set_isa_level(int64_t level) {
  constexpr int64_t kLast = static_cast<int64_t>(kWidest);
  STD_TORCH_CHECK(level >= -1 && level <= kLast, "level must be between -1 and ", kLast, ", got ", level);
  if (level < 0) return static_cast<int64_t>(current_isa());
  return static_cast<int64_t>(set_isa(static_cast<Isa>(level)));
}

}  // namespace
}  // namespace vllm_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cpu, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("fused_add_rms_norm_(Tensor x, Tensor(a!) residual, Tensor weight, float eps) -> Tensor");
  m.def("gate_and_mul(Tensor x, int activation) -> Tensor");
  m.def("scaled(Tensor x, float factor) -> Tensor");
  m.def("added(Tensor x, Tensor y) -> Tensor");
  m.def("embedding(Tensor weight, Tensor token_ids) -> Tensor");
  // The index of the level now used; -1 asks without changing it.
  m.def("set_isa(int level) -> int");
  m.def("has_fast_bf16_dot() -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cpu, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&vllm_cpu::rms_norm));
  m.impl("fused_add_rms_norm_", TORCH_BOX(&vllm_cpu::fused_add_rms_norm_));
  m.impl("gate_and_mul", TORCH_BOX(&vllm_cpu::gate_and_mul));
  m.impl("scaled", TORCH_BOX(&vllm_cpu::scaled));
  m.impl("added", TORCH_BOX(&vllm_cpu::added));
  m.impl("embedding", TORCH_BOX(&vllm_cpu::embedding));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cpu, CompositeExplicitAutograd, m) {
  m.impl("set_isa", TORCH_BOX(&vllm_cpu::set_isa_level));
  m.impl("has_fast_bf16_dot", TORCH_BOX(&vllm_cpu::has_fast_bf16_dot));
}
