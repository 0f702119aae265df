// A weight rounded to 8 bits, in the panels of linear_int8.cpp: each block of 64 values of a row is rotated and divided by
// 64, so that products with rotated activations are those of the plain rows; each group of two blocks has the least scale in
// bfloat16 with which its greatest value is at most 127.
#include <cfloat>

#include "../int8_panels.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

using namespace int8;

// Raises a scale by enough that rounding it to bfloat16 cannot leave it below what the greatest value needs.
constexpr float kRoundedUp = 1.0f + 1.0f / 256;

// Writes a group of a row to its column, which begins at `to`.
inline BF16 pack_group(const Rotated& rotated, int first, int blocks, uint8_t* to) {
  const BF16 scale = from_float<BF16>(rotated.greatest[first / kGroupBlocks] / kBlock / 127.0f * kRoundedUp);
  // A group of zeros, or so nearly that the scale has no inverse, becomes zeros.
  const float step = to_float(scale);
  const Vec divisor = set1(step > FLT_MIN ? step : __builtin_inff()), part = set1(1.0f / kBlock);
  for (int b = first; b < first + blocks; ++b) {
    alignas(64) float whole[kBlock];
    for (int i = 0; i < kBlock; i += kLanes) store(whole + i, round(load(rotated.values[b] + i) * part / divisor));
    alignas(64) uint8_t bytes[kBlock];
    for (int k = 0; k < kBlock; ++k) bytes[k] = static_cast<uint8_t>(static_cast<int32_t>(whole[k]) + 128);
    for (int k = 0; k < kBlock; k += 4, to += kFourBytes) std::memcpy(to, bytes + k, 4);
  }
  return scale;
}

template <typename T>
void pack_all(const PackInt8Args& a) {
  LinearArgs shape{};
  shape.inner = a.inner;
  const int64_t blocks = num_blocks(shape), panels = (a.columns + kPanel - 1) / kPanel;
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < panels; ++panel) {
    uint8_t* bytes = a.panels + panel * panel_bytes(shape);
    BF16* scales = reinterpret_cast<BF16*>(bytes + blocks * kBytesOfBlock);
    for (int64_t column = 0; column < kPanel; ++column) {
      uint8_t* to = bytes + 4 * column;
      BF16* scale = scales + column;
      const int64_t row = panel * kPanel + column;
      if (row >= a.columns) {
        for (int64_t k = 0; k < blocks * kBlock; k += 4, to += kFourBytes) std::memset(to, 128, 4);
        for (int64_t group = 0; group < num_groups(shape); ++group) scale[group * kPanel] = BF16{};
        continue;
      }
      rotate_row(shape, static_cast<const T*>(a.weight) + row * a.weight_stride,
                 [&](const Rotated& rotated, int first, int count) {
                   *scale = pack_group(rotated, first, count, to);
                   scale += kPanel;
                   to += count * kBytesOfBlock;
                 });
    }
  }
}

}  // namespace

void pack_int8(const PackInt8Args& a) { VLLM_DISPATCH_DTYPE(a.dtype, pack_all<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
