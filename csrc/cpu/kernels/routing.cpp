// The operations before and after the experts of a mixture: their choice, and the addition of what all tokens take.
//
// A row is one thread's, whose order of sums follows the number of experts alone.
#include "../kernels_routing.h"

#include "../gates.h"
#include "../scratch.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();

int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Softmax of values that are filled up with -inf to whole vectors.
void softmax(float* x, int64_t n) {
  Vec most = set1(-kInfinity);
  for (int64_t i = 0; i < n; i += kLanes) most = max(most, load(x + i));
  const Vec greatest = set1(reduce_max(most));
  Vec total = zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec e = exp(load(x + i) - greatest);
    store(x + i, e);
    total = total + e;
  }
  const Vec sum = set1(reduce_sum(total));
  for (int64_t i = 0; i < n; i += kLanes) store(x + i, load(x + i) / sum);
}

void sigmoid(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store(x + i, sigmoid(load(x + i)));
}

void softcapped(float* x, int64_t n, float cap) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec e = exp(load(x + i) * set1(2.0f / cap));
    store(x + i, (set1(1.0f) - set1(2.0f) / (e + set1(1.0f))) * set1(cap));
  }
}

// Places of the k greatest of n values in order, of equals the lower first, NaN before all; `best` [k] takes their values.
void greatest(const float* x, int64_t n, int64_t k, int32_t* ids, float* best) {
  int64_t size = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float value = x[i] == x[i] ? x[i] : kInfinity;
    if (size == k && !(value > best[k - 1])) continue;
    int64_t at = size < k ? size++ : k - 1;
    for (; at > 0 && best[at - 1] < value; --at) {
      best[at] = best[at - 1];
      ids[at] = ids[at - 1];
    }
    best[at] = value;
    ids[at] = static_cast<int32_t>(i);
  }
}

struct Row {
  Row(const ChooseExpertsArgs& args)
      : a(args), scores(padded(a.experts)), compared(padded(a.experts)), best(padded(a.experts)), groups(a.groups),
        places(a.experts) {}

  const ChooseExpertsArgs& a;
  Scratch<float> scores, compared, best, groups;
  Scratch<int32_t> places;

  void choose(int64_t row) {
    const int64_t n = a.experts;
    float* x = scores.get();
    const float* logits = a.logits + row * n;
    for (int64_t i = 0; i < n; ++i) x[i] = logits[i];
    for (int64_t i = n; i < padded(n); ++i) x[i] = -kInfinity;
    if (a.softcap > 0) softcapped(x, n, a.softcap);
    int32_t* ids = a.ids + row * a.chosen;
    float* weights = a.weights + row * a.chosen;
    if (a.mixes_within > 0) {
      mix(ids, weights);
      return;
    }
    if (!a.compares_logits) to_scores(x, n);
    const float* values = x;
    if (a.correction != nullptr || a.groups_kept < a.groups) {
      for (int64_t i = 0; i < n; ++i) compared[i] = a.correction == nullptr ? x[i] : x[i] + a.correction[i];
      if (a.groups_kept < a.groups) keep_groups();
      values = compared.get();
    }
    greatest(values, n, a.chosen, ids, best.get());
    weigh(ids, weights);
  }

  void to_scores(float* x, int64_t n) { a.sigmoid ? sigmoid(x, n) : softmax(x, n); }

  void weigh(const int32_t* ids, float* weights) {
    float* own = best.get();
    for (int64_t k = 0; k < a.chosen; ++k) own[k] = scores[ids[k]];
    if (a.compares_logits) {
      for (int64_t k = a.chosen; k < padded(a.chosen); ++k) own[k] = -kInfinity;
      to_scores(own, a.chosen);
    }
    float divisor = 1.0f;
    if (a.renormalised) {
      float sum = 0.0f;
      for (int64_t k = 0; k < a.chosen; ++k) sum += own[k];
      divisor = (sum < a.least_sum ? a.least_sum : sum) + a.added_to_sum;
    }
    for (int64_t k = 0; k < a.chosen; ++k) weights[k] = own[k] / divisor * a.scale;
  }

  void keep_groups() {
    const int64_t size = a.experts / a.groups, top = least(a.group_best, size);
    for (int64_t g = 0; g < a.groups; ++g) {
      greatest(compared.get() + g * size, size, top, places.get(), best.get());
      groups[g] = 0.0f;
      for (int64_t k = 0; k < top; ++k) groups[g] += best[k];
    }
    greatest(groups.get(), a.groups, a.groups_kept, places.get(), best.get());
    for (int64_t g = 0; g < a.groups; ++g) {
      bool kept = false;
      for (int64_t k = 0; k < a.groups_kept; ++k) kept |= places[k] == g;
      if (kept) continue;
      for (int64_t i = g * size; i < (g + 1) * size; ++i) compared[i] = -kInfinity;
    }
  }

