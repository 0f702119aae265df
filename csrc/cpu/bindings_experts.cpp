// The operators of mixtures of experts; ops/experts.py is who calls them.
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "bindings.h"
#include "kernels_experts.h"
#include "packed_weights.h"
#include "recording.h"

namespace vllm_cpu {
namespace {

// One product's weights of all experts of a rank. With gates the products are twice as wide as their results.
struct ExpertWeights {
  int64_t columns, inner;
  bool gated;
  std::vector<ExpertProduct> products;
  std::vector<std::vector<Tensor>> tensors;  // that the products point into
  std::vector<bool> takes;                   // by dtype of the rows, whether all products multiply with it

  ExpertWeights(int64_t count, int64_t columns, int64_t inner, bool gated)
      : columns(columns), inner(inner), gated(gated), products(count), tensors(count), takes(3, true) {}

  int64_t panels() const { return num_panels(columns, gated); }

  bool is_whole() const {
    for (const ExpertProduct& product : products) {
      if (product.kind == ExpertKind::none) return false;
    }
    return true;
  }

  // Takes a weight over; `args` has what its kind adds.
  void put(int64_t index, ExpertKind kind, LinearArgs args, const Tensor& weight, const std::optional<Tensor>& bias,
           std::vector<std::optional<Tensor>> others) {
    STD_TORCH_CHECK(index >= 0 && index < static_cast<int64_t>(products.size()), "index must be in [0, ",
                    products.size(), "), got ", index);
    args.weight = weight.data_ptr();
    args.columns = gated ? panels() * 32 : columns;
    args.inner = inner;
    if (bias.has_value()) {
      check_shape(*bias, "bias", {args.columns});
      check_contiguous(*bias, "bias");
      takes_only(dtype_of(*bias, "bias"));
      args.bias = bias->data_ptr();
    }
    products[index] = {kind, args, weight.stride(0) * weight.element_size()};
    others.push_back(bias);
    tensors[index] = {weight};
    for (const auto& other : others) {
      if (other.has_value()) tensors[index].push_back(*other);
    }
  }

