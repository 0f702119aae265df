// Kernels that read and sample from logits. Each file of csrc/cpu/kernels is compiled once an instruction set,
// in a namespace of that set's name; this header declares one set's entry points.
#pragma once

#include <cstdint>

namespace vllm_cpu {

enum class LogitsType : int { kFloat32, kBFloat16, kFloat16 };

// R rows of V logits; `row_stride` is in elements.
struct LogitsView {
  const void* data;
  LogitsType type;
  int64_t num_rows;
  int64_t vocab_size;
  int64_t row_stride;
};

struct TokenReadingsArgs {
  LogitsView logits;
  const int32_t* token_ids;  // [R, W]
  int64_t token_ids_stride;
  int64_t width;                 // W
  const int32_t* num_token_ids;  // [R], or null: all W
  float* chosen;                 // out [R, W]
  int32_t* ranks;                // out [R, W]
  float* lse;                    // out [R]
  int32_t* argmax;               // out [R]
  float* max;                    // out [R]
};

struct GumbelArgs {
  LogitsView logits;          // float32
  const float* temperature;   // [S]
  const int64_t* seeds;       // [S]
  const int64_t* positions;   // [R]
  const int32_t* idx_mapping; // [R]
  int32_t* token_ids;         // out [R]
};

#define VLLM_DECLARE_SAMPLING_KERNELS(isa)                                                  \
  namespace isa {                                                                           \
  void token_readings(const TokenReadingsArgs& args);                                       \
  void topk(const LogitsView& logits, int64_t k, float* values, int32_t* ids);              \
  void gumbel_sample(const GumbelArgs& args);                                               \
  }

}  // namespace vllm_cpu
