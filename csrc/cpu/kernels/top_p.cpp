// The nucleus of each row of logits: everything outside becomes -inf, in place.
//
// No sort of the row. Where the mass above a threshold t is below the share that is wanted, all above t belong to the
// nucleus; where it is not, nothing at or below t does. So a bisection of t leaves few tokens undecided, and only these
// are sorted. A step of it is one pass over exponentials that stay in the second-level cache.
#include "../logits.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

constexpr int64_t kSegment = 4096;
constexpr int64_t kFewUndecided = 64;
constexpr int kMaxSteps = 40;
// exp(-kRange) is 0 in float32: what lies further below the maximum has no mass.
constexpr float kRange = 104.0f;

struct Above {
  double mass;    // sum of the exponentials
  int64_t count;  // of the tokens
};

// weights[i] = exp(x[i] - highest); returns their sum.
double exponentiate(const float* x, int64_t n, float highest, float* weights) {
  const Vec shift = set1(highest);
  double total = 0;
  for (int64_t first = 0; first < n; first += kSegment) {
    const int64_t end = least(first + kSegment, n);
    Vec sum = zero();
    int64_t i = first;
    for (; i + kLanes <= end; i += kLanes) {
      const Vec weight = exp(load(x + i) - shift);
      store(weights + i, weight);
      sum = sum + weight;
    }
    for (; i < end; ++i) {
      alignas(64) float lanes[kLanes];
      store(lanes, exp(set1(x[i]) - shift));
      weights[i] = lanes[0];
      total += lanes[0];
    }
    total += reduce_sum(sum);
  }
  return total;
}

// The row's values above `threshold`. NaN is above nothing.
Above above(const float* x, const float* weights, int64_t n, float threshold) {
  Above result{0, 0};
  const Vec limit = set1(threshold), one = set1(1.0f);
  for (int64_t first = 0; first < n; first += kSegment) {
    const int64_t end = least(first + kSegment, n);
    Vec sum = zero(), count = zero();
    int64_t i = first;
    for (; i + kLanes <= end; i += kLanes) {
      const Mask greater = gt(load(x + i), limit);
      sum = add_where(greater, sum, load(weights + i));
      count = add_where(greater, count, one);
    }
    for (; i < end; ++i) {
      if (x[i] > threshold) {
        result.mass += weights[i];
        ++result.count;
      }
    }
    result.mass += reduce_sum(sum);
    result.count += static_cast<int64_t>(reduce_sum(count));
  }
  return result;
}

float maximum(const float* x, int64_t n) {
  Vec high = set1(-kInfinity);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) high = max(load(x + i), high);
  float highest = reduce_max(high);
  for (; i < n; ++i) highest = x[i] > highest ? x[i] : highest;
  return highest;
}

// Sets to -inf what is at or below `threshold`, but for the `kept` tokens of `undecided` (key, id).
void cut(float* x, int64_t n, float threshold, const uint64_t* undecided, int64_t kept, float* saved) {
  for (int64_t i = 0; i < kept; ++i) saved[i] = x[static_cast<uint32_t>(undecided[i])];
  const Vec limit = set1(threshold), lowest = set1(-kInfinity);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = load(x + i);
    store(x + i, select(gt(v, limit), v, lowest));
  }
  for (; i < n; ++i) x[i] = x[i] > threshold ? x[i] : -kInfinity;
  for (int64_t j = 0; j < kept; ++j) x[static_cast<uint32_t>(undecided[j])] = saved[j];
}

void cut_row(float* x, int64_t n, float top_p, float* weights, uint64_t* words, uint64_t* spare) {
  const float highest = maximum(x, n);
  // All of it, nothing to choose from, or no probabilities at all.
  if (!(top_p < 1.0f) || !(highest > -kInfinity && highest < kInfinity)) return;
  const double wanted = exponentiate(x, n, highest, weights) * static_cast<double>(top_p);
  float inside = highest, outside = highest - kRange;  // all above `inside` stay, all up to `outside` go
  Above high{0, 0};
  int64_t undecided = above(x, weights, n, outside).count;
  for (int step = 0; step < kMaxSteps && undecided > kFewUndecided; ++step) {
    const float middle = outside + (inside - outside) * 0.5f;
    if (!(middle > outside && middle < inside)) break;
    const Above found = above(x, weights, n, middle);
    if (found.mass < wanted) {
      undecided -= found.count - high.count;
      inside = middle;
      high = found;
    } else {
      undecided = found.count - high.count;
      outside = middle;
    }
  }
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (x[i] > outside && x[i] <= inside) {
      words[count++] = static_cast<uint64_t>(descending_key(x[i])) << 32 | static_cast<uint64_t>(i);
    }
  }
  const uint64_t* sorted = radix_sort<uint64_t, 32>(words, spare, count);
  double before = high.mass;
  int64_t kept = 0;
  // The most likely token always stays.
  while (kept < count && (before < wanted || (kept == 0 && high.count == 0))) {
    before += weights[static_cast<uint32_t>(sorted[kept])];
    ++kept;
  }
  // The weights have done their work: their memory keeps the values for a moment.
  cut(x, n, inside, sorted, kept, weights);
}

}  // namespace

void top_p(const TopPArgs& args) {
  const int64_t n = args.vocab;
#pragma omp parallel
  {
    Scratch<float> weights(n + kLanes);
    Scratch<uint64_t> words(n), spare(n);
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < args.rows; ++row) {
      cut_row(args.logits + row * args.stride, n, args.top_p[row], weights.get(), words.get(), spare.get());
    }
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
