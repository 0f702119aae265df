// x W^T + bias with a weight that stays as its quantised format stores it: see quantized_panels.h.
//
// A group's products are summed with the codes' plain values, and the sum is multiplied with the group's scale; what is
// added to all values of a group is multiplied with the sum of the group's x. For few rows codes are widened in registers,
// for some in the first-level cache, a group at a time, and for many a panel is widened once for all of them. Each output is
// summed in one order, whichever way it is computed: a row's results do not depend on the other rows of the batch. Half
// precision times integers are multiplied as bytes, by another kernel, where the level has dot products of these.
#include "../quantized_dots.h"
#include "../quantized_panels.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

// Rows for which codes are widened in registers.
constexpr int kDirectRows = kLanes == 16 ? 4 : 2;
// How far ahead to fetch codes: what the hardware fetches by itself stops at each page.
constexpr int64_t kAhead = 2048;
// Units whose products are summed before they are scaled, also of long groups: short chains keep the rounding error small.
constexpr int64_t kChainUnits = 32;

// Rows of a tile times the panel's two vectors, plus operands, fill the register file.
constexpr int kTileRows = kLanes == 16 ? 14 : kLanes == 8 ? 6 : 4;

constexpr int panels_of_tile(int rows) { return rows <= kDirectRows && (kLanes == 16 || rows == 1) ? 2 : 1; }

bool is_direct(const LinearArgs& a) { return a.rows <= kDirectRows; }
// Widening anew for each of so few tiles takes less time than writing a panel's floats and reading them again.
bool is_widened_once(const LinearArgs& a) { return a.rows > 3 * kTileRows; }

// Panels that are prepared together.
constexpr int kSlots = 2;

// A prepared panel: scales [groups][32], offsets [groups][32], and widened codes [k][32].
struct Prepared {
  float *scales, *offsets, *values;
  Prepared(const LinearArgs& a, int64_t panel) {
    scales = a.prepared + panel % kSlots * size(a);
    offsets = scales + a.quant.groups * kPanel;
    values = offsets + a.quant.groups * kPanel;
  }
  static int64_t size(const LinearArgs& a) {
    return kPanel * (2 * a.quant.groups + (is_widened_once(a) ? num_units(a.quant) * kUnit : 0));
  }
};

// Widened codes, as Codes.
struct WidenedCodes {
  struct Unit {
    const float* values;
    Unit(const uint8_t* unit, int lane) : values(reinterpret_cast<const float*>(unit) + lane) {}
  };
  // So that a unit takes 32 * kBits bytes.
  static constexpr int kBits = 32;
  WidenedCodes(const LinearArgs&, const uint8_t*, int) {}
  Vec get(const Unit& unit, int half, int k) const { return load(unit.values + k * kPanel + 16 * half); }
};

// Widens units of a panel's codes, kLanes columns of each half, to floats [k][32].
template <typename C>
[[gnu::noinline]] void widen_units(const LinearArgs& a, const uint8_t* panel, const uint8_t* codes, int64_t units,
                                   int lane, float* to) {
  const C kind(a, panel, lane);
  for (int64_t u = 0; u < units; ++u, codes += kPanel * C::kBits) {
    for (int i = 0; i < kPanel * C::kBits; i += 64) __builtin_prefetch(codes + kAhead + i);
    const typename C::Unit unit(codes, lane);
#pragma GCC unroll 8
    for (int k = 0; k < kUnit; ++k) {
      float* row = to + (u * kUnit + k) * kPanel + lane;
      store(row, kind.get(unit, 0, k));
      store(row + 16, kind.get(unit, 1, k));
    }
  }
}

using WidenUnits = void (*)(const LinearArgs&, const uint8_t*, const uint8_t*, int64_t, int, float*);

WidenUnits widen_units_of(const Quantized& q) {
  WidenUnits widen = nullptr;
  with_codes(q, [&](auto* kind) { widen = &widen_units<std::remove_cvref_t<decltype(*kind)>>; });
  return widen;
}

