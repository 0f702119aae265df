// The kernels, declared in every level's namespace. Sizes and strides count elements; the last dimension of every
// tensor is contiguous, and so is what has no stride here. The bindings have checked everything: kernels trust their
// arguments.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "isa.h"
#include "kernels_adapted.h"

namespace vllm_cpu {

struct RmsNormArgs {
  DType dtype;
  const void* x;       // [rows, heads, hidden]
  void* residual;      // [rows, hidden] to add x to first, or null; there is one head then
  const void* weight;  // [hidden], of the dtype or float32
  bool wide_weight;    // it is float32
  void* out;           // [rows, heads, hidden]
  int64_t rows, heads, hidden, x_stride, head_stride, residual_stride;
  float eps;
};

// The numbers of ops/gate_and_mul.py.
enum class Activation : int8_t { silu, gelu_tanh, gelu };

struct GateAndMulArgs {
  DType dtype;
  Activation activation;
  const void* x;  // [rows, 2 * width]
  void* out;      // [rows, width]
  int64_t rows, width, x_stride;
};

struct ElementwiseArgs {
  DType dtype;
  const void* x;  // [count]
  const void* y;  // [count], of `added`
  void* out;      // [count]
  int64_t count;
  float factor;  // of `scaled`
};

// Heads of queries or keys: [tokens, heads, head_dim].
struct Heads {
  void* data;
  int64_t num_heads, token_stride, head_stride;
};

struct RotaryArgs {
  DType dtype;
  const int64_t* positions_int64;  // [tokens], or null
  const int32_t* positions_int32;  // [tokens], used when the other is null
  Heads q, k;
  const float* cos_sin;  // [max positions, rot_dim]
  int64_t tokens, rot_dim, max_positions;
};

// Caches are [num_blocks, num_kv_heads, head_dim * block_size]; see ops/kv_cache.py for a cell's layout.
struct CacheArgs {
  DType dtype;
  CacheDType cache_dtype;
  float k_scale, v_scale;  // that 8-bit floats are multiplied by; else unused
  Heads k, v;
  void* k_cache;
  void* v_cache;
  const int64_t* slots_int64;  // [tokens], or null
  const int32_t* slots_int32;
  int64_t tokens, head_dim, block_size, num_blocks;
};

struct AttentionArgs {
  DType dtype;
  CacheDType cache_dtype;
  Heads q;
  const void* k_cache;
  const void* v_cache;
  void* out;  // [tokens, heads, head_dim]
  const int32_t* block_table;      // [requests, table_stride]
  const int32_t* query_start_loc;  // [requests + 1]
  const int32_t* seq_lens;         // [requests]
  int64_t requests, table_stride, num_kv_heads, head_dim, block_size;
  int64_t value_dim;  // of values and results, where that is not head_dim
  float scale;    // of the scores, of keys as they are cached
  float v_scale;  // of values as they are cached
  int64_t window;             // tokens that a query sees, itself included; 0: all before it
  bool in_chunks;             // it sees those from the last multiple of `window` on in place of these
  float softcap;              // 0: none
  const float* alibi_slopes;  // [heads], or null
  const float* sinks;         // [heads], or null
  bool dots;  // keys are bfloat16, of even head_dim, and multiplied by dot products
};

// The cache, k_cache, is [num_blocks, block_size, head_dim], rows whose first value_dim values are latents. num_kv_heads
// are groups of query heads that attend apart.
struct LatentAttentionArgs : AttentionArgs {
  Heads q_rope;  // of the other head_dim - value_dim values; q is of the latents
};

struct WriteLatentArgs {
  DType dtype;
  CacheDType cache_dtype;
  float scale;  // that 8-bit floats are multiplied by; else unused
  const void* latent;  // [tokens, latent_dim]
  const void* rope;    // [tokens, rope_dim]
  void* cache;         // [num_blocks, block_size, latent_dim + rope_dim]
  const int64_t* slots_int64;  // [tokens], or null
  const int32_t* slots_int32;
  int64_t tokens, latent_dim, rope_dim, latent_stride, rope_stride;
};

struct PackLinearArgs {
  DType dtype;
  const void* weight;  // [columns, inner]
  void* packed;        // [ceil(columns / 32), inner, 32], or, in pairs, [ceil(columns / 32), inner / 2, 32, 2]
  int64_t columns, inner, weight_stride;
  bool pairs;
};

struct PackInt8Args {
  DType dtype;
  const void* weight;  // [columns, inner]
  uint8_t* panels;     // as check_int8_weight asks
  int64_t columns, inner, weight_stride;
};

struct PanelRowsArgs {
  DType dtype, out_dtype;
  const void* packed;   // [panels, inner, 32], or, in pairs, [panels, inner / 2, 32, 2]
  const int64_t* rows;  // [count], or null
  const int32_t* narrow_rows;
  void* out;  // [count, inner]
  int64_t inner, count;
  bool pairs;
};

// See ops/block_codes.py.
struct BitField {
  int64_t first, count, at, width, shift, per_byte, to;
};

constexpr int64_t kMaxBlockCodes = 256;

struct PackCodesArgs {
  const int64_t* addresses;  // [rows]: where each row's blocks begin
  uint8_t* panels;           // [ceil(rows / 32), panel_bytes], codes first
  int64_t rows, panel_bytes, bits;
  int64_t num_blocks, num_codes, num_bytes;  // of a row; of a block
  int flipped;                               // bits of all codes
  const BitField* fields;
  int64_t num_fields;
};

// How the numbers of a quantised weight are stored.
enum class Stored : int8_t { none, f32, f16, bf16, u8, i8, e4m3, e8m0, u4_low, u4_high };

// The meaning of a quantised weight's codes: themselves (of 8 bits: less 128), a table's values, those of a table for each
// column, or 8-bit floats.
enum class Values : int8_t { integers, table, tables, e4m3, e5m2 };

// Where in a panel of a quantised weight each part begins, and its size in bytes.
struct PanelLayout {
  int64_t scales, offsets, zeros, super_scales, super_offsets, tables, size;
};

// How a quantised weight is packed: see quantized_panels.h.
struct Quantized {
  PanelLayout at;
  int64_t bits, group_size, groups, supers;
  Values values;
  Stored scales, offsets, zeros, super_scales, super_offsets;
  float zero;                   // subtracted from all values
  bool zero_in_codes;           // a product's own affair: codes are multiplied less zero already
  const float* table;           // [16], repeated if it is shorter, less `zero`; or null
  const int64_t* order;         // [inner]: where in x a column of codes finds its factor, or null
  const int32_t* sparse_starts;  // [columns + 1], or null: further values to add
  const int32_t* sparse_columns;
  const int32_t* sparse_places;  // where a packed row has x of that column
  const float* sparse_values;
};

struct QuantizedRowsArgs {
  DType dtype;  // of the result
  Quantized quant;
  const void* panels;
  const int64_t* rows;  // [count], or null
  const int32_t* narrow_rows;
  void* out;  // [count, inner]
  int64_t inner, count;
};

struct LinearArgs {
  DType dtype;         // of x, the bias and what is not float32 of the result
  DType weight_dtype;  // of plain panels: dtype, or one of 16 bits
  const void* x;       // [rows, inner]
  const void* weight;  // packed; scaled, in float16, when there are scales, and then dtype is bf16
  const float* scales;  // [columns up to a whole panel], to multiply the products with, or null
  const void* bias;    // [columns], or null
  void* out;           // [rows, out_columns], float32 when float_out
  int64_t rows, columns, inner, x_stride, out_columns;
  int64_t out_stride;
  bool float_out;
  bool pairs;  // how the weight is packed
  Quantized quant;  // of linear_quantized
  float* prepared;  // memory of the product's own for the panels that it is at
  // silu(first half) * second half of each panel: 16 columns of the result.
  bool gated;
  bool alone;              // computed by the calling thread: a part of a larger work
  const int32_t* row_ids;  // [rows]: which rows of x are multiplied; or null: all
  // The product's own affair: the result is written past the caches.
  bool streams;
  // Likewise: which rows [rows] it leaves to another product (see left_rows.h), and where to keep these if x is normed.
  uint8_t* left;
  BF16* left_rows;  // [rows, inner], or null
  // Multiplied are not the rows of x but those of norm(residual += x) * norm_weight, in x's dtype; null: those of x.
  void* residual;  // [rows, inner]
  const void* norm_weight;  // [inner], in x's dtype or float32
  bool wide_norm_weight;    // it is float32
  int64_t residual_stride;
  float eps;
  AdaptedArgs adapted;
};

// A product for each head.
struct HeadLinearArgs {
  LinearArgs first;  // of head 0
  void (*multiply)(const LinearArgs&);
  int64_t heads, x_bytes, weight_bytes, out_bytes;  // from a head to the next
};

struct Logits {
  DType dtype;
  const void* data;  // [rows, vocab]
  int64_t rows, vocab, stride;
};

struct TokenReadingsArgs {
  Logits logits;
  const int32_t* token_ids;  // [rows, width]
  int64_t width, ids_stride;
  const int32_t* num_token_ids;  // [rows], or null: all of them
  int32_t* columns;              // [rows, width], or null: token_ids, each row's first replaced by its argmax
  float* chosen;                 // [rows, width]
  float* logprobs;               // [rows, width]
  int32_t* ranks;                // [rows, width]
  float* lse;                    // [rows]
  int32_t* argmax;               // [rows]
  float* max;                    // [rows]
  float* entropy;                // [rows], or null: not asked for
  int32_t* table;                // [rows, 4 * width + 2], or null: all of it side by side, floats by their bits
};

struct CountAboveArgs {
  Logits logits;
  const float* values;  // [rows, width]
  int64_t width, values_stride;
  const int32_t* num_values;  // [rows], or null: all of them
  int32_t* counts;            // [rows, width]
};

struct TopkArgs {
  Logits logits;
  int64_t k;
  float* values;  // [rows, k]
  int32_t* ids;   // [rows, k]
};

struct GumbelArgs {
  Logits logits;              // float32
  const float* temperature;   // [slots]
  const int64_t* seeds;       // [slots]
  const int64_t* positions;   // [rows]
  const int32_t* slots;       // [rows]
  int64_t first_id;           // the token id of column 0
  int32_t* sampled;           // [rows]
  float* scores;              // [rows]
};

struct TopPArgs {
  float* logits;       // [rows, vocab]
  int64_t rows, vocab, stride;
  const float* top_p;  // [rows]
};

}  // namespace vllm_cpu

