// x W^T + bias with a weight packed once, in float32 or in dot products of two (see PairProduct); linear_half.cpp sums short
// runs in float16.
//
// A packed weight is a row of panels, each 32 output columns wide: panel [K][32]. In bfloat16 columns c and c + 16
// stand side by side, so that one 64-byte load and two bit operations give both as float32; on Intel's CPUs without
// matrix tiles that beats the bfloat16 dot-product instructions, whose rate is half that of float32 multiply-adds.
//
// Each output is a sum of chains of multiply-adds over k, in order, whichever tile or thread computes it: a row's
// results do not depend on the other rows of the batch. Short chains keep the rounding error small.
#include "../pair_product.h"
#include "../transpose.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

// Rows of a panel to fetch ahead: what the hardware fetches by itself stops at each page, and weights come from memory.
constexpr int kAhead = 48;

template <int kLocality, typename T>
inline void prefetch_row(const T* row) {
  const char* bytes = reinterpret_cast<const char*>(row);
  for (unsigned i = 0; i < kPanel * sizeof(T); i += 64) __builtin_prefetch(bytes + i, 0, kLocality);
}

inline int64_t padded_inner(const LinearArgs& a) { return num_runs(a) * kRun; }

// In float32, with a weight in W.
template <typename W>
struct FloatChain {
  using Element = float;
  using Weight = W;
  static constexpr int kValues = 1;
  // Rows of a tile times the panel's two vectors, plus operands, fill the register file.
  static constexpr int kMaxRows = kLanes == 16 ? 14 : kLanes == 8 ? 6 : 4;

  template <int R, int P>
  static inline void multiply(const float* x, const W* panel, int64_t panel_size, int64_t inner, int group,
                              Ahead& ahead, Vec (&sums)[R][P][2]) {
    for (; inner > 0; inner -= kRun, x += R * kRun) {
      const int run = static_cast<int>(least(kRun, inner));
      ahead();
      for (int k = 0; k < run; ++k, panel += kPanel) {
        Vec low[P], high[P];
        unroll<P>([&](int p) VLLM_INLINE {
          if (kGroups == 1 || group == 0) {
            prefetch_row<kWeightLocality<R, kMaxRows>>(panel + p * panel_size + kAhead * kPanel);
          }
          load_pair(panel + p * panel_size, group, &low[p], &high[p]);
        });
        unroll<R>([&](int r) VLLM_INLINE {
          const Vec value = set1(x[r * kRun + k]);
          unroll<P>([&](int p) VLLM_INLINE {
            sums[r][p][0] = fma(value, low[p], sums[r][p][0]);
            sums[r][p][1] = fma(value, high[p], sums[r][p][1]);
          });
        });
      }
    }
  }
};

// Products in float32 of x [rows, K] in T with a weight in W.
template <typename T, typename W>
struct FloatProduct : ChainedProduct<FloatChain<W>, T> {
  static int64_t packed_row(const LinearArgs& a) { return padded_inner(a); }

  // As floats [ceil(K / kRun)][rows][kRun]: whole vectors to write here, and neighbours to read for the product.
  static void pack_row(const LinearArgs& a, const T* x, int64_t r, int64_t rows, float* out) {
    for (int64_t k = 0; k < a.inner; k += kRun) {
      float* run = out + k * rows + r * kRun;
      for (int i = 0; i < kRun && k + i < a.inner; i += kLanes) {
        store(run + i, load_n(x + k + i, static_cast<int>(least(kLanes, a.inner - k - i))));
      }
    }
  }
};

inline int64_t place(int64_t column, const float*) { return column; }
inline int64_t place(int64_t column, const F16*) { return column; }
inline int64_t place(int64_t column, const BF16*) { return column < 16 ? 2 * column : 2 * (column - 16) + 1; }

// Where a panel has the value of a column at k.
template <typename T>
inline int64_t place_in_panel(int64_t column, int64_t k, bool pairs, const T* panel) {
  return pairs ? k / 2 * 2 * kPanel + 2 * column + k % 2 : k * kPanel + place(column, panel);
}

typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

// Rows of the weight that are a panel's columns; none behind the last one: zeros.
template <typename T>
struct PanelSource {
  const PackLinearArgs& args;
  int64_t first;
  const T* row(int64_t column) const {
    const int64_t source = first + column;
    return source < args.columns ? static_cast<const T*>(args.weight) + source * args.weight_stride : nullptr;
  }
  T value(int64_t column, int64_t k) const {
    const T* from = row(column);
    return from != nullptr ? from[k] : T{};
  }
  // Values from k on.
  Words words(int64_t column, int64_t k) const {
    Words result{};
    if (const T* from = row(column)) std::memcpy(&result, from + k, sizeof(result));
    return result;
  }
};

// rows[i] lane j <-> rows[j] lane i.
inline void transpose_words(Words (&words)[kLanes]) {
  Vec rows[kLanes];
  unroll<kLanes>([&](int i) VLLM_INLINE { std::memcpy(&rows[i], &words[i], sizeof(rows[i])); });
  transpose(rows);
  unroll<kLanes>([&](int i) VLLM_INLINE { std::memcpy(&words[i], &rows[i], sizeof(rows[i])); });
}

