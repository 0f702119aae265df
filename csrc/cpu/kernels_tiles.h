// The kernels that the level of matrix tiles has of its own, beside linear. Sizes, strides and trust: as in kernels.h.
#pragma once

#include "kernels.h"

#ifdef VLLM_HAVE_AMX
namespace vllm_cpu {
namespace amx {
void linear_int8(const LinearArgs& args);
void linear_quantized(const LinearArgs& args);
void linear_quantized_int8(const LinearArgs& args);
}  // namespace amx
}  // namespace vllm_cpu
#endif
