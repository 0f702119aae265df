// Attention over a paged cache of latent rows, and the writing of these rows: see latent_attention_worker.h.
//
// Every chunk is widened first, its keys turned so that scores of neighbouring tokens come from one vector for each dimension:
// with many heads to a row that is little beside the products.
#include "../latent_attention_worker.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

template <typename T, typename C, bool kDots>
class WideRows : protected VectorRows {
 public:
  using Value = T;
  using Cached = C;

 protected:
  WideRows(const AttentionArgs& a, const Plan& plan) : VectorRows(a, plan) {
    wide_.keys = reinterpret_cast<decltype(wide_.keys)>(keys_);
    wide_.values = reinterpret_cast<decltype(wide_.values)>(values_);
  }

  void read_part(int64_t row, int64_t at, const T* q, int64_t size) {
    float* to = q_ + row * dim_;
    if constexpr (kDots) {
      std::memcpy(reinterpret_cast<T*>(to) + at, q, size * sizeof(T));
    } else {
      scale_into(to + at, q, set1(factor()), size);
    }
  }

  template <typename RowOf>
  void attend(const Step& step, int64_t count, const RowOf& row_of) {
    for (int64_t begin = 0; begin < count; begin += kLanes) {
      const C* rows[kLanes];
      for (int64_t t = 0; t < kLanes; ++t) rows[t] = row_of(least(begin + t, count - 1));
      float* keys = reinterpret_cast<float*>(wide_.keys) + begin;
      if constexpr (kDots) {
        turn_pairs(rows, dim_, keys);
      } else {
        turn_rows(rows, dim_, keys);
      }
      const int64_t some = least(kLanes, count - begin);
      if constexpr (kDots) {
        const auto value_at = [&](int64_t t) VLLM_INLINE { return t - begin < some ? rows[t - begin] : nullptr; };
        wide_.pack_values(begin, begin + kLanes, value_dim_, value_at);
      } else {
        for (int64_t t = 0; t < some; ++t) {
          scale_into(wide_.values + (begin + t) * value_dim_, rows[t], set1(1.0f), value_dim_);
        }
      }
    }
    attend_rows(step, wide_, first_row(step), end_row(step), [](int64_t, int64_t) {});
  }

 private:
  WideChunkOf<kDots> wide_;
};

template <typename T, typename C, bool kDots = false>
void attend_in(const LatentAttentionArgs& a, const Plan& plan) {
  run_plan<T, LatentWorker<WideRows<T, C, kDots>>>(a, plan);
}

template <typename T>
void attend_all(const LatentAttentionArgs& a) {
  with_plan(a, kMostLatentRows, kRows, [&](const Plan& plan) {
#if defined(__AVX512BF16__)
    if constexpr (__is_same(T, BF16)) {
      if (a.dots) return attend_in<BF16, BF16, true>(a, plan);
    }
#endif
    switch (a.cache_dtype) {
      case CacheDType::same:
        return attend_in<T, T>(a, plan);
      case CacheDType::e4m3:
        return attend_in<T, E4M3>(a, plan);
      case CacheDType::e5m2:
        return attend_in<T, E5M2>(a, plan);
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
    a.multiply(each);
  };
  const bool together = a.heads >= max_threads();
#pragma omp parallel for schedule(dynamic) if (together && a.heads * a.first.rows * a.first.columns * a.first.inner > 65536)
  for (int64_t head = 0; head < a.heads; ++head) multiply(head);
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
