// Products of a quantised weight by dot products of bytes: see kernels/linear_quantized_int8.cpp.
//
// Include only from kernels/*.cpp.
#pragma once

#include "kernels.h"

namespace vllm_cpu {
namespace VLLM_ISA {

// As linear_quantized, if bytes are multiplied faster than floats and both x and the weight can be bytes; else nothing, and
// false.
bool linear_quantized_digits(LinearArgs args);

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
