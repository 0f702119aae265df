// The operators that hold the adapters of products with packed weights.
#include "adapted_weights.h"

namespace vllm_cpu {
namespace {

const void* checked(AdaptedWeights& own, const Tensor& t, const char* name, ScalarType dtype,
                    std::initializer_list<int64_t> sizes) {
  check_shape(t, name, sizes);
  check_contiguous(t, name);
  STD_TORCH_CHECK(t.scalar_type() == dtype, name, " has another dtype than it must have");
  own.kept.push_back(t);
  return t.data_ptr();
}

// See ops/adapted_linear.py; `inner`: the product's.
int64_t make_adapted_weights(Tensor a, Tensor b, Tensor ranks, Tensor scales, Tensor first_blocks, Tensor block_parts,
                             std::optional<Tensor> gain, std::optional<Tensor> shift, int64_t inner) {
  auto own = std::make_shared<AdaptedWeights>();
  AdaptedArgs& args = own->args;
  const ScalarType dtype = a.scalar_type();
  own->dtype = dtype_of(a, "a");
  own->inner = inner;
  check_shape(ranks, "ranks", {-1, -1});
  args.adapters = ranks.size(0);
  args.parts = ranks.size(1);
  args.ranks = static_cast<const int32_t*>(checked(*own, ranks, "ranks", ScalarType::Int, {args.adapters, args.parts}));
  args.scales = static_cast<const float*>(checked(*own, scales, "scales", ScalarType::Float, {args.adapters, args.parts}));
  const int64_t side_by_side = own->dtype == DType::bf16 ? 2 : 1;
  STD_TORCH_CHECK(a.dim() == (side_by_side == 2 ? 5 : 4), "a must have another number of dimensions");
  args.groups = a.size(1);
  STD_TORCH_CHECK(args.parts > 0 && args.groups % args.parts == 0, "a must have groups for each of ", args.parts, " parts");
  const int64_t steps = (inner + side_by_side - 1) / side_by_side;
  args.part_ranks = args.groups / args.parts * kRankGroup;
  const int64_t rank_steps = args.part_ranks / side_by_side;
  args.first_blocks =
      static_cast<const int32_t*>(checked(*own, first_blocks, "first_blocks", ScalarType::Int, {-1}));
  const int64_t halves = first_blocks.size(0) - 1, blocks = block_parts.size(0);
  STD_TORCH_CHECK(halves > 0 && halves % 2 == 0, "first_blocks must be of whole panels");
  own->columns = halves * kBlockColumns;
  args.block_parts = static_cast<const int32_t*>(checked(*own, block_parts, "block_parts", ScalarType::Int, {-1}));
  for (int64_t i = 0; i < halves; ++i) {
    STD_TORCH_CHECK(args.first_blocks[i] <= args.first_blocks[i + 1], "first_blocks must not fall");
  }
  STD_TORCH_CHECK(args.first_blocks[0] == 0 && args.first_blocks[halves] == blocks, "first_blocks must be of all blocks");
  for (int64_t i = 0; i < blocks; ++i) {
    STD_TORCH_CHECK(args.block_parts[i] >= 0 && args.block_parts[i] < args.parts, "block_parts must be in [0, parts)");
  }
  if (side_by_side == 2) {
    args.a = checked(*own, a, "a", dtype, {args.adapters, args.groups, steps, kRankGroup, 2});
    args.b = checked(*own, b, "b", dtype, {blocks, args.adapters, rank_steps, kBlockColumns, 2});
  } else {
    args.a = checked(*own, a, "a", dtype, {args.adapters, args.groups, steps, kRankGroup});
    args.b = checked(*own, b, "b", dtype, {blocks, args.adapters, rank_steps, kBlockColumns});
  }
  STD_TORCH_CHECK(gain.has_value() == shift.has_value(), "gain and shift belong together");
  if (gain.has_value()) {
    args.gain = static_cast<const float*>(checked(*own, *gain, "gain", ScalarType::Float, {args.adapters, own->columns}));
    args.shift = static_cast<const float*>(checked(*own, *shift, "shift", ScalarType::Float, {args.adapters, own->columns}));
  }
  return reinterpret_cast<int64_t>(new std::shared_ptr<AdaptedWeights>(std::move(own)));
}

void free_adapted_weights(int64_t handle) { delete reinterpret_cast<std::shared_ptr<AdaptedWeights>*>(handle); }

}  // namespace
}  // namespace vllm_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cpu, m) {
  m.def(
      "make_adapted_weights(Tensor a, Tensor b, Tensor ranks, Tensor scales, Tensor first_blocks, Tensor block_parts, "
      "Tensor? gain, Tensor? shift, int inner) -> int");
  m.def("free_adapted_weights(int handle) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cpu, CompositeExplicitAutograd, m) {
  m.impl("make_adapted_weights", TORCH_BOX(&vllm_cpu::make_adapted_weights));
  m.impl("free_adapted_weights", TORCH_BOX(&vllm_cpu::free_adapted_weights));
}
