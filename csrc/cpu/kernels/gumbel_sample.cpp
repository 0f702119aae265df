// argmax of logits + temperature * Gumbel noise, the noise a function of (seed, position, token id) only; see
// ops/gumbel_sample.py for the definition. Segments of a row stay in the first-level cache from the random bits to the
// scores.
#include "../logits.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

constexpr int kSegment = 1024;
constexpr int kGroups = kSegment / 4;

// Philox4x32-10 of kGroups consecutive counters: bits[lane][group]. Plain loops, which the compiler vectorises.
void random_bits(uint64_t seed, uint64_t position, uint32_t first_group, uint32_t (*bits)[kGroups]) {
  for (int i = 0; i < kGroups; ++i) {
    bits[0][i] = first_group + static_cast<uint32_t>(i);
    bits[1][i] = static_cast<uint32_t>(position);
    bits[2][i] = static_cast<uint32_t>(position >> 32);
    bits[3][i] = 0;
  }
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kGroups; ++i) {
      const uint64_t product0 = static_cast<uint64_t>(bits[0][i]) * 0xD2511F53u;
      const uint64_t product1 = static_cast<uint64_t>(bits[2][i]) * 0xCD9E8D57u;
      bits[0][i] = static_cast<uint32_t>(product1 >> 32) ^ bits[1][i] ^ key0;
      bits[1][i] = static_cast<uint32_t>(product1);
      bits[2][i] = static_cast<uint32_t>(product0 >> 32) ^ bits[3][i] ^ key1;
      bits[3][i] = static_cast<uint32_t>(product0);
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// -ln(-ln(1 - u)). ln(1 - u) keeps its precision for small u by way of w = 1 - u as rounded: ln(w) u / (1 - w).
inline Vec gumbel(Vec u) {
  const Vec one = set1(1.0f);
  const Vec w = one - u;
  const Vec moved = one - w;
  const Vec rate = select(gt(moved, zero()), (zero() - log(w)) * (u / moved), u);
  return zero() - log(rate);
}

void sample_row(const GumbelArgs& a, int64_t row) {
  alignas(64) float buffer[kSegment];
  // As many more as a segment may begin late.
  alignas(64) float uniform[kSegment + 4] = {};
  alignas(64) uint32_t bits[4][kGroups];
  const int32_t slot = a.slots[row];
  const float temperature = a.temperature[slot];
  float best = -kInfinity;
  int64_t best_id = 0;
  // Four ids share a counter, so segments begin at its multiples: the first one as many columns before the row.
  for (int64_t start = -(a.first_id % 4); start < a.logits.vocab; start += kSegment) {
    const int64_t first = start < 0 ? 0 : start;
    const int64_t size = least(start + kSegment, a.logits.vocab) - first;
    const float* x = as_floats(a.logits, row, first, size, buffer);
    if (temperature != 0.0f) {
      random_bits(static_cast<uint64_t>(a.seeds[slot]), static_cast<uint64_t>(a.positions[row]),
                  static_cast<uint32_t>((a.first_id + start) / 4), bits);
      for (int i = 0; i < kSegment; ++i) {
        const float value = (static_cast<float>(bits[i % 4][i / 4]) + 0.5f) * 0x1p-32f;
        uniform[i] = value < 0x1.fffffep-1f ? value : 0x1.fffffep-1f;
      }
      for (int64_t i = 0; i < size; i += kLanes) {
        store(buffer + i, load(x + i) + set1(temperature) * gumbel(load(uniform + (first - start) + i)));
      }
      x = buffer;
    }
    Vec high = set1(-kInfinity);
    for (int64_t i = 0; i < size; i += kLanes) high = max(load(x + i), high);
    const float top = reduce_max(high);
    if (!(top > best)) continue;
    best = top;
    int64_t i = 0;
    while (x[i] != top) ++i;
    best_id = first + i;
  }
  a.sampled[row] = static_cast<int32_t>(a.first_id + best_id);
  a.scores[row] = best;
}

}  // namespace

void gumbel_sample(const GumbelArgs& a) {
#pragma omp parallel for schedule(dynamic)
  for (int64_t row = 0; row < a.logits.rows; ++row) sample_row(a, row);
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
