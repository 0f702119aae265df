// The kernel of mixtures of experts, declared as those of kernels.h.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "isa.h"
#include "kernels.h"
#include "kernels_encoder.h"

namespace vllm_cpu {

// Which kernel multiplies with an expert's weight.
enum class ExpertKind : int8_t { none, plain, int8, quantized, quantized_half, quantized_int8 };
constexpr int kExpertKinds = 6;

struct ExpertProduct {
  ExpertKind kind;
  LinearArgs args;      // the weight, and what belongs to it: neither rows nor a result
  int64_t panel_bytes;  // from one panel of the weight to the next
};

struct ExpertsArgs {
  DType dtype;
  const void* hidden;        // [tokens, width]
  const int64_t* ids_int64;  // [tokens, top_k], or null
  const int32_t* ids_int32;  // [tokens, top_k], used when the other is null
  const float* weights;      // [tokens, top_k]
  int64_t tokens, width, hidden_stride, top_k;
  int64_t first_expert, num_experts;  // those of this rank
  const ExpertProduct* first;   // [num_experts], of `inner` results, or with gates, 16 of them and 16 others a panel
  const ExpertProduct* second;  // [num_experts], of `width` results
  int64_t inner;
  void (*kernels[kExpertKinds])(const LinearArgs&);  // by kind
  // Operations on the first product's results: see ops/experts.py.
  bool gated;
  Curve curve;
  float limit, slope, offset;  // limit: infinity for none
  bool weigh_inputs;  // else results
  void* out;          // [tokens, width]
};

}  // namespace vllm_cpu

#define VLLM_DECLARE_EXPERTS(ISA)        \
  namespace vllm_cpu {                   \
  namespace ISA {                        \
  void experts(const ExpertsArgs& args); \
  }                                      \
  }
VLLM_FOR_EACH_ISA(VLLM_DECLARE_EXPERTS)