// R packed rows times P panels' kLanes columns of each half, into totals. With `widen`, for one panel of widened codes:
// `codes` are the panel's own.
template <typename C, int R, int P>
[[gnu::noinline]] void multiply_lanes(const LinearArgs& a, const float* x, int64_t panel, const uint8_t* codes,
                                      int64_t codes_stride, int lane, WidenUnits widen, Vec* totals_out) {
  alignas(64) float widened[C::kBits == 32 && P == 1 ? kChainUnits * kUnit * kPanel : 1];
  const Quantized& q = a.quant;
  const uint8_t* weight = static_cast<const uint8_t*>(a.weight) + panel * q.at.size;
  const C first(a, weight, lane), second(a, weight + (P - 1) * q.at.size, lane);
  const float* prepared[P];
  for (int p = 0; p < P; ++p) prepared[p] = Prepared(a, panel + p).scales + lane;
  const int64_t units = units_of_group(q);
  NextPanels next(a, panel, P);
  const bool offsets = has_offsets(q);
  const float* row_sums = x + num_units(q) * kUnit * R;
  Vec totals[R][P][2];
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) totals[r][p][0] = totals[r][p][1] = zero();
  }
  for (int64_t g = 0; g < q.groups; ++g) {
    for (int64_t left = units; left > 0; left -= kChainUnits) {
      Vec sums[R][P][2];
      unroll<R>([&](int r) VLLM_INLINE {
        unroll<P>([&](int p) VLLM_INLINE { sums[r][p][0] = sums[r][p][1] = zero(); });
      });
      const int64_t chain = least(left, kChainUnits);
      const uint8_t* unit_codes = codes;
      codes += chain * kPanel * C::kBits;
      if constexpr (C::kBits == 32 && P == 1) {
        if (widen != nullptr) {
          widen(a, weight, unit_codes, chain, lane, widened);
          codes = unit_codes + chain * kPanel * q.bits;
          unit_codes = reinterpret_cast<const uint8_t*>(widened);
        }
      }
      for (int64_t u = 0; u < chain; ++u, x += R * kUnit, unit_codes += kPanel * C::kBits) {
        if constexpr (C::kBits != 32) {
          if (kGroups == 1 || lane == 0) next.fetch<C::kBits, P>();
        }
        unroll<P>([&](int p) VLLM_INLINE {
          const C& kind = p == 0 ? first : second;
          const typename C::Unit unit(unit_codes + p * codes_stride, lane);
#pragma GCC unroll 8
          for (int k = 0; k < kUnit; ++k) {
            const Vec low = kind.get(unit, 0, k), high = kind.get(unit, 1, k);
            unroll<R>([&](int r) VLLM_INLINE {
              const Vec value = set1(x[r * kUnit + k]);
              sums[r][p][0] = fma(value, low, sums[r][p][0]);
              sums[r][p][1] = fma(value, high, sums[r][p][1]);
            });
          }
        });
      }
      unroll<P>([&](int p) VLLM_INLINE {
        const Vec low = load(prepared[p] + g * kPanel), high = load(prepared[p] + g * kPanel + 16);
        unroll<R>([&](int r) VLLM_INLINE {
          totals[r][p][0] = fma(sums[r][p][0], low, totals[r][p][0]);
          totals[r][p][1] = fma(sums[r][p][1], high, totals[r][p][1]);
        });
      });
    }
    if (offsets) {
      unroll<P>([&](int p) VLLM_INLINE {
        const float* shifts = prepared[p] + (q.groups + g) * kPanel;
        const Vec low = load(shifts), high = load(shifts + 16);
        unroll<R>([&](int r) VLLM_INLINE {
          const Vec sum = set1(row_sums[g * R + r]);
          totals[r][p][0] = fma(sum, low, totals[r][p][0]);
          totals[r][p][1] = fma(sum, high, totals[r][p][1]);
        });
      });
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p, totals_out += 2) {
      totals_out[0] = totals[r][p][0];
      totals_out[1] = totals[r][p][1];
    }
  }
}

// totals [rows][panels][2] += the sparse part of the weight, kLanes columns of each half.
[[gnu::noinline]] void add_sparse(const LinearArgs& a, const float* x, int rows, int panels, int64_t panel, int lane,
                                  Vec* totals) {
  const Quantized& q = a.quant;
  for (int p = 0; p < panels; ++p) {
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < kLanes; ++i) {
        const int64_t column = (panel + p) * kPanel + half * 16 + lane + i;
        if (column >= a.columns) break;
        for (int r = 0; r < rows; ++r) {
          float sum = 0.0f;
          for (int32_t e = q.sparse_starts[column]; e < q.sparse_starts[column + 1]; ++e) {
            const int64_t place = q.sparse_places[e];
            sum += q.sparse_values[e] * x[place / kUnit * kUnit * rows + r * kUnit + place % kUnit];
          }
          float lanes[kLanes];
          Vec* total = totals + (r * panels + p) * 2 + half;
          store(lanes, *total);
          lanes[i] += sum;
          *total = load(lanes);
        }
      }
    }
  }
}