#define VLLM_DECLARE_KERNELS(ISA)                     \
  namespace vllm_cpu {                                \
  namespace ISA {                                     \
  void rms_norm(const RmsNormArgs& args);             \
  void gate_and_mul(const GateAndMulArgs& args);      \
  void scaled(const ElementwiseArgs& args);           \
  void added(const ElementwiseArgs& args);            \
  void rotary(const RotaryArgs& args);                \
  void write_cache(const CacheArgs& args);            \
  void rotary_and_cache(const RotaryArgs& rotary,     \
                        const CacheArgs& cache);      \
  void paged_attention(const AttentionArgs& args);    \
  void latent_attention(                              \
      const LatentAttentionArgs& args);               \
  void write_latent(const WriteLatentArgs& args);     \
  void head_linear(const HeadLinearArgs& args);       \
  void pack_linear(const PackLinearArgs& args);       \
  void pack_int8(const PackInt8Args& args);           \
  void panel_rows(const PanelRowsArgs& args);         \
  void pack_codes(const PackCodesArgs& args);         \
  void linear(const LinearArgs& args);                \
  void linear_int8(const LinearArgs& args);           \
  void linear_quantized(const LinearArgs& args);      \
  void linear_quantized_half(const LinearArgs& args); \
  void linear_quantized_int8(const LinearArgs& args); \
  void quantized_rows(const QuantizedRowsArgs& args); \
  void token_readings(const TokenReadingsArgs& args); \
  void count_above(const CountAboveArgs& args);       \
  void topk(const TopkArgs& args);                    \
  void gumbel_sample(const GumbelArgs& args);         \
  void top_p(const TopPArgs& args);                   \
  }                                                   \
  }
VLLM_FOR_EACH_ISA(VLLM_DECLARE_KERNELS)

#ifdef VLLM_HAVE_AVX512_VNNI
namespace vllm_cpu {
namespace avx512_vnni {
void linear_int8(const LinearArgs& args);
void linear_quantized_int8(const LinearArgs& args);
}  // namespace avx512_vnni
}  // namespace vllm_cpu
#endif

#ifdef VLLM_HAVE_AVX512_FP16
namespace vllm_cpu {
namespace avx512_fp16 {
void linear(const LinearArgs& args);
void linear_quantized_half(const LinearArgs& args);
}  // namespace avx512_fp16
}  // namespace vllm_cpu
#endif

#ifdef VLLM_HAVE_AMX
namespace vllm_cpu {
namespace amx {
void linear(const LinearArgs& args);
void linear_int8(const LinearArgs& args);
void linear_quantized(const LinearArgs& args);
void linear_quantized_int8(const LinearArgs& args);
void paged_attention(const AttentionArgs& args);
void latent_attention(const LatentAttentionArgs& args);
}  // namespace amx
}  // namespace vllm_cpu
#endif
