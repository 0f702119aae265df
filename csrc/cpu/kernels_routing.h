// The kernels around mixtures of experts, declared as those of kernels.h.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "isa.h"

namespace vllm_cpu {

// See ops/choose_experts.py.
struct ChooseExpertsArgs {
  const float* logits;      // [rows, experts]
  const float* correction;  // [experts], or null
  int32_t* ids;             // [rows, chosen]
  float* weights;           // [rows, chosen]
  int64_t rows, experts, chosen, groups, groups_kept, group_best;
  bool sigmoid, compares_logits, renormalised;
  float least_sum, added_to_sum, scale, softcap, mixes_within;
};

struct AddedGatedArgs {
  DType dtype;
  const void* x;      // [rows, width]
  const void* y;      // [rows, width]
  const float* gate;  // [rows]
  void* out;          // [rows, width]
  int64_t rows, width;
};

struct GatedArgs {
  DType dtype;
  const void* x;     // [rows, gates, width]
  const void* gate;  // [rows, gates]
  void* out;         // [rows, gates, width]
  int64_t rows, gates, width;
  bool softplus;  // else a sigmoid
};

struct WidenedArgs {
  DType dtype;
  const void* x;  // [rows, width]
  float* out;     // [rows, width]
  int64_t rows, width, x_stride;
};

}  // namespace vllm_cpu

#define VLLM_DECLARE_ROUTING_KERNELS(ISA)              \
  namespace vllm_cpu {                                 \
  namespace ISA {                                      \
  void choose_experts(const ChooseExpertsArgs& args);  \
  void added_gated(const AddedGatedArgs& args);        \
  void gated(const GatedArgs& args);                   \
  void widened(const WidenedArgs& args);               \
  }                                                    \
  }
VLLM_FOR_EACH_ISA(VLLM_DECLARE_ROUTING_KERNELS)
