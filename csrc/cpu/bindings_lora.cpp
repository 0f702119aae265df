// The operators of adapters.
#include <optional>

#include "bindings.h"
#include "kernels_lora.h"
#include "recording.h"

namespace vllm_cpu {
namespace {

const int32_t* int32s(const Tensor& t, const char* name, std::initializer_list<int64_t> sizes) {
  check_shape(t, name, sizes);
  check_contiguous(t, name);
  check_dtype(t, name, ScalarType::Int, "int32");
  return static_cast<const int32_t*>(t.data_ptr());
}

const float* floats_of(const Tensor& t, const char* name, std::initializer_list<int64_t> sizes) {
  check_shape(t, name, sizes);
  check_contiguous(t, name);
  check_dtype(t, name, ScalarType::Float, "float32");
  return static_cast<const float*>(t.data_ptr());
}

// All but x or the ids.
AddLoraArgs lora_args(const Tensor& out, const Tensor& order, const Tensor& starts, const Tensor& a, const Tensor& b,
                      const Tensor& ranks, const Tensor& scales, const Tensor& borders, const std::optional<Tensor>& gain,
                      const std::optional<Tensor>& shift) {
  AddLoraArgs args{};
  check_shape(out, "out", {-1, -1});
  check_last_contiguous(out, "out");
  check_shape(a, "a", {-1, -1, -1, kRankGroup});
  check_contiguous(a, "a");
  args.rows = out.size(0);
  args.columns = out.size(1);
  args.adapters = a.size(0);
  args.groups = a.size(1);
  args.inner = a.size(2);
  check_shape(borders, "borders", {-1});
  args.parts = borders.size(0) - 1;
  STD_TORCH_CHECK(args.parts > 0 && args.groups % args.parts == 0, "a must have groups for each of ", args.parts, " parts");
  check_shape(b, "b", {args.adapters, args.groups / args.parts * kRankGroup, args.columns});
  check_contiguous(b, "b");
  check_same_dtype(b, "b", a, "a");
  args.dtype = dtype_of(a, "a");
  args.out_dtype = dtype_of(out, "out");
  STD_TORCH_CHECK(args.out_dtype == args.dtype || args.out_dtype == DType::f32, "out must have the dtype of a, or float32");
  args.out = out.data_ptr();
  args.out_stride = out.stride(0);
  args.order = int32s(order, "order", {args.rows});
  args.starts = int32s(starts, "starts", {args.adapters + 1});
  args.a = a.data_ptr();
  args.b = b.data_ptr();
  args.ranks = int32s(ranks, "ranks", {args.adapters, args.parts});
  args.scales = floats_of(scales, "scales", {args.adapters, args.parts});
  args.ends = int32s(borders, "borders", {args.parts + 1}) + 1;
  if (gain.has_value()) args.gain = floats_of(*gain, "gain", {args.adapters, args.columns});
  if (shift.has_value()) args.shift = floats_of(*shift, "shift", {args.adapters, args.columns});
  return args;
}

Tensor add_lora(Tensor out, Tensor x, Tensor order, Tensor starts, Tensor a, Tensor b, Tensor ranks, Tensor scales,
                Tensor borders, std::optional<Tensor> gain, std::optional<Tensor> shift) {
  AddLoraArgs args = lora_args(out, order, starts, a, b, ranks, scales, borders, gain, shift);
  check_shape(x, "x", {args.rows, args.inner});
  check_last_contiguous(x, "x");
  check_same_dtype(x, "x", a, "a");
  args.x = x.data_ptr();
  args.x_stride = x.stride(0);
  if (args.rows > 0) {
    launch([args, kernel = VLLM_KERNEL(add_lora)] { kernel(args); }, out, x, order, starts, a, b, ranks, scales, borders, gain,
           shift);
  }
  return out;
}

Tensor add_lora_embedding(Tensor out, Tensor ids, Tensor order, Tensor starts, Tensor a, Tensor b, Tensor ranks,
                          Tensor scales, Tensor borders) {
  AddLoraArgs args = lora_args(out, order, starts, a, b, ranks, scales, borders, std::nullopt, std::nullopt);
  STD_TORCH_CHECK(args.parts == 1, "borders must be of one part");
  read_integers(ids, "ids", args.rows, &args.ids_int64, &args.ids_int32);
  if (args.rows > 0) {
    launch([args, kernel = VLLM_KERNEL(add_lora)] { kernel(args); }, out, ids, order, starts, a, b, ranks, scales, borders);
  }
  return out;
}

}  // namespace
}  // namespace vllm_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cpu, m) {
  m.def(
      "add_lora_(Tensor(a!) out, Tensor x, Tensor order, Tensor starts, Tensor a, Tensor b, Tensor ranks, Tensor scales, "
      "Tensor borders, Tensor? gain=None, Tensor? shift=None) -> Tensor(a!)");
  m.def(
      "add_lora_embedding_(Tensor(a!) out, Tensor ids, Tensor order, Tensor starts, Tensor a, Tensor b, Tensor ranks, "
      "Tensor scales, Tensor borders) -> Tensor(a!)");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cpu, CPU, m) {
  m.impl("add_lora_", TORCH_BOX(&vllm_cpu::add_lora));
  m.impl("add_lora_embedding_", TORCH_BOX(&vllm_cpu::add_lora_embedding));
}
