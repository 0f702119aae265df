// Logits of tokens whose bit is 0 become -inf, in place. Only what is forbidden is written: of most masks a few words.
#include <cmath>
#include <cstdint>

#include "../kernels_forms.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

constexpr int64_t kBits = 32;

// The bits from `first` on, of a row of `words`; bits beyond its end are 0.
inline uint32_t bits_from(const uint32_t* mask, int64_t words, int64_t first) {
  const int64_t word = first / kBits;
  const int shift = static_cast<int>(first % kBits);
  const uint64_t low = word < words ? mask[word] : 0;
  const uint64_t high = word + 1 < words ? mask[word + 1] : 0;
  return static_cast<uint32_t>((high << kBits | low) >> shift);
}

// n is at most kBits.
inline void keep(float* x, uint32_t bits, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = (bits >> i & 1u) != 0 ? x[i] : -INFINITY;
}

}  // namespace

void keep_bits(const KeepBitsArgs& args) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < args.rows; ++row) {
    float* x = args.logits + (args.places == nullptr ? row : args.places[row]) * args.stride;
    const uint32_t* mask = args.mask + row * args.words;
    int64_t column = 0;
    for (; column + kBits <= args.vocab; column += kBits) {
      const uint32_t bits = bits_from(mask, args.words, args.first + column);
      if (bits != ~0u) keep(x + column, bits, kBits);
    }
    keep(x + column, bits_from(mask, args.words, args.first + column), args.vocab - column);
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