// Words of a block of a panel, whose rows of [32] values, or pairs, begin at `out`. A word's values stay together.
template <typename T>
inline void pack_words(const PanelSource<T>& source, int64_t k, uint32_t* out) {
  for (int64_t column = 0; column < kPanel; column += kLanes) {
    Words words[kLanes];
    unroll<kLanes>([&](int i) VLLM_INLINE { words[i] = source.words(column + i, k); });
    transpose_words(words);
    unroll<kLanes>([&](int i) VLLM_INLINE { std::memcpy(out + i * kPanel + column, &words[i], sizeof(words[i])); });
  }
}

// The same where the two values of a word are neighbours of a row of the weight, and those of a column and of the one that is
// beside it in a panel (see place) become a word.
template <typename T>
inline void pack_neighbours(const PanelSource<T>& source, int64_t k, uint32_t* out) {
  constexpr bool kApart = std::is_same_v<T, BF16>;
  for (int64_t word = 0; word < kPanel / 2; word += kLanes) {
    Words even[kLanes], odd[kLanes];
    unroll<kLanes>([&](int i) VLLM_INLINE {
      const int64_t column = kApart ? word + i : 2 * (word + i);
      const Words first = source.words(column, k), second = source.words(column + (kApart ? 16 : 1), k);
      even[i] = (first & 0xffff) | second << 16;
      odd[i] = first >> 16 | (second & 0xffff0000u);
    });
    transpose_words(even);
    transpose_words(odd);
    unroll<kLanes>([&](int i) VLLM_INLINE {
      std::memcpy(out + i * kPanel + word, &even[i], sizeof(even[i]));
      std::memcpy(out + i * kPanel + kPanel / 2 + word, &odd[i], sizeof(odd[i]));
    });
  }
}

template <typename T>
void pack_all(const PackLinearArgs& a) {
  const int64_t panels = (a.columns + kPanel - 1) / kPanel;
  constexpr int64_t kBlock = kLanes * sizeof(uint32_t) / sizeof(T);
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < panels; ++panel) {
    T* out = static_cast<T*>(a.packed) + panel * a.inner * kPanel;
    const PanelSource<T> source{a, panel * kPanel};
    int64_t k = 0;
    for (; k + kBlock <= a.inner; k += kBlock) {
      uint32_t* block = reinterpret_cast<uint32_t*>(out + k * kPanel);
      sizeof(T) == 4 || a.pairs ? pack_words(source, k, block) : pack_neighbours(source, k, block);
    }
    for (int64_t column = 0; column < kPanel; ++column) {
      for (int64_t i = k; i < a.inner; ++i) out[place_in_panel(column, i, a.pairs, out)] = source.value(column, i);
    }
  }
}

// A row of the weight is a column of a panel, a cache line apart from element to element: many rows take many cores.
template <typename W, typename T>
void take_rows(const PanelRowsArgs& a) {
#pragma omp parallel for schedule(static) if (a.count > 16)
  for (int64_t i = 0; i < a.count; ++i) {
    const int64_t row = a.rows ? a.rows[i] : a.narrow_rows[i];
    T* out = static_cast<T*>(a.out) + i * a.inner;
    const W* panel = static_cast<const W*>(a.packed) + row / kPanel * a.inner * kPanel;
    for (int64_t k = 0; k < a.inner; ++k) {
      const W value = panel[place_in_panel(row % kPanel, k, a.pairs, panel)];
      if constexpr (std::is_same_v<T, W>) {
        out[k] = value;
      } else {
        out[k] = from_float<T>(to_float(value));
      }
    }
  }
}

// Weights that keep 16 bits of their own, beside x in another dtype.
void linear_of_halves(const LinearArgs& a) {
  const bool wide = a.dtype == DType::f32;
  if (a.weight_dtype == DType::f16) {
    wide ? Gemm<FloatProduct<float, F16>>::run(a) : Gemm<FloatProduct<BF16, F16>>::run(a);
  } else {
    wide ? Gemm<FloatProduct<float, BF16>>::run(a) : Gemm<FloatProduct<F16, BF16>>::run(a);
  }
}

}  // namespace

void pack_linear(const PackLinearArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, pack_all<scalar_t>(a)); }

void panel_rows(const PanelRowsArgs& a) {
  VLLM_DISPATCH_DTYPE(a.dtype, {
    using packed_t = scalar_t;
    VLLM_DISPATCH_DTYPE(a.out_dtype, take_rows<packed_t, scalar_t>(a));
  });
}

void linear(const LinearArgs& a) {
  if (a.pairs) {
    Gemm<PairProduct>::run(a);
  } else if (a.scales == nullptr && a.weight_dtype == a.dtype) {
    VLLM_DISPATCH_DTYPE(a.dtype, Gemm<FloatProduct<scalar_t, scalar_t>>::run(a));
  } else if (a.scales == nullptr) {
    linear_of_halves(a);
  } else {
    Gemm<FloatProduct<BF16, F16>>::run(a);
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
