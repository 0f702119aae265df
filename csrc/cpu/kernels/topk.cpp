// The k greatest logits of each row in one pass, ties by the lower id.
//
// The best so far are kept sorted; an element must beat the last of them strictly, and elements come by ascending id,
// so equals stay in the order of their ids. For large k a stable sort of the whole row is cheaper.
#include "../logits.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

constexpr int64_t kSegment = 4096;
constexpr int64_t kSortAbove = 256;

struct Best {
  float* values;
  int32_t* ids;
  int64_t size, k;

  void insert(float value, int32_t id) {
    int64_t at = size < k ? size++ : k - 1;
    for (; at > 0 && values[at - 1] < value; --at) {
      values[at] = values[at - 1];
      ids[at] = ids[at - 1];
    }
    values[at] = value;
    ids[at] = id;
  }
};

void scan_row(const TopkArgs& a, int64_t row) {
  alignas(64) float buffer[kSegment];
  Best best{a.values + row * a.k, a.ids + row * a.k, 0, a.k};
  for (int64_t first = 0; first < a.logits.vocab; first += kSegment) {
    const int64_t size = least(kSegment, a.logits.vocab - first);
    const float* x = as_floats(a.logits, row, first, size, buffer);
    int64_t i = 0;
    // Whatever comes first fills the table, a NaN as the least: ids stay distinct and in range.
    for (; best.size < a.k && i < size; ++i) {
      best.insert(x[i] == x[i] ? x[i] : -kInfinity, static_cast<int32_t>(first + i));
    }
    for (; i < size && i % kLanes != 0; ++i) {
      if (x[i] > best.values[a.k - 1]) best.insert(x[i], static_cast<int32_t>(first + i));
    }
    for (; i < size; i += kLanes) {
      if (!any(gt(load(x + i), set1(best.values[a.k - 1])))) continue;
      for (int64_t j = i; j < least(i + kLanes, size); ++j) {
        if (x[j] > best.values[a.k - 1]) best.insert(x[j], static_cast<int32_t>(first + j));
      }
    }
  }
}

void sort_row(const TopkArgs& a, int64_t row, uint64_t* words, uint64_t* spare, float* values) {
  const float* x = as_floats(a.logits, row, 0, a.logits.vocab, values);
  for (int64_t i = 0; i < a.logits.vocab; ++i) {
    const float value = x[i] == x[i] ? x[i] : -kInfinity;
    words[i] = static_cast<uint64_t>(descending_key(value)) << 32 | static_cast<uint64_t>(i);
  }
  const uint64_t* sorted = radix_sort<uint64_t, 32>(words, spare, a.logits.vocab);
  for (int64_t i = 0; i < a.k; ++i) {
    const int32_t id = static_cast<int32_t>(sorted[i] & 0xffffffffu);
    a.ids[row * a.k + i] = id;
    a.values[row * a.k + i] = x[id] == x[id] ? x[id] : -kInfinity;
  }
}

}  // namespace

void topk(const TopkArgs& a) {
  if (a.k == 0) return;
  const bool sorts = a.k > kSortAbove;
  const int64_t n = sorts ? a.logits.vocab : 0;
#pragma omp parallel
  {
    Scratch<uint64_t> words(n), spare(n);
    Scratch<float> values(n + kLanes);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a.logits.rows; ++row) {
      if (sorts) {
        sort_row(a, row, words.get(), spare.get(), values.get());
      } else {
        scan_row(a, row);
      }
    }
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