// totals = R packed rows times P panels' kLanes columns of each half, whatever x's dtype is.
template <int R, int P>
[[gnu::noinline]] void sum_panels(const LinearArgs& a, const float* x, int64_t panel, int lane, Vec (&totals)[R][P][2]) {
  const int64_t size = a.quant.at.size;
  const uint8_t* weight = static_cast<const uint8_t*>(a.weight) + panel * size;
  if (is_widened_once(a)) {
    const float *values = Prepared(a, panel).values, *last = Prepared(a, panel + P - 1).values;
    multiply_lanes<WidenedCodes, R, P>(a, x, panel, reinterpret_cast<const uint8_t*>(values),
                                       (last - values) * int64_t{sizeof(float)}, lane, nullptr, totals[0][0]);
  } else if (!is_direct(a) || P != panels_of_tile(R)) {
    // A tile of few rows among others, or the last of an odd number of panels: panels one by one.
    for (int p = 0; p < P; ++p) {
      Vec own[R][1][2];
      multiply_lanes<WidenedCodes, R, 1>(a, x, panel + p, weight + p * size, 0, lane, widen_units_of(a.quant), own[0][0]);
      for (int r = 0; r < R; ++r) std::memcpy(totals[r][p], own[r][0], sizeof(own[r][0]));
    }
  } else if constexpr (R <= kDirectRows && P == panels_of_tile(R)) {
    with_codes(a.quant, [&](auto* kind) {
      multiply_lanes<std::remove_cvref_t<decltype(*kind)>, R, P>(a, x, panel, weight, size, lane, nullptr, totals[0][0]);
    });
  }
  if (a.quant.sparse_starts != nullptr) add_sparse(a, x, R, P, panel, lane, totals[0][0]);
}

template <typename T>
struct QuantizedProduct {
  using Row = T;
  using Element = float;
  static constexpr int kMaxRows = kTileRows;
  static constexpr int64_t kPanelsAtATime = kSlots;

  static constexpr int panels_at_once(int rows) { return panels_of_tile(rows); }

  static int64_t panel_size(const LinearArgs& a) { return a.quant.at.size; }
  static int64_t packed_row(const LinearArgs& a) { return num_units(a.quant) * kUnit + a.quant.groups; }

  // As floats [units][rows][8], then the sums of groups [groups][rows].
  static void pack_row(const LinearArgs& a, const T* x, int64_t r, int64_t rows, float* out) {
    const Quantized& q = a.quant;
    float* sums = out + num_units(q) * kUnit * rows + r;
    float* to = out + r * kUnit;
    for (int64_t g = 0; g < q.groups; ++g, sums += rows) {
      const int64_t begin = g * q.group_size, end = least(begin + q.group_size, a.inner);
      Vec sum = zero();
      for (int64_t u = 0; u < units_of_group(q); ++u, to += rows * kUnit) {
        const int64_t k = begin + u * kUnit;
        const int count = static_cast<int>(end - k < kUnit ? end - k : kUnit);
        alignas(64) T run[kUnit] = {};
        if (q.order != nullptr) {
          for (int i = 0; i < count; ++i) run[i] = x[q.order[k + i]];
        } else if (count > 0) {
          std::memcpy(run, x + k, static_cast<size_t>(count) * sizeof(T));
        }
        for (int i = 0; i < kUnit; i += kLanes) {
          const Vec values = load_n(run + i, kLanes < kUnit ? kLanes : kUnit);
          store_n(to + i, values, kLanes < kUnit ? kLanes : kUnit);
          sum = sum + values;
        }
      }
      *sums = reduce_sum(sum);
    }
  }

  static int64_t prepared_size(const LinearArgs& a) { return kPanelsAtATime * Prepared::size(a); }

  static void prepare(const LinearArgs& a, int64_t panel, int64_t stop) {
    const Quantized& q = a.quant;
    for (; panel < stop; ++panel) {
      const uint8_t* weight = static_cast<const uint8_t*>(a.weight) + panel * q.at.size;
      const Prepared to(a, panel);
      widen_scales(q, weight, to.scales, to.offsets);
      if (!is_widened_once(a)) continue;
      const WidenUnits widen = widen_units_of(q);
      for (int lane = 0; lane < 16; lane += kLanes) widen(a, weight, weight, num_units(q), lane, to.values);
    }
  }

  template <int R, int P>
  static void multiply(const LinearArgs& a, const float* x, int64_t row, int64_t panel, Ahead) {
    for (int lane = 0; lane < 16; lane += kLanes) {
      Vec totals[R][P][2];
      sum_panels(a, x, panel, lane, totals);
      write_tile<T>(a, totals, row, panel, lane);
    }
  }
};

