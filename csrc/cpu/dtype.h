// Element types as plain data, the same for every instruction-set level.
#pragma once

#include <cstdint>

namespace vllm_cpu {

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
struct E4M3 {
  uint8_t bits;
};
struct E5M2 {
  uint8_t bits;
};
static_assert(sizeof(BF16) == 2 && sizeof(F16) == 2, "halves must have no padding");
static_assert(sizeof(E4M3) == 1 && sizeof(E5M2) == 1, "8-bit floats must have no padding");

enum class DType : int { f32, bf16, f16 };

// The dtype of the key/value cache: that of the keys and values, or 8-bit floats.
enum class CacheDType : int { same, e4m3, e5m2 };

}  // namespace vllm_cpu

// Runs BODY with `scalar_t` the C++ type of a DType.
#define VLLM_DISPATCH_DTYPE(dtype, ...)   \
  switch (dtype) {                        \
    case ::vllm_cpu::DType::f32: {        \
      using scalar_t = float;             \
      __VA_ARGS__;                        \
      break;                              \
    }                                     \
    case ::vllm_cpu::DType::bf16: {       \
      using scalar_t = ::vllm_cpu::BF16;  \
      __VA_ARGS__;                        \
      break;                              \
    }                                     \
    case ::vllm_cpu::DType::f16: {        \
      using scalar_t = ::vllm_cpu::F16;   \
      __VA_ARGS__;                        \
      break;                              \
    }                                     \
  }
