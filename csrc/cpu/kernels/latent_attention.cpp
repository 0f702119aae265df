// Attention over a paged cache of latent rows, causal, float32 inside, and the writing of these rows. A row of the cache
// is a token's key for all heads, and its first part the token's value.
//
// It is paged_attention.cpp's way through tiles, chunks and segments, and has what is said there of a row's bits. Heads
// are taken in groups, each as if it had a key head of its own. Every chunk is widened first, its keys turned so that
// scores of neighbouring tokens come from one vector for each dimension: with many heads to a row that is little beside
// the products.
#include <cstring>

#include "../attention_rows.h"
#include "../transpose.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

// Rows of queries are long: more of them would leave the second-level cache between two chunks.
constexpr int64_t kTileRows = 96;

template <typename T, typename C, bool kDots>
class Worker : VectorRows {
  using Wide = typename ChunksOf<C, kDots>::Wide;

 public:
  Worker(const LatentAttentionArgs& a, const Plan& plan) : VectorRows(a, plan), a_(a) {
    wide_.keys = reinterpret_cast<decltype(wide_.keys)>(keys_);
    wide_.values = values_;
    if constexpr (kDots) wide_.scale = factor();
  }

  // Takes items from `claim` until there are none.
  template <typename Claim>
  void run(const Claim& claim) {
    for (Step step = first_step(a_, plan_, claim()); step.tile; step = first_step(a_, plan_, claim())) {
      read_queries(step);
      for (Step next; step.tile; step = next) {
        next = next_step(a_, plan_, step);
        attend(step);
        if (!next.tile || next.start / kSegment != step.start / kSegment) end_segment(step);
        if (!next.tile && !plan_.partials) write_rows<T>(a_, plan_, *step.tile, step.head, total_);
      }
    }
  }

 private:
  // A row's query is that for the latent, then the rotated one.
  void read_queries(const Step& step) {
    for (int64_t i = step.tile->first_member; i < step.tile->first_member + step.tile->members; ++i) {
      const Member& member = plan_.members[i];
      const int64_t first = a_.query_start_loc[member.request] + member.first, head = step.head * plan_.group;
      int64_t row = member.row;
      for (int64_t token = 0; token < member.tokens; ++token) {
        for (int64_t each = 0; each < plan_.group; ++each, ++row) {
          read_part(row, 0, a_.q, value_dim_, first + token, head + each);
          read_part(row, value_dim_, a_.q_rope, dim_ - value_dim_, first + token, head + each);
          last_[row] = member.position + token;
        }
      }
    }
  }

  void read_part(int64_t row, int64_t at, const Heads& heads, int64_t size, int64_t token, int64_t head) {
    const T* q = static_cast<const T*>(heads.data) + token * heads.token_stride + head * heads.head_stride;
    float* to = q_ + row * dim_;
    if constexpr (kDots) {
      std::memcpy(reinterpret_cast<T*>(to) + at, q, size * sizeof(T));
    } else {
      scale_into(to + at, q, set1(factor()), size);
    }
  }

  // Tokens from the end on are never used.
  const C* row_of(const Step& step, int64_t t) const {
    const int64_t token = step.start + t;
    const int32_t* blocks = a_.block_table + member_of(step).request * a_.table_stride;
    return static_cast<const C*>(a_.k_cache) +
           (blocks[token / a_.block_size] * a_.block_size + token % a_.block_size) * dim_;
  }

  void widen(const Step& step) {
    // A chunk of several members lies before the queries of all.
    const int64_t count = least(kChunk, member_of(step).end() - step.start);
    for (int64_t begin = 0; begin < count; begin += kLanes) {
      const C* rows[kLanes];
      for (int64_t t = 0; t < kLanes; ++t) rows[t] = row_of(step, least(begin + t, count - 1));
      turn_keys(rows, begin);
      const int64_t some = least(kLanes, count - begin);
      for (int64_t t = 0; t < some; ++t) {
        float* to = wide_.values + (begin + t) * value_dim_;
        for (int64_t d = 0; d < value_dim_; d += kLanes) {
          const int n = static_cast<int>(least(kLanes, value_dim_ - d));
          n == kLanes ? store(to + d, load(rows[t] + d)) : store_n(to + d, load_n(rows[t] + d, n), n);
        }
      }
    }
  }

