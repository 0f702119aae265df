// Products of a quantised weight by dot-product instructions. Each does what linear_quantized does, or nothing, and returns
// false, where the CPU lacks the instructions or x or the weight is not what they multiply.
//
// Include only from kernels/*.cpp.
#pragma once

#include "kernels.h"

namespace vllm_cpu {
namespace VLLM_ISA {

// Rows of bfloat16: see kernels/linear_quantized_pairs.cpp.
bool linear_quantized_pairs(LinearArgs args);

// Rows as bytes: see kernels/linear_quantized_int8.cpp.
bool linear_quantized_digits(LinearArgs args);

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
