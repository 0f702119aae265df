// The operators around mixtures of experts.
#include <optional>
#include <tuple>

#include "bindings.h"
#include "kernels_routing.h"
#include "recording.h"

namespace vllm_cpu {
namespace {

Tensor new_typed(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType dtype, int64_t size) {
  const Recording* recording = Recording::current();
  return recording ? recording->make_tensor(sizes, dtype, size) : torch::stable::new_empty(like, sizes, dtype);
}

std::tuple<Tensor, Tensor> choose_experts(Tensor logits, std::optional<Tensor> correction, int64_t chosen,
                                          int64_t scores, bool compares_logits, int64_t groups, int64_t groups_kept,
                                          int64_t group_best, bool renormalised, double least_sum, double added_to_sum,
                                          double scale, double softcap, double mixes_within) {
  check_shape(logits, "logits", {-1, -1});
  check_contiguous(logits, "logits");
  check_dtype(logits, "logits", ScalarType::Float, "float32");
  ChooseExpertsArgs args{};
  args.rows = logits.size(0);
  args.experts = logits.size(1);
  STD_TORCH_CHECK(chosen > 0 && chosen <= args.experts, "chosen must be in [1, ", args.experts, "], got ", chosen);
  STD_TORCH_CHECK(mixes_within <= 0 || (chosen == 2 && args.experts >= 2), "two experts are mixed, got chosen=", chosen);
  STD_TORCH_CHECK(groups > 0 && args.experts % groups == 0, "groups must divide ", args.experts, ", got ", groups);
  STD_TORCH_CHECK(groups_kept > 0 && groups_kept <= groups, "groups_kept must be in [1, ", groups, "], got ",
                  groups_kept);
  STD_TORCH_CHECK(group_best > 0, "group_best must be positive, got ", group_best);
  STD_TORCH_CHECK(scores == 0 || scores == 1, "scores must be the number of one, got ", scores);
  if (correction.has_value()) {
    check_shape(*correction, "correction", {args.experts});
    check_contiguous(*correction, "correction");
    check_dtype(*correction, "correction", ScalarType::Float, "float32");
    args.correction = static_cast<const float*>(correction->data_ptr());
  }
  args.chosen = chosen;
  args.groups = groups;
  args.groups_kept = groups_kept;
  args.group_best = group_best;
  args.sigmoid = scores == 1;
  args.compares_logits = compares_logits;
  args.renormalised = renormalised;
  args.least_sum = static_cast<float>(least_sum);
  args.added_to_sum = static_cast<float>(added_to_sum);
  args.scale = static_cast<float>(scale);
  args.softcap = static_cast<float>(softcap);
  args.mixes_within = static_cast<float>(mixes_within);
  Tensor ids = new_typed(logits, {args.rows, chosen}, ScalarType::Int, sizeof(int32_t));
  Tensor weights = new_result(logits, {args.rows, chosen});
  args.logits = static_cast<const float*>(logits.data_ptr());
  args.ids = static_cast<int32_t*>(ids.data_ptr());
  args.weights = static_cast<float*>(weights.data_ptr());
  launch([args, kernel = VLLM_KERNEL(choose_experts)] { kernel(args); }, logits, correction, ids, weights);
  return {ids, weights};
}

Tensor added_gated(Tensor x, Tensor y, Tensor gate) {
  check_shape(x, "x", {-1, -1});
  check_shape(y, "y", {x.size(0), x.size(1)});
  check_shape(gate, "gate", {x.size(0), 1});
  check_contiguous(x, "x");
  check_contiguous(y, "y");
  check_contiguous(gate, "gate");
  check_same_dtype(y, "y", x, "x");
  check_dtype(gate, "gate", ScalarType::Float, "float32");
  Tensor out = new_result(x, x.sizes());
  AddedGatedArgs args{};
  args.dtype = dtype_of(x, "x");
  args.x = x.data_ptr();
  args.y = y.data_ptr();
  args.gate = static_cast<const float*>(gate.data_ptr());
  args.out = out.data_ptr();
  args.rows = x.size(0);
  args.width = x.size(1);
  launch([args, kernel = VLLM_KERNEL(added_gated)] { kernel(args); }, x, y, gate, out);
  return out;
}

Tensor gated(Tensor x, Tensor gate, bool softplus) {
  check_shape(x, "x", {-1, -1});
  check_shape(gate, "gate", {x.size(0), -1});
  check_contiguous(x, "x");
  check_contiguous(gate, "gate");
  check_same_dtype(gate, "gate", x, "x");
  GatedArgs args{};
  args.gates = gate.size(1);
  STD_TORCH_CHECK(args.gates > 0 && x.size(1) % args.gates == 0, "gate must have a divisor of ", x.size(1),
                  " columns, got ", args.gates);
  Tensor out = new_result(x, x.sizes());
  args.dtype = dtype_of(x, "x");
  args.x = x.data_ptr();
  args.gate = gate.data_ptr();
  args.out = out.data_ptr();
  args.rows = x.size(0);
  args.width = x.size(1) / args.gates;
  args.softplus = softplus;
  launch([args, kernel = VLLM_KERNEL(gated)] { kernel(args); }, x, gate, out);
  return out;
}

Tensor widened(Tensor x) {
  check_shape(x, "x", {-1, -1});
  check_last_contiguous(x, "x");
  Tensor out = new_typed(x, x.sizes(), ScalarType::Float, sizeof(float));
  WidenedArgs args{};
  args.dtype = dtype_of(x, "x");
  args.x = x.data_ptr();
  args.out = static_cast<float*>(out.data_ptr());
  args.rows = x.size(0);
  args.width = x.size(1);
  args.x_stride = x.stride(0);
  launch([args, kernel = VLLM_KERNEL(widened)] { kernel(args); }, x, out);
  return out;
}

}  // namespace
}  // namespace vllm_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cpu, m) {
  m.def(
      "choose_experts(Tensor logits, Tensor? correction, int chosen, int scores, bool compares_logits, int groups, "
      "int groups_kept, int group_best, bool renormalised, float least_sum, float added_to_sum, float scale, "
      "float softcap, float mixes_within) -> (Tensor, Tensor)");
  m.def("added_gated(Tensor x, Tensor y, Tensor gate) -> Tensor");
  m.def("gated(Tensor x, Tensor gate, bool softplus) -> Tensor");
  m.def("widened(Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cpu, CPU, m) {
  m.impl("choose_experts", TORCH_BOX(&vllm_cpu::choose_experts));
  m.impl("added_gated", TORCH_BOX(&vllm_cpu::added_gated));
  m.impl("gated", TORCH_BOX(&vllm_cpu::gated));
  m.impl("widened", TORCH_BOX(&vllm_cpu::widened));
}
