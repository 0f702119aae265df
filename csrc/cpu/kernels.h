// The kernels of the model's layers, declared in every level's namespace. Sizes and strides count elements; the last
// dimension of every tensor is contiguous. The bindings have checked everything: kernels trust their arguments.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "isa.h"

namespace vllm_cpu {

// x [rows, hidden] -> out [rows, hidden] contiguous.
struct RmsNormArgs {
  DType dtype;
  const void* x;
  void* residual;  // [rows, hidden] to add x to first, or null
  const void* weight;  // [hidden]
  void* out;
  int64_t rows, hidden, x_stride, residual_stride;
  float eps;
};

}  // namespace vllm_cpu

#define VLLM_DECLARE_LAYER_KERNELS(ISA)     \
  namespace vllm_cpu {                      \
  namespace ISA {                           \
  void rms_norm(const RmsNormArgs& args);   \
  }                                         \
  }
VLLM_FOR_EACH_ISA(VLLM_DECLARE_LAYER_KERNELS)
