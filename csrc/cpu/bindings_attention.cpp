// The operators of the paged key/value cache, and of rotation before it. A cell's layout is ops/kv_cache.py's.
#include <optional>

#include "bindings.h"
#include "kernels.h"
#include "recording.h"

namespace vllm_cpu {
namespace {

CacheDType cache_dtype_of(const Tensor& cache, const char* name, const Tensor& like) {
  if (cache.scalar_type() == ScalarType::Float8_e4m3fn) return CacheDType::e4m3;
  if (cache.scalar_type() == ScalarType::Float8_e5m2) return CacheDType::e5m2;
  check_same_dtype(cache, name, like, "q and k, or be float8_e4m3fn or float8_e5m2");
  return CacheDType::same;
}

float scale_of(double scale, const char* name, CacheDType dtype) {
  STD_TORCH_CHECK(scale > 0 && (scale == 1 || dtype != CacheDType::same), name,
                  " must be positive, and 1 for a cache that is not of 8-bit floats, got ", scale);
  return static_cast<float>(scale);
}

// Checks a pair of caches for keys of `head_dim`; the block size.
int64_t check_caches(const Tensor& k_cache, const Tensor& v_cache, int64_t head_dim) {
  check_shape(k_cache, "k_cache", {-1, -1, -1});
  check_shape(v_cache, "v_cache", {k_cache.size(0), k_cache.size(1), k_cache.size(2)});
  check_contiguous(k_cache, "k_cache");
  check_contiguous(v_cache, "v_cache");
  check_same_dtype(v_cache, "v_cache", k_cache, "k_cache");
  STD_TORCH_CHECK(head_dim > 0 && k_cache.size(2) % head_dim == 0 && k_cache.size(2) > 0,
                  "k_cache must have cells of a multiple of ", head_dim, " values, got ", k_cache.size(2));
  return k_cache.size(2) / head_dim;
}

CacheArgs cache_args(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                     const Tensor& slot_mapping, double k_scale, double v_scale) {
  CacheArgs args{};
  args.dtype = dtype_of(k, "k");
  check_same_dtype(v, "v", k, "k");
  args.k = heads_of(k, "k");
  args.v = heads_of(v, "v");
  args.tokens = k.size(0);
  args.head_dim = k.size(2);
  check_shape(v, "v", {args.tokens, k.size(1), k.size(2)});
  args.block_size = check_caches(k_cache, v_cache, args.head_dim);
  args.cache_dtype = cache_dtype_of(k_cache, "k_cache", k);
  args.k_scale = scale_of(k_scale, "k_scale", args.cache_dtype);
  args.v_scale = scale_of(v_scale, "v_scale", args.cache_dtype);
  args.num_blocks = k_cache.size(0);
  check_shape(k_cache, "k_cache", {-1, k.size(1), -1});
  read_integers(slot_mapping, "slot_mapping", args.tokens, &args.slots_int64, &args.slots_int32);
  args.k_cache = k_cache.data_ptr();
  args.v_cache = v_cache.data_ptr();
  return args;
}

void reshape_and_cache_(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slot_mapping, double k_scale,
                        double v_scale) {
  const CacheArgs args = cache_args(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale);
  launch([args, kernel = VLLM_KERNEL(write_cache)] { kernel(args); }, k, v, k_cache, v_cache, slot_mapping);
}

RotaryArgs rotary_args(const Tensor& positions, const Tensor& q, const Tensor& k, const Tensor& cos_sin_cache) {
  RotaryArgs args{};
  args.dtype = dtype_of(q, "q");
  check_same_dtype(k, "k", q, "q");
  args.q = heads_of(q, "q");
  args.k = heads_of(k, "k");
  args.tokens = q.size(0);
  check_shape(k, "k", {args.tokens, -1, q.size(2)});
  read_integers(positions, "positions", args.tokens, &args.positions_int64, &args.positions_int32);
  check_shape(cos_sin_cache, "cos_sin_cache", {-1, -1});
  check_dtype(cos_sin_cache, "cos_sin_cache", ScalarType::Float, "float32");
  check_contiguous(cos_sin_cache, "cos_sin_cache");
  args.rot_dim = cos_sin_cache.size(1);
  args.max_positions = cos_sin_cache.size(0);
  STD_TORCH_CHECK(args.rot_dim % 2 == 0 && args.rot_dim <= q.size(2),
                  "cos_sin_cache must have an even width of at most ", q.size(2), ", got ", args.rot_dim);
  args.cos_sin = static_cast<const float*>(cos_sin_cache.data_ptr());
  return args;
}

void rotary_embedding_(Tensor positions, Tensor q, Tensor k, Tensor cos_sin_cache) {
  const RotaryArgs args = rotary_args(positions, q, k, cos_sin_cache);
  launch([args, kernel = VLLM_KERNEL(rotary)] { kernel(args); }, positions, q, k, cos_sin_cache);
}

void rotary_and_cache_(Tensor positions, Tensor q, Tensor k, Tensor v, Tensor cos_sin_cache, Tensor k_cache,
                       Tensor v_cache, Tensor slot_mapping, double k_scale, double v_scale) {
  const RotaryArgs rotary = rotary_args(positions, q, k, cos_sin_cache);
  const CacheArgs cache = cache_args(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale);
  launch([rotary, cache, kernel = VLLM_KERNEL(rotary_and_cache)] { kernel(rotary, cache); }, positions, q, k, v,
         cos_sin_cache, k_cache, v_cache, slot_mapping);
}

const int32_t* int32_row(const Tensor& t, const char* name, int64_t size) {
  check_shape(t, name, {size});
  check_dtype(t, name, ScalarType::Int, "int32");
  check_contiguous(t, name);
  return static_cast<const int32_t*>(t.data_ptr());
}

// Null, or the values of a row of float32, one a query head.
const float* float_row(const std::optional<Tensor>& t, const char* name, int64_t size) {
  if (!t) return nullptr;
  check_shape(*t, name, {size});
  check_dtype(*t, name, ScalarType::Float, "float32");
  check_contiguous(*t, name);
  return static_cast<const float*>(t->data_ptr());
}

// Which tokens of which blocks the queries see; args.block_size is set.
void read_requests(AttentionArgs& args, const Tensor& block_table, const Tensor& query_start_loc,
                   const Tensor& seq_lens) {
  check_shape(block_table, "block_table", {-1, -1});
  check_dtype(block_table, "block_table", ScalarType::Int, "int32");
  check_last_contiguous(block_table, "block_table");
  args.requests = block_table.size(0);
  args.table_stride = block_table.stride(0);
  args.query_start_loc = int32_row(query_start_loc, "query_start_loc", args.requests + 1);
  args.seq_lens = int32_row(seq_lens, "seq_lens", args.requests);
  for (int64_t r = 0; r < args.requests; ++r) {
    STD_TORCH_CHECK(args.seq_lens[r] <= block_table.size(1) * args.block_size, "block_table must have blocks for ",
                    args.seq_lens[r], " tokens in row ", r);
  }
  args.block_table = static_cast<const int32_t*>(block_table.data_ptr());
}

void paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start_loc,
                     Tensor seq_lens, double scale, Tensor out, int64_t window, double softcap,
                     std::optional<Tensor> alibi_slopes, std::optional<Tensor> sinks, double k_scale, double v_scale,
                     bool in_chunks) {
  AttentionArgs args{};
  args.dtype = dtype_of(q, "q");
  args.q = heads_of(q, "q");
  args.head_dim = args.value_dim = q.size(2);
  args.block_size = check_caches(k_cache, v_cache, args.head_dim);
  args.cache_dtype = cache_dtype_of(k_cache, "k_cache", q);
  args.num_kv_heads = k_cache.size(1);
  STD_TORCH_CHECK(q.size(1) % args.num_kv_heads == 0 && q.size(1) / args.num_kv_heads <= 256,
                  "q must have a multiple of the cache's ", args.num_kv_heads,
                  " heads, at most 256 times as many, got ", q.size(1));
  check_same_dtype(out, "out", q, "q");
  check_shape(out, "out", {q.size(0), q.size(1), q.size(2)});
  check_contiguous(out, "out");
  read_requests(args, block_table, query_start_loc, seq_lens);
  args.scale = static_cast<float>(scale) * scale_of(k_scale, "k_scale", args.cache_dtype);
  args.v_scale = scale_of(v_scale, "v_scale", args.cache_dtype);
  STD_TORCH_CHECK(window >= 0, "window must be at least 1 token, or 0 for none, got ", window);
  STD_TORCH_CHECK(softcap >= 0, "softcap must be positive, or 0 for none, got ", softcap);
  args.window = window;
  args.in_chunks = in_chunks;
  args.softcap = static_cast<float>(softcap);
  args.alibi_slopes = float_row(alibi_slopes, "alibi_slopes", q.size(1));
  args.sinks = float_row(sinks, "sinks", q.size(1));
  args.dots = args.dtype == DType::bf16 && args.cache_dtype == CacheDType::same && args.head_dim % 2 == 0 &&
              has_fast_bf16_dot();
  args.k_cache = k_cache.data_ptr();
  args.v_cache = v_cache.data_ptr();
  args.out = out.data_ptr();
  launch([args, kernel = VLLM_KERNEL(paged_attention)] { kernel(args); }, q, k_cache, v_cache, block_table,
         query_start_loc, seq_lens, out, alibi_slopes, sinks);
}

// Whether its rows are of `width`; the block size.
int64_t check_latent_cache(const Tensor& cache, int64_t width) {
  check_shape(cache, "cache", {-1, -1, width});
  check_contiguous(cache, "cache");
  return cache.size(1);
}

void write_latent_(Tensor latent, Tensor rope, Tensor cache, Tensor slot_mapping, double scale) {
  WriteLatentArgs args{};
  args.dtype = dtype_of(latent, "latent");
  check_same_dtype(rope, "rope", latent, "latent");
  check_shape(latent, "latent", {-1, -1});
  check_shape(rope, "rope", {latent.size(0), -1});
  check_last_contiguous(latent, "latent");
  check_last_contiguous(rope, "rope");
  args.tokens = latent.size(0);
  args.latent_dim = latent.size(1);
  args.rope_dim = rope.size(1);
  args.latent_stride = latent.stride(0);
  args.rope_stride = rope.stride(0);
  check_latent_cache(cache, args.latent_dim + args.rope_dim);
  args.cache_dtype = cache_dtype_of(cache, "cache", latent);
  args.scale = scale_of(scale, "scale", args.cache_dtype);
  read_integers(slot_mapping, "slot_mapping", args.tokens, &args.slots_int64, &args.slots_int32);
  args.latent = latent.data_ptr();
  args.rope = rope.data_ptr();
  args.cache = cache.data_ptr();
  launch([args, kernel = VLLM_KERNEL(write_latent)] { kernel(args); }, latent, rope, cache, slot_mapping);
}

// Query heads that attend together: the most of up to 16 that divide them all. More would leave threads without work,
// fewer would widen every chunk more often.
int64_t heads_at_once(int64_t heads) {
  int64_t count = heads < 16 ? heads : 16;
  while (heads % count) --count;
  return count;
}

void latent_attention(Tensor q_latent, Tensor q_rope, Tensor cache, Tensor block_table, Tensor query_start_loc,
                      Tensor seq_lens, double scale, Tensor out, double cache_scale) {
  LatentAttentionArgs args{};
  args.dtype = dtype_of(q_latent, "q_latent");
  check_same_dtype(q_rope, "q_rope", q_latent, "q_latent");
  args.q = heads_of(q_latent, "q_latent");
  args.q_rope = heads_of(q_rope, "q_rope");
  check_shape(q_rope, "q_rope", {q_latent.size(0), q_latent.size(1), -1});
  STD_TORCH_CHECK(q_latent.size(1) > 0 && q_latent.size(2) > 0, "q_latent must have heads with values");
  args.value_dim = q_latent.size(2);
  args.head_dim = args.value_dim + q_rope.size(2);
  args.block_size = check_latent_cache(cache, args.head_dim);
  args.cache_dtype = cache_dtype_of(cache, "cache", q_latent);
  args.num_kv_heads = q_latent.size(1) / heads_at_once(q_latent.size(1));
  check_same_dtype(out, "out", q_latent, "q_latent");
  check_shape(out, "out", {q_latent.size(0), q_latent.size(1), q_latent.size(2)});
  check_contiguous(out, "out");
  read_requests(args, block_table, query_start_loc, seq_lens);
  args.v_scale = scale_of(cache_scale, "cache_scale", args.cache_dtype);
  args.scale = static_cast<float>(scale) * args.v_scale;
  args.dots = args.dtype == DType::bf16 && args.cache_dtype == CacheDType::same && args.head_dim % 2 == 0 &&
              has_fast_bf16_dot();
  args.k_cache = cache.data_ptr();
  args.out = out.data_ptr();
  launch([args, kernel = VLLM_KERNEL(latent_attention)] { kernel(args); }, q_latent, q_rope, cache, block_table,
         query_start_loc, seq_lens, out);
}

}  // namespace
}  // namespace vllm_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_cpu, m) {
  m.def(
      "reshape_and_cache_(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
      "float k_scale=1., float v_scale=1.) -> ()");
  m.def("rotary_embedding_(Tensor positions, Tensor(a!) q, Tensor(b!) k, Tensor cos_sin_cache) -> ()");
  m.def(
      "rotary_and_cache_(Tensor positions, Tensor(a!) q, Tensor(b!) k, Tensor v, Tensor cos_sin_cache, "
      "Tensor(c!) k_cache, Tensor(d!) v_cache, Tensor slot_mapping, float k_scale=1., float v_scale=1.) -> ()");
  m.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start_loc, "
      "Tensor seq_lens, float scale, Tensor(a!) out, int window=0, float softcap=0., Tensor? alibi_slopes=None, "
      "Tensor? sinks=None, float k_scale=1., float v_scale=1., bool in_chunks=False) -> ()");
  m.def("write_latent_(Tensor latent, Tensor rope, Tensor(a!) cache, Tensor slot_mapping, float scale=1.) -> ()");
  m.def(
      "latent_attention(Tensor q_latent, Tensor q_rope, Tensor cache, Tensor block_table, Tensor query_start_loc, "
      "Tensor seq_lens, float scale, Tensor(a!) out, float cache_scale=1.) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_cpu, CPU, m) {
  m.impl("reshape_and_cache_", TORCH_BOX(&vllm_cpu::reshape_and_cache_));
  m.impl("rotary_embedding_", TORCH_BOX(&vllm_cpu::rotary_embedding_));
  m.impl("rotary_and_cache_", TORCH_BOX(&vllm_cpu::rotary_and_cache_));
  m.impl("paged_attention", TORCH_BOX(&vllm_cpu::paged_attention));
  m.impl("write_latent_", TORCH_BOX(&vllm_cpu::write_latent_));
  m.impl("latent_attention", TORCH_BOX(&vllm_cpu::latent_attention));
}
