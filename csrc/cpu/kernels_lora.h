// The kernel of adapters' thin products, declared as those of kernels.h.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "isa.h"

namespace vllm_cpu {

// Ranks that lie side by side in `a`.
constexpr int64_t kRankGroup = 16;

// See ops/add_lora.py.
struct AddLoraArgs {
  DType dtype, out_dtype;  // of x, a and b; of out: the same or float32
  const void* x;           // [rows, inner]; null where there are ids
  const int64_t* ids_int64;  // [rows], or null
  const int32_t* ids_int32;  // [rows], or null
  void* out;               // [rows, columns]
  const int32_t* order;    // [rows], those of adapter i from starts[i] on
  const int32_t* starts;   // [adapters + 1]
  const void* a;           // [adapters, groups, inner, kRankGroup]
  const void* b;           // [adapters, groups / parts * kRankGroup, columns]
  const int32_t* ranks;    // [adapters, parts]
  const float* scales;     // [adapters, parts]
  const int32_t* ends;     // [parts], the columns where they end
  const float* gain;       // [adapters, columns], or null
  const float* shift;      // [adapters, columns], or null
  int64_t rows, inner, columns, adapters, groups, parts, x_stride, out_stride;
};

}  // namespace vllm_cpu

#define VLLM_DECLARE_LORA(ISA)           \
  namespace vllm_cpu {                   \
  namespace ISA {                        \
  void add_lora(const AddLoraArgs& args); \
  }                                      \
  }
VLLM_FOR_EACH_ISA(VLLM_DECLARE_LORA)
