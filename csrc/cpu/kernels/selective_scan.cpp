// Mamba 1's selective scan: each channel has a state of a few values, and each of them a decay of its own.
//
// A vector of channels goes through a row's tokens while its states stay in the first-level cache.
#include "../gates.h"
#include "../kernels_state.h"
#include "../scratch.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

template <typename T>
void through_row(const SelectiveScanArgs& a, int64_t row, int64_t group, int64_t at, int n, float* states, float* rates,
                 float* inputs) {
  const int64_t size = a.state_dim;
  float* pool = a.pool + a.rows.slots[row] * a.slot_stride + at;
  const bool fresh = a.rows.is_new(row);
  for (int64_t i = 0; i < size; ++i) {
    store(states + i * kLanes, fresh ? zero() : load_n(pool + i * a.channels, n));
    store(rates + i * kLanes, load_n(a.rate + i * a.channels + at, n));
  }
  const Vec bias = a.bias == nullptr ? zero() : load_n(a.bias + at, n), skip = load_n(a.skip + at, n);
  for (int64_t t = a.rows.starts[row]; t < a.rows.starts[row + 1]; ++t) {
    const Vec x = load_n(static_cast<const T*>(a.x) + t * a.x_stride + at, n);
    const Vec dt = softplus(load_n(static_cast<const T*>(a.dt) + t * a.dt_stride + at, n) + bias);
    const Vec input = dt * x, negative = zero() - dt;
    const T* b = static_cast<const T*>(a.b) + t * a.b_stride + group * size;
    const T* c = static_cast<const T*>(a.c) + t * a.c_stride + group * size;
    for (int64_t i = 0; i < size; i += kLanes) {
      const int values = lanes_at(i, size);
      store_n(inputs + i, load_n(b + i, values), values);
      store_n(inputs + size + i, load_n(c + i, values), values);
    }
    Vec sum = skip * x;
    for (int64_t i = 0; i < size; ++i) {
      const Vec decay = exp(negative * load(rates + i * kLanes));
      const Vec state = fma(decay, load(states + i * kLanes), input * set1(inputs[i]));
      store(states + i * kLanes, state);
      sum = fma(set1(inputs[size + i]), state, sum);
    }
    if (a.gate != nullptr) sum = sum * silu(load_n(static_cast<const T*>(a.gate) + t * a.gate_stride + at, n));
    store_n(static_cast<T*>(a.out) + t * a.channels + at, sum, n);
  }
  for (int64_t i = 0; i < size; ++i) store_n(pool + i * a.channels, load(states + i * kLanes), n);
}

template <typename T>
void all_rows(const SelectiveScanArgs& a) {
  const int64_t width = a.channels / a.groups, blocks = (width + kLanes - 1) / kLanes;
  const int64_t tokens = a.rows.starts[a.rows.rows] - a.rows.starts[0];
#pragma omp parallel if (tokens * a.channels * a.state_dim > 16384)
  {
    Scratch<float> states(a.state_dim * kLanes), rates(a.state_dim * kLanes), inputs(2 * a.state_dim);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < a.rows.rows * a.groups * blocks; ++task) {
      const int64_t row = task / (a.groups * blocks), group = task / blocks % a.groups, at = task % blocks * kLanes;
      if (a.rows.starts[row] == a.rows.starts[row + 1]) continue;
      through_row<T>(a, row, group, group * width + at, lanes_at(at, width), states.get(), rates.get(), inputs.get());
    }
  }
}

}  // namespace

void selective_scan(const SelectiveScanArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, all_rows<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