  void takes_only(DType dtype) {
    for (size_t i = 0; i < takes.size(); ++i) takes[i] = takes[i] && i == static_cast<size_t>(dtype);
  }
};

const std::shared_ptr<ExpertWeights>& weights_of(int64_t handle) {
  return *reinterpret_cast<std::shared_ptr<ExpertWeights>*>(handle);
}

int64_t make_expert_weights(int64_t count, int64_t columns, int64_t inner, bool gated) {
  STD_TORCH_CHECK(count >= 0 && columns > 0 && inner > 0, "sizes must be positive, got ", count, ", ", columns, " and ", inner);
  auto own = std::make_shared<ExpertWeights>(count, columns, inner, gated);
  return reinterpret_cast<int64_t>(new std::shared_ptr<ExpertWeights>(std::move(own)));
}

void free_expert_weights(int64_t handle) { delete reinterpret_cast<std::shared_ptr<ExpertWeights>*>(handle); }

// As `linear`'s weights.
void put_expert(int64_t handle, int64_t index, Tensor packed, std::optional<Tensor> scales, std::optional<Tensor> bias) {
  ExpertWeights& own = *weights_of(handle);
  LinearArgs args{};
  args.pairs = is_in_pairs(packed, own.panels(), own.inner);
  args.weight_dtype = dtype_of(packed, "packed");
  if (scales.has_value()) {
    check_dtype(packed, "packed", ScalarType::Half, "float16 where there are scales");
    args.scales = scales_of(*scales, own.panels());
    own.takes_only(DType::bf16);
  } else if (args.pairs || args.weight_dtype == DType::f32) {
    own.takes_only(args.weight_dtype);
  }
  own.put(index, ExpertKind::plain, args, packed, bias, {scales});
}

// As `linear_int8`'s.
void put_int8_expert(int64_t handle, int64_t index, Tensor weight, std::optional<Tensor> bias) {
  ExpertWeights& own = *weights_of(handle);
  check_int8_weight(weight, own.panels(), own.inner);
  own.put(index, ExpertKind::int8, LinearArgs{}, weight, bias, {});
}

// As `linear_quantized`'s.
void put_quantized_expert(int64_t handle, int64_t index, Tensor panels, Tensor description, std::optional<Tensor> table,
                          std::optional<Tensor> order, std::optional<Tensor> sparse_starts,
                          std::optional<Tensor> sparse_columns, std::optional<Tensor> sparse_places,
                          std::optional<Tensor> sparse_values, std::optional<Tensor> bias, bool int8, bool half) {
  ExpertWeights& own = *weights_of(handle);
  const QuantizedParts parts{panels,        description,    table,         order,
                             sparse_starts, sparse_columns, sparse_places, sparse_values};
  LinearArgs args{};
  args.quant = parts.read(own.inner, own.panels());
  args.quant.zero_in_codes = int8;
  check_int8_product(int8, args.quant);
  const ExpertKind kind = int8   ? ExpertKind::quantized_int8
                          : half ? ExpertKind::quantized_half
                                 : ExpertKind::quantized;
  own.put(index, kind, args, panels, bias, {table, order, sparse_starts, sparse_columns, sparse_places, sparse_values});
}

// See ops/experts.py. `limit` is infinity for none.
Tensor experts(Tensor hidden, Tensor ids, Tensor weights, int64_t first, int64_t second, int64_t curve, double limit,
               double slope, double offset, int64_t first_expert, bool weigh_inputs) {
  const std::shared_ptr<ExpertWeights> own_first = weights_of(first), own_second = weights_of(second);
  check_shape(hidden, "hidden", {-1, own_first->inner});
  check_last_contiguous(hidden, "hidden");
  ExpertsArgs args{};
  args.dtype = dtype_of(hidden, "hidden");
  args.tokens = hidden.size(0);
  args.width = hidden.size(1);
  args.hidden_stride = hidden.stride(0);
  check_shape(ids, "ids", {args.tokens, -1});
  check_contiguous(ids, "ids");
  args.top_k = ids.size(1);
  check_shape(weights, "weights", {args.tokens, args.top_k});
  check_dtype(weights, "weights", ScalarType::Float, "float32");
  check_contiguous(weights, "weights");
  args.inner = own_first->columns;
  args.num_experts = static_cast<int64_t>(own_first->products.size());
  STD_TORCH_CHECK(own_second->products.size() == own_first->products.size(), "first and second must have the same experts");
  STD_TORCH_CHECK(own_second->inner == args.inner && own_second->columns == args.width && !own_second->gated,
                  "second must be [", args.width, ", ", args.inner, "], without gates");
  for (const auto& each : {own_first, own_second}) {
    STD_TORCH_CHECK(each->is_whole(), "an expert has no weights yet");
    STD_TORCH_CHECK(each->takes[static_cast<int>(args.dtype)], "hidden has a dtype that an expert's weights do not take");
  }
  STD_TORCH_CHECK(curve >= 0 && curve <= static_cast<int64_t>(Curve::quick_gelu), "there is no activation ", curve);
  if (is_int64(ids, "ids")) {
    args.ids_int64 = static_cast<const int64_t*>(ids.data_ptr());
  } else {
    args.ids_int32 = static_cast<const int32_t*>(ids.data_ptr());
  }
  args.hidden = hidden.data_ptr();
  args.weights = static_cast<const float*>(weights.data_ptr());
  args.first_expert = first_expert;
  args.first = own_first->products.data();
  args.second = own_second->products.data();
  args.kernels[static_cast<int>(ExpertKind::plain)] = VLLM_KERNEL(linear);
  args.kernels[static_cast<int>(ExpertKind::int8)] = VLLM_KERNEL(linear_int8);
  args.kernels[static_cast<int>(ExpertKind::quantized)] = VLLM_KERNEL(linear_quantized);
  args.kernels[static_cast<int>(ExpertKind::quantized_half)] =
      args.dtype == DType::bf16 ? VLLM_KERNEL(linear_quantized_half) : VLLM_KERNEL(linear_quantized);
  args.kernels[static_cast<int>(ExpertKind::quantized_int8)] = VLLM_KERNEL(linear_quantized_int8);
  args.gated = own_first->gated;
  args.curve = static_cast<Curve>(curve);
  args.limit = static_cast<float>(limit);
  args.slope = static_cast<float>(slope);
  args.offset = static_cast<float>(offset);
  args.weigh_inputs = weigh_inputs;
  Tensor out = new_result(hidden, {args.tokens, args.width});
  args.out = out.data_ptr();
  if (args.tokens > 0) {
    const auto kernel = VLLM_KERNEL(experts);
    launch([args, kernel, own_first, own_second] { kernel(args); }, hidden, ids, weights, out);
  }
  return out;
}

}  // namespace
}  // namespace vllm_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cpu, m) {
  m.def("make_expert_weights(int count, int columns, int inner, bool gated) -> int");
  m.def("free_expert_weights(int handle) -> ()");
  m.def("put_expert(int handle, int index, Tensor packed, Tensor? scales, Tensor? bias) -> ()");
  m.def("put_int8_expert(int handle, int index, Tensor weight, Tensor? bias) -> ()");
  m.def(
      "put_quantized_expert(int handle, int index, Tensor panels, Tensor description, Tensor? table, Tensor? order, "
      "Tensor? sparse_starts, Tensor? sparse_columns, Tensor? sparse_places, Tensor? sparse_values, Tensor? bias, "
      "bool int8, bool half) -> ()");
  m.def(
      "experts(Tensor hidden, Tensor ids, Tensor weights, int first, int second, int curve, float limit, float slope, "
      "float offset, int first_expert, bool weigh_inputs) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cpu, CPU, m) {
  m.impl("put_expert", TORCH_BOX(&vllm_cpu::put_expert));
  m.impl("put_int8_expert", TORCH_BOX(&vllm_cpu::put_int8_expert));
  m.impl("put_quantized_expert", TORCH_BOX(&vllm_cpu::put_quantized_expert));
  m.impl("experts", TORCH_BOX(&vllm_cpu::experts));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cpu, CompositeExplicitAutograd, m) {
  m.impl("make_expert_weights", TORCH_BOX(&vllm_cpu::make_expert_weights));
  m.impl("free_expert_weights", TORCH_BOX(&vllm_cpu::free_expert_weights));
}