// A code of column c at k, of a panel in planes, as a number.
uint32_t code_at(const Quantized& q, const uint8_t* panel, int64_t k, int64_t c) {
  const uint8_t* unit = panel + k / kUnit * kPanel * q.bits;
  const int64_t half = c / 16, lane = c % 16, place = k % kUnit;
  if (q.values == Values::e4m3 || q.values == Values::e5m2) return unit[place * kPanel + 2 * lane + half];
  if (q.bits == 8) return unit[place / 4 * 128 + half * 64 + lane * 4 + place % 4];
  uint32_t code = 0;
  int below = 0;
  if (q.bits >= 4) {
    code = unit[half * 64 + lane * 4 + place / 2] >> (place % 2 * 4) & 15;
    below = 4;
    unit += 128;
  }
  if (q.bits % 4 >= 2) {
    code |= static_cast<uint32_t>(unit[lane * 4 + half * 2 + place / 4] >> (place % 4 * 2) & 3) << below;
    below += 2;
    unit += 64;
  }
  if (q.bits % 2 == 1) code |= static_cast<uint32_t>(unit[lane * 2 + half] >> place & 1) << below;
  return code;
}

float value_of(const Quantized& q, const uint8_t* tables, uint32_t code, int64_t c) {
  switch (q.values) {
    case Values::integers:
      return q.bits == 8 ? static_cast<float>(static_cast<int8_t>(code)) : static_cast<float>(code);
    case Values::table:
      // Which holds them less the zero.
      return q.table[code];
    case Values::tables:
      return reinterpret_cast<const float*>(tables)[code * kPanel + c];
    default: {
      const bool small = q.values == Values::e4m3;
      F16 half;
      half.bits = static_cast<uint16_t>(small ? (code & 0x80) << 8 | (code & 0x7f) << 7 : code << 8);
      return small ? 256.0f * to_float(half) : to_float(half);
    }
  }
}

// Value by value as the weight is defined, so that rows are those of the dequantised weight to the bit.
template <typename T>
void take_rows(const QuantizedRowsArgs& a) {
  const Quantized& q = a.quant;
  const PanelLayout& at = q.at;
#pragma omp parallel for schedule(static) if (a.count > 4)
  for (int64_t i = 0; i < a.count; ++i) {
    const int64_t row = a.rows ? a.rows[i] : a.narrow_rows[i], c = row % kPanel;
    const uint8_t* panel = static_cast<const uint8_t*>(a.panels) + row / kPanel * at.size;
    T* out = static_cast<T*>(a.out) + i * a.inner;
    const auto stored = [&](Stored type, int64_t part, int64_t g) {
      float lanes[kLanes];
      with_stored(type, panel + part, [&](const auto& load) { store(lanes, load(g * kPanel + c / kLanes * kLanes)); });
      return lanes[c % kLanes];
    };
    Scratch<float> values(q.sparse_starts == nullptr ? 0 : a.inner);
    for (int64_t g = 0; g < q.groups; ++g) {
      const int64_t super = q.supers > 0 ? g / (q.groups / q.supers) : 0;
      float scale = stored(q.scales, at.scales, g), offset = stored(q.offsets, at.offsets, g);
      if (q.super_scales != Stored::none) scale *= stored(q.super_scales, at.super_scales, super);
      if (q.super_offsets != Stored::none) offset *= stored(q.super_offsets, at.super_offsets, super);
      float zero_point = stored(q.zeros, at.zeros, g);
      if (q.values != Values::table) zero_point += q.zero;
      const int64_t begin = g * q.group_size, end = least(begin + q.group_size, a.inner);
      for (int64_t k = begin; k < end; ++k) {
        const int64_t place = g * units_of_group(q) * kUnit + k - begin;
        const float value = (value_of(q, panel + at.tables, code_at(q, panel, place, c), c) - zero_point) * scale + offset;
        const int64_t to = q.order ? q.order[k] : k;
        if (q.sparse_starts == nullptr) {
          out[to] = from_float<T>(value);
        } else {
          values[to] = value;
        }
      }
    }
    if (q.sparse_starts == nullptr) continue;
    for (int32_t e = q.sparse_starts[row]; e < q.sparse_starts[row + 1]; ++e) values[q.sparse_columns[e]] += q.sparse_values[e];
    for (int64_t k = 0; k < a.inner; ++k) out[k] = from_float<T>(values[k]);
  }
}

}  // namespace

void linear_quantized(const LinearArgs& a) {
  if (linear_quantized_pairs(a) || linear_quantized_digits(a)) return;
  VLLM_DISPATCH_DTYPE(a.dtype, Gemm<QuantizedProduct<scalar_t>>::run(a));
}

void quantized_rows(const QuantizedRowsArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, take_rows<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