  // Keys of kLanes tokens, [dims] rows of neighbouring tokens; in pairs, two dimensions are one value of 32 bits.
  void turn_keys(const C* const (&rows)[kLanes], int64_t begin) {
    using From = std::conditional_t<kDots, float, C>;
    const int64_t width = kDots ? dim_ / 2 : dim_;
    float* keys = reinterpret_cast<float*>(wide_.keys) + begin;
    for (int64_t d = 0; d < width; d += kLanes) {
      const int n = static_cast<int>(least(kLanes, width - d));
      Vec square[kLanes];
      unroll<kLanes>([&](int t) VLLM_INLINE {
        const From* at = reinterpret_cast<const From*>(rows[t]) + d;
        square[t] = n == kLanes ? load(at) : load_n(at, n);
      });
      transpose(square);
      if (n == kLanes) {
        unroll<kLanes>([&](int i) VLLM_INLINE { store(keys + (d + i) * kChunk, square[i]); });
      } else {
        for (int i = 0; i < n; ++i) store(keys + (d + i) * kChunk, square[i]);
      }
    }
  }

  void attend(const Step& step) {
    const Member& first = member_of(step);
    const Member& last = *(&first + step.members - 1);
    widen(step);
    attend_rows(step, wide_, first_seeing(plan_, first, step.start), last_seeing(a_, plan_, last, step.start + kChunk));
  }

  const LatentAttentionArgs& a_;
  Wide wide_;
};

template <typename T>
void attend_all(const LatentAttentionArgs& a) {
  with_plan(a, kTileRows, kRows, [&](const Plan& plan) {
#if defined(__AVX512BF16__)
    if constexpr (__is_same(T, BF16)) {
      if (a.dots) return run_plan<BF16, Worker<BF16, BF16, true>>(a, plan);
    }
#endif
    switch (a.cache_dtype) {
      case CacheDType::same:
        return run_plan<T, Worker<T, T, false>>(a, plan);
      case CacheDType::e4m3:
        return run_plan<T, Worker<T, E4M3, false>>(a, plan);
      case CacheDType::e5m2:
        return run_plan<T, Worker<T, E5M2, false>>(a, plan);
    }
  });
}

template <typename T>
void write_row(const WriteLatentArgs& a, int64_t token) {
  const int64_t slot = a.slots_int64 ? a.slots_int64[token] : a.slots_int32[token];
  if (slot < 0) return;
  const int64_t at = slot * (a.latent_dim + a.rope_dim);
  const auto write = [&](const void* data, int64_t stride, int64_t size, int64_t first) {
    const T* from = static_cast<const T*>(data) + token * stride;
    switch (a.cache_dtype) {
      case CacheDType::same:
        std::memcpy(static_cast<T*>(a.cache) + at + first, from, size * sizeof(T));
        return;
      case CacheDType::e4m3:
        return store_codes(from, a.scale, size, static_cast<E4M3*>(a.cache) + at + first, 1);
      case CacheDType::e5m2:
        return store_codes(from, a.scale, size, static_cast<E5M2*>(a.cache) + at + first, 1);
    }
  };
  write(a.latent, a.latent_stride, a.latent_dim, 0);
  write(a.rope, a.rope_stride, a.rope_dim, a.latent_dim);
}

template <typename T>
void write_all(const WriteLatentArgs& a) {
#pragma omp parallel for schedule(static) if (a.tokens * (a.latent_dim + a.rope_dim) > 32768)
  for (int64_t token = 0; token < a.tokens; ++token) write_row<T>(a, token);
}

}  // namespace

void latent_attention(const LatentAttentionArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, attend_all<scalar_t>(a)); }

void write_latent(const WriteLatentArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, write_all<scalar_t>(a)); }

// Each head is a product of its own: heads are shared out where there are enough, else the rows of each.
void head_linear(const HeadLinearArgs& a) {
  const auto multiply = [&](int64_t head) {
    LinearArgs each = a.first;
    each.x = static_cast<const char*>(each.x) + head * a.x_bytes;
    each.weight = static_cast<const char*>(each.weight) + head * a.weight_bytes;
    each.out = static_cast<char*>(each.out) + head * a.out_bytes;
    linear(each);
  };
  const bool together = a.heads >= max_threads();
#pragma omp parallel for schedule(dynamic) if (together && a.heads * a.first.rows * a.first.columns * a.first.inner > 65536)
  for (int64_t head = 0; head < a.heads; ++head) multiply(head);
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
