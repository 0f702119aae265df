// RWKV 4's weighted mean of values: each channel keeps two sums of exponentials, and the greatest exponent that both are
// divided by.
//
// A vector of channels goes through a row's tokens with its sums in registers.
#include "../gates.h"
#include "../kernels_state.h"
#include "../scratch.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

// Channels that a task has: whole cache lines of every dtype.
constexpr int64_t kChannels = 64;

template <typename T>
void through_row(const WkvArgs& a, int64_t row, int64_t at, int n) {
  float* pool = a.pool + a.rows.slots[row] * a.slot_stride + at;
  const Vec rate = load_n(a.rate + at, n), first_bonus = load_n(a.bonus + at, n);
  const bool begins = a.rows.is_new(row);
  Vec sum = begins ? zero() : load_n(pool, n), total = begins ? zero() : load_n(pool + a.channels, n);
  Vec peak = begins ? set1(-1e38f) : load_n(pool + 2 * a.channels, n);
  for (int64_t t = a.rows.starts[row]; t < a.rows.starts[row + 1]; ++t) {
    const Vec k = load_n(static_cast<const T*>(a.key) + t * a.key_stride + at, n);
    const Vec v = load_n(static_cast<const T*>(a.value) + t * a.value_stride + at, n);
    const Vec own = k + first_bonus, greatest = max(peak, own);
    const Vec before = exp(peak - greatest), now = exp(own - greatest);
    const Vec mean = fma(before, sum, now * v) / fma(before, total, now);
    const Vec gate = sigmoid(load_n(static_cast<const T*>(a.gate) + t * a.gate_stride + at, n));
    store_n(static_cast<T*>(a.out) + t * a.channels + at, gate * mean, n);
    const Vec next = max(peak - rate, k);
    // The difference is exact where peaks are near, and so has what rounding the next one lost.
    const Vec kept = exp((peak - next) - rate), added = exp(k - next);
    peak = next;
    sum = fma(kept, sum, added * v);
    total = fma(kept, total, added);
  }
  store_n(pool, sum, n);
  store_n(pool + a.channels, total, n);
  store_n(pool + 2 * a.channels, peak, n);
}

template <typename T>
void all_rows(const WkvArgs& a) {
  const int64_t blocks = (a.channels + kChannels - 1) / kChannels;
  const int64_t tokens = a.rows.starts[a.rows.rows] - a.rows.starts[0];
#pragma omp parallel for schedule(static) if (tokens * a.channels > 8192)
  for (int64_t task = 0; task < a.rows.rows * blocks; ++task) {
    const int64_t row = task / blocks, from = task % blocks * kChannels, to = least(from + kChannels, a.channels);
    if (a.rows.starts[row] == a.rows.starts[row + 1]) continue;
    for (int64_t at = from; at < to; at += kLanes) through_row<T>(a, row, at, lanes_at(at, to));
  }
}

}  // namespace

void wkv(const WkvArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, all_rows<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