  // SparseMixer, for inference.
  void mix(int32_t* ids, float* weights) {
    const int64_t n = a.experts;
    float* left = best.get();
    for (int64_t i = 0; i < padded(n); ++i) left[i] = scores[i];
    for (int k = 0; k < 2; ++k) {
      float top;
      greatest(left, n, 1, ids + k, &top);
      const float most = left[ids[k]];
      for (int64_t i = 0; i < padded(n); ++i) {
        const float x = scores[i], magnitude = x < 0 ? -x : x;
        const bool far = (most - x) / (magnitude > most ? magnitude : most) > 2 * a.mixes_within;
        compared[i] = far || i >= n ? -kInfinity : left[i];
      }
      softmax(compared.get(), n);
      weights[k] = compared[ids[k]] * a.scale;
      left[ids[k]] = -kInfinity;
    }
  }
};

template <typename T>
void added_gated_rows(const AddedGatedArgs& a) {
  const T *x = static_cast<const T*>(a.x), *y = static_cast<const T*>(a.y);
  T* out = static_cast<T*>(a.out);
#pragma omp parallel for schedule(static) if (a.rows * a.width > 32768)
  for (int64_t row = 0; row < a.rows; ++row) {
    alignas(64) float gate[kLanes];
    for (int i = 0; i < kLanes; ++i) gate[i] = a.gate[row];
    sigmoid(gate, kLanes);
    const Vec factor = load(gate);
    for (int64_t i = row * a.width; i < (row + 1) * a.width; i += kLanes) {
      const int64_t rest = (row + 1) * a.width - i;
      const int n = rest < kLanes ? static_cast<int>(rest) : kLanes;
      store_n(out + i, fma(factor, load_n(y + i, n), load_n(x + i, n)), n);
    }
  }
}

void softplus(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store(x + i, softplus(load(x + i)));
}

template <typename T>
void gated_rows(const GatedArgs& a) {
  const T *x = static_cast<const T*>(a.x), *gates = static_cast<const T*>(a.gate);
  T* out = static_cast<T*>(a.out);
#pragma omp parallel if (a.rows * a.gates * a.width > 32768)
  {
    Scratch<float> factors(padded(a.gates));
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a.rows; ++row) {
      for (int64_t i = 0; i < a.gates; i += kLanes) {
        const int n = a.gates - i < kLanes ? static_cast<int>(a.gates - i) : kLanes;
        store(factors.get() + i, load_n(gates + row * a.gates + i, n));
      }
      a.softplus ? softplus(factors.get(), a.gates) : sigmoid(factors.get(), a.gates);
      if (a.width == 1) {
        for (int64_t i = 0; i < a.gates; i += kLanes) {
          const int n = a.gates - i < kLanes ? static_cast<int>(a.gates - i) : kLanes;
          const int64_t at = row * a.gates + i;
          store_n(out + at, load_n(x + at, n) * load(factors.get() + i), n);
        }
        continue;
      }
      for (int64_t gate = 0; gate < a.gates; ++gate) {
        for (int64_t i = 0; i < a.width; i += kLanes) {
          const int n = a.width - i < kLanes ? static_cast<int>(a.width - i) : kLanes;
          const int64_t at = (row * a.gates + gate) * a.width + i;
          store_n(out + at, load_n(x + at, n) * set1(factors[gate]), n);
        }
      }
    }
  }
}

template <typename T>
void widened_rows(const WidenedArgs& a) {
  for (int64_t row = 0; row < a.rows; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    for (int64_t i = 0; i < a.width; i += kLanes) {
      const int n = a.width - i < kLanes ? static_cast<int>(a.width - i) : kLanes;
      store_n(a.out + row * a.width + i, load_n(x + i, n), n);
    }
  }
}

}  // namespace

void choose_experts(const ChooseExpertsArgs& a) {
#pragma omp parallel if (a.rows * a.experts > 16384)
  {
    Row own(a);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a.rows; ++row) own.choose(row);
  }
}

void added_gated(const AddedGatedArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, added_gated_rows<scalar_t>(a)); }

void gated(const GatedArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, gated_rows<scalar_t>(a)); }

void widened(const WidenedArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, widened_rows<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
