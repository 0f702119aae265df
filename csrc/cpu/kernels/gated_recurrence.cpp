// RG-LRU: each channel keeps one number, which decays by a gate.
//
// A vector of channels goes through a row's tokens with its numbers in a register.
#include "../gates.h"
#include "../kernels_state.h"
#include "../scratch.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

// Channels that a task has: whole cache lines of every dtype.
constexpr int64_t kChannels = 64;

inline Vec sqrt(Vec x) {
  alignas(64) float values[kLanes];
  store(values, x);
  for (int i = 0; i < kLanes; ++i) values[i] = __builtin_sqrtf(values[i]);
  return load(values);
}

// 1 - e^x for x <= 0, by a series where e^x is near 1.
inline Vec one_less_exp(Vec x) {
  const Vec series = zero() - x * fma(x, fma(x, fma(x, set1(1.0f / 24.0f), set1(1.0f / 6.0f)), set1(0.5f)), set1(1.0f));
  return select(gt(x, set1(-0.03f)), series, set1(1.0f) - exp(x));
}

template <typename T>
void through_row(const GatedRecurrenceArgs& a, int64_t row, int64_t at, int n) {
  float* pool = a.pool + a.rows.slots[row] * a.slot_stride + at;
  const Vec rate = load_n(a.rate + at, n);
  const Vec in_bias = load_n(a.input_bias + at, n), kept_bias = load_n(a.kept_bias + at, n);
  const T *x = static_cast<const T*>(a.x) + at, *in = static_cast<const T*>(a.input_gate) + at;
  const T* kept = static_cast<const T*>(a.kept_gate) + at;
  const int64_t first = a.rows.starts[row], last = a.rows.starts[row + 1];
  bool begins = a.rows.is_new(row);
  Vec state = begins ? zero() : load_n(pool, n);
  for (int64_t t = first; t < last; ++t) {
    const Vec log = zero() - rate * sigmoid(load_n(kept + t * a.kept_stride, n) + kept_bias);
    Vec input = load_n(x + t * a.x_stride, n) * sigmoid(load_n(in + t * a.input_stride, n) + in_bias);
    // A sequence's first input counts whole.
    if (!begins) input = input * sqrt(one_less_exp(log + log));
    state = fma(exp(log), state, input);
    begins = false;
    store_n(static_cast<T*>(a.out) + t * a.channels + at, state, n);
  }
  store_n(pool, state, n);
}

template <typename T>
void all_rows(const GatedRecurrenceArgs& a) {
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

void gated_recurrence(const GatedRecurrenceArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, all_rows<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
