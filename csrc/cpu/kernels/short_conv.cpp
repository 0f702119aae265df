// Convolution over the last tokens of a sequence, each channel by itself.
//
// A vector of channels goes through a row's tokens with the inputs that it still needs in registers.
#include "../gates.h"
#include "../kernels_state.h"
#include "../scratch.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

// Channels that a task has: whole cache lines of every dtype.
constexpr int64_t kChannels = 64;

template <typename T, int W>
void through_row(const ShortConvArgs& a, int64_t row, int64_t at, int n) {
  const int64_t first = a.rows.starts[row], last = a.rows.starts[row + 1];
  T* tail = static_cast<T*>(a.pool) + a.rows.slots[row] * a.slot_stride + at;
  const T *x = static_cast<const T*>(a.x) + at, *weight = static_cast<const T*>(a.weight) + at;
  const T *before = static_cast<const T*>(a.before), *after = static_cast<const T*>(a.after);
  const Vec bias = a.bias == nullptr ? zero() : load_n(static_cast<const T*>(a.bias) + at, n);
  T* out = static_cast<T*>(a.out) + at;
  const bool fresh = a.rows.is_new(row);
  Vec taps[W], seen[W];
  unroll<W>([&](auto i) VLLM_INLINE {
    taps[i] = load_n(weight + i * a.channels, n);
    seen[i] = fresh || i == W - 1 ? zero() : load_n(tail + i * a.channels, n);
  });
  for (int64_t t = first; t < last; ++t) {
    Vec value = load_n(x + t * a.x_stride, n);
    if (before != nullptr) {
      // Rounded as it will be read from the tail.
      T rounded[kLanes];
      store(rounded, value * load_n(before + t * a.before_stride + at, n));
      value = load(rounded);
    }
    seen[W - 1] = value;
    Vec sum = bias;
    unroll<W>([&](auto i) VLLM_INLINE { sum = fma(taps[i], seen[i], sum); });
    unroll<W - 1>([&](auto i) VLLM_INLINE { seen[i] = seen[i + 1]; });
    if (a.silu) sum = silu(sum);
    if (after != nullptr) sum = sum * load_n(after + t * a.after_stride + at, n);
    store_n(out + t * a.channels, sum, n);
  }
  unroll<W - 1>([&](auto i) VLLM_INLINE { store_n(tail + i * a.channels, seen[i], n); });
}

template <typename T, int W>
void all_rows(const ShortConvArgs& a) {
  const int64_t blocks = (a.channels + kChannels - 1) / kChannels;
  const int64_t tokens = a.rows.starts[a.rows.rows] - a.rows.starts[0];
#pragma omp parallel for schedule(static) if (tokens * a.channels > 16384)
  for (int64_t task = 0; task < a.rows.rows * blocks; ++task) {
    const int64_t row = task / blocks, from = task % blocks * kChannels, to = least(from + kChannels, a.channels);
    if (a.rows.starts[row] == a.rows.starts[row + 1]) continue;
    for (int64_t at = from; at < to; at += kLanes) through_row<T, W>(a, row, at, lanes_at(at, to));
  }
}

template <typename T>
void of_width(const ShortConvArgs& a) {
  switch (a.width) {
    case 2:
      return all_rows<T, 2>(a);
    case 3:
      return all_rows<T, 3>(a);
    case 4:
      return all_rows<T, 4>(a);
    case 5:
      return all_rows<T, 5>(a);
    case 6:
      return all_rows<T, 6>(a);
    case 7:
      return all_rows<T, 7>(a);
    case 8:
      return all_rows<T, 8>(a);
  }
}

}  // namespace

void short_conv(const ShortConvArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, of_width<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
