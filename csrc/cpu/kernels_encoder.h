// The kernels of encoders' layers, declared as those of kernels.h. Decoders have some of these layers, too.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "isa.h"
#include "kernels.h"

namespace vllm_cpu {

struct PackedAttentionArgs {
  DType dtype;
  Heads q, k, v;
  void* out;              // [tokens, heads of q, head_dim]
  const int32_t* starts;  // [texts + 1]: where each text's tokens begin, and the last one's end
  const int32_t* seen;    // [texts]: of how many of each text's first keys, or null: of all
  int64_t texts, head_dim;
  float scale;
  int64_t left, right;        // tokens that a query sees before and after itself
  bool windowed;              // whether these are bounds
  float softcap;              // 0: none
  const float* alibi_slopes;  // [heads of q], or null
  bool dots;  // values are bfloat16, head_dim is even, and keys are multiplied by dot products
};

struct LayerNormArgs {
  DType dtype;
  const void* x;       // [rows, heads, hidden]
  void* residual;      // [rows, hidden] to add x to first, or null; there is one head then
  const void* weight;  // [hidden], or [heads, hidden], or null
  const void* bias;    // as weight
  bool wide_weight;    // weight and bias are float32, not of dtype
  void* out;           // [rows, heads, hidden]
  int64_t rows, heads, hidden, x_stride, head_stride, residual_stride;
  int64_t weight_stride;  // from head to head
  float eps;
};

// The numbers of ops/activation.py.
enum class Curve : int8_t { silu, gelu_tanh, gelu, relu, relu2, quick_gelu, sigmoid, tanh, mish };

struct ActivationArgs {
  DType dtype;
  Curve curve;
  void* x;  // [count], changed in place
  int64_t count;
};

}  // namespace vllm_cpu

#define VLLM_DECLARE_ENCODER_KERNELS(ISA)                 \
  namespace vllm_cpu {                                    \
  namespace ISA {                                         \
  void packed_attention(const PackedAttentionArgs& args); \
  void layer_norm(const LayerNormArgs& args);             \
  void activation(const ActivationArgs& args);            \
  }                                                       \
  }
VLLM_FOR_EACH_ISA(VLLM_DECLARE_ENCODER_KERNELS)

#ifdef VLLM_HAVE_AMX
namespace vllm_cpu {
namespace amx {
void packed_attention(const PackedAttentionArgs& args);
}  // namespace amx
}  // namespace vllm_cpu
#endif
