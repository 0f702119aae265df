// The kernels of layers that keep a state from token to token, declared as those of kernels.h.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "isa.h"

namespace vllm_cpu {

// Whose state is where: row r has the tokens starts[r] .. starts[r + 1], the last ones of a sequence of lengths[r]. Before
// a sequence's first token its state is zero.
struct StateRows {
  const int64_t* slots;    // [rows], of the pool
  const int32_t* starts;   // [rows + 1]
  const int32_t* lengths;  // [rows]
  int64_t rows;

  bool is_new(int64_t row) const { return lengths[row] == starts[row + 1] - starts[row]; }
};

// See ops/short_conv.py.
struct ShortConvArgs {
  StateRows rows;
  DType dtype;
  const void* x;       // [tokens, channels]
  const void* weight;  // [width, channels]
  const void* bias;    // [channels], or null
  const void* before;  // [tokens, channels], or null
  const void* after;   // [tokens, channels], or null
  void* pool;          // [slots, width - 1, channels]
  void* out;           // [tokens, channels]
  int64_t channels, width, x_stride, before_stride, after_stride, slot_stride;
  bool silu;
};

// See ops/gated_delta_rule.py.
struct DeltaRuleArgs {
  StateRows rows;
  DType dtype;
  const void* qkv;       // [tokens, 2 * key_heads * key_dim + heads * value_dim]
  const void* decay;     // [tokens, heads], or by_channel [tokens, heads * key_dim]
  const void* beta;      // [tokens, heads]
  const float* rate;     // [heads]
  const float* bias;     // as a row of decay
  float* pool;           // [slots, heads, key_dim, value_dim]
  void* out;             // [tokens, heads * value_dim]
  int64_t heads, key_heads, key_dim, value_dim, qkv_stride, decay_stride, beta_stride, slot_stride;
  float beta_scale, bound, eps;
  bool by_channel;
};

// See ops/state_space_scan.py.
struct StateSpaceArgs {
  StateRows rows;
  DType dtype;
  const void* xbc;     // [tokens, heads * head_dim + 2 * groups * state_dim]
  const void* dt;      // [tokens, heads]
  const float* rate;   // [heads]
  const float* bias;   // [heads]
  const float* skip;   // [heads], or null
  float* pool;         // [slots, heads, state_dim, head_dim]
  void* out;           // [tokens, heads * head_dim]
  int64_t heads, groups, head_dim, state_dim, xbc_stride, dt_stride, slot_stride;
  float dt_min, dt_max;
};

// See ops/selective_scan.py.
struct SelectiveScanArgs {
  StateRows rows;
  DType dtype;
  const void* x;       // [tokens, channels]
  const void* dt;      // [tokens, channels]
  const void* b;       // [tokens, groups * state_dim]
  const void* c;       // [tokens, groups * state_dim]
  const void* gate;    // [tokens, channels], or null
  const float* rate;   // [state_dim, channels]
  const float* bias;   // [channels], or null
  const float* skip;   // [channels]
  float* pool;         // [slots, state_dim, channels]
  void* out;           // [tokens, channels]
  int64_t channels, state_dim, groups, x_stride, dt_stride, b_stride, c_stride, gate_stride, slot_stride;
};

// See ops/gated_recurrence.py.
struct GatedRecurrenceArgs {
  StateRows rows;
  DType dtype;
  const void* x;            // [tokens, channels]
  const void* input_gate;   // [tokens, channels]
  const void* kept_gate;    // [tokens, channels]
  const float* input_bias;  // [channels]
  const float* kept_bias;   // [channels]
  const float* rate;        // [channels]
  float* pool;              // [slots, channels]
  void* out;                // [tokens, channels]
  int64_t channels, x_stride, input_stride, kept_stride, slot_stride;
};

// See ops/wkv.py.
struct WkvArgs {
  StateRows rows;
  DType dtype;
  const void* key;     // [tokens, channels]
  const void* value;   // [tokens, channels]
  const void* gate;    // [tokens, channels]
  const float* rate;   // [channels]
  const float* bonus;  // [channels]
  float* pool;         // [slots, 3, channels]
  void* out;           // [tokens, channels]
  int64_t channels, key_stride, value_stride, gate_stride, slot_stride;
};

// See ops/mlstm.py.
struct MlstmArgs {
  StateRows rows;
  DType dtype;
  const void* qkv;    // [tokens, heads * (2 * key_dim + value_dim)]
  const void* gates;  // [tokens, 2 * heads]
  float* pool;        // [slots, heads, key_dim * value_dim + key_dim + 1]
  void* out;          // [tokens, heads * value_dim]
  int64_t heads, key_dim, value_dim, qkv_stride, gates_stride, slot_stride;
  float cap, eps;
};

// See ops/gated_rms_norm.py.
struct GatedNormArgs {
  DType dtype;
  const void* x;       // [tokens, groups * width]
  const void* gate;    // [tokens, groups * width]
  const void* weight;  // [groups * width] or [width]
  void* out;           // [tokens, groups * width]
  int64_t tokens, groups, width, x_stride, gate_stride, weight_stride;
  float eps;
  bool wide_weight, sigmoid, gate_first;
};

}  // namespace vllm_cpu

#define VLLM_DECLARE_STATE_KERNELS(ISA)                    \
  namespace vllm_cpu {                                     \
  namespace ISA {                                          \
  void short_conv(const ShortConvArgs& args);              \
  void gated_delta_rule(const DeltaRuleArgs& args);        \
  void state_space_scan(const StateSpaceArgs& args);       \
  void selective_scan(const SelectiveScanArgs& args);      \
  void gated_recurrence(const GatedRecurrenceArgs& args);  \
  void wkv(const WkvArgs& args);                           \
  void mlstm(const MlstmArgs& args);                       \
  void gated_rms_norm(const GatedNormArgs& args);          \
  }                                                        \
  }
VLLM_FOR_EACH_ISA(VLLM_DECLARE_STATE_KERNELS)
